"""Needles in other words: what changes and what does not, and the program from models to its table."""

import itertools
import json

import pytest

from benchmarks import hybrid_task_tables, hybrid_wordings
from benchmarks.hybrid_wordings import FAR, LENGTH, SPLITS, WORDINGS, Reworded
from foveate.errors import UserError
from foveate.hybrids.models import HybridForCausalLM, make_config
from foveate.lab.evaluation.tasks.ruler import Ruler


def asked(ruler_data, tokenizer, wording, split="niah_multikey_1", limit=20):
    return Reworded(split=split, wording=wording, length=LENGTH, beyond=FAR).items(ruler_data, tokenizer, limit, 0)


def text(item):
    return item.prompt[-1]["content"]


@pytest.mark.parametrize("wording", WORDINGS)
def test_key_and_answer_are_rulers_and_the_words_are_not(ruler_data, untemplated, wording):
    own = Ruler(split="niah_multikey_1", length=LENGTH, beyond=FAR).items(ruler_data, untemplated, 20, 0)
    for item, other in zip(asked(ruler_data, untemplated, wording), own, strict=True):
        assert (item.id, item.answers) == (other.id, other.answers)
        (answer,) = item.answers
        assert text(item).count(answer) == 1
        assert item.meta["keys"][0] in text(item)[-200:]
        assert ("special magic" in text(item)) == (wording == "ruler")
        after = untemplated.encode(text(item)[text(item).index(answer) :])
        assert len(after) > 350  # below 400, because this tokenizer cuts RULER's longer question into more tokens
    if wording == "ruler":
        assert [item.prompt_ids for item in asked(ruler_data, untemplated, wording)] == [
            item.prompt_ids for item in own
        ]


def test_wordings_take_turns_and_nothing_else_changes(ruler_data, untemplated):
    items = asked(ruler_data, untemplated, "untaught")
    ends = [text(item).rpartition("\n")[2] for item in items]
    templates = WORDINGS["untaught"]
    assert len(templates) == 10
    for number, (item, end) in enumerate(zip(items, ends, strict=True)):
        template = templates[number % 10]
        question = (template.question + template.prefix).format(kind="number", key=item.meta["keys"][0])
        assert end == question.strip("\n")
        needle = template.needle.format(kind="number", key=item.meta["keys"][0], value=item.answers[0])
        assert needle in text(item)


def test_no_wording_is_twice():
    every = [template for templates in WORDINGS.values() for template in templates]
    assert len(every) == 30
    for one, other in itertools.combinations(every, 2):
        assert (one.needle, one.question) != (other.needle, other.question)
    assert all("{value}" in template.needle and "{key}" in template.needle for template in every)


def test_an_unknown_wording_is_refused():
    with pytest.raises(UserError, match=r"'rulers'.*ruler"):
        Reworded(wording="rulers")


def test_it_asks_models_and_makes_the_table(ruler_data, untemplated, tmp_path):
    for preset in ("gdn", "gdn_attn"):
        folder = tmp_path / f"{preset}_tiny-27M-0"
        HybridForCausalLM(make_config(preset, "tiny", vocab_size=len(untemplated))).save_pretrained(folder)
        untemplated.save_pretrained(folder)
        hybrid_wordings.main(ruler_data, tmp_path / "out", [folder], limit=2)
    rows = [json.loads(line) for line in (tmp_path / "out" / "hybrids-wordings.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * len(WORDINGS) * len(SPLITS)
    assert {row["method"] for row in rows} == {"own", "dense"}
    table = hybrid_task_tables.wordings(rows)
    assert "needles by their wording, in prompts of 1K tokens, percent [95 %], n = 2 each" in table
    head, _, *lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert head[:3] == ["model", "alone, RULER's wording", "alone, taught wordings"]
    assert head[-1] == "among four keys, untaught wordings"
    assert [line[0] for line in lines] == ["gdn_tiny-27M-0", "gdn_attn_tiny-27M-0"]
    assert all(cell != "–" for line in lines for cell in line)
    for wrong in ([*rows, rows[0]], [*rows[1:], rows[0] | {"n": 3}]):
        with pytest.raises(UserError, match="one length and number of items, and each be there once"):
            hybrid_task_tables.wordings(wrong)
