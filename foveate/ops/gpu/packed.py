"""Whole numbers of four or eight bits in Triton kernels, packed in bytes and words."""

import triton
import triton.language as tl


@triton.jit
def words(ptr, offsets, mask, LANES: tl.constexpr):
    """Words of ``LANES`` bytes, 4 or 1, in int32; ``offsets`` count words."""
    if LANES == 4:
        return tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + offsets, mask=mask, other=0)
    else:
        return tl.load(ptr + offsets, mask=mask, other=0).to(tl.int32)


@triton.jit
def signed(code, BITS: tl.constexpr, dtype: tl.constexpr):
    """``code - 2 ** (BITS - 1)`` exactly, of int32 codes of 4 or 8 bits.

    In half precision a code becomes the mantissa of a large number, which is then subtracted: far cheaper than a
    conversion.
    """
    HALF: tl.constexpr = 2 ** (BITS - 1)
    if dtype == tl.float16:
        return (code | 0x6400).to(tl.int16).to(dtype, bitcast=True) - (1024.0 + HALF)
    elif dtype == tl.bfloat16 and BITS < 8:
        return (code | 0x4300).to(tl.int16).to(dtype, bitcast=True) - (128.0 + HALF)
    elif dtype == tl.bfloat16:  # whose mantissa holds seven bits
        low = ((code & 127) | 0x4300).to(tl.int16).to(dtype, bitcast=True)
        return low - ((code & 128) ^ 0x4380).to(tl.int16).to(dtype, bitcast=True)
    else:
        return code.to(dtype) - HALF
