"""The circumstances of a measurement: device, versions, commit and peak memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def of(device: str) -> dict[str, Any]:
    """The fields ``device``, ``versions`` and ``commit`` that every row of results has."""
    return {"device": device_name(device), "versions": versions(), "commit": commit()}


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that can change a result; CUDA's if torch was built with it."""
    import foveate

    found = {"python": platform.python_version(), "foveate": foveate.__version__, "torch": torch.__version__}
    for package in ("transformers", "tokenizers", "triton", "vllm", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def device_name(device: str) -> str:
    """The device's own name: the GPU's, or the CPU's with the number of torch threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    name = _proc("cpuinfo", "model name") or platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"cpu: {name}, {threads} thread{'s' if threads > 1 else ''}"


def _proc(file: str, name: str) -> str | None:
    """What a file of `/proc` says under a name; None where it says nothing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc", file).read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.split(":", 1)[1].strip()
    return None


def commit() -> str:
    """`git describe --always --dirty` of the checkout that foveate runs from, or "unknown" outside of one.

    Where the code was copied without its history, the variable FOVEATE_COMMIT names the commit.
    """
    if named := os.environ.get("FOVEATE_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


class PeakMemory:
    """The largest memory in use since `start`: allocated by torch on a GPU, the process's resident set on a CPU."""

    def __init__(self, device: str):
        self._cuda = torch.device(device) if device.startswith("cuda") else None
        self._before = 0
        self.kind = "torch.cuda.max_memory_allocated" if self._cuda else "process RSS high-water, weights included"

    def start(self) -> None:
        """Resets the peak. Where the system cannot reset it, the peak is that since the process began."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            self.kind = "process RSS high-water since the process began, weights included"

    def added(self) -> int:
        """Bytes of the peak above the memory allocated at the start. On a CPU: bytes of the whole process."""
        return self.peak() - self._before

    def peak(self) -> int:
        """Bytes."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._cuda)
        if found := _proc("self/status", "VmHWM"):
            return int(found.split()[0]) * 1024
        import resource

        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
