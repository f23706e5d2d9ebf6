"""The page as a browser gets it: its HTML, the data within it, and that it asks for nothing else."""

import builtins
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from foveate.cli import app
from foveate.errors import DataError, UserError
from foveate.lab.evaluation import verdict
from foveate.lab.evaluation.tasks.niah import DEPTHS
from foveate.lab.report import page
from foveate.lab.report.markdown import context_length
from foveate.lab.report.page import charts
from foveate.lab.report.rows import spelled
from foveate.lab.results import lens

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def some(name, keep, most=40):
    rows = [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if keep(row)][:most]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def niah():
    return some("luka-niah.jsonl", lambda row: row["device"] == "NVIDIA H200", 70)


@pytest.fixture(scope="module")
def steps():
    """Those with a profile of their kernels, of layers and of models."""

    def profiled(row):
        return row.get("parts_ms") or any(one.get("parts_ms") for one in (row.get("layers") or {}).values())

    return some("decode.jsonl", profiled, 300)


@pytest.fixture
def lens_of(tmp_path):
    def write(*tokens):
        out, layers = tmp_path / "lens.json", [{"layer": 0, "method": "dense", "reads_choice_of": None}]
        made = {"model": "m", "method": "dense", "dtype": "float32"}
        lens.write(out, tokens, len(tokens) - 1, layers, [[[f"r{len(tokens)}"]]], [[[1.0]]], **made)
        return out

    return write


