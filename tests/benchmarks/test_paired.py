"""Methods beside another method than dense attention."""

import pytest

from benchmarks.table_kinds import paired

VALUES = {
    "dense": {"a": [1.0, 1.0, 1.0, 1.0], "b": [1.0, 1.0]},
    "luka": {"a": [1.0, 0.0, 1.0, 0.0], "b": [0.0, 1.0]},
    "pages": {"a": [1.0, 1.0, 1.0, 0.0], "b": [1.0, 1.0]},
    "quest": {"b": [0.0, 0.0]},
}


def rows_of(*methods, model="tiny", dtype="float32"):
    return [
        {
            **{"method": method, "spec": method, "model": model, "n": len(values), "device": "cpu", "commit": "abc"},
            **{"metrics": {"match": {}}, "item_values": {"match": values}, "run": {"items": items}},
            **{"task": "niah", "split": "single", "length": 4096, "dtype": dtype},
            "versions": {"torch": "2", "transformers": "5"},
        }
        for method in methods
        for items, values in VALUES[method].items()
    ]


def test_differences_to_the_first_method_over_the_items_that_both_have():
    for order in (("dense", "luka", "pages", "quest"), ("luka", "dense", "quest", "pages")):
        lines = paired(rows_of(*order)).splitlines()
        assert lines[2] == "| method | over `luka`, points [95 %, paired] | comparisons | n |"
        cells = {line.split("`")[1]: line.split(" | ")[1:] for line in lines[4:]}
        assert cells.keys() == {"pages", "quest"}
        assert cells["pages"][0].startswith("+33.3 [+0.0, ")  # two of six items more
        assert cells["pages"][1:] == ["2", "6 |"]
        assert cells["quest"][0].startswith("-50.0 [")
        assert cells["quest"][1:] == ["1", "2 |"]


def test_models_and_number_formats_are_tables_of_their_own():
    for other in ({"model": "other"}, {"dtype": "bfloat16"}):
        found = paired(rows_of("luka", "pages") + rows_of("pages", "luka", **other))
        assert found.count("over `luka`") == found.count("over `pages`") == 1
        second = f"{other.get('model', 'tiny')}, {other.get('dtype', 'float32')}, of the comparisons"
        assert found.index("tiny, float32, of the comparisons") < found.index(second)


def test_what_cannot_be_compared():
    apart = [row for row in rows_of("luka") if row["run"]["items"] == "a"] + rows_of("quest")
    with pytest.raises(ValueError, match="tiny, float32: quest and luka have no comparison in common"):
        paired(apart)
    with pytest.raises(ValueError, match="no pooled difference"):
        paired([row | {"metrics": {"perplexity": {}}} for row in rows_of("luka", "pages")])
