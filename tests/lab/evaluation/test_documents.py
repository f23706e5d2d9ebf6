"""A user's own documents as a task."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foveate.cli import app
from foveate.errors import DataError, UserError
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.tasks import documents
from foveate.lab.evaluation.tasks.base import Output
from foveate.lab.evaluation.tasks.fidelity import Fidelity
from tests import tiny


class Words:
    """A tokenizer of words, one token each."""

    chat_template, bos_token_id = None, None

    def encode(self, text, add_special_tokens=False):
        return [hash(word) % 1000 for word in text.split()]

    def __call__(self, text, add_special_tokens, return_offsets_mapping):
        offsets, end = [], 0
        for word in text.split():
            begin = text.index(word, end)
            end = begin + len(word)
            offsets.append((begin, end))
        return {"input_ids": list(range(len(offsets))), "offset_mapping": offsets}


def task(**settings):
    return tasks.parse("documents", **{"length": 20, **settings})


def write(path, *records):
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


QUESTION = {"context": "The bridge is red.", "question": "What colour is the bridge?", "answer": "Red"}


def test_only_texts_need_the_positions_of_a_window(tmp_path):
    record = {"context": "a b c", "question": "what", "answer": "a"}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    own = task(length=4096, max_new_tokens=64)
    assert own.least_positions(tmp_path) == 64
    (tmp_path / "text.md").write_text("one two three")
    assert own.least_positions(tmp_path) == 4160


def test_texts_are_cut_into_windows(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "long.md").write_text(" ".join(f"w{n}" for n in range(49)), encoding="utf-8")
    (tmp_path / "short.txt").write_text("a few words", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\0")
    found = {item.id: item for item in task().items(tmp_path, Words(), 3, 0)}
    assert set(found) == {"notes/long.md@0", "notes/long.md@70", "short.txt@0"}, (
        "nine words are less than half a window"
    )
    assert found["notes/long.md@70"].prompt.split() == [f"w{n}" for n in range(20, 40)]
    assert len(found["notes/long.md@0"].prompt_ids) == 20
    assert task().needs_dense(tmp_path)


def test_questions_are_graded(tmp_path):
    path = write(tmp_path / "asked.jsonl", QUESTION, QUESTION | {"answer": ["a reddish hue", "red"]})
    asked = task()
    first, _ = sorted(asked.items(path, Words(), 2, 0), key=lambda item: item.id)
    assert not asked.needs_dense(path)
    assert first.id == "asked.jsonl:1"
    assert first.prompt[-1]["content"].endswith("bridge?")
    assert asked.grade(first, Output(text="It is red, I think.")) == {"found": 1.0, "f1": pytest.approx(1 / 3)}
    assert asked.grade(first, Output(text="Incredible"))["found"] == 0.0, "a part of a word is no answer"


def test_answers_that_no_rule_decides_are_named(tmp_path):
    path = write(tmp_path / "asked.jsonl", QUESTION | {"answer": "A"}, QUESTION | {"answer": ["I", "red"]})
    with pytest.warns(UserWarning, match=r"asked\.jsonl:1: no rule tells .* 'A', a letter .*1 more such answer"):
        task().items(path, Words(), 2, 0)


def test_a_question_can_be_a_turn_of_its_own(tmp_path):
    path = write(tmp_path / "asked.jsonl", QUESTION)
    (item,) = task(question="after").items(path, Words(), 1, 0)
    words = len(QUESTION["question"].split())
    assert item.context_tokens == len(item.prompt_ids) - words


def test_the_halves_share_no_item(tmp_path):
    path = write(tmp_path / "asked.jsonl", *(QUESTION | {"question": f"What is number {n}?"} for n in range(40)))
    every = {item.id for item in task().items(path, Words(), 40, 0)}
    halves = [{item.id for item in task(split=split).items(path, Words(), 40, 0)} for split in ("tune", "test")]
    assert len(every) == 40
    assert halves[0] | halves[1] == every
    assert not halves[0] & halves[1]
    assert min(map(len, halves)) > 8


def test_a_limit_is_a_maximum(tmp_path):
    path = write(tmp_path / "asked.jsonl", *(QUESTION | {"question": f"What is number {n}?"} for n in range(3)))
    assert len(task().items(path, Words(), 10, 0)) == 3
    alone = write(tmp_path / "one.jsonl", QUESTION)
    (item,) = task().items(alone, Words(), 10, 0)
    there, other = ("tune", "test") if documents._half(item) == "tune" else ("test", "tune")
    assert task(split=there).items(alone, Words(), 10, 0) == [item]
    with pytest.raises(UserError, match=f"all items are in the other half than '{other}'"):
        task(split=other).items(alone, Words(), 10, 0)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([QUESTION, {"context": "Alone."}], "asked.jsonl:2 has no answer, but others have"),
        ([{"context": "One.", "question": "Two?"}, {"context": "Alone."}], "has no question, but others have"),
        ([{"question": "Two?"}], "asked.jsonl:1: expected an object with 'context'"),
        ([QUESTION | {"answer": 3}], "'answer' must be text"),
        ([QUESTION | {"answer": ["..."]}], "a word, number or symbol in each"),
        ([{"context": "One.", "answer": "Two"}], "needs one"),
        ([QUESTION | {"context": " "}], "'context' is empty"),
    ],
)
def test_malformed_records_are_named(tmp_path, records, message):
    path = write(tmp_path / "asked.jsonl", *records)
    with pytest.raises(DataError, match=message):
        task().items(path, Words(), 1, 0)


def test_halves_do_not_depend_on_the_name_of_a_file(tmp_path):
    (tmp_path / "one").mkdir()
    for number in range(12):
        (tmp_path / "one" / f"{number}.txt").write_text(f"text {number}", encoding="utf-8")
        (tmp_path / f"other {number}.txt").write_text(f"text {number}", encoding="utf-8")
    items = task().items(tmp_path, Words(), 24, 0)
    halves = {item.prompt: {documents._half(one) for one in items if one.prompt == item.prompt} for item in items}
    assert all(len(half) == 1 for half in halves.values())


def test_rows_are_not_written_among_the_documents(tmp_path):
    one = task()
    assert one.reads(tmp_path, tmp_path / "runs" / "rows.jsonl")
    assert Fidelity(of=one).reads(tmp_path, tmp_path / "rows.jsonl")
    assert not one.reads(tmp_path, tmp_path.parent / "rows.jsonl")
    assert not tasks.parse("niah").reads(tmp_path, tmp_path / "rows.jsonl")
    (tmp_path / "text.txt").write_text("A text of few words.", encoding="utf-8")
    model = tiny.build(tmp_path.parent / "model-of-documents")  # a missing model would be refused first
    given = ["compare", "--model", model, "--task", "documents", "--data", tmp_path, "--out", tmp_path / "rows.jsonl"]
    done = CliRunner().invoke(app, [str(word) for word in given])
    assert done.exit_code == 2
    assert "whose files are documents; choose another --out" in " ".join(done.output.split())


def test_a_folder_without_documents_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"expected files of \.txt, \.md, \.jsonl"):
        task().files(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        task().files(tmp_path / "missing")


def test_empty_files_are_left_out_and_named(tmp_path):
    write(tmp_path / "asked.jsonl", QUESTION)
    for name in ("empty.txt", "blank.md"):
        (tmp_path / name).write_text("  \n", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"left out as empty: .*blank\.md and 1 more"):
        (item,) = task().items(tmp_path, Words(), 10, 0)
    assert item.id == "asked.jsonl:1"
    (tmp_path / "asked.jsonl").unlink()
    with pytest.raises(DataError, match=r"blank\.md: an empty document"):
        task().items(tmp_path, Words(), 10, 0)


_AS_NOBODY = """
import os, sys
from pathlib import Path
from foveate.lab.evaluation.tasks.documents import Documents
from tests import tiny
b"x".decode("utf-8-sig")  # which nobody may not import
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    print([path.name for path in Documents().items(Path(sys.argv[1]), None, 9, 0)])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("closed", ["closed", "closed/b.txt"])
def test_what_may_not_be_read_is_named(closed):
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are another user's
        folder = Path(name)
        (folder / "closed").mkdir()
        for path in (folder / "a.txt", folder / "closed" / "b.txt"):
            path.write_text("A text.", encoding="utf-8")
        folder.chmod(0o755)
        (folder / closed).chmod(0)
        done = subprocess.run([sys.executable, "-c", _AS_NOBODY, name], capture_output=True, text=True, check=True)
        (folder / closed).chmod(0o755)
    assert done.stdout.startswith(f"DataError {folder / closed}: Permission denied")
