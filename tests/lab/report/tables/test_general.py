from pathlib import Path

import pytest

from foveate.lab.report.rows import read_any
from foveate.lab.report.tables.general import tables
from foveate.methods import parse
from tests.lab.report.plots.test_plots import FIGURE_4, FRONTIER, MODES

LUKA = Path(__file__).resolve().parents[4] / "benchmarks" / "results" / "luka-dev.jsonl"

MORE = {"versions": {"torch": "2", "transformers": "5"}, "commit": "abc", "batch_size": 1}
COSTS = {"kv_bytes_per_step": 1e6, "resident_bytes": 2e6}


def test_perplexities_beside_dense_on_the_same_texts():
    first, second = tables([row | MORE for row in [*FIGURE_4[:2], *MODES]]).split("\n\nperplexity")
    assert first.startswith("perplexity (books), tiny, 512 tokens after a prompt of 1, n = 12, float32 (cpu;")
    assert "1K tokens after a prompt of 1" in second
    assert "| `dense` | 34.81 [27.85, 41.78] |  | 100.0 % |" in second
    assert "| `luka` | 35.20 [28.16, 42.24] | 1.011 [1.011, 1.011] | 100.0 % |" in second


def test_rows_of_settings_that_are_gone_keep_their_names():
    found = tables(read_any(LUKA))
    for spec in (
        "luka:refine=threshold,epsilon=0.002,score=spread",
        "luka:compressor=random,top_k=0.12,score=spread",
        "luka:compressor=attention,temperature=1,top_k=0.12,score=spread",
        "luka:zero_values=true,top_k=0.12,score=spread",
    ):
        assert f"| `{spec}` |" in found
        with pytest.raises(ValueError, match=r"compressor must be one of mean, attention|luka has no setting"):
            parse(spec)


def test_other_tasks_keep_their_scores():
    assert "| `h2o:top_k=0.05` | 30.0 [27.0, 33.0] | -50.0" in tables([row | MORE | COSTS for row in FRONTIER[:3]])


def test_the_peak_of_the_cache_beside_what_stays():
    rows = [row | MORE | COSTS | {"cache_peak_bytes": 8e6, "batch_size": 2} for row in FRONTIER[:3]]
    assert tables(rows).count("| 1.0 MB | 4.0 MB |") == 3
    assert "| resident a sequence | peak of a sequence |" in tables(rows)
    assert "peak" not in tables([*rows[:2], FRONTIER[2] | MORE | COSTS | {"batch_size": 2}])


def test_long_answers_tell_their_length():
    rows = [row | MORE | COSTS for row in FRONTIER[:3]]
    assert "answer, tokens" not in tables(rows)
    length = {"answer_tokens": {"value": 512.4, "low": 470.0, "high": 560.6}}
    found = tables([row | {"metrics": row["metrics"] | length} for row in rows])
    assert "| answer, tokens [95 %] |" in found
    assert found.count("| 512 [470, 561] |") == 3


def test_fidelity_with_its_divergence():
    rows = [
        row | MORE | COSTS | {"task": "fidelity", "task_settings": {"of": "niah", "length": 4096}}
        for row in FRONTIER[:3]
    ]
    for row, kl in zip(rows, (0.0, 0.0212, 1.5)):
        row["metrics"] = row["metrics"] | {"kl": {"value": kl, "low": kl / 2, "high": 2 * kl}}
    first, *_ = tables(rows).splitlines()
    assert first.startswith("fidelity on niah (")
    assert f"| `{rows[1]['spec']}` | 0.0212 [0.0106, 0.0424] | 30.0 [27.0, 33.0] |" in tables(rows)


def test_rows_on_the_same_items_share_a_table_whatever_their_commits():
    rows = [row | MORE | COSTS | {"commit": commit} for row, commit in zip(FRONTIER, ("a, b", "c", "b"))]
    assert tables(rows).count("| method |") == 1
    assert "(cpu; torch 2, transformers 5; commit a, b, c):" in tables(rows)
    assert tables([rows[0], {**rows[1], "device": "gpu"}]).count("| method |") == 2


def test_speeds_tell_what_their_bench_measured_beside_them():
    case = {"method": "quest", "model": "tiny", "context": 8000, "batch": 1, "dtype": "float32"}
    row = {"bench": "prefill", "case": case, "ms": 12.34, "speedup": 0.74, "baseline": "dense", "peak_bytes": 5e6}
    row |= MORE | {"device": "cpu"}
    assert tables([row]).endswith("| `quest` | 12.3 | 0.74× | `dense` | 5 MB |")
    assert tables([row | {"resident_bytes": 2e6}]).endswith("| 5 MB | 2 MB |")
    steps = {"ms_quartiles": [11.6, 12.3, 20.2], "keys_read_share": 0.266, "same_next_token": 0.846}
    found = tables([row | steps | {"peak_kind": "resident"}])
    assert "| method | ms | speed-up | over | resident | quartiles, ms | keys read | same next token |" in found
    assert found.endswith("| 5 MB | 12 to 20 | 26.6 % | 85 % |")
