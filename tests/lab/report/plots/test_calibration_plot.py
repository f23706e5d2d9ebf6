"""The picture of a calibration."""

import dataclasses

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from foveate.calibration import Calibration
from foveate.cli import app
from foveate.errors import DataError, UserError
from foveate.lab.report.plots import calibration

LAYERS, HEADS = 12, 4
RUN = {
    "model": "tiny",
    "tasks": [{"task": "niah", "settings": {}}],
    "tokens": [300, 1234],
    "keys": 64,
    "tile": 128,
    "dtype": "float32",
}
FOUND = {
    "layers": list(range(1, 2 * LAYERS, 2)),  # every other layer of the model has a sliding window
    "run": RUN,
    "similarity": [[1 - 0.05 * abs(i - j) if i <= j else 0.0 for j in range(LAYERS)] for i in range(LAYERS)],
    "importance": [0.3 / (1 + i) for i in range(LAYERS)],
    "coverage": [[0.5 + 0.04 * i] * HEADS for i in range(LAYERS)],
    "coverage_keys": 256,
}
MODEL = {"layers": 2 * LAYERS, "kv_heads": 2}
HEADS_READ = {str(layer): [0, 1] for layer in FOUND["layers"] if layer not in (1, 7, 15)}
MADE = Calibration(MODEL, (1, 7, 15), HEADS_READ, FOUND)


pytestmark = pytest.mark.usefixtures("coarse")


@pytest.fixture
def pages(pages_of):
    return pages_of(calibration)


def changed(**more):
    found = {name: value for name, value in (FOUND | more).items() if value is not ...}
    return dataclasses.replace(MADE, found=found)


def test_it_shows_what_was_found(pages, tmp_path):
    calibration.draw(MADE, tmp_path / "deep" / "a.png")
    assert imread(tmp_path / "deep" / "a.png").shape[:2] == (round(40 * 4.2), round(40 * 13.0))
    left, middle, right, *_ = pages[0].axes
    shown = left.images[0].get_array()
    assert np.ma.getmaskarray(shown).tolist() == np.tri(LAYERS, k=-1, dtype=bool).tolist()
    np.testing.assert_allclose(shown.compressed(), np.array(FOUND["similarity"])[np.triu_indices(LAYERS)])
    assert [(box.get_x(), box.get_y(), box.get_width()) for box in left.patches] == [
        *((-0.5, -0.5, 3), (2.5, 2.5, 4), (6.5, 6.5, 5))
    ]
    assert [bar.get_height() for bar in middle.patches] == FOUND["importance"]
    colors = [bar.get_facecolor() for bar in middle.patches]
    assert [index for index in range(LAYERS) if colors[index] == colors[0]] == [0, 3, 7]
    assert right.images[0].get_array().tolist() == FOUND["coverage"]
    assert [label.get_text() for label in left.get_yticklabels()][:3] == ["1", "3", "5"]
    title = pages[0].get_suptitle()
    assert "Anchors [1, 7, 15]" in title
    assert "tiny · niah, 2 prompts of 300 to 1,234 tokens · 64 keys a tile of 128 queries · float32" in title


def test_divergence_stands_for_similarity(pages, tmp_path):
    lost = [[10.0 ** (i - j) if i <= j else 0.0 for j in range(LAYERS)] for i in range(LAYERS)]
    calibration.draw(changed(divergence=lost), tmp_path / "a.png")
    left, *_ = pages[0].axes
    shown = left.images[0].get_array()
    np.testing.assert_allclose(shown.compressed(), np.array(lost)[np.triu_indices(LAYERS)])
    assert left.get_title(loc="left") == "divergence, nats a token (framed: what is reused)"
    assert left.images[0].norm(1e-2) == pytest.approx(0.5), "from a ten-thousandth of a nat to one, by powers"


def test_the_same_calibration_gives_the_same_bytes(tmp_path):
    for name in ("a.png", "b.png"):
        calibration.draw(MADE, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.filterwarnings("error")
def test_prompts_that_were_short_have_no_coverage(pages, tmp_path):
    calibration.draw(changed(coverage=[[None] * HEADS] * LAYERS), tmp_path / "a.png")
    assert np.ma.getmaskarray(pages[0].axes[2].images[0].get_array()).all()


@pytest.mark.parametrize("name", list(FOUND))
def test_a_calibration_without_its_matrices_is_told(name, tmp_path):
    with pytest.raises(DataError, match=f"the calibration does not tell how it was found .*{name}"):
        calibration.draw(changed(**{name: ...}), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "more",
    [
        {"similarity": [[1.0], [1.0, 2.0]]},
        {"importance": ["a"]},
        {"coverage": None},
        {"coverage": [[0.5] * HEADS]},
        {"importance": [0.5]},
        {"similarity": [[1.0]]},
        {"run": {**RUN, "tokens": []}},
        {"run": None},
        {"layers": [0, 2]},
    ],
    ids=str,
)
def test_damaged_matrices_are_told(more, tmp_path):
    with pytest.raises(DataError, match="the calibration does not tell how it was found"):
        calibration.draw(changed(**more), tmp_path / "a.png")


def test_only_png_files_are_written(tmp_path):
    with pytest.raises(UserError, match=r"must end in \.png"):
        calibration.draw(MADE, tmp_path / "a.pdf")


class TestTheCommand:
    def call(self, *arguments):
        return CliRunner().invoke(app, ["plot", "calibration", *map(str, arguments)])

    def test_draws(self, tmp_path):
        MADE.write(tmp_path / "tiny.json")
        done = self.call(tmp_path / "tiny.json", "--out", tmp_path / "a.png")
        assert done.exit_code == 0, done.output
        assert done.stdout.strip() == f"{tmp_path / 'a.png'}: anchors of tiny.json"
        assert (tmp_path / "a.png").exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [(None, "no such calibration"), ("{}", "not a calibration of foveate"), ("{", "malformed JSON")],
    )
    def test_tells_bad_files_in_one_line(self, tmp_path, content, message):
        if content is not None:
            (tmp_path / "tiny.json").write_text(content)
        done = self.call(tmp_path / "tiny.json", "--out", tmp_path / "a.png")
        assert done.exit_code == 2
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        assert message in line
