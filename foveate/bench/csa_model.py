"""DeepSeek-V4 end to end: a long prompt in bounded memory, and a short one compared with Transformers' own path.

The weights are random, and the model is narrower than DeepSeek-V4-Flash. Depth, order of the layers, window,
compression ratios, index heads and the number of selected entries are those of DeepSeek-V4-Flash.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import foveate
from foveate.bench import options
from foveate.bench.plan import Keep, Row, Say
from foveate.integrations.transformers import releases
from foveate.report.markdown import NONE, columns
from foveate.results import circumstances, timing
from foveate.results.errors import UserError
from foveate.results.measurements import speed_row

_KEPT = 64
"""Positions at the end of each chunk of a prompt whose logits are compared."""
_ROOM = 0.8
"""Share of a GPU's free memory that Transformers' path may need."""
_SPARSE, _HEAVY, _WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"


class Plan(options.CsaModel):
    def check(self) -> None:
        """Raise UserError that names an option, its value, and what is allowed."""
        super().check()
        if min(self.tokens, default=1) < 1 or not (self.tokens or self.small):
            raise UserError(f"tokens must be at least 1, not {list(self.tokens)}")
        if not hasattr(transformers, "DeepseekV4Config"):
            raise UserError(f"Transformers {transformers.__version__} has no DeepSeek-V4; a later one has")


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """Measure foveate at every length, and Transformers, the baseline, at the small one.

    Raises:
        UserError: for an invalid plan.
    """
    plan.check()
    model = build(plan)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    say(f"{plan.layers} layers, {weights / 1e9:.2f} GB of weights")
    rows: list[Row] = []
    for tokens in dict.fromkeys([*([plan.small] if plan.small else []), *plan.tokens]):
        found, kept = {}, {}
        if tokens == plan.small:
            if _fits(plan, tokens):
                found["transformers"], kept["transformers"] = _measure(plan, model, tokens)
            else:
                say(
                    f"transformers at {tokens:,} tokens: products of {_products(plan, tokens) / 1e9:,.0f} GB do not fit"
                )
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
                    plan.bench,
                    {"impl": name, "tokens": tokens, **plan.without("tokens", "small", "device")},
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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""

    def apart(row: dict[str, Any]) -> str:
        if "max_logit_difference" not in row:
            return NONE
        return f"{row['max_logit_difference']:.2g} (of std {row['logit_std']:.2g})"

    return columns(
        rows,
        {
            "": lambda row: row["impl"],
            "tokens": lambda row: f"{row['case']['tokens']:,}",
            "prompt, s": lambda row: f"{row['ms'] / 1e3:,.2f}",
            "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
            "decode, ms": lambda row: f"{row['decode_ms_per_token']:,.1f}",
            "peak, GB": lambda row: f"{row['peak_bytes'] / 1e9:.2f}",
            "cache, GB": lambda row: f"{row['cache_bytes'] / 1e9:.2f}",
            "largest logit difference": apart,
        },
    )


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


def _products(plan: Plan, tokens: int) -> int:
    """Bytes of the largest tensor that Transformers' indexer allocates."""
    return 4 * min(plan.chunk, tokens) * plan.index_heads * (tokens // plan.ratios[0])


def _fits(plan: Plan, tokens: int) -> bool:
    room = torch.cuda.mem_get_info(plan.device)[0] if plan.device.startswith("cuda") else 8 << 30
    return 3.2 * _products(plan, tokens) <= _ROOM * room  # the products, their ReLU and the weighted ones
