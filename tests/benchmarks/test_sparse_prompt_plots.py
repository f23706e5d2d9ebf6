"""The plot of what sparse prompts lose is drawn from the rows that are committed, by the right rows."""

import json

import pytest

from benchmarks import sparse_prompt_plots
from tests.benchmarks.test_csa_report import RESULTS


def test_what_sparse_prompts_lose_is_drawn(tmp_path):
    out = tmp_path / "loss.png"
    sparse_prompt_plots.loss(RESULTS / "sparse-prompts-means.jsonl", RESULTS / "sparse-prompts-times.jsonl", out)
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "spec"),
    [
        ("", 'kascade:calibration="shipped:qwen2.5-coder-1.5b-instruct"'),
        (
            "top_k=0.2,decode_only=false,rest=mean",
            'kascade:top_k=0.2,decode_only=false,rest=mean,calibration="shipped:qwen2.5-coder-1.5b-instruct"',
        ),
    ],
)
def test_a_point_is_of_the_spec_that_the_times_name(settings, spec):
    lines = (RESULTS / "sparse-prompts-means.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["length"] == 8192 and row["split"] == "niah_multikey_3"]
    (own,) = (row for row in rows if row["spec"] == spec)
    point = sparse_prompt_plots._point(rows, sparse_prompt_plots._spec(settings), 2.0)
    assert point.x == 2.0
    assert point.y == pytest.approx(own["diff_to_dense"])
