"""Decode steps on a CPU: a row for each implementation, all fed the same tokens."""

import pytest
from evaluation import tiny

from benchmarks import cpu_decode
from foveate.results.errors import UserError
from foveate.results.measurements import FIELDS


def test_a_row_for_each_implementation(tmp_path):
    model = tiny.build(tmp_path / "tiny-llama")
    rows = cpu_decode.run(cpu_decode.Plan(model, tiny.SAMPLE, 300, 3, 1, ("quest", "h2o:top_k=32")), lambda text: None)
    found = {row["case"]["method"]: row for row in rows}
    assert list(found) == ["transformers-sdpa", "dense", "quest", "h2o:top_k=32"]
    assert all(field in row for row in rows for field in FIELDS)
    assert found["dense"]["same_next_token"] == 1
    assert found["dense"]["largest_logit_difference"] < 1e-4 < found["h2o:top_k=32"]["largest_logit_difference"]
    assert found["h2o:top_k=32"]["keys_read_share"] < found["dense"]["keys_read_share"] == 1
    with pytest.raises(UserError, match="positions"):
        cpu_decode.run(cpu_decode.Plan(model, tiny.SAMPLE, 1 << 20), lambda text: None)
