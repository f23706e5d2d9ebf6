"""The caches of hybrids over a growing sequence, on the CPU at a small size."""

import warnings

from benchmarks import hybrid_memory
from foveate.lab.results.measurements import FIELDS

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
