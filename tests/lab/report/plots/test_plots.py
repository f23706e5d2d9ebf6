import json
import math
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from foveate import methods
from foveate.cli import app
from foveate.errors import DataError, UserError
from foveate.lab.report import lines
from foveate.lab.report.plots import figure
from foveate.lab.report.plots import frontier as plots
from foveate.lab.report.rows import chosen, read, spelled

NIAH = Path(__file__).parents[4] / "benchmarks" / "results" / "luka-niah.jsonl"


SCORES = {"string_match": [80.0] * 50}


def written(spec="dense", share=1.0, score=80.0, **more):
    """A row as it stands in a file."""
    method = methods.parse(spec)
    length = more.pop("length", 4096)
    return {
        "method": method.name,
        "spec": method.spec,
        "settings": methods.settings_of(method),
        "model": "tiny",
        "task": "niah",
        "task_settings": {"split": "single", "length": length},
        "split": "single",
        "length": length,
        "n": 50,
        "score": score,
        "low": score - 3,
        "high": score + 3,
        "ceiling": 100.0,
        "dense_score": 80.0,
        "diff_to_dense": score - 80,
        "diff_low": score - 82,
        "diff_high": score - 78,
        "keys_read_share": share,
        "kv_bytes_per_step": None if share is None else share * length * 12_000,
        "metrics": {},
        "dtype": "float32",
        "device": "cpu",
        "seed": 0,
        "run": {"items": f"{length}"},
        **more,
    }


def row(*args, **more):
    return spelled(written(*args, **more))


def of_text(spec="dense", extra=0.0, tokens=512, gone=None, **more):
    """A row of the task perplexity: the texts of dense, so many nats a token worse; ``gone``: settings of that time."""
    nll = [tokens * (3.0 + 0.1 * text + extra * (1 + 0.1 * (text % 3))) for text in range(12)]
    values = {"nll": nll, "tokens": [float(tokens)] * 12, "bytes": [4.0 * tokens] * 12}
    worth = math.exp(np.mean(nll) / tokens)
    metrics = {"perplexity": {"value": worth, "low": 0.8 * worth, "high": 1.2 * worth}}
    settings = {"split": "books", "length": 1, "continuation": tokens}
    old = written(spec)
    if gone:
        spec += "," + ",".join(f"{name}={value}" for name, value in gone.items())
        old |= {"spec": spec, "settings": old["settings"] | gone}
    return spelled(old) | {
        "task": "perplexity",
        "task_settings": settings,
        "split": "books",
        "length": 1,
        "n": len(nll),
        "run": {"items": f"of {tokens}"},
        "metrics": metrics,
        "item_values": values,
        **more,
    }


FRONTIER = [
    *(row(), row("h2o:top_k=0.05", 0.06, 30), row("h2o:top_k=0.2", 0.21, 60), row("luka:top_k=0.05", 0.1, 70)),
    *(row("luka:top_k=0.2", 0.3, 79), row("luka:top_k=0.1", 0.2, 78), row("luka:top_k=0.1,mass=preserve", 0.2, 9)),
    *(row(length=8192), row("h2o:top_k=0.05", 0.06, 20, length=8192), row("luka:top_k=0.2", 0.3, 75, length=8192)),
]
SHARES = (0, 0.125, 1.0)
FIGURE_4 = [
    of_text(),
    *(
        of_text(f"luka_paper:top_k={s}", (1 - s) * k, gone={"temperature": 1, "compressor": c})
        for s in SHARES
        for c, k in (("mean", 0.9), ("random", 1.2))
    ),
    *(
        of_text(f"luka_paper:compressor=mean,top_k={s}", (1 - s) * 2, gone={"temperature": 1, "zero_values": True})
        for s in SHARES
    ),
]
MODES = [of_text(spec, extra, 1024) for spec, extra in (("dense", 0), ("h2o", 0.1), ("luka", 0.01), ("mixed", 0.2))]


pytestmark = pytest.mark.usefixtures("coarse")


@pytest.fixture
def pages(pages_of):
    return pages_of(figure)


def drawn(axis):
    """The lines of a panel by label: their points."""
    return {line.get_label(): line.get_xydata().tolist() for line in axis.lines if not line.get_label().startswith("_")}


def entries(page):
    return [text.get_text() for text in page.legends[0].get_texts()]


