"""Rows of decoding, chosen and as a picture."""

import json

import pytest
from typer.testing import CliRunner

from foveate.cli import app
from foveate.errors import UserError
from foveate.lab.report.plots import decode as decode_plots
from foveate.lab.report.plots import figure
from foveate.lab.report.rows import of_cases
from foveate.lab.results.measurements import SCHEMA

KASCADE, LUKA = "kascade:anchors=5", "luka:page_size=16,top_k=3,score=summary,prior=0.0"

ELSEWHERE = {"schema": SCHEMA, "device": "a device", "versions": {"torch": "2", "transformers": "5"}, "commit": "abc"}
MADE = ELSEWHERE | {"device": "NVIDIA H100 80GB HBM3"}
MORE = {"baseline": "dense", "baseline_ms": 1.0, "gb_per_s": 1.0, "tflop_per_s": None, "peak_bytes": 1}


def of_layers(method, context, batch, speedup, share=0.5, layers=None):
    case = {"method": method, "context": context, "batch": batch, "level": "kernel"}
    case |= {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "float16"}
    found = {"ms": 2.0, "floor_ms": 2.0 * share, "speedup": speedup, "layers": layers}
    return {"bench": "decode", "case": case, **found, **MORE, **MADE}


def of_model(method, speedup, share=0.5, **case):
    case = {"model": "llama-3.1-8b", "context": 131000, "batch": 1, "liger": False, "dense_below": 0} | case
    found = {"ms": 10.0, "floor_ms": 10.0 * share, "speedup": speedup, "stats": {}}
    return {"bench": "decode", "case": {"method": method, "level": "model", **case}, **found, **MADE}


def kind(layers, ms=1.0, floor=0.5, **parts):
    parts = {"score": 0.0, "select": 0.0, "attend": 0.0, "other": 0.0} | parts
    return {"layers": layers, "ms": ms, "floor_ms": floor, "parts_ms": parts, "upkeep_ms": 0.25}


