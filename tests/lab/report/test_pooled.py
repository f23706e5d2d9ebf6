"""Scores over the splits of a task."""

import pytest

from foveate.errors import UserError
from foveate.lab.report import lines, pooled


def row(spec, split, values, share=0.2, task="ruler", length=8000, **more):
    return {
        "spec": spec,
        "method": spec.split(":")[0],
        "model": "tiny",
        "task": task,
        "task_settings": {"split": split, "length": 8192, "max_new_tokens": 8},
        "split": split,
        "length": length,
        "n": len(values),
        "metrics": {"recall": {}},
        "item_values": {"recall": list(values)},
        "keys_read_share": share,
        "kv_bytes_per_step": share * 1e6,
        "dtype": "float32",
        "commit": "abc",
        "ceiling": 100.0,
        "run": {"items": f"{task} {split}"},
        **more,
    }


ROWS = [
    row("dense", "a_1", [1, 1, 1, 0], share=1.0, length=8000),
    row("quest", "a_1", [1, 0, 1, 0], share=0.2),
    row("dense", "a_2", [1, 1], share=1.0, length=8300, ceiling=40.0, commit="def, abc"),
    row("quest", "a_2", [0, 1], share=0.5, length=8300, ceiling=40.0, commit="def, abc"),
]


def test_each_item_counts_once_and_differences_are_paired():
    (dense, quest), notes = pooled.over_splits(ROWS)
    assert notes == []
    assert (quest["ceiling"], quest["commit"]) == (80.0, "abc, def")
    assert quest["item_values"] == {"recall": [1, 0, 1, 0, 0, 1]}
    assert (quest["split"], quest["n"], quest["length"], dense["length"]) == ("a (2 splits)", 6, 8100, 8100)
    assert quest["score"] == pytest.approx(50)
    assert dense["score"] == quest["dense_score"] == dense["dense_score"] == pytest.approx(100 * 5 / 6)
    assert quest["diff_to_dense"] == pytest.approx(-100 / 3)
    assert quest["keys_read_share"] == pytest.approx((4 * 0.2 + 2 * 0.5) / 6)
    assert quest["kv_bytes_per_step"] == pytest.approx((4 * 0.2e6 + 2 * 0.5e6) / 6)
    assert quest["low"] < quest["score"] < quest["high"]
    assert quest["diff_low"] < quest["diff_to_dense"] < quest["diff_high"] <= 0
    assert (dense["diff_low"], dense["diff_high"]) == (0, 0)
    assert len(lines.cells([dense, quest])) == 1


def test_the_order_of_comparisons_does_not_matter():
    some = [row("dense", f"a_{n}", [1, 1, 0, n % 2], length=1000 * n) for n in range(6)]
    ours = [row("quest", f"a_{n}", [n % 3 > 0, 1, 0, 0], length=1000 * n) for n in range(6)]
    whole = pooled.difference(ours, some)
    assert pooled.difference(ours[::-1], some[::-1]) == whole
    assert pooled.difference(ours[3:] + ours[:3], some[3:] + some[:3]) == whole
    same = [{**one, "task_settings": {**one["task_settings"], "length": 4096}} for one in some + ours]
    bounds = {
        tuple(one[name] for name in ("low", "high", "diff_low", "diff_high"))
        for rows in (same, same[::-1])
        for one in pooled.over_splits(rows)[0]
        if one["spec"] == "quest"
    }
    assert len(bounds) == 1


def test_other_tasks_lengths_models_and_families_are_not_mixed():
    other = [row("dense", "b_1", [1]), row("quest", "b_1", [1])]
    longer = [{**one, "task_settings": {**one["task_settings"], "length": 16384}} for one in ROWS]
    named = [{**one, "model": "small"} for one in ROWS]
    found, _ = pooled.over_splits([*ROWS, *other, *longer, *named])
    assert [one["split"] for one in found] == ["a (2 splits)"] * 2 + ["b_1"] * 2 + ["a (2 splits)"] * 4
    assert found[2:4] == other


def test_a_method_that_a_split_lacks_is_left_out_and_said():
    found, notes = pooled.over_splits([*ROWS, row("tova", "a_2", [1, 1])])
    assert [one["spec"] for one in found] == ["dense", "quest"]
    assert notes == ["tova: not measured on a_1 of ruler, 8192 tokens, left out"]


def test_a_method_that_took_no_steps_read_nothing():
    found, _ = pooled.over_splits([*ROWS[:3], {**ROWS[3], "keys_read_share": None, "kv_bytes_per_step": None}])
    assert found[1]["keys_read_share"] is found[1]["kv_bytes_per_step"] is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[1:], "no row of dense in ruler a_1 on tiny"),
        ([*ROWS, {**ROWS[1], "n": 2}], "two comparisons of ruler a_1 on tiny; choose one"),
        ([{**one, "item_values": {"nll": [1.0]}} for one in ROWS], "no mean over items"),
    ],
)
def test_what_cannot_be_pooled(rows, message):
    with pytest.raises(UserError, match=message):
        pooled.over_splits(rows)
