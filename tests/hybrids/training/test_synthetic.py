"""Generated retrieval: answers follow from the row, roles are right, what evaluation asks for never occurs."""

import itertools
import re

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from foveate.errors import UserError
from foveate.hybrids.training import templates
from foveate.hybrids.training.halves import halves
from foveate.hybrids.training.needles import Needles
from foveate.hybrids.training.sources import ANSWER, DRAWN, TEXT, Draw, Text, Vocabulary
from foveate.hybrids.training.synthetic import SOURCES, Cloze, Copies, Recall
from foveate.hybrids.training.words import ADJECTIVES, NOUNS
from foveate.lab.evaluation.tasks import niah
from foveate.lab.evaluation.tasks.ruler.draft import NOISE

# (


@pytest.fixture
def rows(store):
    """Rows of a source: `rows(source, length, count)`."""
    vocabulary = Vocabulary(store)

    def made(source, length=256, count=20, progress=1.0):
        for number in range(count):
            draw = Draw(np.random.default_rng([7, number]), length, number, (7,), progress)
            row = source.row(store, vocabulary, draw)
            assert row.ids.shape == row.roles.shape == (length,)
            assert row.ids.min() >= 0
            assert row.ids.max() < store.vocab_size
            yield row

    return made


def runs(roles):
    """(role, first, end) of each run of equal roles."""
    begin = 0
    for role, group in itertools.groupby(roles.tolist()):
        end = begin + len(list(group))
        yield role, begin, end
        begin = end


def test_keys_and_values_are_those_of_the_evaluation(store):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(store.folder / "tokenizer" / "tokenizer.json"))
    ours, theirs = Vocabulary(store).halves, halves(tokenizer)
    assert tuple(half.tolist() for half in ours) == theirs
    assert not {*theirs[0]} & {*theirs[1]}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("length", [331, 512])
def test_rows_have_their_length_and_depend_on_the_draw_alone(rows, kind, length):
    source = SOURCES[kind]()
    first, second = (list(rows(source, length)) for _ in range(2))
    for one, other in zip(first, second):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.roles, other.roles)
    assert len({row.ids.tobytes() for row in first}) == len(first)
    if kind != "text":
        assert sum((row.roles == ANSWER).any() for row in first) > 15


@pytest.mark.parametrize("source", [Needles(), Cloze()])
def test_rows_that_are_too_short_are_refused(rows, source):
    with pytest.raises(UserError, match=r"mixture\.\w+: rows of 24 tokens are too short for"):
        list(rows(source, 24, 5))


def test_an_epoch_of_text_reads_every_window_once(store, rows):
    source, length = Text(), 100
    count = source.windows(store, length)
    ids = [row.ids for row in rows(source, length, 2 * count)]
    whole = store.train.window(0, len(store.train))
    for epoch in (ids[:count], ids[count:]):
        got = np.bincount(np.concatenate(epoch), minlength=store.vocab_size)
        assert len({one.tobytes() for one in epoch}) == count
        assert (np.abs(got - np.bincount(whole, minlength=store.vocab_size)) <= 100).all()
    assert {one.tobytes() for one in ids[:count]} != {one.tobytes() for one in ids[count:]}


def test_copies_come_from_the_gap_before(rows):
    source = Copies(gap=(30, 90), span=(10, 20), drawn=0.5)
    copies, gaps = 0, []
    for row in rows(source, 512):
        for (cue_role, cue, _), (role, begin, end) in itertools.pairwise(runs(row.roles)):
            if role != ANSWER:
                continue
            assert cue_role == DRAWN
            begin -= 4
            copy = row.ids[begin:end].tolist()
            size = len(copy)
            found = [at for at in range(begin) if row.ids[at : at + size].tolist() == copy]
            assert found
            gaps.append(min((begin - at - size for at in found), key=lambda gap: abs(gap - 60)))
            copies += 1
            assert 10 <= size <= 20 or end == 512
            assert begin - cue <= 20
    assert copies > 60
    assert all(30 <= gap <= 90 for gap in gaps)
    assert max(gaps) - min(gaps) > 30


