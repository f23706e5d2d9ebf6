"""Attention over summaries on a GPU against the reference in fp32: odd sizes, dtypes, poison, repeats, graphs."""

import pytest
import torch
from matrix import Driver, Tokens

from foveate import methods, ops
from foveate.ops import Logits, dispatch
from foveate.ops.summaries import launch, reference
from tests.combinations import every_pair
from tests.kernels import poisoned_memory
from tests.trees import Problem, recent_attention

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
GROUPS = (("heads", "kv_heads"), [(3, 3), (8, 2), (14, 2), (32, 4), (16, 1), (70, 1)])
DIMS = (("dim", "value_dim"), [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
SCALING = 0.1


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    monkeypatch.delenv("FOVEATE_KERNELS", raising=False)
    assert "attend_summaries" in set(dispatch.kernel_status().split(", "))
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


def problem(pages, **more):
    return Problem(pages, device="cuda", **{"dim": 128, "heads": 8, "kv_heads": 2, "loudness": 1.0} | more)


def in_fp32(tree):
    def single(x):
        return None if x is None else x.float()

    levels = [of._replace(nodes=ops.Nodes(*map(single, of.nodes)), recent=single(of.recent)) for of in tree.levels]
    return tree._replace(levels=tuple(levels))


def run(some, how):
    """The kernels' result, and the places of refined nodes of each level."""
    steps = launch.SummariesLaunch(*some.arguments, some.looked_at(how, False), how, Logits(SCALING), None)
    return steps.run(True), [visit.selection.chosen for visit in steps.space.visits]


def check(some, how):
    """Against the reference in fp32; which nodes are refined may differ where their masses hardly do."""
    q = some.arguments[0]
    tree = in_fp32(some.looked_at(how, True))
    expected, _, visited = reference.with_masses(q.float(), some.finite(torch.float32), tree, how, Logits(SCALING))
    with poisoned_memory("cuda"):
        found, chosen = run(some, how)
    again, also = run(some, how)
    for mine, its in zip((found.out, found.lse, *chosen), (again.out, again.lse, *also), strict=True):
        assert torch.equal(mine, its)
    alike = torch.ones(q.shape[:2], dtype=torch.bool, device="cuda")
    for mine, its in zip(chosen, visited, strict=True):
        padded = torch.nn.functional.pad(its.chosen, (0, mine.shape[2] - its.chosen.shape[2]), value=-1)
        alike &= (mine == padded).all(-1).repeat_interleave(q.shape[1] // some.kv_heads, 1)
    assert alike.float().mean() > (0.6 if q.dtype == torch.bfloat16 else 0.85)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(found.out[alike].float(), expected.out[alike], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        found.lse[alike], expected.lse[alike], rtol=1e-4, atol=3e-3 if tolerance > 1e-3 else 1e-4
    )
    return found, chosen


@every_pair(DTYPES, GROUPS, ("pages", [(1,), (37, 4, 0), (700, 699), (5000,)]), strength=3)
def test_few_pages_of_any_group(dtype, heads, kv_heads, pages):
    check(
        problem(pages, heads=heads, kv_heads=kv_heads, sizes=(16,), tail=128, dtype=dtype), ops.summaries.Refinement()
    )


@every_pair(DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (16, 1)])
def test_summaries_that_seem_far_heavier_than_their_keys(dtype, heads, kv_heads):
    """Nothing of them may be left in the output."""
    for pages in ((700, 40), (5000,)):
        some = problem(pages, heads=heads, kv_heads=kv_heads, sizes=(16,), tail=128, dtype=dtype)
        some.overrate([7, 8, 699], 15.0, SCALING)
        _, (chosen,) = check(some, ops.summaries.Refinement())
        assert (chosen[0] == torch.tensor([7, 8, 699], device="cuda")).all()


@every_pair(DTYPES, DIMS)
def test_any_head_dim(dtype, dim, value_dim):
    how = ops.summaries.Refinement(score="spread")
    check(problem((300, 41), dim=dim, value_dim=value_dim, sizes=(16,), dtype=dtype), how)


@every_pair(
    DTYPES,
    ("sizes", [(8, 32), (16, 64, 256), (16,)]),
    ("score", ["summary", "spread", "lowrank"]),
    strength=3,
)
def test_shares_of_levels(dtype, sizes, score):
    pages, allowed = (1600, 1024, 64), (0.11, 0.3, 0.5)[: len(sizes)]
    check(problem(pages, sizes=sizes, allowed=allowed, dtype=dtype), ops.summaries.Refinement(score=score, prior=0.5))


def test_pages_that_are_not_refined_are_not_read():
    some, how = problem((90, 40), sizes=(16,), dtype=torch.float16), ops.summaries.Refinement()
    found, (chosen,) = check(some, how)
    slots = torch.arange(some.k.shape[2], device="cuda")
    for b in range(2):
        start = int(some.tree.rows.numbers[1, b])
        for head in range(2):
            pages = chosen[b, head]
            read = (slots < 2) | (slots >= start) | torch.isin((slots - 2) // 16, pages[pages >= 0])
            some.k[b, head, ~read], some.v[b, head, ~read] = torch.nan, torch.inf
    again = ops.summaries.attend_summaries(
        *some.arguments, some.looked_at(how, False), how, logits=Logits(SCALING), need_lse=True
    )
    assert torch.equal(again.out, found.out)
    assert torch.equal(again.lse, found.lse)


@pytest.mark.parametrize(("pages", "sizes", "allowed"), [((4000,), (16,), (3,)), ((512,) * 16, (8, 32), (0.1, 0.3))])
def test_graphs_and_no_wait(pages, sizes, allowed):
    """Equal to the last bit when a captured graph is replayed over other contents and other lengths; nothing waits."""
    how = ops.summaries.Refinement(score="spread", prior=0.5)
    first, second = (
        problem(pages, heads=32, kv_heads=8, sizes=sizes, allowed=allowed, dtype=torch.float16, same=True, seed=seed)
        for seed in (0, 1)
    )
    second.tree.rows.numbers[0] -= 3  # three tokens of the tail fewer, in all rows

    def step(some):
        tree = some.looked_at(how, False)
        how_much = {"logits": Logits(SCALING), "need_lse": True}
        found = ops.summaries.attend_summaries(some.q, ops.KV(some.k, some.v), tree, how, **how_much)
        return found.out, found.lse, found.read, found.refined

    def contents(some):
        levels = [x for of in some.tree.levels for x in (*of.nodes, of.recent) if x is not None]
        return [some.q, some.k, some.v, some.tree.rows.numbers, *levels]

    expected = [[x.clone() for x in step(some)] for some in (first, second)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step(first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(first)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(*pair) for pair in zip(again, expected[0], strict=True))
    given = [[x.clone() for x in contents(some)] for some in (first, second)]
    for turn in (0, 1, 0, 1, 1):  # each but the last after other contents, so that nothing stale would be right
        for old, new in zip(contents(first), given[turn], strict=True):
            old.copy_(new)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(found, expected[turn], strict=True))


@pytest.mark.parametrize(
    ("pages", "sizes", "allowed"), [((4000, 70, 0), (16,), (3,)), ((512,) * 16, (8, 32), (0.1, 0.3))]
)
def test_running_averages(pages, sizes, allowed):
    """Of what a step has looked at, in the memory of a larger cache."""
    some = problem(pages, sizes=sizes, allowed=allowed, dtype=torch.float32)
    how, k, made = ops.summaries.Refinement(prior=0.5), some.k, []
    tree, averages = some.looked_at(how, True), some.uniform(*k.shape[:2], k.shape[2] + 9)
    for attend in (ops.summaries.attend_summaries, reference.attend_summaries):
        own = tree._replace(levels=tuple(x._replace(recent=x.recent.clone()) for x in tree.levels))
        kept = ops.summaries.Sums(0.2, recent=averages.clone()[..., : k.shape[2]])
        attend(some.arguments[0], some.finite(), own, how, logits=Logits(SCALING), sums=kept)
        made.append([kept.recent, *recent_attention(own)])
    for mine, its in zip(*made, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-6)


def test_many_steps_are_equal_bit_for_bit():
    """However programs are scheduled: the last one of a row to be ready merges."""
    some, how = problem((7000,), heads=32, kv_heads=8, sizes=(16,), dtype=torch.float16), ops.summaries.Refinement()
    tree = some.looked_at(how, False)
    outs = [
        ops.summaries.attend_summaries(*some.arguments, tree, how, logits=Logits(SCALING), need_lse=True)[:2]
        for _ in range(300)
    ]
    assert all(torch.equal(out, outs[0][0]) and torch.equal(lse, outs[0][1]) for out, lse in outs)


def test_methods_run_on_the_kernels(monkeypatch):
    ran, real = [], launch.attend_summaries
    monkeypatch.setattr(launch, "attend_summaries", lambda *a, **k: ran.append(1) or real(*a, **k))
    tokens = Tokens.random(2, 700)
    cuda = Tokens(*(x.to("cuda", torch.float16) for x in (tokens.q, tokens.k, tokens.v)))
    specs = (
        "luka",
        "luka:page_size=16,top_k=3,prior=0.0,score=summary",
        "luka:page_size=16,top_k=3,score=spread",
        "luka:score=spread",
    )
    for spec in specs:
        outs = []
        for kernels in (True, False):
            monkeypatch.setenv("FOVEATE_KERNELS", "1" if kernels else "0")
            driver = Driver(methods.parse(spec), 690)
            driver.feed(cuda[:690])
            outs.append(driver.feed_steps(cuda[690:]))
        torch.testing.assert_close(*outs, rtol=1e-2, atol=1e-2)
    assert len(ran) == len(specs) * 10
