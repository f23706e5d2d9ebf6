"""Dense causal attention by libraries: which are installed, what each takes, how to call it, and whether it is right.

The fastest library that takes the queries, keys and values computes the attention: FlashAttention-3, cuDNN's, or
PyTorch's own kernel. The first two are compared with the reference before their first use, once for every device,
dtype, head dim and group. A warning gives the reason if an installed library is not used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from foveate.ops.attend import dense
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.partials import merge
from foveate.ops.attend.sdpa import scaled_dot_product
from foveate.ops.dispatch import KernelWarning, kernels_wanted
from foveate.ops.kv import KV
from foveate.ops.logits import Logits

_HALF = (torch.float16, torch.bfloat16)
_LARGEST = 256
"""The largest head dim that any library takes."""
_OUT_TOLERANCE, _LSE_TOLERANCE, _CAPPED_TOLERANCE = 0.02, 1e-3, 1e-2
"""The largest errors that a proof accepts: of an output, relative to the largest number of its vector (bf16 rounds to
0.004); of a log-sum-exp; and of a log-sum-exp of capped logits, for whose tanh GPUs use an approximation."""
_PROBLEMS = ((77, 0), (130, 213), (1, 301))
"""The problems of a proof: the number of queries, and the number of keys before them."""
_CAP, _LOUDNESS, _UNUSED = 3.0, 2.0, 5
"""Numbers of a proof: the cap of logits, the factor of the queries, and the number of NaN keys after the used keys."""


class Library:
    """One library. Its instances have no state."""

    name: ClassVar[str]
    trusted: ClassVar[bool] = False
    """Whether the library is used without a proof."""
    least_work: ClassVar[int] = 0
    """The number of queries times keys from which the library is faster than the next one."""

    def missing(self, device: torch.device) -> str:
        """Why the library does not run on a device; empty when it does."""
        raise NotImplementedError

    def limit(self, q: Tensor, k: Tensor, v: Tensor, offset: int, softcap: float | None) -> str:
        """Why a library that runs on the device does not take these queries, keys and values; empty when it does."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, logits: Logits, offset: int, need_lse: bool) -> Attended:
        """As :func:`foveate.ops.attend.dense.attend_causal` without sinks; ``Lk`` is ``offset + Lq``.

        The output is the same to the last bit with and without the log-sum-exp. A library may return a log-sum-exp that
        was not asked for.
        """
        raise NotImplementedError


class FlashAttention3(Library):
    """FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), package ``flash_attn_interface``."""

    name = "FlashAttention-3"
    module: ClassVar[str] = "flash_attn_interface"

    def missing(self, device: torch.device) -> str:
        if not _on_gpu(device) or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
            return "it runs on Hopper GPUs"
        if not kernels_wanted():
            return "kernels are switched off"
        return self._unloadable()

    @functools.cache  # noqa: B019  there is one instance
    def _unloadable(self) -> str:
        """Why the package cannot be imported; empty when it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # one that is made for another torch raises anything
            return _warn_once(self, f"{self.module} does not load: {_line(error)}")
        return ""

    def limit(self, q: Tensor, k: Tensor, v: Tensor, offset: int, softcap: float | None) -> str:
        if softcap is not None and self._leaves_out_caps():
            return "it is built without caps of logits"
        return _limit(q, k, v)

    def _leaves_out_caps(self) -> bool:
        """Whether the package was built without caps of logits, according to its module of build flags."""
        try:
            flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):
            return False
        return bool(flags.get("FLASHATTENTION_DISABLE_SOFTCAP", False))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, logits: Logits, offset: int, need_lse: bool) -> Attended:
        """The library's causal mask lets the last query see the last key, also with fewer queries than keys."""
        attend = importlib.import_module(self.module).flash_attn_with_kvcache
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        how = {"softmax_scale": logits.scaling, "softcap": logits.softcap or 0.0, "causal": True}
        out, lse, *_ = attend(q, k, v, **how, return_softmax_lse=True)
        return Attended(out.transpose(1, 2), lse)


class CuDNN(Library):
    """cuDNN's attention, called through PyTorch."""

    name = "cuDNN"
    least_work = 1 << 26
    """cuDNN plans for each new pair of lengths, which takes tens of milliseconds. From 8K tokens on the layers of a
    model together gain about as much."""

    def missing(self, device: torch.device) -> str:
        if not _on_gpu(device) or torch.version.hip:
            return "it runs on NVIDIA GPUs"
        if not kernels_wanted():
            return "kernels are switched off"
        return "" if torch.backends.cudnn.is_available() else "PyTorch is built without cuDNN"

    def limit(self, q: Tensor, k: Tensor, v: Tensor, offset: int, softcap: float | None) -> str:
        if softcap is not None:
            return "it caps no logits"
        if reason := _limit(q, k, v):
            return reason
        for keys, values, causal in _parts(k, v, offset):
            if not can_use_cudnn_attention(SDPAParams(q, keys, values, None, 0.0, causal, True)):
                return "PyTorch does not offer it for these heads and lengths"
        return ""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, logits: Logits, offset: int, need_lse: bool) -> Attended:
        """cuDNN's causal mask begins at the first key, so the keys before the first query's own key are a separate
        call."""

        def part(keys: Tensor, values: Tensor, causal: bool) -> Attended:
            # always with the log-sum-exp: another plan might round in another order
            run = torch.ops.aten._scaled_dot_product_cudnn_attention
            out, lse, *_ = run(q, keys, values, None, True, 0.0, causal, False, scale=logits.scaling)
            return Attended(out, lse.reshape(q.shape[:3]).float())

        return _merged([part(*one) for one in _parts(k, v, offset)])


