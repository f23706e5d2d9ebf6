import pytest
import torch

from foveate.errors import DataError, UserError
from foveate.hybrids.models import HybridForCausalLM, make_config
from foveate.hybrids.training.halves import halves
from foveate.lab.evaluation import generation, tasks
from foveate.lab.evaluation.metrics import columns, estimate
from foveate.lab.evaluation.tasks.base import Output


def pairs_of(item, pairs):
    """The pairs of a prompt, found by the keys that are asked for, and the queries, in order."""
    flat = [item.prompt_ids[-1], *item.target_ids]
    queries = list(zip(flat[::2], flat[1::2]))
    keys = {key for key, _ in queries}
    (start,) = [
        at for at in range(len(item.prompt_ids) - 2 * pairs) if set(item.prompt_ids[at : at + 2 * pairs : 2]) == keys
    ]
    block = item.prompt_ids[start : start + 2 * pairs]
    return start, list(zip(block[::2], block[1::2])), queries


@pytest.mark.parametrize(("length", "pairs"), [(300, 8), (200, 40), (18, 8)])
def test_every_pair_is_asked_for_once(sample, tokenizer, length, pairs):
    keys, values = map(set, halves(tokenizer))
    task = tasks.parse("mqar", length=length, pairs=pairs)
    for item in task.items(sample, tokenizer, 6, 0):
        assert (len(item.prompt_ids), len(item.target_ids)) == (length, 2 * pairs - 1)
        start, shown, asked = pairs_of(item, pairs)
        assert sorted(shown) == sorted(asked)
        assert len(set(dict(shown))) == pairs
        assert set(dict(shown)) <= keys
        assert {value for _, value in shown} <= values
        around = item.prompt_ids[:start] + item.prompt_ids[start + 2 * pairs : -1]
        assert not keys & set(around) & set(dict(shown))
        assert start <= len(around) / 4
        assert item.answers == tuple(tokenizer.decode([value]) for _, value in asked)


def test_queries_have_an_order_of_their_own_and_places_differ(sample, tokenizer):
    items = tasks.parse("mqar:length=300,pairs=8").items(sample, tokenizer, 6, 0)
    found = [pairs_of(item, 8) for item in items]
    assert all(shown != asked for _, shown, asked in found)
    assert len({start for start, _, _ in found}) > 1
    assert len({item.prompt_ids for item in items}) == 6
    assert items[:2] == tasks.parse("mqar:length=300,pairs=8").items(sample, tokenizer, 2, 0)
    assert items[:2] != tasks.parse("mqar:length=300,pairs=8").items(sample, tokenizer, 2, 1)


def test_grading_by_hand(sample, tokenizer):
    task = tasks.parse("mqar:length=60,pairs=4")
    items = task.items(sample, tokenizer, 2, 0)
    hits = [(True, True, False, True, True, False, True), (False, True, False, True, False, True, False)]
    outputs = [Output(hits=hit) for hit in hits]  # values, of which 3 of 4 and none are right, and keys between them
    assert [task.grade(*pair)["accuracy"] for pair in zip(items, outputs)] == [0.75, 0.0]
    assert estimate(task.metrics["accuracy"], columns(map(task.grade, items, outputs))).value == 37.5
    assert [*map(task.said, items, outputs)] == ["3 of 4 right", "0 of 4 right"]


def test_queries_are_decoded_by_a_hybrid(sample, tokenizer):
    """Hits are those of one forward pass over prompt and queries."""
    torch.manual_seed(0)
    model = HybridForCausalLM(make_config("lalte", "tiny", vocab_size=600)).eval()
    (item,) = tasks.parse("mqar:length=90,pairs=12").items(sample, tokenizer, 1, 0)
    (output,) = generation.run_batch(model, tokenizer, [item]).outputs
    with torch.inference_mode():
        best = model(torch.tensor([item.prompt_ids + item.target_ids])).logits[0, 89:-1].argmax(-1).tolist()
    assert output.hits == tuple(ours == theirs for ours, theirs in zip(best, item.target_ids))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("pairs=0", "pairs must be at least 1, got 0"),
        ("length=17,pairs=8", "length must be at least 18, got 17"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UserError, match=message):
        tasks.parse(f"mqar:{settings}")


def test_too_little_of_everything(sample, tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"800 pairs need as many keys, and 29\d tokens of the vocabulary can be keys"):
        tasks.parse("mqar:length=1602,pairs=800").items(sample, tokenizer, 1, 0)
    (tmp_path / "short.txt").write_text("Call me Ishmael.", encoding="utf-8")
    with pytest.raises(UserError, match="a length of 300 with 8 pairs needs 283 tokens of text, and the novels give"):
        tasks.parse("mqar:length=300,pairs=8").items(tmp_path, tokenizer, 1, 0)
    (tmp_path / "short.txt").unlink()
    with pytest.raises(DataError, match="no novels found"):
        tasks.parse("mqar").items(tmp_path, tokenizer, 1, 0)