def test_recall_answers_each_key_with_its_value(rows):
    seen = set()
    for row in rows(Recall(pairs=(2, 16), grows=0.0), 256, 40):
        ids, answers = row.ids.tolist(), np.flatnonzero(row.roles == ANSWER)
        assert len(answers)
        for at in answers:
            key, value = ids[at - 1], ids[at]
            before = [i for i in range(at - 1) if ids[i] == key]
            assert before, "the key was not there before"
            assert {ids[i + 1] for i in before} == {value}  # and had one value alone
        seen.add(len(answers))
    assert len(seen) > 5


def test_recall_grows_with_the_training(rows):
    source = Recall(pairs=(2, 32), grows=0.5)
    early, late = (
        max((row.roles == ANSWER).sum() for row in rows(source, 256, 40, progress)) for progress in (0.0, 0.5)
    )
    assert early <= 2 * 8 < late


def test_needles_are_in_the_context_before_they_are_asked_for(store, rows):
    kinds = {"number": r"\d{7}", "word": r"[a-z]+-[a-z]+", "uuid": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"}
    found = set()
    for row in rows(Needles(ruler=0.3), 512, 60):
        for role, begin, end in runs(row.roles):
            if role != ANSWER:
                continue
            answer = store.tokenizer.decode(row.ids[begin:end].tolist()).strip()
            (kind,) = [kind for kind, form in kinds.items() if re.fullmatch(rf"{form}\.", answer)]
            found.add(kind)
            context = store.tokenizer.decode(row.ids[:begin].tolist())
            assert answer[:-1] in context
    assert found == set(kinds)


def test_what_is_drawn_in_a_needle_counts_only_where_it_can_be_known(store, rows):
    one = Needles(values=("uuid",), uuid_keys=1.0, keys=(1, 1), noise=1.0, distractors=0.0, shorter=0.0)
    for row in rows(one, 512, 20):
        texts = {
            role: [
                store.tokenizer.decode(row.ids[begin:end].tolist())
                for got, begin, end in runs(row.roles)
                if got == role
            ]
            for role in (DRAWN, ANSWER)
        }
        (answer,) = texts[ANSWER]
        assert answer.strip().removesuffix(".") in "".join(texts[DRAWN])
        assert sum(len(text.strip()) for text in texts[DRAWN]) >= 3 * 36  # key and value of the needle, key asked for


def test_a_row_may_hold_several_haystacks_each_with_its_own_needles(store, rows):
    parts = set()
    how = {"shorter": 1.0, "keys": (1, 1), "values": ("number",), "noise": 1.0, "distractors": 0.0}
    for row in rows(Needles(**how), 2048, 20):
        ends = np.flatnonzero(row.ids == store.end) + 1
        begins, parts = np.r_[0, ends[:-1]], parts | {len(ends)}
        assert ends[-1] == 2048
        assert {end - begin for begin, end in zip(begins, ends)} == {2048 // len(ends)}
        for begin, end in zip(begins, ends):
            (answer,) = [span for span in runs(row.roles[begin:end]) if span[0] == ANSWER]
            value = store.tokenizer.decode(row.ids[begin + answer[1] : begin + answer[2]].tolist()).strip().strip(".")
            assert value in store.tokenizer.decode(row.ids[begin : begin + answer[1]].tolist())
    assert parts == {2, 4}
    assert all((row.ids == store.end).sum() == 1 for row in rows(Needles(**how), 1000, 10)), "too short to cut"


def test_needles_among_others_stand_on_lines_of_their_own(rows, store):
    """The haystack's first line may be cut; a needle comes at a line's end, or first of all."""
    source = Needles(noise=0.0, distractors=1.0, shorter=0.0, keys=(2, 2))
    vocabulary, places = Vocabulary(store), set()
    for number in range(20):
        rng, template = np.random.default_rng(number), templates.RULER
        hay, ends = source._others(vocabulary, template, "number", "word", (["a-b"], ["1"]), 200, rng, store.words)
        assert len(hay.ids) == 200
        assert ends[-1] == 200
        lines = store.tokenizer.decode(hay.ids.tolist()).splitlines(keepends=True)
        begins = np.concatenate([[0], ends])
        pieces = [store.tokenizer.decode(hay.ids[a:b].tolist()) for a, b in itertools.pairwise(begins) if a < b]
        assert pieces == lines
        places.add(len(lines))
    assert max(places) > 3


def test_keys_of_evaluation_never_occur(store):
    assert not {*ADJECTIVES, *NOUNS} & set(store.words)
    assert len(store.words) > 200


def test_ruler_and_its_noise_are_among_the_wordings():
    assert templates.NOISE == NOISE
    ours = templates.RULER
    assert f"{ours.introduction}{{context}}{ours.question}" == niah.TEMPLATE
    assert (ours.needle, ours.prefix.strip()) == (niah.NEEDLE, niah.ANSWER_PREFIX)
    assert len(set(templates.TEMPLATES)) == 20
    assert ours in templates.TEMPLATES


def test_haystacks_are_of_the_text_that_is_not_held_out(store, rows):
    held_out = store.held_out.window(0, len(store.held_out))
    forbidden = {held_out[i : i + 30].tobytes() for i in range(len(held_out) - 30)}
    train = store.train.window(0, len(store.train))
    assert not forbidden & {train[i : i + 30].tobytes() for i in range(len(train) - 30)}
    for source in (Needles(noise=0.0, distractors=0.0), Recall(), Copies(), Text()):
        for row in rows(source, 512, 10):
            assert not forbidden & {row.ids[i : i + 30].tobytes() for i in range(len(row.ids) - 30)}


def test_cloze_answers_are_in_their_passages(store, rows):
    asked = 0
    for row in rows(Cloze(), 512, 20):
        for role, begin, end in runs(row.roles):
            if role != ANSWER:
                continue
            asked += 1
            answer = store.tokenizer.decode(row.ids[begin:end].tolist()).strip()
            assert answer in store.tokenizer.decode(row.ids[:begin].tolist())
    assert asked > 20


def test_text_around_answers_counts_and_what_is_drawn_does_not(rows):
    (row,) = rows(Needles(), 512, 1)
    assert {DRAWN, TEXT, ANSWER} == set(row.roles.tolist())


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Copies, {"gap": (9, 3)}, r"mixture.copies.gap must be \[low, high\] with 1 <= low <= high, got \[9, 3\]"),
        (Copies, {"span": (4, 9)}, r"mixture.copies.span must be \[low, high\] with 5 <= low <= high, got \[4, 9\]"),
        (Copies, {"loss": "answer"}, r"mixture.copies: unknown loss 'answer'. Did you mean 'answers'\?"),
        (Needles, {"values": ("uid",)}, "unknown kind of value 'uid'. Did you mean 'uuid'"),
        (Needles, {"noise": 0.7, "distractors": 0.6}, "noise and distractors must add up to 1 at most, got 1.3"),
        (Recall, {"share": -0.1}, "mixture.recall.share must be at least 0, got -0.1"),
    ],
)
def test_bad_settings(kind, settings, message):
    with pytest.raises(UserError, match=message):
        kind(**settings)


