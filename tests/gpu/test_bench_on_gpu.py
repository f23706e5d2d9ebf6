"""The benches of decode and of hybrids on a GPU, on little data: what is recorded is recorded there."""

import pytest

from foveate.bench import cold, decode, hybrids

pytestmark = pytest.mark.gpu

METHODS = (
    "kascade:decode_only=true",
    "quest",
    "omnikv",
    "lessismore",
    "luka:page_size=16,top_k=3",
    "luka",
    "h2o",
    "tova",
    "snapkv",
    "streaming",
)


@pytest.mark.parametrize("level", decode.LEVELS)
def test_steps_of_all_methods_are_recorded(level, monkeypatch):
    monkeypatch.setattr(cold, "_SECONDS", 0.0)
    evict = {"h2o", "tova", "snapkv", "streaming"} if level == "kernel" else set()
    plan = decode.Plan([spec for spec in METHODS if spec not in evict], (4096,), (2,), level=level)
    rows = decode.run(plan, say=lambda text: None)
    assert {row["case"]["method"]: row["cuda_graph"] for row in rows if not row["cuda_graph"]} == {}
    assert [row["case"]["method"] for row in rows if row["below_floor"]] == [], "keys are not found in a cache"


def test_steps_of_hybrids_are_recorded_and_right(monkeypatch):
    monkeypatch.setattr(cold, "_SECONDS", 0.0)
    rows = hybrids.run(hybrids.Plan(context=4096, batches=(2,)), say=lambda text: None)
    waits = {row["case"]["what"] for row in rows if not row["cuda_graph"]}
    assert waits <= {"lte, scores of a step"}
    errors = {row["case"]["what"]: row["error"] for row in rows if row["error"] is not None}
    assert len(errors) == 5
    assert max(errors.values()) < 1e-2
