"""The references and methods on a GPU against the same on the CPU. Run with `make test-gpu`."""

import dataclasses

import pytest
import torch
from matrix import DECODED, LENGTHS, PROMPT, VARIANTS, Driver, Tokens, close, each, each_variant, padded

from foveate import methods, ops
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.calibration import calibrate
from foveate.ops import KV, Logits
from tests import tiny
from tests.combinations import every_pair

pytestmark = pytest.mark.gpu


def on_gpu(tokens, dtype=torch.float32):
    return Tokens(*(x.to("cuda", dtype) for x in (tokens.q, tokens.k, tokens.v)))


@each_variant
def test_prompt_and_decode_equal_the_cpu(method):
    tokens = Tokens.random(2, PROMPT + DECODED)
    cpu, gpu = Driver(method), Driver(method)
    expected = torch.cat([cpu.feed(tokens[:PROMPT]), cpu.feed_steps(tokens[PROMPT:])], 2)
    tokens = on_gpu(tokens)
    out = torch.cat([gpu.feed(tokens[:PROMPT]), gpu.feed_steps(tokens[PROMPT:])], 2)
    close(out.cpu(), expected, 1e-4)


@each_variant
def test_padded_rows_equal_the_cpu(method):
    prompts = [Tokens.random(1, length, seed=length) for length in LENGTHS]
    batch, mask = padded(prompts, PROMPT)
    steps = Tokens.random(len(LENGTHS), DECODED, seed=1)
    cpu, gpu = Driver(method), Driver(method)
    cpu.feed(batch, mask)
    gpu.feed(on_gpu(batch), mask.cuda())
    close(gpu.feed_steps(on_gpu(steps)).cpu(), cpu.feed_steps(steps), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(14, 2), (9, 3), (8, 8)])
@pytest.mark.parametrize(("length", "offset"), [(1, 777), (333, 0), (129, 1000), (1024, 0)])
def test_attention_and_mass_of_every_dtype_against_fp64(dtype, heads, kv_heads, length, offset):
    q = torch.randn(2, heads, length, 64, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, offset + length + 50, 64, device="cuda", dtype=dtype)
    end = offset + length
    attended = ops.attend_causal(q, KV(k, v), logits=Logits(0.125), offset=offset, need_lse=True)
    mass = ops.column_mass(q, KV(k[:, :, :end]), attended.lse, logits=Logits(0.125), offset=offset)
    group = heads // kv_heads
    wide_k, wide_v = (x[:, :, :end].double().repeat_interleave(group, 1) for x in (k, v))
    logits = q.double() @ wide_k.transpose(-1, -2) * 0.125
    future = torch.ones(length, end, device="cuda").triu(offset + 1).bool()
    logits = logits.masked_fill(future, float("-inf"))
    weights = logits.softmax(-1)
    tolerance = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    close(attended.out.double(), weights @ wide_v, tolerance)
    close(attended.lse.double(), logits.logsumexp(-1), 2e-3 if dtype != torch.float32 else 1e-4)
    close(mass.double(), weights.sum(2).unflatten(1, (kv_heads, group)).sum(2), 5e-3)
    fused = ops.attend_causal(q, KV(k, v), logits=Logits(0.125), offset=offset)
    close(fused.out.double(), weights @ wide_v, tolerance)


@every_pair(
    ("dtype", [torch.float16, torch.bfloat16, torch.float32]),
    (("heads", "kv_heads", "dim"), [(14, 2, 64), (9, 3, 80), (8, 8, 128), (4, 2, 20)]),
    (("batch", "length"), [(1, 1), (3, 61), (1, 333), (2, 4096)]),
)
def test_prompt_output_is_the_same_to_the_last_bit_with_the_log_sum_exp(dtype, heads, kv_heads, dim, batch, length):
    q = torch.randn(batch, heads, length, dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, length + 50, dim, device="cuda", dtype=dtype)[:, :, :, :length]
    with_lse = ops.attend_causal(q, KV(k, v), logits=Logits(dim**-0.5), need_lse=True)
    assert torch.equal(ops.attend_causal(q, KV(k, v), logits=Logits(dim**-0.5)).out, with_lse.out)


