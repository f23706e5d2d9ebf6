"""Rows of decoding beside their goals, and as a picture."""

import json

import pytest
from report.test_indexer_report import MADE as ELSEWHERE
from report.test_indexer_report import cells
from typer.testing import CliRunner

from foveate.cli import app
from foveate.evaluation.errors import UserError
from foveate.methods import parse
from foveate.report import decode_goals, decode_plots, figure

KASCADE, LUKA = "kascade:decode_only=true", "luka:page_size=16,score=summary,prior=0.0,top_k=3"


MADE = ELSEWHERE | {"device": "NVIDIA H100 80GB HBM3"}
MORE = {"baseline": "dense", "baseline_ms": 1.0, "gb_per_s": 1.0, "tflop_per_s": None, "peak_bytes": 1}


def of_layers(method, context, batch, speedup, share=0.5, layers=None):
    case = {"method": parse(method).spec, "context": context, "batch": batch, "level": "kernel"}
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


def judged(rows):
    lines = cells(decode_goals.goals(rows))
    return {(line[""], line["goal"]): (line["measured"], line["met"]) for line in lines}


def test_nothing_is_met_that_was_not_measured():
    assert set(judged([]).values()) == {("not yet", "–")}
    smaller = of_layers(KASCADE, 131072, 64, 9.0)
    smaller["case"]["heads"] = 16
    other = of_layers(KASCADE, 131072, 64, 9.0) | ELSEWHERE
    short = of_model("kascade", 2.0, dense_below=8192)
    assert set(judged([smaller, other, short]).values()) == {("not yet", "–")}


def test_speedups_and_floors():
    goal = ("Kascade, a tenth, 131,072 tokens, 64 sequences", "≥ 4.6×")
    layers = {"choosing": kind(4, 8.1, 7.0), "reading": kind(27, 1.4, 1.3)}
    for speedup, share, met in ((4.61, 0.5, "yes"), (4.59, 0.5, "no"), (4.59, 0.91, "yes")):
        found = judged([of_layers(KASCADE, 131072, 64, speedup, share, layers)])
        assert found[goal] == (f"{speedup:.2f}× ({100 * share:.0f} % of the floor)", met)
        assert found["a layer of it that chooses", "≤ 8.2 ms"] == ("8.10 ms", "yes")
        assert found["one that reads", "≤ 1.22 ms"] == ("1.40 ms", "yes")  # 93 % of it is memory
        assert sum(one[1] != "–" for one in found.values()) == 3
    layers["reading"]["floor_ms"] = 1.0
    assert judged([of_layers(KASCADE, 131072, 64, 5, 0.5, layers)])["one that reads", "≤ 1.22 ms"] == ("1.40 ms", "no")
    spelled = of_layers("luka:top_k=3,prior=0.0,page_size=16,score=summary", 8192, 1, 1.6)
    assert (
        judged([spelled])["LuKA, pages of 16, 3 refined by summaries alone, 8,192 tokens, 1 sequence", "≥ 1.5×"][1]
        == "yes"
    )


def test_choosing_and_making_pages():
    layers = {"luka": kind(32, score=1.0, select=0.5, attend=3.25)}
    found = judged([of_layers("luka", 131072, 32, 4.1, layers=layers)])
    assert found["choosing and making pages, of its step", "< 15 %"] == ("15.0 %", "no")
    layers["luka"]["parts_ms"]["attend"] = 3.5
    assert judged([of_layers("luka", 131072, 32, 4.1, layers=layers)])[
        "choosing and making pages, of its step", "< 15 %"
    ] == ("14.3 %", "yes")


def test_models():
    rows = [of_model("luka", 1.4), of_model("luka:top_k=3", 1.81, liger=True), of_model("kascade", 1.5)]
    rows += [of_model("quest", 0.97, context=2048, dense_below="auto"), of_model("dense", 1.0, dense_below="auto")]
    rows += [of_model("luka", 0.7, context=2048)]  # not dense by itself: another question
    rows += [of_model("luka", 2.1, model="Qwen2.5-Coder-1.5B-Instruct", context=30000, batch=16)]
    found = judged(rows)
    assert found["LuKA", "≥ 1.8×"] == ("1.81× (`luka:top_k=3`, Liger's kernels under both)", "yes")
    assert found["LuKA", "≥ 2×"] == ("2.10× (`luka`)", "yes")
    assert found["tokens/s, an 8B shape, 131,000 tokens, 1 sequence: Kascade", "≥ 1.6×"] == ("1.50× (`kascade`)", "no")
    assert found["below 4,096 tokens, 1 sequence, any method", "≥ 0.95×"] == ("0.97× at the least (`quest`)", "yes")


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
        (group,) = pages[0].subfigs
        assert group.get_suptitle() == "1 sequence"
        short, long = group.axes
        assert [axis.get_title(loc="left") for axis in (short, long)] == ["8,192 tokens", "32,768 tokens"]
        lengths = [[bar.get_width() for bar in container] for container in short.containers]
        assert lengths == [[0, 500], [0, 0], [1000, 625], [0, 93.75], [250, 250]]
        assert [text.get_text() for text in short.texts] == [" 1,250 ", " 1,469 "]
        (bar,) = long.containers[0]
        assert (bar.get_width(), bar.get_y() + bar.get_height() / 2) == (1000, pytest.approx(2))
        names = [label.get_text() for label in short.get_yticklabels()]
        assert names == ["dense", KASCADE, "luka:page_size=16,\ntop_k=3,score=summary,prior=0.0"]

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
        decode_plots.parts([rows[-2]], tmp_path / "library.png", "model")  # nothing of ours to go by
        assert pages[-1].subfigs[0].axes[0].get_xlim()[1] == pytest.approx(1.2 * 117.5)
        with pytest.raises(UserError, match="no row of foveate bench decode --level model"):
            decode_plots.parts(self.ROWS, tmp_path / "steps.png", "model")
        with pytest.raises(UserError, match="level must be one of kernel, model, not 'layer'"):
            decode_plots.parts(rows, tmp_path / "steps.png", "layer")

    def test_the_command(self, tmp_path, coarse):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in self.ROWS), encoding="utf-8")
        result = CliRunner().invoke(app, ["plot", "decode", str(file), "--out", str(tmp_path / "parts.png")])
        assert result.exit_code == 0, result.output
        assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")
