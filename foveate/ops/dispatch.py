"""The choice of the code that runs a verb: its Triton kernel where that can run, its reference everywhere else.

A verb's ``__init__.py`` puts the two under one name::

    column_mass = dispatch(reference.column_mass, "foveate.ops.score.column_mass_kernel")

A call goes to the function of the same name in the kernel's module when kernels are switched on, every tensor is on
one GPU that can run them, and autograd has nothing to record. Otherwise it goes to the reference, which is the
specification. A kernel raises :class:`UnsupportedError`, before it computes anything, for a case that it does not
support, such as a head dim or a dtype. The reference then runs, and a warning gives the reason, once for each reason.

``with reference_only():`` and the environment variable ``FOVEATE_KERNELS=0`` switch all kernels off. ``with
watched(watch):`` passes the arguments of every verb's call to a function.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from foveate.ops.kv import KV
from foveate.ops.logits import Logits

P = ParamSpec("P")
R = TypeVar("R")

_OLDEST = (8, 0)
_reference_only = ContextVar("reference_only", default=False)
_watch: ContextVar[Callable[[str, dict[str, Any]], None] | None] = ContextVar("watch", default=None)
_verbs: dict[str, str] = {}
"""From a verb's name to the module of its kernel."""


class UnsupportedError(NotImplementedError):
    """A kernel does not support this case; the reference does."""


def dispatch(reference: Callable[P, R], kernel: str, check: Callable[P, None] | None = None) -> Callable[P, R]:
    """The verb that runs ``reference``, or the function of the same name in the module ``kernel``.

    The module is imported at the first use of the kernel. ``check`` is called first, with the same arguments, and
    raises ValueError for invalid arguments.
    """
    name = reference.__name__
    _verbs[name] = kernel

    @functools.wraps(reference)
    def verb(*args: P.args, **kwargs: P.kwargs) -> R:
        if check is not None:
            check(*args, **kwargs)
        if (watch := _watch.get()) is not None:
            watch(name, inspect.signature(reference).bind(*args, **kwargs).arguments)
        given = (*args, *kwargs.values())
        if use_kernel(*given):
            try:
                with torch.cuda.device_of(next(x for x in given if isinstance(x, Tensor))):
                    return getattr(importlib.import_module(kernel), name)(*args, **kwargs)
            except UnsupportedError as reason:
                _say_once(f"{name}: the kernel does not support {reason}, the slower reference runs")
        return reference(*args, **kwargs)

    return verb


def use_kernel(*given: Any) -> bool:
    """Whether a kernel may run on the tensors among the arguments, including the tensors of a :class:`KV` and of
    :class:`Logits`. It warns once if the tensors are on a GPU and no kernel may run."""
    tensors, given = [], list(given)
    for x in given:
        if isinstance(x, Tensor):
            if not x.is_cuda:
                return False
            tensors.append(x)
        elif isinstance(x, KV):
            given += x.k, x.v, x.lengths
        elif isinstance(x, Logits):
            given.append(x.sinks)
    device = tensors[0].device
    if not kernels_wanted() or any(x.device != device for x in tensors):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    reason = _unusable(device.index)
    if reason:
        _say_once(f"no kernels, the slower references run: {reason}")
    return not reason


@contextmanager
def reference_only() -> Iterator[None]:
    """Run references instead of kernels inside the block (in this thread)."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


@contextmanager
def watched(watch: Callable[[str, dict[str, Any]], None] | None) -> Iterator[None]:
    """Call ``watch(name, arguments)`` before each verb's call inside the block, in this thread; None: watch nothing."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def kernels_wanted() -> bool:
    """False inside :func:`reference_only` and under ``FOVEATE_KERNELS=0``."""
    return not _reference_only.get() and os.environ.get("FOVEATE_KERNELS", "1") != "0"


def runs_kernel(verb: str) -> bool:
    """Whether a verb runs its kernel on this machine's GPUs, in the cases that the kernel supports."""
    if not (torch.cuda.is_available() and kernels_wanted()) or _unusable(torch.cuda.current_device()):
        return False
    return verb in _verbs


def kernel_status() -> str:
    """A text with the verbs whose kernels run on this machine's first GPU, or the reason why none runs."""
    if not torch.cuda.is_available():
        return "none: no GPU"
    if not kernels_wanted():
        return "none: switched off"
    reason = _unusable(0)
    return f"none: {reason}" if reason else ", ".join(sorted(_verbs))


@functools.cache
def _unusable(device: int) -> str | None:
    """Why this GPU runs no kernels; None if it runs them."""
    if torch.version.hip:
        return "they are written for NVIDIA GPUs"
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return "they need compute capability {}.{}".format(*_OLDEST)
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler"
    return None


class KernelWarning(UserWarning):
    """A slower path runs; the message gives the reason. It is shown as one line, see
    :func:`foveate.errors.show_plainly`."""


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, KernelWarning, stacklevel=3)
