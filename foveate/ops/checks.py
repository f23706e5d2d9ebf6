"""Checks of the verbs' arguments: one for each kind of operand, made before the reference or the kernel runs.

Shapes, dtypes and numbers on the host are checked on every device. The values of a tensor are checked on the CPU alone.
A GPU would have to wait for this check; there an index out of range gives an undefined result.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from foveate.ops._math import on_host

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def check_out(out: Tensor | None, q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless ``out`` is None, or contiguous memory that fits the output."""
    shape = (*q.shape[:3], v.shape[3])
    if out is not None and not (out.shape == shape and out.dtype == q.dtype and out.is_contiguous()):
        given = f"{out.dtype} {list(out.shape)} of strides {list(out.stride())}"
        raise ValueError(f"out must be a contiguous {q.dtype} {list(shape)}, not {given}")


def check_mask(mask: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``mask`` is None, or a bool tensor that can be expanded to the shape."""
    if mask is None or (
        mask.dtype == torch.bool and mask.dim() == len(shape) and all(x in (1, y) for x, y in zip(mask.shape, shape))
    ):
        return
    raise ValueError(f"mask must be bool, broadcastable to {list(shape)}, not {mask.dtype} {list(mask.shape)}")


def check_counts(counts: Tensor | None, batch: int, kv_heads: int | None = None, name: str = "counts") -> None:
    """Raise ValueError unless ``counts`` is None, or has one integer for each row or, with ``kv_heads``, for each KV
    head of each row."""
    if counts is None:
        return
    shapes = [(batch,)] if kv_heads is None else [(batch,), (batch, kv_heads)]
    if counts.dtype not in INTEGERS or counts.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must be integers {allowed}, not {counts.dtype} {list(counts.shape)}")


def check_places(name: str, places: Tensor, batch: int, heads: Collection[int], number: int) -> None:
    """Raise ValueError unless ``places`` are integers ``[B, H, P]``, on the CPU each -1 (unused) or below
    ``number``."""
    if places.dtype not in INTEGERS:
        raise ValueError(f"{name} must be integers, not {places.dtype}")
    if places.dim() != 3 or len(places) != batch or places.shape[1] not in heads:
        allowed = " or ".join(str(x) for x in sorted(set(heads)))
        raise ValueError(f"{name} {tuple(places.shape)} do not fit {batch} rows of {allowed} heads")
    if on_host(places) and places.numel():
        least, most = torch.stack(places.aminmax()).tolist()
        if least < -1 or most >= number:
            raise ValueError(f"{name} must be below {number}, or -1 for none, not {least if least < -1 else most}")


def check_number(name: str, number: int, least: int) -> None:
    """Raise ValueError unless ``number`` is an integer of at least ``least``."""
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {number!r}")


def check_own_keys(number: int, queries: int, offset: int) -> None:
    """Raise ValueError unless ``number`` keys include each query's own key after ``offset`` other keys."""
    check_number("offset", offset, 0)
    if number < offset + queries:
        raise ValueError(f"k has {number} keys; offset {offset} and {queries} queries need {offset + queries}")
