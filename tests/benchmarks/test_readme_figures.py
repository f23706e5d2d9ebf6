"""The pictures of the README."""

import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks import readme_figures, tables


@pytest.mark.parametrize("name", readme_figures.PICTURES)
def test_pictures_are_those_of_the_result_files(name):
    committed = (readme_figures.FIGURES / name).read_text(encoding="utf-8")
    assert committed == readme_figures.PICTURES[name](), "stale: run `python -m benchmarks.readme_figures`"
    ET.fromstring(committed)
    assert "prefers-color-scheme: dark" in committed


def test_each_row_of_a_whole_model_has_its_two_bars():
    panels = readme_figures.panels()
    assert [[(point.batch, point.tokens) for point in panel.points] for panel in panels] == [
        [(1, 8192), (1, 131072), (8, 32768), (16, 8192), (16, 16384)],
        [(1, 32000), (1, 131072), (4, 131072), (8, 32000), (32, 8192)],
    ]
    drawn = readme_figures.whole_model()
    assert len(re.findall("<rect", drawn)) == 2 * sum(len(panel.points) for panel in panels) + 2  # and the legend
    assert re.findall(r">([\d.]+)×<", drawn) == [factor(point) for panel in panels for point in panel.points]


README = (readme_figures.ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_the_times_of_the_server_that_the_rows_have():
    shape, small = ({(point.batch, point.tokens): point for point in panel.points} for panel in readme_figures.panels())
    drafts, fifths = {}, {}
    for row in readme_figures.rows("serving"):
        place = row["case"]["batch"], row["case"]["tokens"]
        if "lossless" in row["case"]:
            drafts[place] = max(drafts.get(place, 0), round(row["speedup"], 2))
        elif "top_k=0.2" in row["case"]["method"]:
            fifths[place] = row
    for words, place in (
        ("8 requests of 32K tokens decode", (8, 32768)),
        ("one request of 128K tokens decodes", (1, 131072)),
        ("one request of 8K tokens decodes", (1, 8192)),
    ):
        point = shape[place]
        lossless = f"{drafts[place]}×" if place in drafts else ""
        fifth = f"{fifths[place]['ms']:.1f} ms, {fifths[place]['speedup']:.2f}×" if place in fifths else ""
        line = f"| {words} | {point.dense:.1f} ms | {point.method:.1f} ms, {factor(point)}× | {fifth} | {lossless} |"
        assert re.sub(r"\|  (?=\|)", "| ", line) in README
    assert f"| 4 requests of 128K tokens decode | | | | {drafts[4, 131072]}× |" in README
    own = [f"{fifths[place]['baseline_ms']:.1f}" for place in ((8, 32768), (1, 131072))]
    assert f"when vLLM's own attention took {own[0]} and {own[1]} ms" in README
    assert f"With one sequence of 32,000 tokens the 1.5B is {factor(small[1, 32000])} times as fast" in README
    loads = [
        row for row in readme_figures.rows("serving-load") if (row["case"]["rate"], row["case"]["seed"]) == (0.5, 1)
    ]
    loads = [row for row in loads if row["case"]["model"] == "llama-3.1-8b-shape"]
    loads = [row for row in loads if (row["case"]["runner"], row["case"]["kv_cache_dtype"]) == ("v2", "auto")]
    (fast,), (exact,) = ([row for row in loads if bool(row["case"].get("lossless")) == kind] for kind in (False, True))
    assert (
        f"{fast['baseline_ms']:.1f} ms | {fast['ms']:.1f} ms, {fast['speedup']:.2f}× | | {exact['speedup']:.2f}× |"
        in README
    )
    own, ours = (exact[name][0] / 1000 for name in ("baseline_first_token_ms", "first_token_ms"))
    assert f"it waits {ours:.2f} s instead of {own:.2f}." in README


def lines_of(table):
    """The cells of each line of a table, by its method."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]
    return {name: rest for name, *rest in cells}


def test_the_readme_has_the_points_and_times_of_the_same_run():
    sixteen, eight = map(
        lines_of, tables.marked(["benchmarks/results/end-to-end.jsonl", "end-to-end"]).split("\n\nqwen")
    )
    ours = "`kascade:top_k=0.2`"
    assert sixteen.keys() - eight.keys() == {"`pages`"}
    for name, rest in (*sixteen.items(), *eight.items()):
        *points, token, faster, _, _, cache = rest
        time = f"{float(token):.1f} ms" + (f", {faster}" if faster else "")
        assert not [point for point in points if point.startswith("dense in")], "every step is sparse"
        shown = f"`attach(model)`: {name}" if name == ours else name
        assert f"| {shown} | {' | '.join(points)} | {time} | {cache} |" in README
    most, most_by_a_tenth = (sixteen[name][-2].rstrip("×").rpartition("–")[2] for name in (ours, "`kascade`"))
    assert f"up to {most} times as fast with what `attach` takes, and {most_by_a_tenth} times with `kascade`" in README
    assert {one[-3].partition("–")[0] for one in sixteen.values()} - {"–", ""} <= {"6.1", "6.2"}, "takes 6 s"


def test_the_readme_has_what_long_answers_cost():
    lines = tables.marked(
        ["benchmarks/results/long-answers.jsonl", "end-to-end", "split=countdown_0.5k", "split=math500"]
    )
    made = lines_of(lines.split("\n\n")[1])
    for words, name in (
        ("all: `dense`", "`dense`"),
        ("a tenth: `kascade`", "`kascade`"),
        ("a fifth: `attach` by itself, `kascade:top_k=0.2`", "`kascade:top_k=0.2`"),
        ("a quarter, in pages: `pages`", "`pages`"),
    ):
        countdown, mathematics, token, faster, *_ = made[name]
        time = f"{float(token):.1f} ms" + (f", {faster}" if faster else "")
        assert f"  | {words} | {countdown} | {mathematics} | {time} |" in README
    assert "32 × 30,000 tokens" in lines
    assert "32 at a time (n = 96 each" in README


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