class TestFrontier:
    def test_a_panel_for_each_length_and_a_line_for_each_method(self, pages, tmp_path):
        assert plots.frontier(FRONTIER, tmp_path / "a.png", margin=2) == []
        first, second = pages[0].axes
        assert first.get_title(loc="left") == "niah / single, 4K tokens"
        assert second.get_title(loc="left") == "niah / single, 8K tokens"
        assert drawn(first)["luka: exact"] == [[10, 70], [20, 78], [30, 79]]
        assert drawn(first)["luka: preserve"] == [[20, 9]]
        assert drawn(second)["luka: exact"] == [[30, 75]]
        assert entries(pages[0]) == ["dense", "2 points below dense", "h2o", "luka: exact", "luka: preserve"]
        assert "tiny · float32 · cpu · n = 50 · 95 % intervals" in pages[0].get_suptitle()
        assert first.get_xscale() == "log"

    def test_a_method_looks_the_same_everywhere(self, pages, tmp_path):
        for rows in (FRONTIER, FRONTIER[:3], FRONTIER[3:]):
            plots.frontier(rows, tmp_path / "a.png")
        colors = {
            line.get_color() for page in pages for axis in page.axes for line in axis.lines if line.get_label() == "h2o"
        }
        assert colors == {figure.look("h2o").color}
        assert figure.look("a method of tomorrow") == figure.look("a method of tomorrow")

    def test_recommended(self, pages, tmp_path):
        plots.frontier(FRONTIER, tmp_path / "a.png", recommended="luka:top_k=0.2")
        assert drawn(pages[0].axes[0])["recommended: luka:top_k=0.2"] == [[30, 79]]
        with pytest.raises(UserError, match=r"unknown spec 'luka:top_k=0.3'\. Did you mean 'luka:top_k=0.2'"):
            plots.frontier(FRONTIER, tmp_path / "a.png", recommended="luka:top_k=0.3")

    def test_splits_in_one_panel(self, pages, tmp_path):
        values = {"metrics": {"em": {}}, "item_values": {"em": [1.0, 0.0]}, "n": 2, "commit": "abc", "ceiling": 100.0}
        rows = [row(spec, share=0.2, split=f"a_{s}", **values) for spec in ("dense", "h2o:top_k=0.2") for s in "12"]
        plots.frontier([*rows, row("h2o:top_k=0.1", split="a_1", **values)], tmp_path / "a.png", over_splits=True)
        (axis,) = pages[0].axes
        assert axis.get_title(loc="left") == "niah / a (2 splits), 4K tokens"
        assert drawn(axis)["h2o"] == [[20, 50]]

    def test_against_bytes(self, pages, tmp_path):
        plots.frontier(FRONTIER, tmp_path / "a.png", against="kv_bytes_per_step", recommended="luka:top_k=0.2")
        first, second = pages[0].axes
        megabytes = [share * 4096 * 12_000 / 1e6 for share in (0.06, 0.21, 0.3)]
        assert drawn(first)["h2o"] == [[pytest.approx(megabytes[0]), 30], [pytest.approx(megabytes[1]), 60]]
        assert drawn(first)["recommended: luka:top_k=0.2"] == [[pytest.approx(megabytes[2]), 79]]
        assert drawn(second)["luka: exact"] == [[pytest.approx(2 * megabytes[2]), 75]]
        assert "against the bytes of keys and values" in pages[0].get_suptitle()
        assert first.get_xlabel() == "bytes read in a decode step, a sequence"
        assert first.xaxis.get_major_formatter()(2.5, 0) == "2.5 MB"
        assert list(first.get_xticks()) == [2.5, 3, 4, 5, 6, 8, 10, 12, 15]
        with pytest.raises(UserError, match=r"--against: unknown field 'kv_bytes'\. Did you mean 'kv_bytes_per_step'"):
            plots.frontier(FRONTIER, tmp_path / "a.png", against="kv_bytes")

    @pytest.mark.parametrize("against", ["keys_read_share", "kv_bytes_per_step"])
    def test_what_is_left_out_is_said_whatever_it_is_drawn_against(self, tmp_path, against):
        said = plots.frontier([*FRONTIER, row("tova", None)], tmp_path / "a.png", against=against)
        assert said == ["tova: took no decode steps, not drawn"]

    def test_what_is_left_out_is_said(self, tmp_path):
        rows = [*FRONTIER, FRONTIER[1], row("tova", None)]
        said = plots.frontier(rows, tmp_path / "a.png")
        assert said == ["rows that repeat others, left out: 1", "tova: took no decode steps, not drawn"]
        with pytest.raises(UserError, match="the rows are all of dense"):
            plots.frontier([row()], tmp_path / "a.png")

    @pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
    def test_as_many_panels_as_there_are_tasks(self, pages, tmp_path, count):
        rows = [one for n in range(count) for one in (row(length=1000 + n), row("h2o", 0.1, 50, length=1000 + n))]
        plots.frontier(rows, tmp_path / "a.png")
        assert sum(axis.get_visible() for axis in pages[0].axes) == count


