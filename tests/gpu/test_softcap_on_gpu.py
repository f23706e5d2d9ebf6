"""Capped logits in the kernels of prompts and of decoding, on a GPU, against the references in fp32."""

import copy

import pytest
import torch
import transformers
from matrix import Driver, Tokens
from test_cover_on_gpu import in_fp32

import foveate
from foveate import methods, ops
from foveate.methods import SharedPrompt
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import decode, decode_kernel, pooled, tiles, tiles_kernel, window, window_kernel
from foveate.ops.score import column_mass_kernel as mass_kernel
from foveate.ops.score import pooled as score
from foveate.ops.score import pooled_kernel
from foveate.ops.score import reference as masses
from foveate.ops.score import tiles_kernel as tile_mass_kernel
from foveate.ops.summaries import launch
from foveate.ops.summaries import reference as summaries_reference
from foveate.runtime import CudaRecorder
from tests.combinations import every_pair
from tests.families import family
from tests.helpers import cached, generate, left_padded, prepare, tokens
from tests.problems import listed
from tests.recorded import Replayed
from tests.trees import Problem

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
HEADS = ("heads", [(64, 8), (12, 2), (7, 1), (6, 6), (9, 3), (10, 2), (8, 2)])
DIMS = ("dim", [64, 128, 80, 256])
CAPS = ("softcap", [5.0, 50.0])
LOUD = 8.0
"""Times the usual size of queries: logits reach far beyond the smaller cap, and near the larger one."""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    monkeypatch.delenv("FOVEATE_KERNELS", raising=False)
    assert "attend_capped" in dispatch.kernel_status().split(", ")
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


def draw(batch, heads, number, dim, dtype, queries=1):
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((heads[0], queries), (heads[1], number), (heads[1], number))
    q, k, v = (torch.randn(batch, h, n, dim, generator=generator, device="cuda") for h, n in sizes)
    sinks = torch.tensor(float(number), device="cuda").log() + 2 * torch.randn(
        heads[0], generator=generator, device="cuda"
    )
    return (LOUD * q).to(dtype), k.to(dtype), v.to(dtype), sinks.to(dtype)


