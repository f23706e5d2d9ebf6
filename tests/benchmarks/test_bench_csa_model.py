"""The bench of DeepSeek-V4, on the CPU at a small size."""

import pytest

from benchmarks import csa_model
from foveate.lab.results.measurements import FIELDS

pytest.importorskip("transformers.models.deepseek_v4")
SMALL = {
    "tokens": (150,),
    "small": 90,
    "chunk": 40,
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "head_dim": 16,
    "experts": 4,
    "index_heads": 8,
    "index_dim": 16,
    "top_k": 5,
    "window": 8,
    "ratios": (4, 16),
    "steps": 2,
    "dtype": "float32",
    "device": "cpu",
}


def test_the_short_prompt_is_compared_and_the_long_one_measured():
    said = []
    rows = csa_model.run(csa_model.Plan(**SMALL), said.append)
    found = [(row["impl"], row["case"]["tokens"], row["baseline"]) for row in rows]
    assert found == [("transformers", 90, "transformers"), ("foveate", 90, "transformers"), ("foveate", 150, "foveate")]
    assert all(field in row for row in rows for field in FIELDS)
    assert rows[1]["positions_compared"] == 90
    assert rows[1]["max_logit_difference"] < 1e-4 < rows[1]["logit_std"]
    assert rows[1]["same_top_1"] == 1
    assert rows[0]["cache_bytes"] == rows[1]["cache_bytes"] < rows[2]["cache_bytes"]
    assert all(row["ms"] > 0 and row["decode_ms_per_token"] > 0 for row in rows)
    assert len(said) == 4


def test_a_wrong_result_is_seen(monkeypatch):
    import foveate.csa

    real = foveate.csa.lightning_indexer
    monkeypatch.setattr(foveate.csa, "lightning_indexer", lambda *a, **k: real(*a, **k).clamp(-1, 3))
    row = csa_model.run(csa_model.Plan(**(SMALL | {"tokens": ()})), lambda _: None)[1]
    assert row["max_logit_difference"] > 1e-3


def test_layers_are_those_of_flash():
    model = csa_model.build(csa_model.Plan(**(SMALL | {"layers": 7})))
    kinds = [kind.split("_")[0] for kind in model.config.layer_types]
    assert kinds == ["sliding", "sliding", "compressed", "heavily", "compressed", "heavily", "compressed"]
