"""The benches of decode, of prompts and of hybrids on a GPU, on little data: what is recorded is recorded there."""

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import cold_cache_timing as cold
from benchmarks import decode, hybrid_attention, hybrid_layers, hybrid_memory, hybrid_training, prefill
from foveate import ops
from foveate.lab.bench import models, prefill_model
from foveate.ops.attend import prompt_path

pytestmark = pytest.mark.gpu

SHAPE = {"heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 32, "dtype": "float16", "seed": 0, "device": "cuda"}
METHODS = (
    "kascade_paper:decode_only=true",
    "quest",
    "pages",
    "locks",
    "omnikv",
    "lessismore",
    "luka:page_size=16,top_k=3,score=spread",
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
    plan = decode.Plan([spec for spec in METHODS if spec not in evict], (4096,), (2,), level=level, **SHAPE)
    rows = decode.run(plan, say=lambda text: None)
    assert {row["case"]["method"]: row["cuda_graph"] for row in rows if not row["cuda_graph"]} == {}
    assert [row["case"]["method"] for row in rows if row["below_floor"]] == [], "keys are not found in a cache"


def test_steps_of_hybrids_are_recorded_and_right(monkeypatch):
    monkeypatch.setattr(cold, "_SECONDS", 0.0)
    rows = hybrid_attention.run(hybrid_attention.Plan(context=4096, batches=(2,)), say=lambda text: None)
    waits = {row["case"]["what"] for row in rows if not row["cuda_graph"]}
    assert waits <= {"lte, scores of a step"}
    errors = {row["case"]["what"]: row["error"] for row in rows if row["error"] is not None}
    assert len(errors.keys() - {"swa, flash-attention-3"}) == 5
    assert max(errors.values()) < 1e-2


def test_the_cache_of_lalte_stays_as_large_as_it_is():
    plan = hybrid_memory.Plan(contexts=(4096, 12288), chunk=2048, steps=2)
    rows = {(row["case"]["preset"], row["case"]["context"]): row for row in hybrid_memory.run(plan, lambda text: None)}
    assert rows["lalte", 4096]["cache_bytes"] == rows["lalte", 12288]["cache_bytes"]
    assert rows["gdn_attn", 12288]["cache_bytes"] > 2 * rows["gdn_attn", 4096]["cache_bytes"]


def test_whole_layers_of_hybrids():
    plan = hybrid_layers.Plan(size="27M", contexts=(1024,), decoded=(1024,), batch=2, steps=8, repeats=1)
    kernels = [row.get("kernels_ms") for row in hybrid_layers.run(plan, lambda text: None)]
    assert kernels.count(None) == 5
    assert min(filter(None, kernels)) > 0


def test_training_steps():
    plan = hybrid_training.Plan(models=("lalte-27M",), tokens=4096, steps=2, compile=False)
    (row,) = hybrid_training.run(plan, lambda text: None)
    assert row["peak_bytes"] > 16 * row["parameters"]


def test_prompts_of_all_methods():
    methods = ("kascade:decode_only=false", "kascade_paper", "streaming", "snapkv", "tova", "h2o", "luka")
    plan = prefill.Plan(methods, (4096,), repeats=1, **SHAPE)
    rows = {row["case"]["method"]: row for row in prefill.run(plan, say=lambda text: None)}
    assert {"sdpa-cudnn", "sdpa-flash"} <= set(rows)
    for name, row in rows.items():
        assert row["ms"] > 0
        assert 0 <= row["peak_bytes"] < 1 << 30, name
        for kind in (row["layers"] or {}).values():
            assert kind["parts_ms"]["attend"] > 0, name
    (dense,) = rows["dense"]["layers"].values()
    assert dense["parts_ms"]["attend"] > 0.9 * sum(dense["parts_ms"].values())
    for kind in ("dense, choosing", "choosing"):
        parts = rows["kascade:decode_only=false"]["layers"][kind]["parts_ms"]
        assert parts["score"] > 0
        assert parts["select"] > 0
    assert rows["h2o"]["layers"]["dense, learning"]["learn_ms"] > 0
    assert rows["snapkv"]["layers"]["dense, learning"]["end_ms"] > 0


def test_the_first_token_of_a_model(monkeypatch):
    config = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 4}
    small = LlamaConfig(**config, num_key_value_heads=2, vocab_size=500, max_position_embeddings=8192)
    monkeypatch.setitem(models.SHAPES, "small", small)
    plan = prefill_model.Plan("small", ("kascade_paper",), (4096,), (0, 1024), 1, "bfloat16", 0, "cuda")
    rows = prefill_model.run(plan, say=lambda text: None)
    assert [(row["case"]["method"], row["case"]["chunk"]) for row in rows] == [
        (name, chunk) for chunk in (0, 1024) for name in ("dense", "kascade_paper", "transformers-sdpa")
    ]
    assert all(row["ms"] > 0 and row["peak_bytes"] > 0 for row in rows)
    library = prompt_path(ops.PromptHeads(torch.device("cuda", 0), torch.bfloat16, 64, 64, 2))
    assert {row["dense_prompts"] for row in rows if row["case"]["method"] != "transformers-sdpa"} == {library}
