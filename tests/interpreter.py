"""Triton's interpreter without work that changes nothing: kernels compute the same in a fraction of the time."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_BUILTIN = tl.core.builtin(lambda: None).__code__
"""The code of what Triton wraps around its own functions to see that ``_semantic`` is there."""

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")
_SWAPPED = {f"__r{name}__" for name in _ARITHMETIC}
_BINARY = _SWAPPED | {f"__{name}__" for name in (*_ARITHMETIC, "lt", "le", "gt", "ge", "eq", "ne", "lshift", "rshift")}
_BINARY |= {"maximum", "minimum"}
_NOTED: deque[Any] = deque(maxlen=2)
"""The last calls of NumPy: function, operands and result."""


def speed_up() -> None:
    """Call it once, before any kernel runs.

    - Triton computes every sum, difference and product of small integers a second time in 64 bits and compares it with
      the limits of its type, for an assertion that only the option ``debug`` makes.
    - Triton looks through all of ``triton.language`` for functions to replace by interpreted ones, at every launch and
      at every call of a function inside a kernel. They are replaced once and stay so.
    - Triton describes the type of every value anew. A description of the same type is remembered.
    - Triton works out for every operation which types its operands are converted to and which shape they share. The
      types of the operands alone decide that: the first operation on two types works it out, and the others reuse it.
    - Where that first operation was one function of NumPy on the operands as they were, the others call it at once.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are asserted: their checks must stay"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    builder.binary_op = _note(builder.binary_op, lambda lhs, rhs, op: op)
    builder.create_addptr = _note(builder.create_addptr, lambda ptr, offset: _moved(ptr.get_element_ty()))
    interpreter._patch_lang = _once_a_module(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _remember_dtypes(interpreter._get_np_dtype)
    tl.dtype.__eq__ = _compare_names_first(tl.dtype.__eq__)
    tl.block_type.__init__ = _remember_types(tl.block_type.__init__)
    tl.tensor.__init__ = _remember_shapes(tl.tensor.__init__)
    tl.tensor.__getitem__ = _remember_axes(tl.tensor.__getitem__)
    TritonSemantic.to_tensor = _remember_numbers(TritonSemantic.to_tensor)
    TritonSemantic.broadcast_impl_value = _remember_broadcasts(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_type_checking_impl = _remember_operands(TritonSemantic.binary_op_type_checking_impl)


def _once_a_module(patch: Any) -> Any:
    done = set()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) not in done:
            patch(fn)
            done.add(id(fn.__globals__))
        return SimpleNamespace(restore=lambda: None)

    return patch_once


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As Triton's, without a copy of the named arguments and a search for ``_semantic`` among them."""
    plain = member.__wrapped__ if member.__code__ is _BUILTIN else member

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return plain(*arguments, **named)

    scope.set_attr(obj, name, _remember_function(call, name) if name in _BINARY else call)


def _note(operation: Any, function: Any) -> Any:
    """The operation of the builder, which notes which function it applies to which numbers."""

    def noted(lhs: Any, rhs: Any, *more: Any) -> Any:
        result = operation(lhs, rhs, *more)
        _NOTED.append((function(lhs, rhs, *more), lhs.data, rhs.data, result))
        return result

    return noted


@functools.cache
def _moved(element: Any) -> Any:
    """Addresses of ``element`` and how many elements they move by."""
    width = max(1, element.primitive_bitwidth // 8)
    return lambda addresses, offsets: addresses + width * offsets.astype(np.uint64)


def _remember_function(compute: Any, name: str) -> Any:
    """Of two tensors, or a tensor and a number: the function that gives the result, and all of it but its numbers."""
    known: dict[Any, Any] = {}
    swapped = name in _SWAPPED
    new_tensor, new_handle = tl.tensor.__new__, interpreter.TensorHandle.__new__

    def remembered(*arguments: Any, **named: Any) -> Any:
        if named or len(arguments) != 2:
            return compute(*arguments, **named)
        x, y = arguments
        if type(y) is tl.constexpr:
            y = y.value
        kind = type(y)
        if type(x) is not tl.tensor or not (kind is tl.tensor or kind is int or (kind is float and y and y == y)):
            return compute(x, y)  # as keys, zeros of both signs would be one number, and NaN never the same
        key = (x.type.name, y.type.name) if kind is tl.tensor else (x.type.name, kind, y)
        plan = known.get(key)
        if not plan:
            if plan is None:
                known[key], result = _learn(compute, x, y, swapped)
                return result
            return compute(x, y)
        function, number, narrowed, dtype, fields = plan
        right = y.handle.data if number is None else number
        left = x.handle.data
        data = function(right, left) if swapped else function(left, right)
        if narrowed is not None:
            data = data.astype(narrowed)
        result, handle = new_tensor(tl.tensor), new_handle(interpreter.TensorHandle)
        handle.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
        result.__dict__ = {**fields, "handle": handle}
        return result

    return remembered


def _learn(compute: Any, x: Any, y: Any, swapped: bool) -> tuple[Any, Any]:
    """How to compute it of operands of these types, False if that takes more than one function; and what it is here."""
    _NOTED.clear()
    result = compute(x, y)
    if len(_NOTED) != 1 or _NOTED[0][3] is not result.handle:
        return False, result
    function, *operands, handle = _NOTED[0]
    left, right = operands[::-1] if swapped else operands
    number = None if type(y) is tl.tensor else right
    if not _same(left, x) or (number is None and not _same(right, y)):
        return False, result
    numbers = handle.data.dtype
    narrowed = None if function(*operands).dtype == numbers else numbers
    return (function, number, narrowed, handle.dtype, vars(result)), result


def _same(data: np.ndarray, x: Any) -> bool:
    """Whether these are a tensor's own numbers, perhaps broadcast: neither cast nor computed."""
    return data.dtype == x.handle.data.dtype and np.may_share_memory(data, x.handle.data)


def _remember_dtypes(look_up: Any) -> Any:
    known = {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    return remembered


def _compare_names_first(equal: Any) -> Any:
    def compared(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is tl.dtype else equal(self, other)

    return compared


def _remember_types(describe: Any) -> Any:
    known = {}

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        key = (element_ty.name, sizes)
        if key not in known:
            describe(self, element_ty, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    return remembered


def _remember_shapes(describe: Any) -> Any:
    known = {}

    def remembered(self: Any, handle: Any, type: Any) -> None:
        name = type.name
        if name not in known:
            describe(self, handle, type)
            known[name] = vars(self).copy()
        mine = self.__dict__
        mine.update(known[name])
        mine["handle"], mine["type"] = handle, type

    return remembered


def _remember_axes(index: Any) -> Any:
    """Of ``x[:, None]`` and its like: the type and the shape that they give."""
    known = {}

    @functools.wraps(index)
    def remembered(self: Any, slices: Any, _semantic: Any = None) -> Any:
        key = (self.type.name, repr(slices))
        if key not in known:
            found = index(self, slices, _semantic=_semantic)
            known[key] = (found.type, found.handle.data.shape)
            return found
        type, shape = known[key]
        return tl.tensor(_handle(self, self.handle.data.reshape(shape)), type)

    return remembered


def _remember_numbers(convert: Any) -> Any:
    known = {}

    def remembered(self: Any, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is tl.tensor:
            return x
        if kind is not int and kind is not bool:
            return convert(self, x, check_type)
        if (kind, x) not in known:
            known[kind, x] = _constant(convert(self, x))
        return known[kind, x]

    return remembered


def _constant(x: Any) -> Any:
    """The same block of one number, which nothing can write to."""
    x.handle.data = np.broadcast_to(x.handle.data.ravel()[0], x.handle.data.shape)
    return x


def _remember_broadcasts(broadcast: Any) -> Any:
    known = {}

    def remembered(self: Any, lhs: Any, rhs: Any) -> Any:
        key = (lhs.type.name, rhs.type.name)
        if key not in known:
            given = (lhs, rhs)
            found = broadcast(self, lhs, rhs)
            known[key] = tuple([None if new is old else new.type for new, old in zip(found, given)])
            return found
        left, right = known[key]
        return _spread(lhs, left), _spread(rhs, right)

    return remembered


def _spread(x: Any, type: Any) -> Any:
    if type is None:
        return x
    return tl.tensor(_handle(x, np.broadcast_to(x.handle.data, type.shape)), type)


def _handle(x: Any, data: np.ndarray) -> Any:
    """Of the type in x's handle, which of a comparison is that of its operands."""
    return interpreter.TensorHandle(data, x.handle.dtype.scalar)


def _remember_operands(check: Any) -> Any:
    """Of two tensors: the types that they get. Of a tensor and a number: the tensor's type and the block of the number.

    NumPy broadcasts operands by itself, so that a tensor is given its new shape without a copy of its numbers.
    """
    pairs, numbers = {}, {}

    def remembered(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        left, right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if named or not (left or right):
            return check(self, lhs, rhs, *flags, **named)
        if left and right:
            key = (lhs.type.name, rhs.type.name, flags)
            if key not in pairs:
                found = check(self, lhs, rhs, *flags)
                pairs[key] = tuple([_change(new, old) for new, old in zip(found, (lhs, rhs))])
                return found
            first, second = pairs[key]
            return _changed(self, lhs, first), _changed(self, rhs, second)
        tensor, number = (lhs, rhs) if left else (rhs, lhs)
        key = (tensor.type.name, left, type(number), number, flags)
        if key not in numbers:
            found = check(self, lhs, rhs, *flags)
            kept, block = found if left else found[::-1]
            if number == number:
                numbers[key] = (_change(kept, tensor), _constant(block))
            return found
        change, block = numbers[key]
        tensor = _changed(self, tensor, change)
        return (tensor, block) if left else (block, tensor)

    return remembered


def _change(new: Any, old: Any) -> tuple[Any, Any] | None:
    """None: as it was; else the type that the numbers are converted to, if any, and the type of the tensor."""
    if new is old:
        return None
    return None if new.type.scalar == old.type.scalar else new.type.scalar, new.type


def _changed(semantic: Any, x: Any, change: tuple[Any, Any] | None) -> Any:
    if change is None:
        return x
    scalar, type = change
    if scalar is not None:
        x = semantic.cast(x, scalar)
    return tl.tensor(x.handle, type)
