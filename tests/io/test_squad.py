import json
import lzma

import pytest

from foveate.errors import DataError
from foveate.io.squad import Answer, Article, Paragraph, Question, Squad, find_squad, read_squad

TEXT = "Rollo came in 911. He stayed."


def document(version="v2.0", **question):
    answered = {"id": "1", "question": "When?", "answers": [{"text": "911", "answer_start": 14}]}
    impossible = {"id": "2", "question": "Why?", "answers": [], "is_impossible": True}
    paragraph = {"context": TEXT, "qas": [{**answered, **question}, impossible]}
    return {"version": version, "data": [{"title": "The_Normans", "paragraphs": [paragraph]}]}


def expected(version):
    questions = (Question("1", "When?", (Answer("911", 14),)), Question("2", "Why?", ()))
    return Squad(version, (Article("The_Normans", (Paragraph(TEXT, questions),)),))


@pytest.mark.parametrize(("written", "version"), [("1.1", "1.1"), ("v1.1", "1.1"), ("2.0", "2.0"), ("v2.0", "2.0")])
def test_files_plain_and_compressed(tmp_path, written, version):
    content = json.dumps(document(written)).encode()
    (tmp_path / "a.json").write_bytes(content)
    (tmp_path / "a.json.xz").write_bytes(lzma.compress(content))
    assert read_squad(tmp_path / "a.json") == read_squad(tmp_path / "a.json.xz") == expected(version)
    answered, impossible = read_squad(tmp_path / "a.json").articles[0].paragraphs[0].questions
    assert (answered.is_impossible, impossible.is_impossible) == (False, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "not a SQuAD file: expected an object with 'version' and a list 'data'"),
        ({"data": []}, "not a SQuAD file"),
        ({"version": "v2.0", "data": {}}, "not a SQuAD file"),
        (document(version="3.0"), "unknown SQuAD version '3.0'. Allowed: 1.1, v1.1, 2.0, v2.0"),
        ({"version": ["v2.0"], "data": [1]}, "unknown SQuAD version"),
        ({"version": "v2.0", "data": []}, "no articles"),
        ({"version": "v2.0", "data": ["x"]}, "data[0]: expected an object with 'title' (text)"),
        ({"version": "v2.0", "data": [{"title": "x"}]}, "data[0]: expected an object with 'paragraphs' (list)"),
        (
            {"version": "v2.0", "data": [{"title": "x", "paragraphs": [{"qas": []}]}]},
            "data[0].paragraphs[0]: expected an object with 'context' (text)",
        ),
        (
            {"version": "v2.0", "data": [{"title": "x", "paragraphs": [{"context": "y", "qas": 1}]}]},
            "data[0].paragraphs[0]: expected an object with 'qas' (list)",
        ),
        (document(id=7), "data[0].paragraphs[0].qas[0]: expected an object with 'id' (text)"),
        (document(question=None), "qas[0]: expected an object with 'question' (text)"),
        (document(answers="911"), "qas[0]: expected an object with 'answers' (list)"),
        (document(is_impossible="no"), "qas[0]: expected an object with 'is_impossible' (true or false)"),
        (document(is_impossible=True), "qas[0]: 'is_impossible' contradicts the 1 'answers'"),
        (document(answers=[], is_impossible=False), "qas[0]: 'is_impossible' contradicts the 0 'answers'"),
        (document(answers=[{"text": "911"}]), "qas[0].answers[0]: expected an object with 'answer_start' (number)"),
        (document(answers=[911]), "qas[0].answers[0]: expected an object with 'text' (text)"),
    ],
)
def test_errors_name_file_and_place(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError) as error:
        read_squad(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_which_file_of_a_folder(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        find_squad(tmp_path / "none")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"no SQuAD file found; expected \.json or \.json\.xz in .*squad"):
        find_squad(tmp_path)
    for name in ("train-v2.0.json", "dev-v1.1.json.xz"):
        (tmp_path / name).touch()
    assert find_squad(tmp_path).name == "dev-v1.1.json.xz"
    (tmp_path / "dev-v2.0.json").touch()
    assert find_squad(tmp_path).name == "dev-v2.0.json"
    assert find_squad(tmp_path, "dev-v1.1.json").name == "dev-v1.1.json.xz"
    with pytest.raises(DataError, match=r"mine\.json: no such file \(nor mine\.json\.xz\)"):
        find_squad(tmp_path, "mine.json")
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "other.json").touch()
    assert find_squad(tmp_path).name == "other.json"