def close(found, expected, dtype):
    torch.testing.assert_close(found.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def close_masses(found, expected, dtype):
    torch.testing.assert_close(found, expected, rtol=1e-3 if dtype == torch.float32 else 3e-2, atol=1e-5)


@every_pair(DTYPES, HEADS, DIMS, CAPS, ("number", [131, 4099, 30_001]), ("beside", [False, True]))
def test_decoding(dtype, heads, dim, softcap, number, beside):
    """One query a row, over all keys, over chosen ones and over pages. Learned sinks are not capped."""
    q, k, v, sinks = draw(2, heads, number, dim, dtype)
    full_q, full, kv = q.float(), KV(k.float(), v.float()), KV(k, v)
    how = {"logits": Logits(dim**-0.5, sinks if beside else None, softcap)}
    lengths = torch.randint(
        1, number + 1, (2, heads[1]), generator=torch.Generator("cuda").manual_seed(1), device="cuda"
    )
    more, ragged = {"need_lse": True, "need_mass": True}, KV(k, v, lengths=lengths)
    exact = KV(full.k, full.v, lengths=lengths)
    found, expected = decode_kernel.attend(q, ragged, **how, **more), decode.attend(full_q, exact, **how, **more)
    close(found.out, expected.out, dtype)
    close(found.lse, expected.lse, dtype)
    close_masses(found.mass, expected.mass, dtype)
    again = decode_kernel.attend(q, ragged, **how, **more)
    assert torch.equal(again.out, found.out)
    assert torch.equal(again.mass, found.mass)
    indices = torch.randint(-1, number, (2, heads[1], 777), device="cuda", dtype=torch.int32)
    found = decode_kernel.attend_indices(q, kv, indices, **how).out
    close(found, decode.attend_indices(full_q, full, indices, **how).out, dtype)
    pages = torch.rand(2, heads[1], -(-number // 16), device="cuda").argsort(-1)[..., :50].to(torch.int32)
    found = decode_kernel.attend_pages(q, kv, pages, 16, **how).out
    close(found, decode.attend_pages(full_q, full, pages, 16, **how).out, dtype)
    for pooling in ("post_softmax", "sqrt", "max"):
        expected = score.pooled_mass(full_q, full, pooling=pooling, **how)
        close_masses(pooled_kernel.pooled_mass(q, KV(k), pooling=pooling, **how), expected, dtype)
        found = decode_kernel.attend_pooled(q, kv, pooling=pooling, **how)
        close_masses(found.mass, expected, dtype)
        close(found.out, pooled.attend_pooled(full_q, full, pooling=pooling, **how).out, dtype)


@every_pair(DTYPES, HEADS, DIMS, CAPS)
def test_prompts(dtype, heads, dim, softcap):
    """Windows, all keys with the log-sum-exp, tiles, and the masses of keys and of tiles."""
    number = 1500
    q, k, v, sinks = draw(2, heads, number, dim, dtype, queries=number - 300)
    full_q, full, kv = q.float(), KV(k.float(), v.float()), KV(k, v)
    how = {"logits": Logits(dim**-0.5, softcap=softcap), "offset": 300}
    lower = torch.arange(300, number, device="cuda") - 257
    for learned in (None, sinks):
        own = how | {"logits": Logits(dim**-0.5, learned, softcap)}
        bounds = {"lower": lower, "sinks": 4, **own}
        found, expected = (
            window_kernel.attend_window(q, kv, **bounds).out,
            window.attend_window(full_q, full, **bounds).out,
        )
        close(found, expected, dtype)
        found = ops.attend_causal(q, kv, **own)
        with dispatch.reference_only():
            expected = ops.attend_causal(full_q, full, **own)
        close(found.out, expected.out, dtype)
        close(found.lse, expected.lse, dtype)
    lse = window.attend_capped(full_q, full, **how).lse
    found, expected = mass_kernel.column_mass(q, KV(k), lse, **how), masses.column_mass(q, KV(k), lse, **how)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    tile, starts = 32, torch.arange(288, number, 32)
    rows = ops.fold_group(q[:, :, : 32 * 37], heads[1]).unflatten(2, (heads[0] // heads[1], 37, 32))
    rows = rows.transpose(2, 3).flatten(3, 4)
    row_lse = lse[:, :, : 32 * 37].unflatten(2, (37, 32)).unflatten(1, (heads[1], -1)).transpose(2, 3).flatten(3, 4)
    given = (rows, k, row_lse.contiguous(), starts[:37].cuda())
    some = {"logits": Logits(dim**-0.5, softcap=softcap)}
    found, expected = (one.tile_block_mass(*given, **some) for one in (tile_mass_kernel, masses))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    chosen = torch.stack([torch.randperm(start)[:200].sort().values for start in starts.tolist()])
    chosen = chosen.to("cuda", torch.int32).expand(2, heads[1], -1, -1)
    how |= {"tile": tile, **listed(chosen)}
    close(tiles_kernel.attend_tiles(q, kv, **how).out, tiles.attend_tiles(full_q, full, **how).out, dtype)


def test_a_long_prompt_has_no_matrix(much_memory):
    """Of all queries and keys it would be 32 GB."""
    q, k, v, _ = draw(1, (8, 2), 32_768, 128, torch.bfloat16, queries=32_768)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops.attend_causal(q, KV(k, v), logits=Logits(0.1, softcap=50.0), need_lse=True)
    assert torch.cuda.max_memory_allocated() - before < 256 << 20


@every_pair(
    DTYPES,
    (("heads", "kv_heads"), [(3, 3), (8, 2), (14, 2), (32, 4), (16, 1)]),
    ("dim", [64, 80, 128, 256]),
    CAPS,
    ("score", ["summary", "spread", "lowrank"]),
    ("few", [True, False]),
)
def test_summaries(dtype, heads, kv_heads, dim, softcap, score, few):
    """Pages refined may differ where their masses hardly do."""
    how = ops.summaries.Refinement(score=score)
    sizes, pages, allowed = ((16,), (301, 77), (3 if few else 40,)) if dim != 80 else ((4, 16), (320, 80), (5, 4))
    more = {"device": "cuda", "dtype": dtype, "tail": 130, "loudness": 3.0, "seed": 2}
    some = Problem(pages, sizes, allowed, heads, kv_heads, dim, **more)
    q, kv = some.arguments
    tree, logits = in_fp32(some.looked_at(how, True)), Logits(dim**-0.5, softcap=softcap)
    expected, _, visited = summaries_reference.with_masses(q.float(), some.finite(torch.float32), tree, how, logits)
    steps = launch.SummariesLaunch(q, kv, some.looked_at(how, False), how, logits, None)
    found = steps.run(True)
    alike = torch.ones(q.shape[:2], dtype=torch.bool, device="cuda")
    for visit, its in zip(steps.space.visits, visited, strict=True):
        mine = visit.selection.chosen
        padded = torch.nn.functional.pad(its.chosen, (0, mine.shape[2] - its.chosen.shape[2]), value=-1)
        alike &= (mine == padded).all(-1).repeat_interleave(heads // kv_heads, 1)
    assert alike.float().mean() > 0.6
    close(found.out[alike], expected.out[alike], dtype)
    torch.testing.assert_close(found.lse[alike], expected.lse[alike], rtol=1e-3, atol=5e-3)


def loud_tokens(number):
    some = Tokens.random(2, number)
    return Tokens(*(x.cuda() for x in (3 * some.q, some.k, some.v)))


SPECS = [
    "dense",
    "h2o:top_k=16,window=4",
    "tova:top_k=20",
    "snapkv:top_k=16,window=4",
    "streaming:window=20",
    "quest:top_k=32,page_size=4,dense_layers=0",
    "pages:top_k=32,page_size=8",
    "kascade_paper:anchors=[0],top_k=16,min_k=4",
    "omnikv:filters=[0],wait=0,top_k=16,min_k=4",
    "lessismore:selections=[0],top_k=16,min_k=4",
    "luka:page_size=4,tail=9,top_k=2",
    "luka:page_size=4,tail=9,top_k=2,score=spread",
]


@pytest.mark.parametrize("spec", SPECS)
def test_methods_are_those_of_the_references(spec):
    """A prompt and some steps of one layer in fp32, which chooses alike."""

    def run():
        some, driver = loud_tokens(90), Driver(methods.parse(spec).for_layer(0, 2), 77, softcap=5.0)
        return torch.cat([driver.feed(some[:77]), driver.feed_steps(some[77:])], 2)

    found = run()
    with dispatch.reference_only():
        torch.testing.assert_close(found, run(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_replayed_steps(spec):
    """The cap is in what was recorded."""
    outs = []
    for softcap, replays in ((5.0, False), (5.0, True), (None, True)):
        some = loud_tokens(77 + 60)
        driver = Driver(methods.parse(spec).for_layer(0, 2), 77, softcap=softcap)
        driver.feed(some[:77])
        driver = Replayed(driver, CudaRecorder(torch.device("cuda"))) if replays else driver
        outs.append(driver.feed_steps(some[77:]))
        assert not replays or driver.use.replayed > 30
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(outs[2], outs[1], rtol=1e-2, atol=1e-2)


@pytest.fixture(scope="module")
def gemma():
    """Gemma 2 without windows, whose steps are replayed."""
    config = copy.deepcopy(family("Gemma 2").config)
    config.layer_types = ["full_attention"] * 4
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return prepare(model).cuda()


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("name", ["dense", "luka", "kascade", "h2o", "quest", "streaming"])
def test_tokens_are_those_of_transformers(gemma, name, windows):
    batch = {name: x.cuda() for name, x in left_padded([60, 41]).items()}
    model = family("Gemma 2").cuda() if windows else gemma
    try:
        own = generate(model, **batch, new=24)
        with foveate.attached(model, name, **methods.get(name).about.full_budget):
            assert torch.equal(generate(model, **batch, new=24), own)
            assert (foveate.stats(model).graphs.replayed > 0) == (not windows)
    finally:
        if windows:
            model.cpu()


@torch.no_grad()
def test_a_shared_prompt(gemma):
    specs, found = ["dense", "h2o:top_k=8,window=4", "quest:top_k=16,page_size=4,dense_layers=0"], {}
    for spec in specs:
        with foveate.attached(gemma, spec):
            cache = foveate.Cache(gemma)
            cache.begin(40, assistant=False)
            gemma(tokens(40).cuda(), **cached(cache))
            found[spec] = [gemma(tokens(1, seed=n).cuda(), **cached(cache)).logits for n in range(4)]
    with foveate.attached(gemma, SharedPrompt(tuple(map(methods.parse, specs)))):
        cache = foveate.Cache(gemma)
        cache.begin(40, assistant=False)
        gemma(tokens(40).cuda(), **cached(cache))
    for spec in specs:
        with foveate.attached(gemma, spec):
            branch = cache.branch(gemma)
            for n in range(4):
                logits = gemma(tokens(1, seed=n).cuda(), **cached(branch)).logits
                torch.testing.assert_close(logits, found[spec][n], rtol=1e-3, atol=1e-3)