def test_needles_are_near_at_first(store, rows):
    """`grows`: a share of the training in which rows are cut, which falls to `shorter`."""
    source = Needles(keys=(1, 1), shorter=0.0, grows=0.5, noise=1.0, distractors=0.0)

    def cut(progress):
        return sum((row.ids == store.end).sum() > 1 for row in rows(source, 2048, 20, progress))

    shares = [cut(progress) for progress in (0.0, 0.25, 0.5, 1.0)]
    assert shares[0] == 20
    assert 0 < shares[1] < 20
    assert shares[2:] == [0, 0]


def test_pairs_in_few_parts_are_far(rows):
    def parts(row):
        return sum(len(row.ids) // 8 < end - begin for role, begin, end in runs(row.roles) if role == TEXT)

    fewest = [{parts(row) for row in rows(Recall(pairs=(2, 4), grows=0.0, parts=most), 512, 30)} for most in (1, 8)]
    assert max(fewest[0]) < max(fewest[1])
    with pytest.raises(UserError, match="parts must be at least 1, got 0"):
        Recall(parts=0)


def test_copies_of_digits(store, rows):
    vocabulary = Vocabulary(store)
    assert [store.tokenizer.decode([int(index)]).strip() for index in vocabulary.digits] == [*"0123456789"]
    for row in rows(Copies(gap=(20, 60), span=(8, 16), drawn=0.0, digits=1.0), 256, 10):
        assert np.isin(row.ids[row.roles == ANSWER], vocabulary.digits).all()
    with pytest.raises(UserError, match=r"drawn and digits must add up to 1 at most"):
        Copies(drawn=0.6, digits=0.6)
