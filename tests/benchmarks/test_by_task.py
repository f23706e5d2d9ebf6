"""Differences to dense attention by task, over all lengths of it."""

import pytest

from benchmarks.table_kinds import by_task

VALUES = {
    "dense": {("niah", 4096): [1.0, 1.0], ("niah", 8192): [1.0, 0.0], ("qa", 4096): [0.0, 0.0]},
    "luka": {("niah", 4096): [1.0, 0.0], ("niah", 8192): [0.0, 0.0], ("qa", 4096): [1.0, 1.0]},
    "quest": {("niah", 4096): [1.0, 1.0]},
}


def rows_of(*methods, model="tiny"):
    return [
        {
            **{"method": method, "spec": method, "model": model, "n": len(values), "device": "cpu", "commit": "abc"},
            **{"metrics": {"match": {}}, "item_values": {"match": values}, "run": {"items": f"{task} {length}"}},
            **{"task": task, "split": "single", "length": length, "dtype": "float32", "task_settings": {}},
            **{"keys_read_share": length / 16384, "versions": {"torch": "2", "transformers": "5"}},
        }
        for method in methods
        for (task, length), values in VALUES[method].items()
    ]


def test_lengths_of_a_task_are_one_column_and_all_items_the_last():
    for order in (("dense", "luka"), ("luka", "dense")):
        lines = by_task(rows_of(*order)).splitlines()
        assert lines[2] == "| method | keys read | niah single, n = 4 | qa single, n = 2 | all, n = 6 |"
        (cells,) = [line.strip("| ").split(" | ") for line in lines[4:]]
        assert cells[:2] == ["`luka`", "25–50 %"]
        assert [cell.split(" ")[0] for cell in cells[2:]] == ["-50.0", "+100.0", "+0.0"]


def test_one_task_has_no_column_of_all():
    rows = [row for row in rows_of("dense", "luka") if row["task"] == "niah"]
    assert by_task(rows).splitlines()[2] == "| method | keys read | niah single, n = 4 |"
    assert by_task([row | {"keys_read_share": 0.2} for row in rows]).splitlines()[4].startswith("| `luka` | 20 % |")


def test_methods_that_lack_a_comparison_are_left_out():
    assert "quest" not in by_task(rows_of("dense", "luka", "quest"))


def test_models_are_tables_of_their_own():
    found = by_task(rows_of("dense", "luka") + rows_of("dense", "luka", model="other"))
    assert found.count("| `luka` |") == 2
    assert found.index("tiny, float32, difference") < found.index("other, float32, difference")


def test_what_has_no_difference_to_dense():
    with pytest.raises(ValueError, match="tiny, float32: no row of dense on niah 4096, niah 8192, qa 4096"):
        by_task(rows_of("luka"))
    with pytest.raises(ValueError, match="no pooled difference"):
        by_task([row | {"metrics": {"perplexity": {}}} for row in rows_of("dense", "luka")])
