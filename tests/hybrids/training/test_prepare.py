"""Text on the disk: documents, titles left out, shards, and what is refused."""

import json
import lzma
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from foveate.errors import DataError, UserError
from foveate.hybrids.training import tokens
from foveate.hybrids.training.documents import documents, normalised, read_titles, text_files
from foveate.hybrids.training.prepare import Preparation, prepare
from foveate.hybrids.training.tokens import TokenStore

WIKI = (
    '<doc id="1" url="u?curid=1" title="Salt &amp; Pepper">\nSalt &amp; Pepper\n\nTwo spices.\n</doc>\n'
    '<doc id="2" url="u?curid=2" title="The "Quoted" One">\nThe "Quoted" One\n\nMore.\n\n</doc>\n'
)


SAMPLE = Path(__file__).resolve().parents[3] / "examples" / "data"


def quiet(text):
    pass


def test_documents_of_each_format(tmp_path):
    (tmp_path / "a.txt").write_text("One text.\n")
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(b'{"text": "x", "title": "T"}\n{"text": " "}\n{"text": "y"}\n'))
    (tmp_path / "c.txt").write_text(WIKI)
    (tmp_path / "d.md").write_text("not text that is read")
    found = [tuple(one) for path in text_files(tmp_path) for one in documents(path)]
    assert found == [
        ("a", "One text."),
        ("T", "x"),
        ("", "y"),
        ("Salt & Pepper", "Salt & Pepper\n\nTwo spices."),
        ('The "Quoted" One', 'The "Quoted" One\n\nMore.'),
    ]


def test_bad_text(tmp_path):
    with pytest.raises(DataError, match=r"none: no such folder"):
        text_files(tmp_path / "none")
    with pytest.raises(DataError, match=r"a folder without text; expected files that end in \.txt, \.txt\.xz"):
        text_files(tmp_path)
    (tmp_path / "a.txt").write_text(WIKI[:-8])
    with pytest.raises(DataError, match=r"a\.txt: 2 lines begin with '<doc id=', 1 with '</doc>', 1 fit together"):
        list(documents(tmp_path / "a.txt"))
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"texts": "x"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl:2: expected an object with 'text' \(text\)"):
        list(documents(tmp_path / "b.jsonl"))
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(DataError, match="a folder without text; its files hold no document"):
        prepare(Preparation(tmp_path), tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()


def test_titles_of_squad_and_of_a_list(tmp_path):
    squad = {"version": "v2.0", "data": [{"title": "Salt_%26_Pepper", "paragraphs": []}, {"title": "Geology"}]}
    (tmp_path / "a.json").write_text(json.dumps(squad))
    (tmp_path / "b.txt").write_text("The Who\n\n")
    assert read_titles([tmp_path / "a.json", tmp_path / "b.txt"]) == {"salt %26 pepper", "geology", "the who"}
    assert normalised("Imperial_College  LONDON") == "imperial college london"
    (tmp_path / "b.txt").write_text("\n")
    with pytest.raises(DataError, match=r"b\.txt: no titles"):
        read_titles([tmp_path / "b.txt"])


def test_a_tokenizers_own_truncation_and_padding_cut_no_document(text_folder, store_folder, tmp_path):
    """A tokenizer.json can set both; here with the tokenizer of the other folder."""
    shutil.copytree(store_folder / tokens.TOKENIZER, tmp_path / "tokenizer")
    path = str(tmp_path / "tokenizer" / "tokenizer.json")
    raw = Tokenizer.from_file(path)
    raw.enable_truncation(5)
    raw.enable_padding(length=700)
    raw.save(path)
    prepare(Preparation(text_folder, tokenizer=tmp_path / "tokenizer", held_out=0.1), tmp_path / "out", quiet)
    ours, theirs = TokenStore(tmp_path / "out"), TokenStore(store_folder)
    assert len(ours.train) == len(theirs.train)
    assert len(ours.tokenizer.encode("Call me Ishmael. " * 9).ids) > 5
    raw.save(str(tmp_path / "out" / tokens.TOKENIZER / "tokenizer.json"))  # as a store of before has it
    assert 5 < len(TokenStore(tmp_path / "out").tokenizer.encode("Call me Ishmael. " * 9).ids) < 700


def test_shards_hold_the_documents_once(text_folder, store_folder):
    store = TokenStore(store_folder)
    store.verify()
    sizes = [shard["tokens"] for shard in store.meta["parts"]["train"]]
    assert len(sizes) > 1
    assert set(sizes[:-1]) == {20_000}
    whole = {part: getattr(store, part).window(0, len(getattr(store, part))) for part in tokens.PARTS}
    texts = {part: store.tokenizer.decode(ids.tolist(), skip_special_tokens=False) for part, ids in whole.items()}
    parts = {part: text.removesuffix("<|end|>").split("<|end|>") for part, text in texts.items()}
    expected = [one.text for path in text_files(text_folder) for one in documents(path)]
    assert sorted(parts["train"] + parts["held_out"]) == sorted(expected)
    assert {part: len(found) for part, found in parts.items()} == {
        part: store.meta["documents"][part] for part in tokens.PARTS
    }
    assert 3 <= len(parts["held_out"]) <= 25


def test_windows_cross_shards_and_the_end(store):
    whole = np.concatenate(
        [np.fromfile(store.folder / shard["file"], "<u2").astype(np.int64) for shard in store.meta["parts"]["train"]]
    )
    doubled = np.concatenate([whole, whole])
    for start in (0, 19_990, len(whole) - 5):
        assert np.array_equal(store.train.window(start, 30), doubled[start : start + 30])
    again = pickle.loads(pickle.dumps(store))
    assert np.array_equal(again.train.window(19_990, 30), doubled[19_990:20_020])


def test_digits_stand_alone_and_text_comes_back(store):
    coded = store.tokenizer.encode("In 1851, 27 whales — “Moby”…\n\n x")
    assert [token for token in coded.tokens if any(c.isdigit() for c in token)] == list("185127")
    assert store.tokenizer.decode(coded.ids) == "In 1851, 27 whales — “Moby”…\n\n x"


def test_a_limit_and_titles_left_out(text_folder, tmp_path):
    (tmp_path / "titles.txt").write_text("part 3\nPart_4\n")
    settings = {"vocab_size": 400, "held_out": 0.1, "leave_out": (tmp_path / "titles.txt",)}
    assert prepare(Preparation(text_folder, limit=9_000, **settings), tmp_path / "a", quiet)
    store = TokenStore(tmp_path / "a")
    assert 8_990 <= len(store.train) <= 9_000
    assert store.meta["documents"]["left_out"] == 2
    assert prepare(Preparation(text_folder, **settings), tmp_path / "b", quiet)
    whole = TokenStore(tmp_path / "b")
    text = whole.tokenizer.decode(whole.train.window(0, len(whole.train)).tolist())
    rows = [json.loads(line) for line in (text_folder / "parts.jsonl").read_text().splitlines()]
    assert rows[3]["text"][100:200] not in text
    assert sum(rows[i]["text"][100:200] in text for i in range(100)) > 75


def test_of_a_book_some_pieces_are_held_out(tmp_path):
    text = (SAMPLE / "books" / "moby_dick.txt").read_text(encoding="utf-8").strip()
    assert prepare(Preparation(SAMPLE / "books", vocab_size=400, held_out=0.3), tmp_path / "out", quiet)
    store = TokenStore(tmp_path / "out")
    parts = {}
    for part in tokens.PARTS:
        ids = getattr(store, part).window(0, len(getattr(store, part))).tolist()
        parts[part] = store.tokenizer.decode(ids, skip_special_tokens=False)
    assert parts["train"].count("<|end|>") <= 1
    assert len(parts["held_out"].split("<|end|>")) - 1 == store.meta["documents"]["held_out"] >= 1
    together = [*parts["train"].replace("<|end|>", ""), *parts["held_out"].replace("<|end|>", "")]
    assert sorted(together) == sorted(text)
    assert all(piece in text for piece in parts["held_out"].split("<|end|>"))


def test_once_only_and_never_over_other_text(text_folder, store_folder, tmp_path):
    plan = Preparation(text_folder, vocab_size=400, held_out=0.1)
    out, said = tmp_path / "out", []
    assert prepare(plan, out, quiet)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert not prepare(plan, out, said.append)
    assert said == [f"{out} already holds this text; nothing to do"]
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(UserError, match=r"holds text prepared otherwise \(vocab_size differ\)"):
        prepare(Preparation(text_folder, vocab_size=500, held_out=0.1), out, quiet)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UserError, match="exists and is not a folder of tokenised text"):
        prepare(plan, tmp_path / "other", quiet)


