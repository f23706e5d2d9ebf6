"""What attention takes in the layers of hybrids: learned eviction beside a sliding window, native sparse beside dense.

Keys and values are drawn, and no model is there. A decode step finds nothing of what it reads in the GPU's cache. Every
output is held against attention in fp64 for some of its queries.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate import ops
from foveate.bench import cold, dense_peers
from foveate.bench.indexer import matmul_rate
from foveate.layers import LearnedEviction, NativeSparseAttention
from foveate.ops._dispatch import reference_only
from foveate.results import circumstances
from foveate.results.errors import UserError
from foveate.state.hybrid import BlockMemory, RetainedMemory

BENCH = "hybrids"
PHASES = ("decode", "prefill")
_DTYPES = ("bfloat16", "float16", "float32")
_FLASH = "flash-attention-3"
_CHECKED = 16
"""Queries at the end of a prompt whose outputs are compared with those in fp64."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure; the defaults are the shapes of laLTE-1.4B and laNSA-1.4B."""

    context: int = 32768
    batches: Sequence[int] = (32, 64)
    phases: Sequence[str] = PHASES
    heads: int = 32
    kv_heads: int = 8
    nsa_kv_heads: int = 2
    head_dim: int = 64
    window: int = 768
    buffer: int = 512
    half: int = 256
    """Retained tokens where the buffer is not full."""
    sliding: int = 1024
    """Tokens of the sliding window that learned eviction is compared with."""
    share: float = 0.25
    """Tokens of a prompt whose scores are above the threshold."""
    block: int = 64
    blocks: int = 16
    nsa_window: int = 512
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "cuda"

    def check(self) -> None:
        """Raises UserError naming what cannot be."""
        for name in ("context", "heads", "kv_heads", "nsa_kv_heads", "head_dim", "buffer", "sliding"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.batches or min(self.batches) < 1:
            raise UserError(f"batch must be at least 1, not {min(self.batches, default='none')}")
        for name in ("kv_heads", "nsa_kv_heads"):
            if self.heads % getattr(self, name):
                raise UserError(f"heads must be a multiple of {name}, {getattr(self, name)}, not {self.heads}")
        strange = [phase for phase in self.phases if phase not in PHASES]
        if strange or not self.phases:
            raise UserError(f"phase must be among {', '.join(PHASES)}, not {', '.join(strange) or 'none'}")
        if not 0 < self.half < self.buffer:
            raise UserError(f"half must be above 0 and below the buffer's {self.buffer}, not {self.half}")
        if self.context <= max(self.window + self.buffer, self.sliding):
            raise UserError(f"context must be more than window and buffer and sliding hold, not {self.context}")
        if not 0 < self.share <= 1:
            raise UserError(f"share must be above 0 and at most 1, not {self.share}")
        if self.dtype not in _DTYPES:
            raise UserError(f"dtype must be one of {', '.join(_DTYPES)}, not '{self.dtype}'")
        if self.device not in ("cuda", "cpu"):
            raise UserError(f"device must be cuda or cpu, not '{self.device}'")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("no CUDA device is here; --device cpu measures the references")

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5

    @property
    def slots(self) -> int:
        """What learned eviction holds of a KV head."""
        return self.window + 1 + self.buffer


class Case(NamedTuple):
    """One thing to time."""

    what: str
    baseline: str
    step: Callable[[], Any]
    bytes: float | None = None
    flops: float | None = None
    exact: Callable[[], tuple[Tensor, Tensor]] | None = None
    """What was computed and the same in fp64."""
    steps: int = 1
    """Decode steps that share the cost."""


class Limits(NamedTuple):
    """What the device moves and multiplies at most, measured."""

    gb_per_s: float
    tflop_per_s: float


@torch.inference_mode()
def run(
    plan: Plan,
    say: Callable[[str], None] = print,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """A row for each kind of attention, in decode for each batch size and for a prompt of one sequence.

    Args:
        keep: is given the rows when they are complete.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    cold.settle(plan.device)
    limits = Limits(cold.memory_rate(plan.device), matmul_rate(plan.dtype, plan.device))
    rows: list[dict[str, Any]] = []
    if "decode" in plan.phases:
        for batch in plan.batches:
            for cases in (_decode_cases, _nsa_cases):
                rows += _rows(plan, "decode", batch, cases(plan, batch, say), limits, say)
    if "prefill" in plan.phases:
        rows += _rows(plan, "prefill", 1, _prefill_cases(plan, say), limits, say)
    keep(rows)
    return rows


def _rows(
    plan: Plan, phase: str, batch: int, cases: Sequence[Case], limits: Limits, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Time cases of one phase; baselines are among them: of several windows or dense libraries the fastest."""
    memory, found, rows = circumstances.PeakMemory(plan.device), {}, []
    for case in cases:
        before = torch.cuda.memory_allocated() if plan.device == "cuda" else 0
        memory.start()
        case.step()
        peak = memory.peak() - before
        timed = cold.repeated(case.step, plan.device)
        found[case.what] = timed._replace(ms=timed.ms / case.steps), peak, _error(case)
    fastest = {}
    for kind in ("swa", "dense"):
        names = [name for name in found if name.startswith(kind)]
        fastest[kind] = min(names, key=lambda name: found[name][0].ms, default=kind)
    for case in cases:
        timed, peak, error = found[case.what]
        baseline = fastest.get(case.baseline, case.baseline)
        baseline_ms = found[baseline][0].ms
        say(f"{phase}, batch {batch}: {case.what} {1000 * timed.ms:,.1f} µs, {baseline_ms / timed.ms:.2f}× {baseline}")
        sizes = {name: value for name, value in dataclasses.asdict(plan).items() if name not in ("batches", "phases")}
        gb_per_s = None if case.bytes is None else case.bytes / timed.ms / 1e6
        tflop_per_s = None if case.flops is None else case.flops / timed.ms / 1e9
        rows.append(
            {
                "bench": BENCH,
                "case": {"what": case.what, "phase": phase, "batch": batch, **sizes},
                "ms": timed.ms,
                "steps_that_share": case.steps,
                "cuda_graph": timed.graph,
                "error": error,
                "error_counts": "norm of the difference to fp64 over its norm",
                "baseline": baseline,
                "baseline_ms": baseline_ms,
                "speedup": baseline_ms / timed.ms,
                "gb_per_s": gb_per_s,
                "of_memory": None if gb_per_s is None else gb_per_s / limits.gb_per_s,
                "memory_gb_per_s": limits.gb_per_s,
                "tflop_per_s": tflop_per_s,
                "of_matmul": None if tflop_per_s is None else tflop_per_s / limits.tflop_per_s,
                "matmul_tflop_per_s": limits.tflop_per_s,
                "peak_bytes": peak,
                **circumstances.of(plan.device),
            }
        )
    return rows


def _error(case: Case) -> float | None:
    if case.exact is None:
        return None
    found, exact = case.exact()
    return ((found.double() - exact).norm() / exact.norm()).item()


def _drawer(plan: Plan) -> Callable[..., Tensor]:
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    dtype = getattr(torch, plan.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=plan.device).normal_(generator=generator)

    return draw


def _decode_cases(plan: Plan, batch: int, say: Callable[[str], None]) -> list[Case]:
    """A step of learned eviction with a full and a half-full buffer, of a sliding window, and of dense attention."""
    draw, size = _drawer(plan), (batch, plan.kv_heads)
    q = draw(batch, plan.heads, 1, plan.head_dim)
    token = 2 * plan.kv_heads * plan.head_dim * q.element_size() * batch  # bytes of a key and its value

    def attention(what: str, keys: Tensor, values: Tensor, used: int) -> Case:
        lengths = torch.full(size, used, device=plan.device)
        step = functools.partial(ops.attend, q, keys, values, scaling=plan.scaling, lengths=lengths)

        def exact() -> tuple[Tensor, Tensor]:
            wide = (x[:1].double() for x in (q, keys[:, :, :used], values[:, :, :used]))
            with reference_only():
                expected = ops.attend(*wide, scaling=plan.scaling).out
            return step().out[:1], expected

        return Case(what, "swa", step, bytes=token * used, exact=exact)

    sliding = (draw(*size, plan.sliding, plan.head_dim) for _ in range(2))
    layer, memory = _evicting(plan, batch, draw)
    held, ring = memory.tensors, memory.ring
    cases = [attention("swa", *sliding, plan.sliding)]
    cases += [attention("lte, buffer full", held["keys"], held["values"], plan.slots)]
    cases += [attention("lte, buffer half full", held["keys"], held["values"], ring + plan.half)]
    step = functools.partial(layer._step, q, draw(*size, 1, plan.head_dim), draw(*size, 1, plan.head_dim), memory)

    def whole_step() -> None:
        memory.unscored = list(memory.lengths)  # scores are timed by themselves
        step()

    def score() -> None:
        memory.unscored = [length - plan.window + layer.reach for length in memory.lengths]
        layer._score_late(memory)

    together = plan.window - 2 * layer.reach
    cases += [Case("lte, step with replacement", "swa", whole_step, bytes=token * plan.slots)]
    cases += [Case("lte, scores of a step", "lte, buffer full", score, steps=together)]
    keys, values = (draw(*size, plan.context, plan.head_dim) for _ in range(2))
    for name, attend in dense_peers.available(plan.device, plan.dtype, say).items():
        dense = functools.partial(attend, q, keys, values, plan.scaling)
        cases.append(Case(f"dense, {name}", "dense", dense, bytes=token * plan.context))
    return cases


def _evicting(plan: Plan, batch: int, draw: Callable[..., Tensor]) -> tuple[LearnedEviction, RetainedMemory]:
    """A layer and its memory with a full buffer."""
    torch.manual_seed(plan.seed)
    layer = LearnedEviction(64, plan.heads, plan.kv_heads, plan.head_dim, plan.window, plan.buffer)
    layer = layer.to(plan.device, getattr(torch, plan.dtype)).eval()
    memory = RetainedMemory(plan.window, plan.buffer)
    first = torch.zeros(1, 1, dtype=torch.int64, device=plan.device)
    memory.start(*(draw(batch, plan.kv_heads, 1, plan.head_dim) for _ in range(2)), first)
    held = memory.tensors
    for name in ("keys", "values"):
        held[name].copy_(draw(*held[name].shape))
    held["margins"].uniform_(0, 0.5)
    held["positions"].copy_(torch.arange(plan.buffer, device=plan.device).expand_as(held["positions"]))
    held["kept"].fill_(plan.buffer)
    memory.lengths = [plan.context] * batch
    return layer, memory


def _nsa_cases(plan: Plan, batch: int, say: Callable[[str], None]) -> list[Case]:
    """A step of native sparse attention and of dense attention over the same keys."""
    draw, size = _drawer(plan), (batch, plan.nsa_kv_heads)
    q = draw(batch, plan.heads, 1, plan.head_dim)
    token = 2 * plan.nsa_kv_heads * plan.head_dim * q.element_size() * batch
    torch.manual_seed(plan.seed)
    layer = NativeSparseAttention(
        64, plan.heads, plan.nsa_kv_heads, plan.head_dim, plan.block, plan.blocks, plan.nsa_window
    ).to(plan.device, q.dtype)
    memory = BlockMemory(plan.block)
    memory.append(*(draw(*size, plan.context, plan.head_dim) for _ in range(2)), None)
    keys, values = (memory.tensors[name][:, :, : plan.context] for name in ("keys", "values"))
    lengths = torch.full((batch,), plan.context, device=plan.device)
    gates = torch.rand(3, batch, plan.heads, 1, device=plan.device).to(q.dtype)
    given = q, keys, values, *memory.summaries(layer._compressed), gates
    sizes = {"block": plan.block, "blocks": plan.blocks, "window": plan.nsa_window, "scaling": plan.scaling}
    step = functools.partial(ops.attend_gated, *given, lengths, **sizes)

    def exact() -> tuple[Tensor, Tensor]:
        wide = [x[:, :1].double() if x is gates else x[:1].double() for x in given]
        with reference_only():
            expected = ops.attend_gated(*wide, lengths[:1], **sizes).out
        return step().out[:1], expected

    read = plan.context // plan.block + plan.blocks * plan.block + plan.nsa_window
    cases = [Case("nsa", "dense", step, bytes=token * read, exact=exact)]
    for name, attend in dense_peers.available(plan.device, plan.dtype, lambda text: None).items():
        dense = functools.partial(attend, q, keys, values, plan.scaling)
        cases.append(Case(f"dense of nsa's heads, {name}", "dense", dense, bytes=token * plan.context))
    return cases


def _prefill_cases(plan: Plan, say: Callable[[str], None]) -> list[Case]:
    """The attention of a prompt, and the choice of the tokens to retain."""
    draw, length = _drawer(plan), plan.context
    q = draw(1, plan.heads, length, plan.head_dim)
    k, v = (draw(1, plan.kv_heads, length, plan.head_dim) for _ in range(2))
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    margins = torch.rand(1, plan.kv_heads, length, generator=generator, device=plan.device) - (1 - plan.share)
    at = torch.arange(length, device=plan.device)
    empty = torch.zeros(1, plan.kv_heads, plan.buffer, device=plan.device)
    left = length - plan.window - 1
    offer = empty, torch.full_like(empty, -1, dtype=torch.int64), margins[:, :, :left], at[None, :left]
    until = torch.full(k.shape[:3], length, device=plan.device)
    until[:, :, :left] = ops.running_best(*offer).new + plan.window + 1
    pair = 4 * plan.heads * plan.head_dim  # FLOP of a query and a key
    how = {"scaling": plan.scaling, "window": plan.window, "retained": plan.buffer}

    def evicting() -> Tensor:
        return ops.attend_until(q, k, v, until, **how).out

    def sliding() -> Tensor:
        return ops.attend_window(q, k, v, scaling=plan.scaling, lower=at - plan.sliding + 1).out

    def exact(step: Callable[[], Tensor], ends: Tensor) -> tuple[Tensor, Tensor]:
        last = q[:, :, -_CHECKED:].double()
        with reference_only():
            wide = ops.attend_until(last, k.double(), v.double(), ends - (length - last.shape[2]), scaling=plan.scaling)
        return step()[:, :, -_CHECKED:], wide.out

    fixed = (at + plan.sliding).clamp_max(length).expand_as(until)
    pairs = [int((ends - at).sum()) / plan.kv_heads for ends in (fixed, until)]
    cases = [
        Case("swa", "swa", sliding, flops=pair * pairs[0], exact=lambda: exact(sliding, fixed)),
        Case("lte", "swa", evicting, flops=pair * pairs[1], exact=lambda: exact(evicting, until)),
        Case("lte, selection of tokens", "swa", lambda: ops.running_best(*offer)),
        Case("lte, with selection", "swa", lambda: (ops.running_best(*offer), evicting()), flops=pair * pairs[1]),
    ]
    for name, attend in _prompt_libraries(plan).items():
        dense = functools.partial(attend, q, k, v, plan.scaling)
        cases.append(Case(f"dense, {name}", "dense", dense, flops=pair * length * (length + 1) / 2))
        if name == _FLASH:
            window = functools.partial(dense, window=plan.sliding)
            check = functools.partial(exact, window, fixed)
            cases.append(Case(f"swa, {name}", "swa", window, flops=pair * pairs[0], exact=check))
    return cases


def _prompt_libraries(plan: Plan) -> dict[str, dense_peers.Attend]:
    """Causal dense attention of a prompt, by library."""

    def sdpa(q: Tensor, k: Tensor, v: Tensor, scaling: float, backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)

    if plan.device == "cpu" or plan.dtype == "float32":
        return {"sdpa-math": functools.partial(sdpa, backend=SDPBackend.MATH)}
    found = {
        "sdpa-cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        "sdpa-flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    }
    try:
        from flash_attn_interface import flash_attn_func
    except Exception:  # it loads a library, which may not fit the device or torch; the decode cases have said why
        return found

    def flash_attention_3(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None) -> Tensor:
        how = {"softmax_scale": scaling, "causal": True}
        if window is not None:
            how["window_size"] = (window - 1, 0)
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **how)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return found | {_FLASH: flash_attention_3}
