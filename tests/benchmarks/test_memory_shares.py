"""Methods at the same share of the keys, on made-up rows."""

import pytest

from benchmarks.table_kinds import memory_shares
from foveate.errors import UserError

MADE = {"device": "H100", "versions": {"torch": "2", "transformers": "5"}, "commit": "abc"}


def row(spec, share, score, task="ruler", question="after"):
    settings = {"length": 4096, "question": question}
    which = {"task": task, "split": "niah_single_3" if task == "ruler" else "dev", "task_settings": settings, "n": 32}
    shown = {"score": score, "low": score - 5, "high": score + 5, "keys_read_share": share}
    return {"method": spec.partition(":")[0], "spec": spec, **which, **shown, **MADE}


ROWS = [
    row("dense", 1.0, 90.0),
    row('lte:file="a.safetensors",top_k=410,window=32,allocation=global', 0.10, 80.0),
    row('lte:file="a.safetensors",top_k=123,window=32,allocation=global', 0.03, 70.0),
    row("snapkv:top_k=91", 0.036, 10.0),
    row("snapkv:top_k=378", 0.105, 20.0),
    row("streaming:sinks=4,window=119", 0.029, 5.0),
    row("streaming:sinks=4,window=406", 0.097, 6.0),
]


def test_budgets_side_by_side():
    title, rest = memory_shares(ROWS).split("\n\n")
    assert title.startswith("niah_single_3, 4K tokens, question after eviction, n = 32")
    lines = [line.strip("| ").split(" | ") for line in rest.splitlines()]
    assert lines[0] == ["method", "3%", "10%"]
    assert lines[2] == ["dense", "90.0 [85.0, 95.0]", "90.0 [85.0, 95.0]"]
    assert [line[0] for line in lines[3:]] == ["`lte:allocation=global`", "`snapkv`", "`streaming`"]
    assert [line[1].split()[0] for line in lines[3:]] == ["70.0", "10.0", "5.0"]
    assert [line[2].split()[0] for line in lines[3:]] == ["80.0", "20.0", "6.0"]


def test_a_table_for_each_question():
    more = [row(one["spec"], one["keys_read_share"], 1.0, "hotpotqa", "with") for one in ROWS]
    blocks = memory_shares([*ROWS, *more]).split("\n\n")
    assert len(blocks) == 4
    assert blocks[2].startswith("hotpotqa, 4K tokens, question in the prompt")


def test_a_missing_budget_is_an_error():
    with pytest.raises(UserError, match=r"as many budgets each on niah_single_3, not \[1, 2\]"):
        memory_shares(ROWS[:-1])
