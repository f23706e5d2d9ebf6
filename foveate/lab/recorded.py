"""On a CPU, a stand-in for a CUDA graph: what a callable does to memory is recorded, and done again without it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foveate.runtime import Recording

_WAITING = {
    "_local_scalar_dense": "reads a number from the device",
    "nonzero": "has as many results as the data say",
    "masked_select": "has as many results as the data say",
    "unique_dim": "has as many results as the data say",
    "_unique2": "has as many results as the data say",
    "equal": "reads a number from the device",
    "lift_fresh": "sends numbers of the host to the device",
}


class RecordedOps(TorchDispatchMode):
    """Records every operation on tensors, with the memory that it read and wrote."""

    def __init__(self):
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict[str, Any], list[torch.Tensor]]] = []
        """Each with the tensors that it gave; none where it writes to those it was given."""
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _WAITING:
            raise RuntimeError(f"{name} {_WAITING[name]}, which no graph can capture")
        writes = _writes(func)
        if writes:
            for argument, given in zip(func._schema.arguments, args):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for storage in (tensor.untyped_storage() for tensor in _tensors(given)):
                        self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **(kwargs or {}))
        if not _is_view(func):
            self.operations.append((func, args, kwargs or {}, [] if writes else _tensors(out)))
        return out

    def undo(self) -> None:
        """Put back what was written over: under a capture nothing is done yet."""
        for storage, before in self._before.values():
            storage.copy_(before)

    def replay(self) -> None:
        """Do everything again, over the same memory: what the host decided stays decided."""
        for func, args, kwargs, given in self.operations:
            again = func(*args, **kwargs)
            if given:
                for old, new in zip(
                    given, [again] if isinstance(again, torch.Tensor) else _tensors(again), strict=True
                ):
                    if old.shape != new.shape:
                        raise RuntimeError(
                            f"{func} gave {list(old.shape)} where it was recorded, and {list(new.shape)}"
                        )
                    old.copy_(new)


def record(run) -> Recording:
    """Stands in for :class:`~foveate.runtime.CudaRecorder`."""
    operations = RecordedOps()
    try:
        with operations:
            out = run()
    finally:
        operations.undo()
    return Recording(out, operations.replay)


@functools.cache
def _is_view(func) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


@functools.cache
def _writes(func) -> bool:
    return any(given.alias_info is not None and given.alias_info.is_write for given in func._schema.arguments)


def _tensors(x) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(x) if isinstance(leaf, torch.Tensor)]
