"""The caches of hybrids over a growing sequence, on the CPU at a small size."""

import warnings

import pytest

from foveate.bench import hybrid_memory
from foveate.results.errors import UserError
from foveate.results.measurements import FIELDS

SMALL = {"size": "tiny", "contexts": (200, 400, 800), "chunk": 64, "steps": 2, "dtype": "float32", "device": "cpu"}


def test_the_cache_of_lalte_is_flat_and_that_of_full_attention_grows():
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # such as of sequences beyond the trained length
        rows = hybrid_memory.run(hybrid_memory.Plan(**SMALL), said.append)
    assert all(field in row for row in rows for field in FIELDS)
    held = {(row["case"]["preset"], row["case"]["context"]): row["cache_bytes"] for row in rows}
    assert held["lalte", 200] == held["lalte", 400] == held["lalte", 800] > 0
    assert held["gdn_attn", 800] > 1.5 * held["gdn_attn", 400] > 2 * held["gdn_attn", 200]
    assert held["gdn_attn", 800] >= 2 * 800 * 2 * 2 * 16 * 4  # 2 layers, keys and values of 2 heads of 16, fp32
    assert {row["baseline"] for row in rows} == {"gdn_attn"}
    assert all(row["ms"] > 0 and row["decode_ms_per_token"] > 0 for row in rows)
    assert len(said) == 6


def test_a_preset_out_of_memory_leaves_the_others(monkeypatch):
    feed = hybrid_memory._feed

    def full(model, ids, cache):
        if "attn" in model.config.mixers and cache.get_seq_length() > 250:
            raise hybrid_memory.torch.cuda.OutOfMemoryError
        return feed(model, ids, cache)

    monkeypatch.setattr(hybrid_memory, "_feed", full)
    said, kept = [], []
    rows = hybrid_memory.run(hybrid_memory.Plan(**SMALL), said.append, kept.append)
    assert [len(some) for some in kept] == [1, 3]
    assert [row["baseline"] for row in rows] == ["gdn_attn", "gdn_attn", "lalte", "lalte"]
    assert "gdn_attn-tiny: out of memory after 1 of 3 contexts" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"presets": ("lalt",)}, "unknown preset 'lalt'"),
        ({"size": "2M"}, "unknown size '2M'"),
        ({"chunk": 0}, "chunk must be at least 1, not 0"),
        ({"contexts": (400, 402)}, r"context must grow by more than the 2 steps, not \[400, 402\]"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be cuda or cpu"),
    ],
)
def test_plans_that_cannot_be(change, message):
    with pytest.raises(UserError, match=message):
        hybrid_memory.run(hybrid_memory.Plan(**(SMALL | change)))
