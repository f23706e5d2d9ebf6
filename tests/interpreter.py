"""Triton's interpreter without work that changes nothing: kernels compute the same in a third of the time."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Call it once, before any kernel runs.

    - Triton computes every sum, difference and product of small integers a second time in 64 bits and compares it with
      the limits of its type, for an assertion that only the option ``debug`` makes.
    - Triton looks through all of ``triton.language`` for functions to replace by interpreted ones, at every launch and
      at every call of a function inside a kernel. They are replaced once and stay so.
    - Triton describes the type of every value anew. A description of the same type is remembered.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are asserted: their checks must stay"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _once_a_module(interpreter._patch_lang)
    interpreter._get_np_dtype = _remember_dtypes(interpreter._get_np_dtype)
    tl.block_type.__init__ = _remember_types(tl.block_type.__init__)
    tl.tensor.__init__ = _remember_shapes(tl.tensor.__init__)


def _once_a_module(patch: Any) -> Any:
    done = set()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) not in done:
            patch(fn)
            done.add(id(fn.__globals__))
        return SimpleNamespace(restore=lambda: None)

    return patch_once


def _remember_dtypes(look_up: Any) -> Any:
    known = {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    return remembered


def _remember_types(describe: Any) -> Any:
    known = {}

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = (element_ty.name, sizes)
        if key not in known:
            describe(self, element_ty, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    return remembered


def _remember_shapes(describe: Any) -> Any:
    known = {}

    def remembered(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            describe(self, handle, type)
            known[type.name] = vars(self).copy()
        vars(self).update(known[type.name], handle=handle, type=type)

    return remembered