class PyTorch(Library):
    """PyTorch's own kernel: FlashAttention-2 on GPUs, and its counterpart on CPUs."""

    name = "PyTorch"
    trusted = True

    def missing(self, device: torch.device) -> str:
        return "" if device.type in ("cpu", "cuda") else f"its kernels do not run on {device.type}"

    def limit(self, q: Tensor, k: Tensor, v: Tensor, offset: int, softcap: float | None) -> str:
        if softcap is not None:
            return "it caps no logits"
        if q.device.type == "cuda":
            return _limit(q, k, v)
        alike = q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        return "" if alike else "it takes head dims that are alike and multiples of 8"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, logits: Logits, offset: int, need_lse: bool) -> Attended:
        if offset == 0 and not need_lse:
            return Attended(scaled_dot_product(q, k, v, logits.scaling, causal=True))
        return _merged([self._part(q, *one, logits.scaling) for one in _parts(k, v, offset)])

    def _part(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scaling: float) -> Attended:
        """The kernel that :func:`scaled_dot_product` runs, whose public interface returns no log-sum-exp."""
        aten = torch.ops.aten
        if q.is_cuda:
            out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scaling)[:2]
        else:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scaling)
        return Attended(out, lse.float())


FLASH_ATTENTION_3, CUDNN, PYTORCH = FlashAttention3(), CuDNN(), PyTorch()
LIBRARIES: tuple[Library, ...] = (FLASH_ATTENTION_3, CUDNN, PYTORCH)
"""The libraries, the fastest first."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, logits: Logits, offset: int, need_lse: bool) -> Attended | None:
    """Dense causal attention by the fastest library that takes the arguments; None if no library does.

    Autograd does not record it.

    Args:
        q: ``[B, Hq, Lq, D]``.
        k, v: ``[B, Hkv, offset + Lq, D(v)]``.
    """
    for library in LIBRARIES:
        if q.shape[2] * k.shape[2] < library.least_work or obstacle(library, q, k, v, offset, logits.softcap):
            continue
        try:
            with torch.no_grad():
                found = library.attend(q, k, v, logits, offset, need_lse)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if library is LIBRARIES[-1]:
                raise
            shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)} in {q.dtype}"
            _warn_once(library, f"it fails for {shapes}: {_line(error)}")
            continue
        return found if need_lse else Attended(found.out)
    return None


def obstacle(library: Library, q: Tensor, k: Tensor, v: Tensor, offset: int = 0, softcap: float | None = None) -> str:
    """Why a library is never used for these arguments; empty when it is used, perhaps only for longer prompts."""
    if reason := library.missing(q.device) or library.limit(q, k, v, offset, softcap):
        return reason
    if library.trusted:
        return ""
    kind = _Kind(q.device, q.dtype, q.shape[3], q.shape[1] // k.shape[1], softcap is not None)
    return _fault(library, kind)


class PromptHeads(NamedTuple):
    """Facts of a layer's prompt attention on which the choice of a library depends."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int = 64
    value_dim: int = 64
    group: int = 1
    """Query heads of a KV head."""
    softcap: float | None = None


def in_use(heads: PromptHeads) -> str:
    """The library that computes dense attention, and the next one if the first takes only long prompts; empty if none
    does."""
    found = []
    for library in LIBRARIES:
        if not obstacle(library, *_sample(heads), softcap=heads.softcap):
            found.append(library.name)
            if not library.least_work:
                break
    return " (short prompts: ".join(found) + ")" * (len(found) - 1)


def dense_obstacles(heads: PromptHeads) -> dict[str, str]:
    """For every library, by its name, the reason why it is not used for these heads; empty if it may be used."""
    return {library.name: obstacle(library, *_sample(heads), softcap=heads.softcap) for library in LIBRARIES}


