"""Learned sinks in the kernels of prompts and of decoding, on a GPU, against the references in fp32."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits
from foveate.ops.attend import decode, decode_kernel, dense, pooled, tiles, tiles_kernel, window, window_kernel
from foveate.ops.score import pooled as score
from foveate.ops.score import pooled_kernel
from tests.combinations import every_pair
from tests.problems import listed

pytestmark = pytest.mark.gpu

SIZES = {
    "dtype": [torch.bfloat16, torch.float16],
    "heads": [(64, 8), (12, 2), (7, 1), (6, 6)],
    "dim": [64, 128, 80],
    "number": [131, 4099, 70_001],
    "batch": [1, 3],
}


def draw(batch, heads, number, dim, dtype, queries=1):
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((heads[0], queries), (heads[1], number), (heads[1], number))
    q, k, v = (torch.randn(batch, h, n, dim, generator=generator, device="cuda").to(dtype) for h, n in sizes)
    level = torch.tensor(float(number), device="cuda").log()  # as much as all keys together
    sinks = (level + 2 * torch.randn(heads[0], generator=generator, device="cuda")).to(dtype)
    return q, k, v, sinks


def close(found, expected):
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-3)


@every_pair(*SIZES.items())
def test_decoding(dtype, heads, dim, number, batch):
    q, k, v, sinks = draw(batch, heads, number, dim, dtype)
    full_q, full, kv = q.float(), KV(k.float(), v.float()), KV(k, v)
    how = {"logits": Logits(dim**-0.5, sinks)}
    lengths = torch.randint(1, number + 1, (batch, heads[1]), device="cuda")
    more, ragged = {"need_lse": True, "need_mass": True}, KV(k, v, lengths=lengths)
    exact = KV(full.k, full.v, lengths=lengths)
    found, expected = decode_kernel.attend(q, ragged, **how, **more), decode.attend(full_q, exact, **how, **more)
    close(found.out, expected.out)
    close(found.lse, expected.lse)
    torch.testing.assert_close(found.mass, expected.mass, rtol=3e-2, atol=1e-5)
    indices = torch.randint(-1, number, (batch, heads[1], 777), device="cuda", dtype=torch.int32)
    close(
        decode_kernel.attend_indices(q, kv, indices, **how).out,
        decode.attend_indices(full_q, full, indices, **how).out,
    )
    pages = torch.rand(batch, heads[1], -(-number // 16), device="cuda").argsort(-1)[..., :50].to(torch.int32)
    close(
        decode_kernel.attend_pages(q, kv, pages, 16, **how).out,
        decode.attend_pages(full_q, full, pages, 16, **how).out,
    )
    for pooling in ("post_softmax", "max"):
        expected = score.pooled_mass(full_q, full, pooling=pooling, **how)
        found = pooled_kernel.pooled_mass(q, KV(k), pooling=pooling, **how)
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=1e-6)
        found = decode_kernel.attend_pooled(q, kv, pooling=pooling, **how)
        torch.testing.assert_close(found.mass, expected, rtol=3e-2, atol=1e-6)
        close(found.out, pooled.attend_pooled(full_q, full, pooling=pooling, **how).out)


@every_pair(*((name, SIZES[name]) for name in ("dtype", "heads", "dim")))
def test_prompts(dtype, heads, dim):
    number = 1500
    q, k, v, sinks = draw(2, heads, number, dim, dtype, queries=number - 300)
    full_q, full, kv = q.float(), KV(k.float(), v.float()), KV(k, v)
    how = {"logits": Logits(dim**-0.5, sinks), "offset": 300}
    lower = torch.arange(300, number, device="cuda") - 257
    close(
        window_kernel.attend_window(q, kv, lower=lower, sinks=4, **how).out,
        window.attend_window(full_q, full, lower=lower, sinks=4, **how).out,
    )
    close(ops.attend_causal(q, kv, **how).out, dense.attend_causal(full_q, full, **how).out)
    tile, starts = 32, torch.arange(288, number, 32)
    chosen = torch.stack([torch.randperm(start)[:200].sort().values for start in starts.tolist()])
    chosen = chosen.to("cuda", torch.int32).expand(2, heads[1], -1, -1)
    how |= {"tile": tile, **listed(chosen)}
    close(tiles_kernel.attend_tiles(q, kv, **how).out, tiles.attend_tiles(full_q, full, **how).out)
