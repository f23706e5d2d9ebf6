"""DeepSeek-V4 end to end: a long prompt in bounded memory, and a short one compared with Transformers' own path.

The weights are random, and the model is narrower than DeepSeek-V4-Flash. Depth, order of the layers, window,
compression ratios, index heads and the number of selected entries are those of DeepSeek-V4-Flash.

    python -m benchmarks.csa_model --out benchmarks/results/csa-model.jsonl
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import typer
from torch import Tensor, nn

import foveate
from benchmarks import csa_tables
from foveate.integrations.transformers import releases
from foveate.io import circumstances
from foveate.lab.bench.plan import Keep, Row, Say, measure
from foveate.lab.results import timing
from foveate.lab.results.measurements import speed_row

_KEPT = 64
"""Positions at the end of each chunk of a prompt whose logits are compared."""
_SPARSE, _HEAVY, _WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure. Widths that are no field are proportional to those that are."""

    tokens: Sequence[int] = (262144,)
    small: int = 8192
    """Tokens of the prompt that Transformers' own path reads, too; 0 for none."""
    chunk: int = 4096
    layers: int = 43
    hidden: int = 1024
    heads: int = 16
    head_dim: int = 512
    experts: int = 16
    index_heads: int = 64
    index_dim: int = 128
    top_k: int = 512
    window: int = 128
    ratios: tuple[int, int] = (4, 128)
    steps: int = 16
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "cuda"


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """Measure foveate at every length, and Transformers, the baseline, at the small one."""
    sizes = {name: value for name, value in vars(plan).items() if name not in ("tokens", "small", "device")}
    model = build(plan)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    say(f"{plan.layers} layers, {weights / 1e9:.2f} GB of weights")
    rows: list[Row] = []
    for tokens in dict.fromkeys([*([plan.small] if plan.small else []), *plan.tokens]):
        found, kept = {}, {}
        if tokens == plan.small:
            found["transformers"], kept["transformers"] = _measure(plan, model, tokens)
        with foveate.attached(model):
            found["foveate"], kept["foveate"] = _measure(plan, model, tokens)
        if len(kept) == 2:
            found["foveate"] |= _compared(kept["foveate"], kept["transformers"])
        baseline = next(iter(found))
        fresh = []
        for name, measured in found.items():
            say(
                f"{name} at {tokens:,} tokens: {measured['ms'] / 1e3:,.2f} s, "
                f"{measured['tokens_per_s']:,.0f} tokens/s, peak {measured['peak_bytes'] / 1e9:.2f} GB"
            )
            fresh.append(
                speed_row(
                    "csa-model",
                    {"impl": name, "tokens": tokens, **sizes},
                    plan.device,
                    baseline=(baseline, found[baseline]["ms"]),
                    impl=name,
                    **measured,
                    weight_bytes=weights,
                )
            )
        keep(fresh)
        rows += fresh
    return rows


def build(plan: Plan) -> nn.Module:
    """A DeepSeek-V4 with random weights and the layers of V4-Flash.

    Two layers have a window alone. The others alternate: sparse (selected entries), heavily compressed (all entries).
    """
    torch.manual_seed(plan.seed)
    between = [_HEAVY if place % 2 else _SPARSE for place in range(plan.layers)]
    config = transformers.DeepseekV4Config(
        vocab_size=8192,
        hidden_size=plan.hidden,
        moe_intermediate_size=plan.hidden // 2,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        head_dim=plan.head_dim,
        q_lora_rank=plan.hidden // 4,
        o_groups=1 if plan.heads % 8 else 8,
        o_lora_rank=plan.hidden // 4,
        n_routed_experts=plan.experts,
        num_experts_per_tok=min(6, plan.experts),
        index_n_heads=plan.index_heads,
        index_head_dim=plan.index_dim,
        index_topk=plan.top_k,
        sliding_window=plan.window,
        layer_types=[_WINDOW, _WINDOW, *between][: plan.layers] if plan.layers > 2 else between,
        compress_rates=dict(zip((_SPARSE, _HEAVY), plan.ratios)),
        qk_rope_head_dim=min(64, plan.head_dim // 2, plan.index_dim),
        eos_token_id=None,
    )
    with torch.device(plan.device):
        model = transformers.DeepseekV4ForCausalLM._from_config(config, dtype=getattr(torch, plan.dtype)).eval()
        for module in model.modules():
            if hasattr(module, "tid2eid"):  # routes tokens to experts; zeros would use the same ones for all
                module.tid2eid.copy_(torch.rand(config.vocab_size, plan.experts).topk(module.tid2eid.shape[1]).indices)
    return model


def _measure(plan: Plan, model: nn.Module, tokens: int) -> tuple[dict[str, Any], Tensor]:
    """Time, memory and rates of a chunked prompt and the decode steps after it, and the logits to compare."""
    generator = torch.Generator().manual_seed(plan.seed + 1)
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=generator).to(plan.device)
    model(ids[:, : min(tokens, plan.chunk)], use_cache=False, logits_to_keep=1)  # compiles and tunes kernels
    cuda, memory = plan.device.startswith("cuda"), circumstances.PeakMemory(plan.device)
    memory.start()
    cache, kept = transformers.DynamicCache(config=model.config), []

    def feed(*pieces: Tensor) -> None:
        for piece in pieces:
            kept.append(model(piece, **{releases.CACHE: cache}, logits_to_keep=_KEPT).logits[0].float())

    milliseconds = timing.milliseconds(functools.partial(feed, *ids.split(plan.chunk, 1)), plan.device)
    logits, times = torch.cat(kept), []
    for _ in range(plan.steps):
        token = kept[-1][-1:].argmax(-1)[None]
        times.append(timing.milliseconds(functools.partial(feed, token), plan.device))
    measured = {
        "ms": milliseconds,
        "tokens_per_s": 1e3 * tokens / milliseconds,
        "decode_ms_per_token": statistics.median(times),
        "peak_bytes": memory.added(),
        "peak_counts": f"{memory.kind}; less the weights" if cuda else memory.kind,
        "cache_bytes": _bytes(cache),
    }
    return measured, logits


def _compared(found: Tensor, expected: Tensor) -> dict[str, float]:
    """Differences of logits ``[n, V]``. In half precision a path may choose another expert or entry."""
    return {
        "max_logit_difference": float((found - expected).abs().max()),
        "mean_logit_difference": float((found - expected).abs().mean()),
        "logit_std": float(expected.std()),
        "same_top_1": float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        "positions_compared": len(found),
    }


def _bytes(cache: transformers.DynamicCache) -> int:
    """Bytes that the layers hold; a tensor that is both keys and values counts once."""
    held = {}
    for layer in cache.layers:
        states = [value for states in vars(layer).values() if isinstance(states, dict) for value in states.values()]
        for tensor in [layer.keys, layer.values, *states]:
            if isinstance(tensor, Tensor):
                held[tensor.data_ptr(), tensor.shape] = tensor.nbytes
    return sum(held.values())


def main(dtype: str = Plan.dtype, out: Path | None = None) -> None:
    """Measure the model; in float32 logits can be compared."""
    measure("csa-model", run, Plan(dtype=dtype), out, csa_tables.csa_model)


if __name__ == "__main__":
    typer.run(main)