class TestLines:
    def test_budgets_differ_along_a_line_also_within_specs(self):
        specs = [f'mixed:lined="h2o:top_k={s}",clustered="luka:top_k={s},bias=log"' for s in (0.1, 0.2)]
        specs += [methods.make("per_layer", layers={"rest": f"luka:top_k={s}"}).spec for s in (3, 4)]
        specs += ["streaming:window=64", "streaming:window=0.5"]
        assert list(lines.names([row(spec) for spec in specs], plots.BUDGETS).values()) == [
            "mixed",
            "per_layer",
            "streaming",
        ]

    def test_settings_that_differ_are_named_and_those_in_common_are_told(self):
        rows = [
            row(spec) for spec in ("luka:tail=32,sinks=1", "luka:tail=64,sinks=1,page_size=[16,64]", "h2o:window=9")
        ]
        assert list(lines.names(rows, ("tail",)).values()) == [
            "luka: page_size=[8, 32]",
            "luka: page_size=[16, 64]",
            "h2o",
        ]
        assert lines.common(rows, ("tail",)) == "luka with sinks=1; h2o with window=9"
        assert list(lines.names(rows, ("tail", "page_size")).values()) == ["luka", "h2o"]

    def test_a_calibration_stands_for_its_anchors(self):
        rows = [row("kascade:anchors=[0,2]"), row("kascade:anchors=[0,3]")]
        rows = [{**one, "settings": {**one["settings"], "calibration": f"{n}.json"}} for n, one in enumerate(rows)]
        assert list(lines.names(rows, ()).values()) == ["kascade: calibration=0.json", "kascade: calibration=1.json"]

    def test_rows_of_an_older_release_know_fewer_settings(self):
        old = row("luka:bias=entropy")
        old["settings"] = {name: value for name, value in old["settings"].items() if name != "expand"}
        assert list(lines.names([old, row("luka:bias=entropy")], ("top_k",)).values()) == ["luka", "luka: expand=0.3"]
        assert lines.common([old, row("luka:bias=entropy")], ("top_k",)) == "luka with bias=entropy"