@pytest.mark.parametrize("spec", ["h2o", "luka:compressor=attention", "snapkv", "tova"])
def test_importance_of_a_long_prompt_stays_in_bounded_memory(spec):
    """No attention matrix: at 32K tokens one head's alone would take 4 GiB."""
    method, length = methods.parse(spec), 32768
    tokens = on_gpu(Tokens.random(1, length), torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    Driver(method, length).feed(tokens)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 640 << 20


METHODS = dict(VARIANTS)
UNEQUAL = {name: method for name, method in METHODS.items() if not (method.evicts or name[:5] in ("mixed", "per_l"))}


@pytest.mark.parametrize(
    ("method", "lengths"),
    [
        *(pytest.param(method, LENGTHS[:1] * 2, id=f"{name}-equal") for name, method in METHODS.items()),
        *(pytest.param(method, LENGTHS[:2], id=f"{name}-unequal") for name, method in UNEQUAL.items()),
    ],
)
def test_decode_does_not_wait_for_the_device(method, lengths):
    """Eviction from rows of unequal length does."""
    batch, mask = padded([Tokens.random(1, length, seed=length) for length in lengths], PROMPT)
    steps = on_gpu(Tokens.random(2, 8, seed=1), torch.bfloat16)
    driver = Driver(method)
    driver.feed(on_gpu(batch, torch.bfloat16), None if len(set(lengths)) == 1 else mask.cuda())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        driver.feed_steps(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each([(name, one) for name, one in VARIANTS if one.evicts and not (one.evicts.unevenly or one.needs_rotary)])
def test_a_prompt_does_not_wait_for_the_device(method):
    tokens = on_gpu(Tokens.random(2, PROMPT), torch.bfloat16)
    Driver(method).feed(tokens)  # kernels are compiled, libraries proved and constants made
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        Driver(method).feed(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("n", [513, 9000, 40000])
def test_slots_to_keep_equal_those_of_the_cpu_ties_and_nothing_included(n):
    scores = torch.randint(0, 40, (2, 3, n)).float()
    scores[0, 0, n // 2 :] = float("-inf")
    scores[1, 2] = 1.0
    scores[1, 1, ::5] = float("inf")
    protected = torch.rand(2, 3, n) < 0.01
    for number in (5, n // 10, n // 3 + 1, n):
        kept = ops.keep_best(scores.cuda(), number, protected.cuda())
        assert torch.equal(kept.cpu(), ops.keep_best(scores, number, protected))


@pytest.mark.parametrize("n", [7, 513, 9000, 40000])
def test_topk_equals_the_cpu_ties_and_nothing_included(n):
    scores = torch.randint(0, 40, (2, 3, n)).float()
    scores[0, 0, n // 2 :] = float("-inf")
    scores[1, 2] = 1.0
    for k in (1, 5, n // 3 + 1, n):
        assert torch.equal(ops.topk(scores.cuda(), k).cpu(), ops.topk(scores, k))
        counts = torch.tensor([k, max(1, k // 2)])
        assert torch.equal(ops.topk_rows(scores.cuda(), counts.cuda(), k).cpu(), ops.topk_rows(scores, counts, k))


def test_a_calibration_by_divergence_equals_the_cpu(tmp_path):
    folder = tiny.build(tmp_path / "tiny-llama", layers=4)
    plan = calibrate.Plan(folder, tasks.parse("niah", length=300), tiny.SAMPLE, tmp_path / "cpu.json", limit=3, keys=16)
    plan = dataclasses.replace(
        plan, anchors=2, by="divergence", method=methods.parse("kascade_paper:top_k=9"), batch_size=2
    )
    found = []
    for device in ("cpu", "cuda"):
        one = dataclasses.replace(plan, dtype="float32", device=device, out=tmp_path / f"{device}.json")
        found.append(calibrate.run(one, say=lambda text: None).found)
    for name, tolerance in (("divergence", 2e-2), ("similarity", 1e-3), ("importance", 1e-3)):
        cpu, gpu = (torch.tensor(one[name]) for one in found)
        torch.testing.assert_close(gpu, cpu, rtol=tolerance, atol=1e-5)
