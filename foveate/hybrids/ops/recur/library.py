"""The gated delta rule of flash-linear-attention, where it is installed and has been proved right on the device."""

import functools
import importlib
import importlib.util
import warnings

import torch
from torch import Tensor

from foveate.errors import FoveateWarning
from foveate.hybrids.ops.recur import chunked
from foveate.hybrids.ops.recur.reference import Recurred
from foveate.ops.dispatch import kernels_wanted

_TOLERANCE = 0.015
"""Largest error of the library, relative to the largest number in fp32. bf16 rounds to 0.004, and what the library adds
up in bf16 was off by 0.011 on an H200 (fla-core 0.6.0, four heads of 64)."""
_GUARD = "TRITON_ABOVE_3_7_1"


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, state: Tensor | None = None
) -> Recurred:
    """As the reference's, of the same arguments on one GPU."""
    rules = importlib.import_module("fla.ops.gated_delta_rule")
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    log_decay, beta = log_decay.float().transpose(1, 2).contiguous(), beta.float().transpose(1, 2).contiguous()
    rule = rules.chunk_gated_delta_rule
    if q.shape[1] == 1 and not (torch.is_grad_enabled() and q.requires_grad):
        rule = rules.fused_recurrent_gated_delta_rule
    out, state = rule(
        q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return Recurred(out.transpose(1, 2), state)


def obstacle(q: Tensor, v: Tensor) -> str:
    """Why the library's kernels do not run for such queries and values; empty when they do."""
    if q.device.type != "cuda":
        return "they run on GPUs"
    if not kernels_wanted():
        return "kernels are switched off"
    if q.dtype not in (torch.bfloat16, torch.float16) or v.dtype != q.dtype:
        return f"they take bf16 and fp16, not {q.dtype}"
    reason = "fla-core is not installed"
    if importlib.util.find_spec("fla") is not None:
        reason = _proved(q.device, q.shape[1], q.shape[3], v.shape[3], q.dtype, torch.is_grad_enabled())
    if reason:
        _say_once(f"flash-linear-attention's gated delta rule is not used, the slower torch path runs: {reason}")
    return reason


@functools.cache
def _proved(device: torch.device, heads: int, dim: int, value_dim: int, dtype: torch.dtype, gradients: bool) -> str:
    """Compare outputs and states with the torch path in fp32 on this device, once; with ``gradients``, gradients too.

    The library autotunes its kernels for each number of heads. This takes minutes, and the kernels of gradients take
    longest.
    """
    try:
        guarded = importlib.import_module("fla.ops.common.chunk_o")
    except Exception as error:  # whatever a library raises, there is another path
        return f"{type(error).__name__}: {error}"
    # On Hopper the library refuses its backward for Triton 3.4 to 3.7.0, which compile it wrongly in some shapes. The
    # comparison finds out whether these are among them.
    refuses = getattr(guarded, _GUARD, True)
    setattr(guarded, _GUARD, True)
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), torch.autocast("cuda", enabled=False):
            worst = max(_error(length, device, heads, dim, value_dim, dtype) for length in (192, 77))
        reason = "" if worst < _TOLERANCE else f"it differs from fp32 by {worst:.2g} of the largest number"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason or not gradients:
        setattr(guarded, _GUARD, refuses)
    return reason


def _error(length: int, device: torch.device, heads: int, dim: int, value_dim: int, dtype: torch.dtype) -> float:
    generator = torch.Generator(device).manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, heads, *shape, generator=generator, device=device)

    given = [normal(length, dim), normal(length, dim), normal(length, value_dim)]
    gates = [-torch.nn.functional.softplus(normal(length) - 2), normal(length).sigmoid()]
    start, back = normal(dim, value_dim), normal(length, value_dim)
    gradients, results = torch.is_grad_enabled(), []
    for rule, kind in ((gated_delta_rule, dtype), (chunked.gated_delta_rule, torch.float32)):
        leaves = [x.to(dtype).to(kind).requires_grad_(gradients) for x in given]
        leaves += [x.clone().requires_grad_(gradients) for x in gates]
        found = list(rule(*leaves, state=start))
        if gradients:
            out, state = found
            found += torch.autograd.grad((out.float() * back).sum() + state.sum(), leaves)
        results.append(found)
    step = [x[:, :, :1].to(dtype) for x in given] + [x[:, :, :1] for x in gates]
    with torch.no_grad():
        results[0] += list(gated_delta_rule(*step, state=start))
        results[1] += list(chunked.gated_delta_rule(*(x.float() for x in step), state=start))
    errors = [(a.float() - b).abs().amax() / b.abs().amax() for a, b in zip(*results)]
    worst = torch.stack(errors).detach().amax()
    return float(worst) if bool(worst.isfinite()) else float("inf")


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, FoveateWarning, stacklevel=4)