class Page(HTMLParser):
    """What is in a page: its tags, ids, the text of its scripts, and the cells of its tables."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.ids, self.scripts, self.cells, self._open = [], {}, [], [], []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.data = json.loads(next(text for more, text in self.scripts if more.get("type") == "application/json"))

    def handle_starttag(self, tag, more):
        self.tags.append((tag, dict(more)))
        self.ids |= {dict(more)["id"]: tag} if "id" in dict(more) else {}
        self._open.append(tag)
        if tag == "script":
            self.scripts.append((dict(more), ""))

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open[-1:] == ["script"]:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif "td" in self._open:
            self.cells.append(data)


def test_the_page_asks_for_nothing_else(niah, steps, lens_of, tmp_path):
    files = [written(tmp_path / "a.jsonl", niah), written(tmp_path / "b.jsonl", steps), lens_of("a", "b")]
    page.write(files, tmp_path / "page.html")
    made = Page(tmp_path / "page.html")
    assert {"script", "style", "select", "canvas", "details"} <= {tag for tag, _ in made.tags}
    assert not [more for _, more in made.tags if more.keys() & {"src", "href", "srcset", "action"}]
    (policy,) = (more["content"] for _, more in made.tags if more.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert not re.search(r"https?:", policy)
    assert not re.search(r"url\(|@import", re.search(r"<style>(.*?)</style>", made.source, re.DOTALL)[1])
    assert "prefers-color-scheme: dark" in made.source


def test_what_the_script_looks_for_is_there(lens_of, tmp_path):
    page.write([lens_of("a", "b")], tmp_path / "page.html")
    made = Page(tmp_path / "page.html")
    own = made.scripts[-1][1]
    looked_for = set(re.findall(r'\bat\("([\w-]+)"\)', own)) | set(re.findall(r'^begin\("(\w+)"', own, re.MULTILINE))
    assert len(looked_for) > 15
    assert looked_for <= made.ids.keys()
    labels = [more for tag, more in made.tags if tag == "select"]
    assert all("id" in more for more in labels)
    assert set(charts.AMOUNTS) <= set(re.findall(r"^  (\w+): \{ words", own, re.MULTILINE))


def test_a_page_of_lenses_alone_is_small(lens_of, tmp_path):
    page.write([lens_of("a", "b")], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 50_000


def test_frontiers_are_those_of_the_rows(niah, tmp_path):
    page.write([written(tmp_path / "a.jsonl", niah)], tmp_path / "page.html")
    panels = Page(tmp_path / "page.html").data["frontier"]
    rows = [spelled(row) for row in niah]
    drawn = {
        (panel["title"].split(" tokens")[0].rsplit(" ", 1)[1], point["spec"]): point
        for panel in panels
        for line in panel["lines"]
        for point in line["points"]
    }
    expected = {(context_length(row["length"]), row["spec"]): row for row in rows if row["method"] != "dense"}
    assert drawn.keys() == expected.keys()
    for key, point in drawn.items():
        assert all(point[name] == expected[key][name] for name in point)
    for panel in panels:
        assert panel["dense_score"] == 100.0
        assert panel["dense"] == pytest.approx([100 * 0.025 ** (1 / niah[0]["n"]), 100.0])
        best = [line["best"] for line in panel["lines"]]
        assert best == sorted(best, reverse=True)
        assert any(best)


def test_the_best_trade_offs_are_those_that_no_other_beats():
    rows = [
        {"spec": spec, "keys_read_share": share, "score": score}
        for spec, share, score in [("a", 0.1, 50), ("b", 0.2, 60), ("c", 0.2, 55), ("d", 0.3, 60), ("e", 0.1, 50)]
    ]
    assert charts._undominated(rows) == {"a", "b", "e"}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_what_is_best_is_as_every_pair_says(points):
    rows = [{"spec": str(n), "keys_read_share": share, "score": score} for n, (share, score) in enumerate(points)]
    beaten = {
        str(n)
        for n, (share, score) in enumerate(points)
        if any(less <= share and more >= score and (less, more) != (share, score) for less, more in points)
    }
    assert charts._undominated(rows) == {row["spec"] for row in rows} - beaten


def test_a_page_takes_no_longer_a_row_where_there_are_more(niah, monkeypatch):
    """A thousand comparisons of one method, and a thousand methods of one comparison: few steps a row."""
    dense, one = (next(row for row in niah if (row["method"] == "dense") == wanted) for wanted in (True, False))
    many = [row | {"run": {"items": str(n)}} for n in range(1000) for row in (dense, one)]
    methods = [one | {"spec": f"h2o:window={n}", "settings": one["settings"] | {"window": n}} for n in range(1, 1001)]
    steps = 0

    def counted(frame, event, argument):
        nonlocal steps
        steps += event == "line"
        return counted

    for rows in (many, [dense, *methods]):
        before, steps = sys.gettrace(), 0
        sys.settrace(counted)
        try:
            charts.frontier(rows)
            charts.needles(rows)
        finally:
            sys.settrace(before)
        assert steps < 2500 * len(rows)


def test_needles_are_counted_by_depth_and_length(niah, tmp_path):
    page.write([written(tmp_path / "a.jsonl", niah)], tmp_path / "page.html")
    maps = Page(tmp_path / "page.html").data["needles"]
    assert maps[0]["lengths"] == [*map(context_length, sorted({row["task_settings"]["length"] for row in niah}))]
    row = next(spelled(row) for row in niah if row["method"] == "streaming" and 0 < row["score"] < 100)
    column = maps[0]["lengths"].index(context_length(row["length"]))
    shown = [line[column] for line in maps[0]["maps"][row["spec"]]]
    values, found = row["item_values"]["string_match"], [[] for _ in range(10)]
    for item, value in enumerate(values):
        depth = DEPTHS[(20 + 23 * item) % 40]
        found[min(depth // 10, 9)].append(value)
    assert shown == [[pytest.approx(100 * sum(part) / len(part)), len(part)] for part in found]
    assert sum(number for _, number in shown) == row["n"]
    assert shown[9][0] > shown[0][0] == 0  # what is recent alone is found


def test_needles_of_other_items_have_a_map_of_their_own(niah, tmp_path):
    row = next(row for row in niah if row["method"] == "streaming")
    other = row | {"run": row["run"] | {"items": "others"}}
    page.write([written(tmp_path / "a.jsonl", [row, other])], tmp_path / "page.html")
    maps = Page(tmp_path / "page.html").data["needles"]
    assert len(maps) == len({one["title"] for one in maps}) == 2
    assert maps[0]["maps"] == maps[1]["maps"]


def test_steps_are_those_of_the_profiles(steps, tmp_path):
    page.write([written(tmp_path / "a.jsonl", steps)], tmp_path / "page.html")
    panels = Page(tmp_path / "page.html").data["steps"]
    bars = [bar for panel in panels for bar in panel["bars"]]
    assert len(bars) == len(steps)
    assert {panel["unit"] for panel in panels} == {"µs a layer", "ms a step"}
    for bar in bars:
        assert bar["total"] == pytest.approx(sum(value for _, value in bar["parts"]))
    names = {name for bar in bars for name, _ in bar["parts"]}
    assert all(names <= panel["words"].keys() & panel["colors"].keys() for panel in panels)


def test_tables_have_every_row(niah, tmp_path):
    page.write([written(tmp_path / "a.jsonl", niah)], tmp_path / "page.html")
    cells = "".join(Page(tmp_path / "page.html").cells)
    for row in niah:
        assert row["spec"] in cells
        assert f"{row['score']:.1f} [{row['low']:.1f}, {row['high']:.1f}]" in cells


def test_texts_cannot_become_part_of_the_page(niah, lens_of, tmp_path):
    evil = "</script><script>alert(1)</script><!--$facts"
    row = niah[0] | {"model": evil, "commit": "<b>bold</b>"}
    page.write([written(tmp_path / "a.jsonl", [row]), lens_of(evil, "b")], tmp_path / "page.html")
    made = Page(tmp_path / "page.html")
    assert len(made.scripts) == 3
    assert made.data["lenses"][0]["tokens"] == [evil, "b"]
    assert "b" not in {tag for tag, _ in made.tags}


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"seed": 1}, {"device": "another"}])
def test_rows_of_other_circumstances_are_comparisons_of_their_own(change, niah, tmp_path):
    two = niah[:8]
    files = [written(tmp_path / "a.jsonl", two), written(tmp_path / "b.jsonl", [row | change for row in two])]
    page.write(files, tmp_path / "page.html")
    panels = Page(tmp_path / "page.html").data["frontier"]
    assert len(panels) == 2
    assert panels[0]["title"] != panels[1]["title"]
    (value,) = map(str, change.values())
    assert value in panels[0]["title"], "the rows that were written last come first"
    os.utime(files[0], (2e9, 2e9))
    page.write(files, tmp_path / "page.html")
    made = Page(tmp_path / "page.html")
    assert [panel["title"] for panel in made.data["frontier"]] == [panels[1]["title"], panels[0]["title"]]


def test_each_table_has_dense_once(niah, tmp_path):
    rows = [row for row in niah if row["length"] == niah[0]["length"]]
    dense = next(row for row in rows if row["method"] == "dense")
    files = [
        written(tmp_path / f"{n}.jsonl", [dense | {"commit": f"abc{n}"}, row])
        for n, row in enumerate(row for row in rows if row is not dense)
    ]
    page.write(files, tmp_path / "page.html")
    made = Page(tmp_path / "page.html")
    assert [tag for tag, _ in made.tags].count("table") == 1
    assert made.cells.count("dense") == 1
    assert all(spelled(row)["spec"] in "".join(made.cells) for row in rows)


def test_the_verdict_is_on_the_page(niah, tmp_path):
    page.write([written(tmp_path / "a.jsonl", niah)], tmp_path / "page.html")
    made = Page(tmp_path / "page.html")
    panels = made.data["frontier"]
    assert all(panel["verdict"]["words"].startswith(("Within a point", "No method")) for panel in panels)
    for panel, (_, rows) in zip(panels, charts.comparisons([spelled(row) for row in niah])):
        assert panel["verdict"]["words"] == verdict.judge(rows).words
        assert len(panel["verdict"]["within"]) <= len(rows) - 1
        assert all(re.fullmatch(r"yes|no: needs about [\d,]+ items", one[3]) for one in panel["verdict"]["within"])
    assert 'at("verdict").textContent = panel.verdict.words' in made.scripts[-1][1]


def test_where_dense_attention_answers_nothing_the_page_and_the_tables_recommend_nothing(niah, tmp_path):
    nothing = {
        "score": 0.0,
        "low": 0.0,
        "high": 60.2,
        "dense_score": 0.0,
        "n": 4,
        "item_values": {"string_match": [0.0] * 4},
    }
    nothing |= {"metrics": {"string_match": {"value": 0.0, "low": 0.0, "high": 60.2}}}
    nothing |= {"diff_to_dense": 0.0, "diff_low": 0.0, "diff_high": 0.0}
    rows = written(tmp_path / "a.jsonl", [row | nothing for row in niah if row["length"] == niah[0]["length"]])
    page.write([rows], tmp_path / "page.html")
    (panel,) = Page(tmp_path / "page.html").data["frontier"]
    assert panel["verdict"]["words"].startswith(
        "Dense attention answers none of 4 items, so they compare nothing: take"
    )
    assert panel["verdict"]["within"] == []
    printed = call(rows)
    assert printed.exit_code == 0, printed.output
    assert printed.output.count("Dense attention answers none of 4 items") == 1
    assert "reads least" not in printed.output


def test_the_newest_table_of_each_task_is_open_and_the_first_task_too(niah, tmp_path):
    two = [row | change for change in ({}, {"seed": 1}) for row in niah[:8]]
    page.write([written(tmp_path / "a.jsonl", two)], tmp_path / "page.html")
    tables = Page(tmp_path / "page.html").source.split('<section id="tables">')[1].split("</section>")[0]
    opened = re.findall("<details( open)?><summary>(.*?)</summary>", tables)
    assert [bool(one) for one, _ in opened] == [True, True, False]
    assert opened[0][1] == "niah"
    assert "seed 1" in opened[1][1]


def test_many_commits_are_counted_and_few_are_named(niah, tmp_path):
    for number, said in ((3, "commit c0, c1, c2<"), (4, "; 4 commits<")):
        rows = [row | {"commit": f"c{n % number}"} for n, row in enumerate(niah[:8])]
        page.write([written(tmp_path / "a.jsonl", rows)], tmp_path / "page.html")
        (facts,) = re.findall(r'<p class="faint">8 rows.*', Page(tmp_path / "page.html").source)
        assert said in facts


def test_rows_of_one_method_that_differ_are_refused_and_equal_ones_drawn_once(niah, tmp_path):
    row = next(row for row in niah if row["method"] == "snapkv")
    values = {name: [*column[1:], column[0]] for name, column in row["item_values"].items()}
    assert values != row["item_values"]
    files = [written(tmp_path / "a.jsonl", [row]), written(tmp_path / "b.jsonl", [row | {"commit": "fedcba9"}])]
    page.write(files, tmp_path / "page.html")
    (panel,) = Page(tmp_path / "page.html").data["frontier"]
    assert [len(line["points"]) for line in panel["lines"]] == [1]
    written(files[1], [row | {"commit": "fedcba9", "item_values": values}])
    with pytest.raises(UserError, match=rf"two rows of snapkv:.* differ, of commit {row['commit']} and fedcba9"):
        page.write(files, tmp_path / "page.html")


def test_the_same_rows_make_the_same_page(niah, tmp_path):
    for name in ("one.html", "two.html"):
        page.write([written(tmp_path / "a.jsonl", niah[:8])], tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


# The command


def call(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_a_page_and_a_table(niah, tmp_path):
    rows = written(tmp_path / "a.jsonl", niah[:4])
    done = call(rows, "--out", tmp_path / "page.html", "--csv", tmp_path / "rows.csv")
    assert done.exit_code == 0, done.output
    assert Page(tmp_path / "page.html").data["frontier"]
    assert len((tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()) == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "page.png"], "--out must end in .html"),
        (["--csv", "page.txt"], "--csv must be a file that ends in .csv"),
    ],
)
def test_what_cannot_be_written_is_refused(options, said, niah, tmp_path):
    options = [tmp_path / one if not one.startswith("--") else one for one in options]
    done = call(written(tmp_path / "a.jsonl", niah[:2]), *options)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_files_of_something_else_are_refused(tmp_path):
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.json: not a lens"):
        page.write([tmp_path / "a.json"], tmp_path / "page.html")
    done = call(tmp_path / "a.json")
    assert done.exit_code == 2
    assert "no rows (JSON Lines); foveate plot calibration draws a calibration" in " ".join(done.output.split())


@pytest.mark.parametrize(("missing", "option"), [("plotly", "--out"), ("pandas", "--csv")])
def test_without_the_extra_the_error_names_it(missing, option, niah, lens_of, tmp_path, monkeypatch):
    def guarded(name, *args, plain=builtins.__import__):
        if name.partition(".")[0] == missing:
            raise ImportError(name)
        return plain(name, *args)

    monkeypatch.setattr(builtins, "__import__", guarded)
    out = tmp_path / ("page.html" if option == "--out" else "rows.csv")
    done = call(written(tmp_path / "a.jsonl", niah[:2]), option, out)
    assert done.exit_code == 2
    assert f"{missing}, which is not installed: pip install 'foveate[report]'" in " ".join(done.output.split())
    assert not out.exists()
    if option == "--out":
        assert call(lens_of("a", "b"), option, out).exit_code == 0, "lenses need no library"