def cells(text):
    """The lines of a table, the head first."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line)) for line in lines[1:]]


class TestCases:
    ROWS = [of_layers(method, context, 1, 1.0) for context in (8192, 32768) for method in ("dense", KASCADE)]

    def test_of_several_values_any_in_their_order(self):
        found = of_cases(self.ROWS, [f"method={KASCADE}", "method=dense", "context=32768"])
        assert [(row["case"]["method"], row["case"]["context"]) for row in found] == [
            (KASCADE, 32768),
            ("dense", 32768),
        ]
        assert of_cases(self.ROWS, []) == self.ROWS

    def test_a_name_that_some_cases_have(self):
        rows = [*self.ROWS, of_model("luka", 1.0)]
        assert of_cases(rows, ["model=llama-3.1-8b"]) == rows[-1:]

    def test_nothing_is_left(self):
        with pytest.raises(UserError, match=r"unknown name 'contexts'\. Did you mean 'context'"):
            of_cases(self.ROWS, ["contexts=8192"])
        with pytest.raises(UserError, match="context=1 or context=2: no row is left"):
            of_cases(self.ROWS, ["context=1", "context=2"])


class TestPicture:
    ROWS = [
        of_layers("dense", 8192, 1, 1.0, layers={"dense": kind(32, attend=1.0)}),
        of_layers(
            KASCADE,
            8192,
            1,
            2.0,
            layers={"choosing": kind(8, score=2.0, attend=1.0), "reading": kind(24, attend=0.5, other=0.125)},
        ),
        of_layers("quest", 8192, 1, 1.0),
        of_layers(LUKA, 32768, 1, 3.0, layers={"luka": kind(32, score=1.0)}),
    ]

    def test_means_over_the_layers(self):
        assert decode_plots.mean_parts(self.ROWS[1]) == {
            "score": 0.5,
            "select": 0.0,
            "attend": 0.625,
            "other": 0.09375,
            "upkeep": 0.25,
        }
        assert decode_plots.mean_parts(self.ROWS[2]) == {}

    def test_bars(self, tmp_path, coarse, monkeypatch, pages_of):
        pages = pages_of(figure)
        decode_plots.parts(self.ROWS, tmp_path / "parts.png")
        assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")
        assert [group.get_suptitle() for group in pages[0].subfigs] == ["1 sequence"] * 2
        short, long = (axis for group in pages[0].subfigs for axis in group.axes)
        assert [axis.get_title(loc="left") for axis in (short, long)] == ["8K tokens", "32K tokens"]
        lengths = [[bar.get_width() for bar in container] for container in short.containers]
        assert lengths == [[0, 500], [0, 0], [1000, 625], [0, 93.75], [250, 250]]
        assert [text.get_text() for text in short.texts] == [" 1,250 ", " 1,469 "]
        (bar,) = long.containers[0]
        assert (bar.get_width(), bar.get_y() + bar.get_height() / 2) == (1000, pytest.approx(0))
        names = [[label.get_text() for label in axis.get_yticklabels()] for axis in (short, long)]
        assert names == [["dense", KASCADE], ["luka:page_size=16,\ntop_k=3,score=summary,prior=0.0"]]

    def test_without_a_profile(self, tmp_path):
        with pytest.raises(UserError, match="nothing to draw: no row of foveate bench decode"):
            decode_plots.parts(self.ROWS[2:3], tmp_path / "parts.png")

    def test_a_models_step(self, tmp_path, coarse, monkeypatch, pages_of):
        parts = {"score": 1.0, "select": 0.5, "attend": 2.0, "other": 8.0, "idle": 0.25}
        rows = [of_model(method, 1.0, liger=liger) for liger in (False, True) for method in ("dense", "luka")]
        rows = [*self.ROWS, *(row | {"parts_ms": parts} for row in rows)]
        slow = {part: 10 * ms for part, ms in parts.items()}
        rows += [of_model("transformers-sdpa", 0.1) | {"parts_ms": slow}, of_model("quest", 0.5)]
        pages = pages_of(figure)
        decode_plots.parts(rows, tmp_path / "steps.png", "model")
        titles = [group.get_suptitle() for group in pages[0].subfigs]
        assert titles == ["llama-3.1-8b, 1 sequence", "llama-3.1-8b, 1 sequence, Liger's kernels"]
        axes = [axis for group in pages[0].subfigs for axis in group.axes]
        assert [axis.get_title(loc="left") for axis in axes] == ["131,000 tokens"] * 2
        lengths = [[bar.get_width() for bar in container] for container in axes[0].containers]
        assert lengths == [[ms, ms, 10 * ms] for ms in parts.values()]
        assert axes[0].get_xlim()[1] == pytest.approx(1.2 * 11.75)  # which the library's own path leaves
        assert [text.get_text() for text in axes[0].texts] == [" 11.8 ", " 11.8 ", " 118 "]
        assert [line.get_ydata()[0] for line in axes[0].lines] == [2.5, 2.5]  # the strokes that show where it is cut
        decode_plots.parts([rows[-2]], tmp_path / "library.png", "model")  # nothing of ours to go by
        assert pages[-1].subfigs[0].axes[0].get_xlim()[1] == pytest.approx(1.2 * 117.5)
        with pytest.raises(UserError, match="no row of foveate bench decode-model"):
            decode_plots.parts(self.ROWS, tmp_path / "steps.png", "model")
        with pytest.raises(UserError, match="level must be one of kernel, model, not 'layer'"):
            decode_plots.parts(rows, tmp_path / "steps.png", "layer")

    def test_the_command(self, tmp_path, coarse):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in self.ROWS), encoding="utf-8")
        result = CliRunner().invoke(app, ["plot", "decode", str(file), "--out", str(tmp_path / "parts.png")])
        assert result.exit_code == 0, result.output
        assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")
