"""Gluon kernels of Hopper on the CPU: what Triton's interpreter is for kernels in Triton.

A kernel's source runs with a ``gl`` of PyTorch. Warp partitions are threads, barriers have phases, shared memory begins
as NaN, accesses are checked, and products are made as late as waits allow, so that memory which is given back too early
is seen. Layouts mean nothing here: what they compile to is tested by compiling.
"""

from __future__ import annotations

import builtins
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PATIENCE = 20.0
"""Seconds after which a wait is a deadlock."""
_THREADS = 128
"""Threads of a partition that copies."""
_HELPERS = re.compile(r"from foveate\.ops\.\w+\.(\w+_hopper_gather_kernel) import (?:\([^)]*\)|[^\n]*)\n")
"""Imports of functions of a kernel that are in a file of their own, beside it."""


def load_kernel(path: str | Path, changed: Sequence[tuple[str, str]] = ()) -> ModuleType:
    """The module at ``path``, whose kernels run on the CPU, with the functions that it imports from beside it.

    Args:
        changed: parts of the text, and what replaces them.
    """
    text = _HELPERS.sub(lambda found: Path(path).with_name(f"{found[1]}.py").read_text(), Path(path).read_text())
    for old, new in changed:
        assert old in text, old
        text = text.replace(old, new)
    text = re.sub(r"from triton\.experimental[.\w]* import (\([^)]*\)|[^\n]*)\n", "", text)
    text = re.sub(r"from foveate\.ops\.gpu\.tiles import multiprocessors\n", "", text)
    text = re.sub(r"\w+\.type\.layout", "None", text)
    module, launch = ModuleType("emulated"), _Launch()
    module.__dict__.update(
        gluon=SimpleNamespace(jit=launch.jit, constexpr_function=lambda function: function),
        gl=_language(launch),
        range=_range,
        mbarrier=SimpleNamespace(MBarrierLayout=_BarrierLayout, init=_init, arrive=_arrive, wait=launch.wait),
        async_copy=SimpleNamespace(async_copy_global_to_shared=_copy, mbarrier_arrive=_arrive_after_copies),
        fence_async_shared=lambda: None,
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_wait_for_products,
        multiprocessors=lambda device: 2,
    )
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


