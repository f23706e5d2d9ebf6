"""Latency of a server under load, as a plot."""

import json
from pathlib import Path

import pytest

from benchmarks import serving_plots, table_kinds
from foveate.lab.report.plots import figure

pytestmark = pytest.mark.usefixtures("coarse")
ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "serving-load.jsonl"


def test_each_kind_of_latency_has_a_panel_and_each_engine_a_line(pages_of, tmp_path):
    pages = pages_of(figure)
    serving_plots.load(ROWS, tmp_path / "load.png")
    first, between, whole = pages[0].axes
    assert [axis.get_title(loc="left") for axis in pages[0].axes] == list(serving_plots.KINDS.values())
    assert [line.get_label() for line in between.lines] == ["vLLM's own attention", "kascade"]
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    own, method = between.lines
    assert own.get_data()[1].tolist() == [row["baseline_token_ms"][0] for row in rows]
    assert method.get_data()[1].tolist() == [row["token_ms"][0] for row in rows]
    bars = first.collections[1].get_segments()
    assert [bar[:, 1].tolist() for bar in bars] == [[row["first_token_ms"][n] for n in (0, -1)] for row in rows]
    assert [text.get_text() for text in whole.get_xticklabels()] == ["16", "32", "64"]


def test_settings_of_one_method_are_told_apart(pages_of, tmp_path):
    pages, rows = pages_of(figure), [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    for row in list(rows):
        rows.append(row | {"case": row["case"] | {"method": "kascade:pool=layer,anchors=5"}})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    serving_plots.load(tmp_path / "rows.jsonl", tmp_path / "load.png")
    _, one, other = pages[0].axes[1].lines
    assert [one.get_label(), other.get_label()] == [
        'kascade:calibration="data-free.json"',
        "kascade:pool=layer,anchors=5",
    ]
    assert one.get_linestyle() != other.get_linestyle()


def test_a_line_of_the_table_has_both_engines_percentiles():
    row = {
        "case": {"model": "m", "method": "dense", "rate": 4.0, "requests": 9},
        "failed": 0,
        **{key: [1000.0, 1500.0, 2000.0] for key in serving_plots.KINDS},
        **{f"baseline_{key}": [500.0, 700.0, 900.0] for key in serving_plots.KINDS},
    }
    cells = [cell(row) for cell in table_kinds.serving_load.cells.values()]
    assert cells[2:] == ["1.00, 2.00 (0.50, 0.90)", "1000.00, 2000.00 (500.00, 900.00)", cells[2], "0 of 9"]
