"""Keys and values in e4m3 on tensor cores: as fp16, which is exact and takes one instruction for two.

Values are read as int16, two dimensions each, because a product sums them along the keys: from shared memory, tensor
cores take 16 bits that way at once, and single bytes one by one.
"""

import triton
import triton.language as tl


@triton.jit
def lower(pairs):
    """The lower bytes of int16, which are numbers in e4m3, in fp16; of ``pairs >> 8`` the upper ones."""
    return (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def queries_for(k_ptr, q, scale):
    """``q [M, D]`` as keys are multiplied by it, and the scale of the product, also ``[M, 1]``.

    Of bf16 beside e4m3 it is in fp16, over the largest power of two that the row's largest entry reaches: so no entry
    is too large, and those above 2 ** -16 of the largest are exact.
    """
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        largest = tl.max(tl.abs(wide), 1)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power > 0, power, 1.0)
        return (wide / power[:, None]).to(tl.float16), (power * scale)[:, None]
    else:
        return q, scale
