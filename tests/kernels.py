"""What the tests of kernels share: compiling for a GPU that is not there, and memory that holds NaN."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Compiled(NamedTuple):
    """A kernel's code for one GPU."""

    ptx: str
    shared: int
    """Shared memory in bytes."""
    spilled: int
    """Bytes a thread that did not fit into its registers."""
    registers: int
    """Registers of a thread."""


def compile_for(capability: int, kernel: Any, arguments: dict[str, Any], **options: int | None) -> Compiled:
    """Compile a kernel as a launch would, without a GPU.

    Args:
        capability: 80 or 90.
        kernel: what ``triton.jit`` returned.
        arguments: by parameter: a type such as ``"*bf16"`` or ``"i32"``, with ``":16"`` after it when a launch would
            find the value divisible by 16, or the value of a constant; a tuple of these for a tuple.
        options: num_warps and the like; None is left out.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    signature, constants, divisible = {}, {}, {}

    def described(value: Any, place: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            return tuple(described(entry, (*place, number)) for number, entry in enumerate(value))
        if not isinstance(value, str):
            constants[place] = value
            return "constexpr"
        if value.endswith(":16"):
            divisible[place] = [["tt.divisibility", 16]]
        return value.removesuffix(":16")

    for number, name in enumerate(kernel.arg_names):
        signature[name] = described(arguments[name], (number,))
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    options = {name: value for name, value in options.items() if value is not None}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    return Compiled(compiled.asm["ptx"], compiled.metadata.shared, spilled, registers)


def assert_products_overlap(compiled: Compiled) -> None:
    """Hopper's assembler has not put waits after matrix products whose registers it could not follow."""
    import triton

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file, tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        file.write(compiled.ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", file.name, "-o", cubin.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "wgmma" not in said, said


def assert_compiled_well(compiled: Compiled, capability: int, half: bool, spilled: int) -> None:
    """Matrix units and loads ahead for half precision, fast exponentials, shared memory that every GPU has."""
    assert ("wgmma.mma_async" in compiled.ptx) == (half and capability == 90)
    assert ("mma.sync" in compiled.ptx) == (half and capability == 80)
    assert ("cp.async" in compiled.ptx) == half, "tiles are loaded ahead"
    assert "ex2.approx.ftz.f32" in compiled.ptx
    assert compiled.shared <= 99 << 10
    assert compiled.spilled <= spilled


def noted(monkeypatch: Any, rows_kernel: Any) -> list[torch.Tensor]:
    """What ``_settle`` of the top-k of rows writes from now on, of each call."""
    kernel, settled = rows_kernel._settle, []

    class Noted:
        def __getitem__(self, grid: Any) -> Any:
            def run(*arguments: Any, **options: Any) -> None:
                kernel[grid](*arguments, **options)
                settled.append(arguments[kernel.arg_names.index("settled_ptr")].clone())

            return run

    monkeypatch.setattr(rows_kernel, "_settle", Noted())
    return settled


@contextmanager
def poisoned_memory(device: str = "cpu") -> Iterator[None]:
    """Fresh memory holds NaN inside the block, so that what a kernel fails to write is seen."""
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import the compiler, for seconds
    try:
        assert torch.empty(1, device=device).isnan()
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
