"""Tables whose cells may hold anything, and the words for lengths and circumstances."""

import pytest

from foveate.lab.report.markdown import context_length, made_beside, markdown_table, titled


def test_no_cell_ends_its_table():
    lines = markdown_table([("method", "score"), ('`lte:file="a | b`\n# H.safetensors"`', "1.0")]).splitlines()
    assert lines == ["| method | score |", "|---|--:|", '| `lte:file="a \\| b` # H.safetensors"` | 1.0 |']
    row = {"device": "cpu", "versions": {"torch": "2", "transformers": "5"}, "commit": "abc"}
    assert titled("a\nb", [row], "T") == "a b (cpu; torch 2, transformers 5; commit abc):\n\nT"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(0, "0"), (806.4, "806"), (1000, "1,000"), (4032, "4,032"), (8192.0, "8K"), (131072, "128K"), (2**20, "1M")],
)
def test_contexts_are_named_in_units_of_1024_tokens(tokens, words):
    assert context_length(tokens) == words


def test_what_a_title_says_is_not_said_beside_it():
    row = {"device": "cpu", "versions": {"torch": "2", "transformers": "5"}, "commit": "abc"}
    assert made_beside("niah, cpu; torch 2, transformers 5", [row]) == "commit abc"
    assert made_beside("niah", [row]) == "cpu; torch 2, transformers 5; commit abc"
