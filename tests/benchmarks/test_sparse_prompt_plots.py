"""The plot of sparse prompts and their page are made from the rows that are committed."""

import json

import pytest

from benchmarks import sparse_prompt_plots as plots
from benchmarks.tables import ROOT
from tests.benchmarks.test_csa_report import RESULTS

PAGE = (ROOT / "docs" / "papers" / "kascade.md").read_text(encoding="utf-8")
WORDS = {"": "a tenth", "top_k=0.2": "a fifth"}
LINES = {"": ", prompts dense", ",decode_only=false": "", ",decode_only=false,rest=mean": ", `rest=mean`"}


def rows_of(name):
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows():
    return rows_of("sparse-prompts-means.jsonl")


@pytest.fixture(scope="module")
def timed():
    return [row for row in rows_of("sparse-prompts-times.jsonl") if row["case"]["context"] == 131072]


def signed(value):
    return f"{value:+.1f}" if abs(value) >= 0.05 else "0.0"


@pytest.mark.parametrize("share", WORDS)
@pytest.mark.parametrize("more", LINES)
def test_the_page_has_what_is_drawn(share, more, rows, timed):
    spec = plots.spec(share + more)
    ten, five = (plots.speeds(timed, *counts) for counts in (plots.anchors_of(rows[0]), (5, 32)))
    point = plots.point(rows, spec, ten)
    cells = [
        f"{signed(point.y)} [{signed(point.low)}, {signed(point.high)}]",
        f"{point.x:.2f}",
        f"{five.get(spec, 1):.2f}",
    ]
    assert point.x == ten.get(spec, 1.0)
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"  | {WORDS[share]}{LINES[more]} | "))
    assert line.endswith(f"| {' | '.join(cells)} |")
    one = [row for row in rows if (row["split"], row["length"]) == ("niah_multikey_3", 8192)]
    (own,) = (row for row in one if row["spec"].partition('calibration="')[0].rstrip(",:") == spec)
    assert plots.point(one, spec, ten)[1:] == (own["diff_to_dense"], own["diff_low"], own["diff_high"])


def test_layers_that_are_weighed_as_they_were_timed_take_what_was_timed(timed):
    found = plots.speeds(timed, 5, 32)
    assert len(found) == 4
    for row in timed:
        if row["case"]["method"] in found:
            assert found[row["case"]["method"]] == pytest.approx(row["speedup"])


def test_a_sparse_prompt_whose_time_is_not_known_is_an_error(rows):
    with pytest.raises(KeyError):
        plots.point(rows, plots.spec("decode_only=false"), {})


def test_a_plot_is_written(tmp_path):
    out = tmp_path / "loss.png"
    plots.loss(RESULTS / "sparse-prompts-means.jsonl", RESULTS / "sparse-prompts-times.jsonl", out)
    assert out.read_bytes().startswith(b"\x89PNG")
