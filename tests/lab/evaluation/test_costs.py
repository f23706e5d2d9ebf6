import pytest

from foveate.lab.evaluation import costs


def batch(steps, read, share, prefill, token):
    stats = {
        "decode_steps": steps,
        "keys_read_per_step": read,
        "keys_read_share": share,
        "kv_bytes_per_step": 10 * read,
        "resident_bytes": 7 * steps,
        "tokens_evicted": 2,
        "pages_refined": 0,
        "notes": ["layer 1 stays as it is"],
    }
    times = {"prefill_ms": prefill, "decode_ms_per_token": token, "timing": "generate"}
    return {"stats": stats, **times, "peak_bytes": steps, "peak_kind": "x", "commit": f"c{steps % 2}"}


def test_costs_are_weighted_by_steps():
    total = costs.add_up(
        [batch(10, 50.0, 0.5, 1.0, 3.0), batch(30, 10.0, 0.1, 9.0, None), batch(0, 0.0, 1.0, 2.0, 4.0)]
    )
    assert total["keys_read_share"] == pytest.approx((10 * 50 + 30 * 10) / (10 * 100 + 30 * 100))
    assert total["kv_bytes_per_step"] == pytest.approx((10 * 500 + 30 * 100) / 40)
    assert total["decode_steps"] == 40
    assert total["resident_bytes"] == 210
    assert total["tokens_evicted"] == 6
    assert total["indices_reused"] == 0
    assert total["notes"] == ["layer 1 stays as it is"]
    assert (total["prefill_ms"], total["decode_ms_per_token"]) == (2.0, 3.5)
    assert total["commit"] == "c0"
    shared = {**batch(10, 50.0, 0.5, None, 3.0), "timing": "generate, shared prompt"}
    mixed = costs.add_up([shared, batch(10, 50.0, 0.5, 1.0, 3.0), shared])
    assert (mixed["timing"], mixed["prefill_ms"]) == ("generate, shared prompt / generate", 1.0)
    assert costs.add_up([shared])["prefill_ms"] is None
    assert total["mass_read_share"] is None
    estimating = [batch(10, 5.0, 0.5, 1.0, 3.0), batch(30, 5.0, 0.5, 1.0, 3.0), batch(9, 5.0, 0.5, 1.0, 3.0)]
    estimating[0]["stats"]["mass_read_share"], estimating[1]["stats"]["mass_read_share"] = 0.9, 0.5
    assert costs.add_up(estimating)["mass_read_share"] == pytest.approx((10 * 0.9 + 30 * 0.5) / 40)
    assert total["cache_peak_bytes"] is None
    held = [batch(10, 5.0, 0.5, 1.0, 3.0), batch(30, 5.0, 0.5, 1.0, 3.0)]
    held[0]["stats"]["cache_peak_bytes"], held[1]["stats"]["cache_peak_bytes"] = 900, 300
    assert costs.add_up(held)["cache_peak_bytes"] == 900
    assert costs.add_up([*held, batch(9, 5.0, 0.5, 1.0, 3.0)])["cache_peak_bytes"] is None
    idle = costs.add_up([batch(0, 0.0, 1.0, 2.0, None)])
    assert idle["keys_read_share"] is idle["kv_bytes_per_step"] is idle["decode_ms_per_token"] is None
