"""GPUs that a plan is made for: their memory and bandwidth, by their data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple

from foveate.errors import unknown


class Gpu(NamedTuple):
    """A GPU, or a size of memory alone."""

    name: str
    memory: int
    """Bytes, as its data sheet names them."""
    bandwidth: float | None = None
    """Bytes a second of its memory, by its data sheet; None: not known, so that no time is estimated."""


GPUS = {
    "h200": Gpu("H200", 141 * 10**9, 4.8e12),
    "h100": Gpu("H100 SXM", 80 * 10**9, 3.35e12),
    "a100": Gpu("A100 80GB SXM", 80 * 10**9, 2.039e12),
    "l40s": Gpu("L40S", 48 * 10**9, 0.864e12),
    "4090": Gpu("RTX 4090", 24 * 10**9, 1.008e12),
}
"""By the name that a user gives."""

MEASURED = "H200"
"""The GPU on which the times of :mod:`foveate.planning.step` were measured; others follow from bandwidth."""

_SIZE = re.compile(r"([1-9]\d*(?:\.\d+)?) ?GB", re.IGNORECASE)


def gpu_of(name: str) -> Gpu:
    """The GPU of a name, or one of so much memory and unknown bandwidth for a size such as ``24GB``.

    Raises:
        UserError: for anything else.
    """
    if size := _SIZE.fullmatch(name.strip()):
        return Gpu("a GPU", int(float(size[1]) * 10**9))
    if found := GPUS.get(name.strip().lower()):
        return found
    raise unknown("GPU", name, (*GPUS, "a size such as 24GB"))


def gpu_here() -> Gpu | None:
    """The first GPU of this machine, with the memory in bytes that it reports; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    about = torch.cuda.get_device_properties(0)
    known = next((one for name, one in GPUS.items() if name in about.name.lower()), None)
    return Gpu(about.name, about.total_memory, None if known is None else known.bandwidth)