class TestFiles:
    def test_the_same_rows_give_the_same_bytes(self, tmp_path):
        plots.frontier(FRONTIER, tmp_path / "new" / "a.png")
        with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9}):  # somebody's own style
            plots.frontier(FRONTIER, tmp_path / "b.png")
        first, second = (tmp_path / "new" / "a.png").read_bytes(), (tmp_path / "b.png").read_bytes()
        assert first == second
        assert b"Software" not in first
        assert imread(tmp_path / "b.png").shape[1] == figure.WIDTH * figure.DPI

    def test_names_that_are_no_pictures(self, tmp_path):
        with pytest.raises(UserError, match=r"must end in \.png"):
            plots.frontier(FRONTIER, tmp_path / "a.svg")

    def test_without_matplotlib(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(UserError, match=r"plots need matplotlib.*pip install 'foveate\[plot\]'"):
            plots.frontier(FRONTIER, tmp_path / "a.png")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", r"a\.jsonl: no rows in this file"),
            ("{}", r"a\.jsonl:1: not a row of foveate compare \('method' is missing\)"),
            ("\n[1]", r"a\.jsonl:2: not a row"),
            ('{"bench": "prefill", "case": {}}', r"a\.jsonl:1: not a row"),
            ("{", r"a\.jsonl:1: malformed JSON"),
        ],
    )
    def test_files_of_something_else(self, tmp_path, content, message):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(DataError, match=message):
            read([tmp_path / "a.jsonl"])

    @pytest.mark.parametrize(
        ("field", "value", "fault"),
        [
            ("settings", None, "'settings' is missing"),
            ("score", None, "'score' is missing"),
            ("score", "x", "'score' must be a finite number, not \"x\""),
            ("score", True, "'score' must be a finite number, not true"),
            ("score", float("nan"), "'score' must be a finite number, not NaN"),
            ("settings", [], "'settings' must be an object, not []"),
            ("spec", 3, "'spec' must be a text, not 3"),
            ("keys_read_share", "all", "'keys_read_share' must be a number from 0 to 4, or null, not \"all\""),
            ("keys_read_share", 9.0, "'keys_read_share' must be a number from 0 to 4, or null, not 9.0"),
            ("keys_read_share", -0.1, "'keys_read_share' must be a number from 0 to 4, or null, not -0.1"),
            ("mass_read_share", 1.5, "'mass_read_share' must be a number from 0 to 1, or null, not 1.5"),
            ("score", 10**290, "outside its interval"),
            ("score", 500.0, "'score' is 500.0, outside its interval of "),
            ("diff_low", 77.0, "outside its interval of 77.0 to "),
            ("metrics", {"f1": {"value": 3, "low": 1, "high": 2}}, "'metrics' must be an object of intervals"),
            (
                "metrics",
                {"f1": {"value": 1}},
                "'metrics' must be an object of intervals ('value', 'low', 'high'), not {",
            ),
            ("item_values", {"f1": [1, None]}, "'item_values' must be an object of lists of finite numbers, not {"),
            ("item_values", {"f1": [1, 2]}, "'item_values' has 2 of 'f1', and 'n' is 50"),
            ("device", None, ""),
            ("device", 7, "'device' must be a text, not 7"),
        ],
    )
    def test_damaged_rows_are_named_with_their_line_and_field(self, tmp_path, field, value, fault):
        file, whole = tmp_path / "a.jsonl", written() | {"item_values": SCORES}
        damaged = {name: old for name, old in whole.items() if name != field}
        if value is not None:
            damaged[field] = value
        file.write_text(json.dumps(whole) + "\n" + json.dumps(damaged) + "\n")
        if not fault:
            assert len(read([file])) == 2  # nobody needs it
            return
        with pytest.raises(DataError) as error:
            read([file])
        assert str(error.value).startswith(f"{file}:2: ")
        assert fault in str(error.value)
        for command in (["report"], ["plot", "frontier", "--out", tmp_path / "a.png"]):
            done = CliRunner().invoke(app, list(map(str, [*command, file])))
            assert done.exit_code == 2
            (line,) = done.stderr.strip().splitlines()
            assert line.startswith(f"error: {file}:")

    def test_a_row_that_is_there_twice_is_named_with_both_lines(self, tmp_path):
        file = tmp_path / "a.jsonl"
        line, other = (json.dumps(written(spec) | {"item_values": SCORES}) + "\n" for spec in ("dense", "h2o"))
        file.write_text(line + other + "\n" + line)
        with pytest.raises(DataError) as error:
            read([file])
        assert str(error.value) == f"{file}:4: the same row as in line 1; leave one of them out"
        for command in (["report"], ["plot", "frontier", "--out", tmp_path / "a.png"]):
            done = CliRunner().invoke(app, list(map(str, [*command, file])))
            assert done.exit_code == 2
            assert done.stderr.strip() == f"error: {error.value}"
        file.write_text(line + other)
        (tmp_path / "b.jsonl").write_text(line)
        assert len(read([file, tmp_path / "b.jsonl"])) == 3  # of several files: each may have the row to compare with

    @pytest.mark.parametrize("spec", ['mixed:clustered="luka:tail=64"', 'per_layer:layers={"rest":"luka:tail=64"}'])
    def test_methods_within_settings_are_specs(self, tmp_path, spec):
        method, file = methods.parse(spec), tmp_path / "a.jsonl"
        file.write_text(json.dumps({**written(spec), "item_values": SCORES}) + "\n")
        (found,) = read([file])
        for name in {"clustered", "layers"} & found["settings"].keys():
            assert str(found["settings"][name]) == str(getattr(method, name))

    def test_methods_with_other_settings_by_now_keep_their_specs(self, tmp_path):
        file, old = tmp_path / "a.jsonl", {**written("luka"), "spec": "by other defaults", "item_values": SCORES}
        for changed in ({**old["settings"], "gone": 1}, {"tail": 64}, {**old["settings"], "tail": -1}):
            file.write_text(json.dumps({**old, "settings": changed}) + "\n")
            assert read([file]) == [{**old, "settings": json.loads(json.dumps(changed))}]

    def test_choosing_rows(self):
        def specs(*conditions):
            return [one["spec"] for one in chosen([*FRONTIER, *MODES], conditions)]

        assert specs("task=perplexity", "method=luka") == ["dense", "luka"]
        assert specs("continuation=1024", "mass=exact") == ["dense", "luka"]
        assert specs("length=8192", "top_k=0.05") == ["dense", "h2o:top_k=0.05"]
        assert specs("task=niah", "length=4096", "top_k=0.2", "top_k=0.05") == [
            *("dense", "h2o:top_k=0.2", "luka:top_k=0.2", "h2o:top_k=0.05", "luka:top_k=0.05")
        ]
        assert specs("length=8192", "spec=luka:expand=0.3,top_k=0.2") == ["dense", "luka:top_k=0.2"]
        with pytest.raises(UserError, match="--where length=5 or length=6: no row is left"):
            specs("length=5", "length=6")
        for lost in ("spec=quest:top_k=0.2", "method=quest"):  # one that has rows does not hide that another has none
            with pytest.raises(UserError, match=f"--where {lost}: no row has it"):
                specs(lost, lost.partition("=")[0] + "=luka")
        elsewhere = {**row("kascade:top_k=0.2"), "spec": 'kascade:top_k=0.2,calibration="no.json"'}
        assert chosen([elsewhere], ['spec=kascade:calibration="no.json",top_k=0.2,min_k=128']) == [elsewhere]
        levels = [row("luka:page_size=[16, 64]"), row("luka:page_size=16"), row("luka")]
        levels = json.loads(json.dumps(levels))  # as a file has them
        found = chosen(levels, ["page_size=16", "page_size=[16,64]"])
        assert [one["settings"]["page_size"] for one in found] == [16, [16, 64]]
        with pytest.raises(UserError, match=r"unknown name 'compresor'\. Did you mean 'compressor'"):
            specs("compresor=mean")
        with pytest.raises(UserError, match="expected NAME=VALUE"):
            specs("luka")
        with pytest.raises(UserError, match="--where task=niha: no row is left"):
            specs("task=niha")