def test_an_interrupted_preparation_leaves_nothing(text_folder, tmp_path, monkeypatch):
    def interrupt(text):
        if "tokens so far" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(Preparation(text_folder, vocab_size=400, held_out=0.1), tmp_path / "out", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_from_a_folder(text_folder, store_folder, tmp_path):
    plan = Preparation(text_folder, tokenizer=store_folder / "tokenizer", held_out=0.1)
    prepare(plan, tmp_path / "out", quiet)
    one, other = TokenStore(store_folder), TokenStore(tmp_path / "out")
    assert np.array_equal(one.train.window(0, 5000), other.train.window(0, 5000))
    with pytest.raises(UserError, match=r"no tokenizer there \(tokenizer\.json is missing\)"):
        prepare(Preparation(text_folder, tokenizer=tmp_path), tmp_path / "other", quiet)


def test_damaged_folders_of_tokens(store_folder, tmp_path):
    with pytest.raises(DataError, match=r"no tokenised text there \(meta\.json is missing\); foveate train prepare"):
        TokenStore(tmp_path)
    for path in store_folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = tmp_path / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000\.bin: damaged \(its sha256"):
        TokenStore(tmp_path).verify()
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"train-00000\.bin: 39,998 bytes, meta\.json says 40,000"):
        TokenStore(tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00000\.bin: no such file; meta\.json names it"):
        TokenStore(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "schema": 99}))
    with pytest.raises(DataError, match="schema 99, this version reads 1"):
        TokenStore(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 0.0}, "held_out must be between 0 and 1"),
        ({"shard_tokens": 0}, "shard_tokens must be at least 1, got 0"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
    ],
)
def test_bad_settings(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        Preparation(tmp_path, **settings)


def test_a_vocabulary_needs_room_for_the_bytes(text_folder, tmp_path):
    with pytest.raises(UserError, match="vocab_size must be at least 258"):
        prepare(Preparation(text_folder, vocab_size=100), tmp_path / "out", quiet)
