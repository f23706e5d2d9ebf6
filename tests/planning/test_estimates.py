"""The estimates of `foveate plan`, beside what was measured."""

import json
from pathlib import Path

import pytest
import transformers

from foveate.lab.bench.models import SHAPES
from foveate.lab.results.earlier import as_now
from foveate.planning.gpus import GPUS
from foveate.planning.plan import Asked, plan_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SHAPE_OF_1_5B = {
    **{"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151936},
    **{"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
}
CLOSE, CLOSE_GAIN = 0.17, 0.25
"""How far an estimate may be from a measured time, as a share of it, and from a measured gain."""
CLOSE_ELSEWHERE = 0.18
"""How far a time may be that was measured on another GPU."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders with a config.json alone, by the names that rows have."""
    root = tmp_path_factory.mktemp("models")
    larger = SHAPES["llama-3.1-8b"].to_dict() | {"dtype": "bfloat16"}
    transformers.LlamaConfig(**larger).save_pretrained(root / "8b")
    smaller = transformers.Qwen2Config(**SHAPE_OF_1_5B, max_position_embeddings=131072, dtype="bfloat16")
    smaller.save_pretrained(root / "1.5b")
    both = {"llama-3.1-8b": root / "8b", "qwen2.5-coder-1.5b-instruct": root / "1.5b"}
    return both | {"llama-3.1-8b-shape": root / "8b"}


def rows():
    """The rows of a model's steps under dense attention, `kascade` and `pages`."""
    for name in ("serving", "recommended-times"):
        for row in map(as_now, map(json.loads, (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())):
            case = row["case"]
            known = case["method"].startswith(("dense", "kascade", "pages")) and "data-free" not in case["method"]
            if known and case.get("level", "model") == "model" and "lossless" not in case:
                yield name, row


def estimated(folders, name, row):
    """The plan of a row's case, with as many positions as it needs."""
    case = row["case"]
    tokens = case.get("tokens") or case["context"]
    kinds = {"kv_cache_dtype": case.get("kv_cache_dtype", "auto"), "ranks": case.get("ranks", 1)}
    plan = plan_of(folders[case["model"]], Asked(tokens, case["batch"], GPUS["h200"], method=case["method"], **kinds))
    decoding = plan.vllm if name == "serving" else plan.transformers
    share = row.get("keys_read_share") or row["stats"]["keys_read_share"]
    return decoding, (decoding.dense_ms if share == 1.0 else decoding.sparse_ms)


CASES = [
    pytest.param(
        name, row, id="-".join(str(row["case"].get(one)) for one in ("model", "method", "batch")) + f"-{index}"
    )
    for index, (name, row) in enumerate(rows())
]


def test_there_are_rows_of_both_engines_and_models():
    found = {(name, row["case"]["model"]) for name, row in rows()}
    assert len(found) == 3
    assert len(CASES) > 60


@pytest.mark.parametrize(("name", "row"), CASES)
def test_an_estimate_is_near_what_was_measured(name, row, folders):
    decoding, ms = estimated(folders, name, row)
    assert row["device"] == "NVIDIA H200"
    assert decoding.dense_ms == pytest.approx(row["baseline_ms"], rel=CLOSE)
    assert ms == pytest.approx(row["ms"], rel=CLOSE)
    assert decoding.dense_ms / ms == pytest.approx(row["speedup"], abs=CLOSE_GAIN)


def of_h100():
    """Steps of whole models on an H100, of one long sequence."""
    for row in map(json.loads, (RESULTS / "decode.jsonl").read_text(encoding="utf-8").splitlines()):
        case, on_h100 = row["case"], "H100" in row["device"]
        of_model = case.get("level") == "model" and case["method"].startswith(("dense", "kascade"))
        if on_h100 and of_model and case["context"] > 30000:
            yield row


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{index}") for index, row in enumerate(of_h100())])
def test_another_gpu_is_estimated_by_its_data_sheet(row, folders):
    """Rows that no constant was fitted to, of earlier versions; two of the same dense step are 10 % apart."""
    tokens, sequences = row["case"]["context"], row["case"]["batch"]
    asked = Asked(tokens, sequences, GPUS["h100"], method=row["case"]["method"])
    decoding = plan_of(folders[row["case"]["model"]], asked).transformers
    share = row["stats"]["keys_read_share"]
    assert decoding.dense_ms == pytest.approx(row["baseline_ms"], rel=CLOSE_ELSEWHERE)
    assert (decoding.dense_ms if share == 1.0 else decoding.sparse_ms) == pytest.approx(row["ms"], rel=CLOSE_ELSEWHERE)


def test_sixteen_sequences_that_no_constant_was_fitted_to(folders):
    """`end-to-end.jsonl`: long answers of the 1.5B to prompts of 30,000 tokens, each step with what `generate` adds.

    In short ones, of nine to forty steps a batch, the first steps, which record graphs, are much of the time.
    """
    lines = (RESULTS / "end-to-end.jsonl").read_text(encoding="utf-8").splitlines()
    found, dense = [json.loads(line) for line in lines], {}
    checked = 0
    for row in found:
        if row["decode_steps"] < 1000:
            continue
        if row["method"] == "dense":
            dense[row["task"], row["commit"]] = row["decode_ms_per_token"]
        elif row["method"] in ("kascade", "pages"):
            asked = Asked(row["length"], row["batch_size"], GPUS["h200"], method=row["spec"])
            decoding = plan_of(folders[row["model"]], asked).transformers
            assert decoding.acts
            assert decoding.sparse_ms == pytest.approx(row["decode_ms_per_token"], rel=CLOSE)
            gain = dense[row["task"], row["commit"]] / row["decode_ms_per_token"]
            assert decoding.gain == pytest.approx(gain, abs=CLOSE_GAIN)
            checked += 1
    assert checked >= 6