class _Launch:
    """Runs the programs of a grid, one after another."""

    def __init__(self):
        self.program, self.grid, self.failed = (0, 0), (1, 1), False

    def jit(self, function: Callable | None = None, **options: Any) -> Any:
        return self.jit if function is None else _Kernel(self, function)

    def wait(self, barrier: _Barrier, parity: Any) -> None:
        """Until the phase of this parity is over, as that before the first one is."""
        with barrier.changed:
            over = barrier.changed.wait_for(lambda: self.failed or barrier.phase != int(parity), PATIENCE)
        if self.failed or not over:
            self.failed = True
            raise RuntimeError("deadlock")

    def specialise(self, partitions: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
        errors: list[Exception] = []

        def run(function: Callable, arguments: tuple) -> None:
            try:
                function(*arguments)
            except Exception as error:
                self.failed = True
                errors.append(error)

        threads = [threading.Thread(target=run, args=partition) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class _Kernel:
    def __init__(self, launch: _Launch, function: Callable):
        self.launch, self.function = launch, function

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self.function(*arguments, **more)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, num_warps: int, **constants: Any) -> None:
            pointers = [_Pointer.to(x) if isinstance(x, Tensor) else x for x in arguments]
            self.launch.grid, self.launch.failed = (*grid, 1)[:2], False
            for second in builtins.range(self.launch.grid[1]):
                for first in builtins.range(self.launch.grid[0]):
                    self.launch.program = (first, second)
                    self.function(*pointers, **constants)

        return run


class _Pointer:
    """Places in a tensor's memory."""

    def __init__(self, memory: Tensor, offset: Tensor):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x: Tensor) -> _Pointer:
        size = x.untyped_storage().nbytes() // x.element_size()
        return cls(torch.as_strided(x, (size,), (1,), 0), torch.tensor(x.storage_offset()))

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.memory, self.offset + more)

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where, and which of them count."""
        mask = torch.ones((), dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        offset, mask = torch.broadcast_tensors(self.offset, mask)
        assert not (mask & ((offset < 0) | (offset >= len(self.memory)))).any(), "outside of a tensor's memory"
        return offset, mask


class _Shared:
    """Shared memory."""

    def __init__(self, data: Tensor):
        self.data, self.dtype = data, data.dtype

    def index(self, which: Any) -> _Shared:
        assert 0 <= int(which) < len(self.data)
        return _Shared(self.data[int(which)])

    def slice(self, start: int, length: int, dim: int = 0) -> _Shared:
        return _Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(self.data.permute(*order))

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


class _BarrierLayout:
    pass


class _Barrier:
    def __init__(self):
        self.changed, self.phase, self.count, self.missing = threading.Condition(), 0, 0, 0


class _Barriers(list):
    def index(self, which: Any) -> _Barrier:
        return self[int(which)]


def _init(barrier: _Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def _arrive(barrier: _Barrier, count: int = 1, pred: Any = True) -> None:
    if not bool(pred):
        return
    with barrier.changed:
        barrier.missing -= count
        assert barrier.missing >= 0, "more arrivals than a phase has"
        if not barrier.missing:
            barrier.phase, barrier.missing = barrier.phase ^ 1, barrier.count
            barrier.changed.notify_all()


def _arrive_after_copies(barrier: _Barrier, increment_count: bool) -> None:
    assert not increment_count
    _arrive(barrier, _THREADS)


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if isinstance(layout, _BarrierLayout):
        return _Barriers(_Barrier() for _ in builtins.range(shape[0])) if len(shape) > 1 else _Barrier()
    return _Shared(torch.full(shape, float("nan") if dtype.is_floating_point else -(1 << 30), dtype=dtype))


def _load(pointer: _Pointer, mask: Tensor | None = None, other: Any = 0) -> Tensor:
    offset, mask = pointer.places(mask)
    found = torch.full(offset.shape, other, dtype=pointer.memory.dtype)
    found[mask] = pointer.memory[offset[mask]]
    return found


def _store(pointer: _Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    offset, mask = pointer.places(mask)
    pointer.memory[offset[mask]] = value.expand(offset.shape)[mask].to(pointer.memory.dtype)


def _copy(shared: _Shared, pointer: _Pointer, mask: Tensor | None = None) -> None:
    found = _load(pointer, mask)
    assert found.shape == shared.data.shape
    shared.data.copy_(found)


class _Product:
    """Made when a wait asks for it."""

    def __init__(self, make: Callable[[], Tensor]):
        self.make, self.value = make, None


_local = threading.local()


def _pending() -> list[_Product]:
    """Products of this thread that are not made."""
    if not hasattr(_local, "pending"):
        _local.pending = []
    return _local.pending


def _multiply(a: Any, b: _Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> _Product:
    assert is_async

    def make() -> Tensor:
        left = a.data if isinstance(a, _Shared) else a
        return left.float() @ b.data.float() + (acc if use_acc else 0)

    product = _Product(make)
    _pending().append(product)
    return product


def _wait_for_products(outstanding: int, deps: tuple) -> Any:
    pending = _pending()
    while len(pending) > outstanding:
        product = pending.pop(0)
        product.value = product.make()
    found = []
    for one in deps:
        found.append(one.value if isinstance(one, _Product) else one)
        assert found[-1] is not None, "a product is used before a wait for it"
    return found[0] if len(found) == 1 else tuple(found)


def _range(*bounds: Any) -> Iterator[Tensor]:
    return (torch.tensor(number) for number in builtins.range(*(int(bound) for bound in bounds)))


class _Constant(float):
    @property
    def value(self) -> float:
        return float(self)


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    a, b = (x if isinstance(x, (int, float)) else torch.as_tensor(x) for x in (a, b))
    return torch.where(torch.as_tensor(condition), a, b)


def _language(launch: _Launch) -> SimpleNamespace:
    layouts = ("Blocked", "Slice", "NVMMADistributed", "DotOperand", "NVMMAShared", "SwizzledShared")
    return SimpleNamespace(
        constexpr=lambda x: _Constant(x) if isinstance(x, float) else x,
        program_id=lambda axis: torch.tensor(launch.program[axis]),
        num_programs=lambda axis: launch.grid[axis],
        warp_specialize=launch.specialise,
        static_range=builtins.range,
        allocate_shared_memory=_allocate,
        load=_load,
        store=_store,
        where=_where,
        cdiv=lambda a, b: (a + b - 1) // b,
        arange=lambda start, end, layout: torch.arange(start, end),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2,
        log2=torch.log2,
        convert_layout=lambda x, layout: x,
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        **{f"{layout}Layout": lambda *a, **k: None for layout in layouts},
        DistributedLinearLayout=lambda *a, **k: None,
    )
