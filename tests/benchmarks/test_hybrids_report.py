"""Tables of hybrids' speed: what a time is held against."""

from benchmarks import hybrid_tables as hybrids

SHAPE = {"heads": 32, "kv_heads": 8, "nsa_kv_heads": 2, "head_dim": 64, "window": 768, "buffer": 512, "sliding": 1024}
MADE = {"device": "H100", "versions": {"torch": "2", "transformers": "5"}, "commit": "abc"}


def row(what, ms, phase="decode", batch=32, context=32768):
    case = {"what": what, "phase": phase, "batch": batch, "context": context, **SHAPE, "dtype": "bfloat16"}
    return {"case": case, "ms": ms, "gb_per_s": None, "tflop_per_s": None, "error": None, **MADE}


def cells(table):
    """Cells of each line by its first."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: rest for name, *rest in lines}


def test_each_attention_is_held_against_its_own_heads_and_the_fastest_window():
    rows = [
        row("swa", 2.0),
        row("swa, flash-attention-3", 1.0),
        row("lte, buffer full", 1.5),
        row("lte, scores of a step", 0.1),
        row("dense, a", 8.0),
        row("dense, b", 6.0),
        row("nsa", 0.5),
        row("dense of nsa's heads, a", 2.0),
    ]
    found = cells(hybrids.speed(rows))
    assert found["lte, buffer full"][:3] == ["1.50 ms", "1.50×", "4.00×"]
    assert found["swa"][1] == "2.00×"
    assert found["lte, scores of a step"][:3] == ["100 µs", "0.10×", "–"]
    assert found["nsa"][:3] == ["500 µs", "–", "4.00×"]
    assert found["dense, a"][:3] == ["8.00 ms", "–", "0.75×"]


def test_batches_are_columns_and_phases_are_tables():
    rows = [row(what, ms * batch, batch=batch) for batch in (1, 2) for what, ms in (("swa", 1.0), ("dense, a", 2.0))]
    rows += [row(what, 1.0, phase="prefill", batch=1) for what in ("swa", "dense, a")]
    decode, prefill = hybrids.speed(rows).split("prefill, ")
    assert cells(decode)["swa"][:5] == ["1.00 ms", "1.00×", "2.00×", "–", "2.00 ms"]
    assert cells(prefill)["swa"] == ["1.00 ms", "1.00×", "1.00×", "–", "–"]


def test_contexts_are_tables():
    rows = [row(what, ms, context=size) for size, ms in ((4096, 1.0), (32768, 3.0)) for what in ("swa", "dense, a")]
    short, long = hybrids.speed(rows).split("decode, 32K tokens")
    assert short.startswith("decode, 4K tokens")
    assert [cells(table)["dense, a"][0] for table in (short, long)] == ["1.00 ms", "3.00 ms"]


def test_a_preset_that_lacks_a_context_has_empty_cells():
    def one(preset, context, held):
        case = {"preset": preset, "context": context, "size": "27M", "chunk": 4096, "dtype": "bfloat16"}
        times = {"ms": 12.0, "decode_ms_per_token": 0.5}
        return {"case": case, "cache_bytes": held, "peak_bytes": 2e9, **times, **MADE}

    rows = [one("gdn_attn", 4096, 5e6), one("lalte", 4096, 1e6), one("lalte", 16384, 1e6)]
    found = cells(hybrids.memory(rows))
    assert found["4K"] == ["5.0 MB", "2.0 GB", "12.0 ms", "500 µs", "1.0 MB", "2.0 GB", "12.0 ms", "500 µs"]
    assert found["16K"] == ["–"] * 4 + ["1.0 MB", "2.0 GB", "12.0 ms", "500 µs"]


def test_two_gpus_are_held_against_one():
    def one(processes, rate, rule="flash-linear-attention"):
        case = {"preset": "lalte", "size": "27M", "gpus": processes, "processes": processes, "tokens": 65536}
        case |= {"length": 2048, "dtype": "bfloat16", "compile": True}
        beside = {"speedup": 0.8, "baseline": "transformer", "peak_share": 0.1, "peak_bytes": 3e10}
        return {"case": case, "tokens_per_s": rate, "gated_delta_rule": rule, **beside, **MADE}

    lines = hybrids.training(
        [one(1, 5e5), one(2, 9.5e5), one(2, 3e5, "torch (fla-core is not installed)")]
    ).splitlines()
    first = "| 1 | 65,536 | 500,000 | 1.00× | flash-linear-attention | 0.80× `transformer` | 10.0 % | 30.0 GB |"
    assert first in lines[-3]
    assert "| 2 | 131,072 | 950,000 | 1.90× |" in lines[-2]
    assert "| 2 | 131,072 | 300,000 | – | torch |" in lines[-1]
    other = one(2, 9.5e5) | {"device": "another GPU"}
    assert "| 2 | 131,072 | 950,000 | – |" in hybrids.training([one(1, 5e5), other])
    alone = one(1, 5e5) | {"speedup": 1.0, "baseline": "lalte"}  # no other preset was measured beside it
    assert "| 1.00× | flash-linear-attention | – | 10.0 % | 30.0 GB |" in hybrids.training([alone])