class _Kind(NamedTuple):
    """A case for which a library is proved."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    group: int
    capped: bool

    def __str__(self) -> str:
        heads = f"{self.group} query heads of dim {self.head_dim} to a KV head"
        return f"{self.dtype}, {heads}" + ", capped logits" * self.capped


_faults: dict[tuple[Library, _Kind], str] = {}
"""The results of proofs, see :func:`_fault`."""


def _fault(library: Library, kind: _Kind) -> str:
    """What a library computes wrongly, by a proof that runs once; empty if the library is right."""
    if (library, kind) not in _faults:
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "it cannot be proved while a CUDA graph is captured"
        try:
            with torch.inference_mode(), torch.autocast(kind.device.type, enabled=False):
                reason = _compared(library, kind)
        except Exception as error:  # whatever a library raises, there is another path
            reason = _line(error)
        _faults[library, kind] = reason and _warn_once(library, f"{reason} ({kind})")
    return _faults[library, kind]


def _compared(library: Library, kind: _Kind) -> str:
    """Where a library differs from the fp32 reference, with and without the log-sum-exp; empty if it does not."""
    cap, compared = _CAP if kind.capped else None, 0
    for queries, offset in _PROBLEMS:
        q, k, v = _problem(kind, queries, offset)
        if library.limit(q, k, v, offset, cap):
            continue
        compared += 1
        logits = Logits(kind.head_dim**-0.5, softcap=cap)
        exact = KV(k.float(), v.float())
        right = dense.attend_causal(q.float(), exact, logits=logits, offset=offset, need_lse=True)
        found = library.attend(q, k, v, logits, offset, True)
        alone = library.attend(q, k, v, logits, offset, False).out
        what = f"of {queries} queries after {offset} keys"
        if found.out.shape != q.shape or found.out.dtype != q.dtype:
            return f"its output {what} is {found.out.dtype} {tuple(found.out.shape)}"
        if found.lse is None or found.lse.shape != q.shape[:3] or found.lse.dtype != torch.float32:
            lse = found.lse
            return f"its log-sum-exp {what} is {lse if lse is None else f'{lse.dtype} {tuple(lse.shape)}'}"
        error = ((found.out.float() - right.out).abs().amax(-1) / right.out.abs().amax(-1)).amax()
        if not error <= _OUT_TOLERANCE:
            return f"its output {what} differs from fp32 by {float(error):.2g} of the largest number"
        error = (found.lse - right.lse).abs().amax()
        if not error <= (_CAPPED_TOLERANCE if kind.capped else _LSE_TOLERANCE):
            return f"its log-sum-exp {what} differs from fp32 by {float(error):.2g}"
        if not torch.equal(alone, found.out):
            return f"its output {what} is another without the log-sum-exp"
    return "" if compared else "it takes none of the problems of its proof"


def _problem(kind: _Kind, queries: int, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences of two KV heads. Keys and values lie as in a cache with room for more tokens; that room holds
    NaN."""
    generator = torch.Generator(kind.device).manual_seed(queries)

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(2, heads, length, kind.head_dim, generator=generator, device=kind.device)

    q = (_LOUDNESS * normal(2 * kind.group, queries)).to(kind.dtype)
    kept = []
    for _ in range(2):
        buffer = normal(2, offset + queries + _UNUSED).to(kind.dtype)
        buffer[:, :, offset + queries :] = float("nan")
        kept.append(buffer[:, :, : offset + queries])
    return q, *kept


def _sample(heads: PromptHeads) -> tuple[Tensor, Tensor, Tensor]:
    """A few queries, keys and values with these heads, to try a library with."""

    def empty(number: int, dim: int) -> Tensor:
        return torch.empty(1, number, 8, dim, device=heads.device, dtype=heads.dtype)

    return empty(heads.group, heads.head_dim), empty(1, heads.head_dim), empty(1, heads.value_dim)


def _parts(k: Tensor, v: Tensor, offset: int) -> list[tuple[Tensor, Tensor, bool]]:
    """The keys and values before the queries' own, which all queries see, and the queries' own, under a causal mask."""
    own = (k[:, :, offset:], v[:, :, offset:], True)
    return [(k[:, :, :offset], v[:, :, :offset], False), own] if offset else [own]


def _merged(parts: list[Attended]) -> Attended:
    return merge(parts) if len(parts) > 1 else parts[0]


def _limit(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why these arguments exceed the limits that all three libraries have on a GPU; empty if they do not."""
    dim = q.shape[-1]
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= set(_HALF):
        given = " with ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"it takes float16 or bfloat16, not {given}"
    if v.shape[-1] != dim or dim % 8 or dim > _LARGEST:
        return f"it takes head dims that are alike, multiples of 8 and at most {_LARGEST}, not {dim} and {v.shape[-1]}"
    if not all(_aligned(x) for x in (q, k, v)):
        return "vectors do not begin at multiples of 16 bytes"
    return ""


def _aligned(x: Tensor) -> bool:
    """Whether all vectors begin at multiples of 16 bytes. The kernels assume this without a check."""
    begins = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1])
    return begins and x.stride(-1) == 1


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _warn_once(library: Any, reason: str) -> str:
    """Warn once why a library is not used, and return the reason."""
    _say_once(f"{library.name}'s dense attention is not used, a slower one runs: {reason}")
    return reason


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, KernelWarning, stacklevel=5)
