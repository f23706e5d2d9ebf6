"""Perplexity over that of dense attention, as plots."""

import json
import math

import pytest

from benchmarks import perplexity_plots as plots
from foveate.lab.report.plots import figure
from tests.lab.report.plots.test_plots import FIGURE_4, MODES, SHARES, entries, of_text

pytestmark = pytest.mark.usefixtures("coarse")


@pytest.fixture
def pages(pages_of):
    return pages_of(figure)


def drawn(draw, rows, folder, where=()):
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    draw(folder / "rows.jsonl", folder / "a.png", list(where))


def test_a_line_for_each_compressor_dashed_without_values(pages, tmp_path):
    drawn(plots.refined, [*FIGURE_4, *MODES], tmp_path, ["continuation=512"])
    (axis,) = pages[0].axes
    found = {line.get_label(): line for line in axis.lines}
    assert entries(pages[0]) == [
        *("dense", "luka_paper: mean", "luka_paper: mean, values zeroed", "luka_paper: random"),
    ]
    kept, zeroed = found["luka_paper: mean"], found["luka_paper: mean, values zeroed"]
    assert kept.get_color() == zeroed.get_color() != found["luka_paper: random"].get_color()
    assert (kept.get_linestyle(), zeroed.get_linestyle()) == ("-", "--")
    x, y = kept.get_data()
    assert x == pytest.approx(SHARES, abs=0.01)
    assert y[-1] == pytest.approx(1)


def test_rows_without_the_setting_of_zeroed_values_have_values(pages, tmp_path):
    drawn(plots.refined, FIGURE_4, tmp_path, ["zero_values=False"])
    assert entries(pages[0]) == ["dense", "luka_paper: mean", "luka_paper: random"]


def test_ratios_are_paired(pages, tmp_path):
    rows = [of_text(), *(of_text(f"luka:top_k={share}", 0.1 * (1 - share)) for share in SHARES)]
    others = [of_text("luka_paper:bias=log,top_k=0.5"), of_text("luka_paper:top_k=3"), of_text("h2o")]
    drawn(plots.refined, rows + others, tmp_path)
    (axis,) = pages[0].axes
    assert entries(pages[0]) == ["dense", "luka"], "lines of several shares alone"
    _, y = next(line for line in axis.lines if line.get_label() == "luka").get_data()
    assert y[0] == pytest.approx(math.exp(0.1 * 1.1))
    assert y[-1] == pytest.approx(1)
    (low, high) = axis.collections[0].get_segments()[0][:, 1]
    assert 1.08 < low < y[0] < high < 1.15  # far narrower than between the texts


def test_lines_of_one_compressor_are_told_apart(pages, tmp_path):
    rows = [of_text(f"luka_paper:compressor=mean,sinks={n},top_k={s}", 1 - s) for n in (0, 4) for s in SHARES]
    drawn(plots.refined, [of_text(), *rows], tmp_path)
    assert entries(pages[0]) == ["dense", "luka_paper: sinks=0", "luka_paper: sinks=4"]
    assert len({line.get_color() for line in pages[0].axes[0].lines if line.get_label().startswith("luka")}) == 2
    assert "luka_paper with compressor=mean" in pages[0].get_suptitle()


def test_a_place_for_each_method(pages, tmp_path):
    drawn(plots.modes, MODES, tmp_path)
    (axis,) = pages[0].axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["h2o", "luka", "mixed"]
    assert [text.get_text() for text in axis.texts] == ["1.116", "1.011", "1.246"]
    assert axis.get_title(loc="left") == "perplexity of 1K tokens after a prompt of 1"
