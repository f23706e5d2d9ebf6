"""The bench of a layer of compressed sparse attention, on the CPU at a small size."""

import pytest
from typer.testing import CliRunner

from foveate.bench import csa_layer
from foveate.cli import app
from foveate.results.errors import UserError
from foveate.results.measurements import FIELDS

SMALL = {
    "heads": 4,
    "dim": 16,
    "index_heads": 16,
    "index_dim": 8,
    "top_k": 20,
    "window": 9,
    "chunk": 48,
    "dtype": "float32",
    "repeats": 1,
    "device": "cpu",
}


def test_a_row_for_each_implementation_and_length():
    said = []
    rows = csa_layer.run(csa_layer.Plan(tokens=(40, 130), **SMALL), said.append)
    assert [(row["impl"], row["case"]["tokens"]) for row in rows] == [
        (name, tokens) for tokens in (40, 130) for name in csa_layer.IMPLEMENTATIONS
    ]
    assert len(said) == 4
    for row in rows:
        assert all(field in row for field in FIELDS)
        assert row["baseline"] == "reference"
        assert row["error"] < 1e-5
        read = sum(min((t + 1) // 4, 20) + min(t + 1, 9) for t in range(row["case"]["tokens"]))
        assert row["attention_tflop_per_s"] * row["attention_ms"] * 1e9 == pytest.approx(4 * 4 * 16 * read)


def test_a_chunk_that_is_computed_for_another_place_is_seen(monkeypatch):
    real = csa_layer.csa.forward
    monkeypatch.setattr(csa_layer.csa, "forward", lambda *a, offset, **k: real(*a, offset=max(0, offset - 1), **k))
    (row,) = csa_layer.run(csa_layer.Plan(tokens=(130,), implementations=("foveate",), **SMALL), lambda _: None)
    assert row["error"] > 1e-2
    assert row["speedup"] == 1


def test_the_reference_is_left_out_where_it_takes_too_long(monkeypatch):
    monkeypatch.setattr(csa_layer, "_LONGEST", 50)
    said = []
    rows = csa_layer.run(csa_layer.Plan(tokens=(40, 130), **SMALL), said.append)
    assert [row["impl"] for row in rows] == ["foveate", "reference", "foveate"]
    assert any("reference at 130 tokens: left out" in line for line in said)
    with pytest.raises(UserError, match="nothing was measured"):
        csa_layer.run(csa_layer.Plan(tokens=(130,), implementations=("reference",), **SMALL), said.append)


def test_the_command(tmp_path):
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    out = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(app, ["bench", "csa", "--tokens=64", "--impl=foveate", *arguments, f"--out={out}"])
    assert done.exit_code == 0, done.output
    assert len(out.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "window must be at least 1, not 0"),
        ({"dtype": "float8_e4m3fn"}, "dtype must be one of"),
        ({"implementations": ("dense",)}, "impl must be among foveate, reference, not dense"),
        ({"tokens": (3,)}, "tokens must be at least the ratio"),
    ],
)
def test_bad_plans(wrong, message):
    with pytest.raises(UserError, match=message):
        csa_layer.run(csa_layer.Plan(**{"tokens": (64,), **SMALL, **wrong}))
