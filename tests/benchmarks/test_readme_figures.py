"""The pictures of the README."""

import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks import readme_figures


@pytest.mark.parametrize("name", readme_figures.PICTURES)
def test_pictures_are_those_of_the_result_files(name):
    committed = (readme_figures.FIGURES / name).read_text(encoding="utf-8")
    assert committed == readme_figures.PICTURES[name](), "stale: run `python -m benchmarks.readme_figures`"
    ET.fromstring(committed)
    assert "prefers-color-scheme: dark" in committed


def test_each_row_of_a_whole_model_has_its_two_points():
    panels = readme_figures.panels()
    assert [[(point.batch, point.tokens) for point in panel.points] for panel in panels] == [
        [(1, 8192), (1, 131072), (8, 32768), (16, 8192), (16, 16384)],
        [(1, 32768), (1, 131072), (4, 131072), (8, 32768), (32, 8192)],
        [(1, 32000), (1, 131072), (4, 131072), (8, 32000), (32, 8192)],
    ]
    drawn = len(re.findall("<circle", readme_figures.whole_model()))
    assert drawn == 2 * sum(len(panel.points) for panel in panels) + 2  # and the legend


def test_the_readme_has_the_times_of_a_whole_model_that_the_rows_have():
    """The factors that the README gives."""
    _, shape, small = (
        {(point.batch, point.tokens): point for point in panel.points} for panel in readme_figures.panels()
    )
    readme = (readme_figures.ROOT / "README.md").read_text(encoding="utf-8")
    at_32k, at_128k, small_32k, small_128k = map(
        factor, (shape[1, 32768], shape[1, 131072], small[1, 32000], small[1, 131072])
    )
    assert (
        f"`kascade` has {at_32k} at 32K tokens and {at_128k} at 128K, the 1.5B with its two KV heads {small_32k} and"
        f" {small_128k}." in readme
    )
    one = {
        row["case"]["method"].partition(":")[0]: f"{row['speedup']:.2f}"
        for row in readme_figures.rows("recommended-times")
        if (row["case"].get("weights"), row["case"]["batch"], row["case"]["context"]) == ("trained", 1, 32000)
    }
    assert (
        f"the 1.5B has {one['kascade']} times at 32K under `kascade`, {one['pages']} under `pages`, {one['lte']} under"
        " `lte`." in readme
    )
    found = [
        row
        for row in readme_figures.rows("recommended-times")
        if row["case"]["level"] == "model" and row["case"]["model"] == "llama-3.1-8b" and row["case"]["batch"] == 8
    ]
    eight = {row["case"]["method"].partition(":")[0]: f"{row['speedup']:.2f}" for row in found}
    assert len(eight) == len(found)
    table = re.findall(r"^\| `(\w+).*\| (\d\.\d\d) \|", readme, re.MULTILINE)
    assert {name for name, _ in table} == eight.keys() - {"dense", "transformers-sdpa"}
    assert all(said == eight[name] for name, said in table)


def factor(point):
    return f"{point.dense / point.method:.2f}"


def test_a_place_with_two_rows_is_an_error():
    row = {"case": {"tokens": 8192, "batch": 1}, "ms": 1.0, "baseline_ms": 2.0}
    with pytest.raises(ValueError, match="expected one row a place"):
        readme_figures.points([row, row], "tokens")


def test_the_illustration_keeps_its_promises():
    """A selecting method chooses anew in each step; an evicting one reads what it kept, and the new token."""
    first, second = readme_figures.CHOSEN
    assert set(first) - set(second)
    assert set(second) - set(first)
    drawn = readme_figures.what_is_read()
    tokens = readme_figures.TOKENS
    reads = (2 * tokens + 1) + len(first) + len(second) + 2 * len(readme_figures.KEPT) + 1
    assert drawn.count('class="read"') == reads + 1  # and the legend
