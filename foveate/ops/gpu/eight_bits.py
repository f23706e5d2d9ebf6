"""Keys and values in e4m3 on tensor cores: they are converted to fp16, which is exact and takes one instruction for two
numbers.

Values are read as int16, two dimensions each, because a product sums values along the keys: in that direction tensor
cores take 16-bit elements from shared memory at once, and single bytes one by one.
"""

import triton
import triton.language as tl


@triton.jit
def lower(pairs):
    """The lower bytes of int16 ``[N, W]``, which are numbers in e4m3, as fp16 ``[N, W]``. For the upper bytes pass
    ``pairs >> 8``."""
    return (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def queries_for(k_ptr, q, scale):
    """``q [M, D]`` as keys are multiplied by it, and the scale of the product, a scalar or ``[M, 1]``.

    With bf16 queries and e4m3 keys the result is in fp16. Each row is divided by the largest power of two that its
    largest entry reaches, so that no entry overflows; entries above 2^-16 of the largest are exact. The row's scale
    takes the power back.
    """
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)  # [M, D]
        largest = tl.max(tl.abs(wide), 1)  # [M]
        # [M]; the exponent bits alone
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power > 0, power, 1.0)  # [M]
        return (wide / power[:, None]).to(tl.float16), (power * scale)[:, None]  # [M, D], [M, 1]
    else:
        return q, scale
