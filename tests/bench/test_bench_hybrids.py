"""The bench of hybrids' attention, on the CPU at a small size."""

import json

import pytest
from typer.testing import CliRunner

from foveate.bench import cold, hybrids
from foveate.cli import app
from foveate.results.errors import UserError
from foveate.results.measurements import FIELDS

SMALL = {
    "contexts": (200,),
    "batches": (2,),
    "heads": 4,
    "kv_heads": 2,
    "nsa_kv_heads": 1,
    "head_dim": 16,
    "window": 40,
    "buffer": 16,
    "half": 8,
    "sliding": 48,
    "dtype": "float32",
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    monkeypatch.setattr(cold, "_SECONDS", 0.0)


def test_a_row_for_each_kind_of_attention():
    rows = hybrids.run(hybrids.Plan(**SMALL), lambda text: None)
    assert [(row["case"]["phase"], row["case"]["what"], row["baseline"]) for row in rows] == [
        ("decode", "swa", "swa"),
        ("decode", "lte, buffer full", "swa"),
        ("decode", "lte, buffer half full", "swa"),
        ("decode", "lte, step with replacement", "swa"),
        ("decode", "lte, scores of a step", "lte, buffer full"),
        ("decode", "dense, sdpa", "dense, sdpa"),
        ("decode", "nsa", "dense of nsa's heads, sdpa"),
        ("decode", "dense of nsa's heads, sdpa", "dense of nsa's heads, sdpa"),
        ("prefill", "swa", "swa"),
        ("prefill", "lte", "swa"),
        ("prefill", "lte, selection of tokens", "swa"),
        ("prefill", "lte, with selection", "swa"),
        ("prefill", "dense, sdpa", "dense, sdpa"),
    ]
    assert all(field in row for row in rows for field in FIELDS)
    checked = [row["error"] for row in rows if row["error"] is not None]
    assert len(checked) == 6
    assert max(checked) < 1e-5
    full, half = (row["gb_per_s"] * row["ms"] for row in rows[1:3])
    assert full / half == pytest.approx((41 + 16) / (41 + 8))


def test_scores_are_shared_by_the_steps_that_need_them():
    rows = hybrids.run(hybrids.Plan(**SMALL, phases=("decode",)), lambda text: None)
    assert [row["steps_that_share"] for row in rows if row["steps_that_share"] > 1] == [40 - 2 * 6]


@pytest.mark.parametrize("verb", ["attend_until", "attend"])
def test_a_wrong_result_is_seen(verb, monkeypatch):
    real = getattr(hybrids.ops, verb)

    def wrong(q, *args, **how):
        attended = real(q, *args, **how)
        return attended if q.dtype.itemsize == 8 else attended._replace(out=attended.out * 1.1)

    monkeypatch.setattr(hybrids.ops, verb, wrong)
    phase = "prefill" if verb == "attend_until" else "decode"
    rows = hybrids.run(hybrids.Plan(**SMALL, phases=(phase,)), lambda text: None)
    assert max(row["error"] for row in rows if row["error"] is not None) > 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads must be at least 1, not 0"),
        ({"batches": ()}, "batch must be at least 1, not none"),
        ({"kv_heads": 3}, "heads must be a multiple of kv-heads, 3, not 4"),
        ({"half": 16}, "half must be above 0 and below the buffer's 16, not 16"),
        ({"contexts": (200, 50)}, "context must be more than"),
        ({"share": 0.0}, "share must be above 0"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be cuda or cpu"),
    ],
)
def test_plans_that_cannot_be(change, message):
    with pytest.raises(UserError, match=message):
        hybrids.run(hybrids.Plan(**(SMALL | change)))


def test_the_command(tmp_path):
    out = tmp_path / "rows.jsonl"
    sizes = {name: value for name, value in SMALL.items() if name not in ("batches", "contexts")}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    done = CliRunner().invoke(
        app, ["bench", "hybrids", "--context=200", "--batch=1", "--phase=decode", *options, f"--out={out}"]
    )
    assert done.exit_code == 0, done.output
    assert "lte, buffer full" in done.output
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 8


def test_the_command_measures_caches_and_training_steps(tmp_path):
    out = tmp_path / "rows.jsonl"
    memory = "--phase=memory --size=tiny --context=100 --context=200 --chunk=64 --dtype=float32"
    training = "--phase=training --train=gdn_swa-tiny --tokens=64 --length=64 --no-compile --steps=2"
    options = [*memory.split(), *training.split(), "--device=cpu", f"--out={out}"]
    done = CliRunner().invoke(app, ["bench", "hybrids", *options])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"]["what"] for row in rows] == ["cache"] * 4 + ["training step"]
    assert rows[0]["case"]["steps"] == 2
    assert "cache" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--phase=memory --heads=4", "--heads does nothing with --phase memory"),
        ("--tokens=64", "--tokens does nothing with --phase decode and prefill"),
        ("--phase=prefill --batch=4", "--batch does nothing with --phase prefill"),
        ("--phase=memori", "unknown phase 'memori'"),
        ("--phase=memory --phase=training --train=lalt-27M", "model must be PRESET-SIZE"),
    ],
)
def test_options_that_do_nothing_are_refused(options, message):
    done = CliRunner().invoke(app, ["bench", "hybrids", *options.split(), "--device=cpu"])
    assert done.exit_code != 0
    assert message in f"{done.output} {done.exception}"