class TestCommands:
    def call(self, *arguments):
        return CliRunner().invoke(app, ["plot", *map(str, arguments)])

    def test_help_names_all_kinds(self):
        text = self.call("--help").stdout
        assert all(kind in text for kind in ("frontier", "recall", "decode", "calibration"))

    def test_recall_by_layer_and_method(self, tmp_path, pages):
        shares = [("dense", None), ("h2o", {"0": 0.25, "11": 0.5}), ("tova", {"0": 1.0, "2": 0.75, "11": 0.5})]
        rows = [written(spec, recall=recall) for spec, recall in shares]
        for one in rows:
            one["metrics"] = {"string_match": {"value": one["score"], "low": one["low"], "high": one["high"]}}
            one["item_values"] = {"nll": [1.0] * 50}
        other = written("h2o", length=8192, recall={"0": 0.5})
        other |= {"metrics": rows[0]["metrics"], "item_values": rows[0]["item_values"]}
        file, out = tmp_path / "rows.jsonl", tmp_path / "a.png"
        file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
        done = self.call("recall", file, "--out", out)
        assert done.exit_code == 0, done.output
        assert "dense: no recall was measured, not drawn" in done.stderr
        cells = pages[0].axes[0].images[0].get_array().filled(-1)
        assert cells.tolist() == [[25, -1, 50], [100, 75, 50]]
        file.write_text(file.read_text(encoding="utf-8") + json.dumps(other) + "\n", encoding="utf-8")
        assert (
            "the rows are of 2 comparisons: choose one of them with --where"
            in self.call("recall", file, "--out", out).stderr
        )
        assert self.call("recall", file, "--out", out, "--where", "length=8192").exit_code == 0
        done = self.call("recall", NIAH, "--out", out)
        assert "no recall was measured: compare with recall=4" in done.stderr

    def test_from_rows_to_a_picture(self, tmp_path):
        out = tmp_path / "a.png"
        arguments = ["frontier", NIAH, "--out", out, "--where", "length=8192", "--along", "page_size"]
        for more in ([], ["--against", "kv_bytes_per_step"]):
            assert self.call(*arguments, *more).exit_code == 0
        done = self.call(*arguments)
        assert done.exit_code == 0, done.output
        assert f"wrote {out}" in done.stderr
        assert out.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["frontier", NIAH, "--out", "a.pdf"], "must end in .png"),
            (["frontier", "nowhere.jsonl", "--out", "a.png"], "nowhere.jsonl: no such file"),
            (["frontier", NIAH, "--out", "a.png", "--recommended", "luca"], "unknown spec 'luca'"),
            (["frontier", NIAH, "--out", "a.png", "--along", "page_sise"], "unknown setting 'page_sise'"),
        ],
    )
    def test_bad_input_is_one_line(self, tmp_path, monkeypatch, arguments, message):
        monkeypatch.chdir(tmp_path)
        done = self.call(*arguments)
        assert done.exit_code == 2
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        assert message in line
        assert not list(tmp_path.iterdir())
