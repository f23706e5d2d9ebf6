"""The kernels of attention over summaries against the reference, in numbers that Triton's interpreter gets right."""

import dataclasses

import pytest
import torch

from foveate import ops
from foveate.ops import Logits
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.summaries import launch, reference
from tests.combinations import every_pair
from tests.problems import in_buffer
from tests.trees import Problem

pytestmark = pytest.mark.usefixtures("poisoned")

HALF = ("dtype", [torch.float32, torch.float16])
SPLITS = ("splits", [1, 8])


@pytest.fixture
def splits(request, monkeypatch):
    """Few programs, and so many multiprocessors that rows are split."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: request.param)


def check(problem, how, softcap=None):
    """The kernels' results and selections against the reference's, which may leave away places that nothing is in.

    Returns:
        ``(result, chosen)``: of each level from the top down the places of refined nodes.
    """
    q, kv = problem.arguments
    tree, logits = problem.looked_at(how, True), Logits(0.3, softcap=softcap)
    expected, _, visited = reference.with_masses(q, problem.finite(), tree, how, logits)
    steps = launch.SummariesLaunch(q, kv, problem.looked_at(how, False), how, logits, None)
    found, chosen = steps.run(True), [visit.selection.chosen for visit in steps.space.visits]
    half = found.out.dtype != torch.float32
    tolerance = 3e-3 if half else 2e-5
    torch.testing.assert_close(found.out, expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=2e-3 if half else 1e-4)
    for mine, its in zip(chosen, visited, strict=True):
        padded = torch.nn.functional.pad(its.chosen, (0, mine.shape[2] - its.chosen.shape[2]), value=-1)
        assert torch.equal(mine, padded)
    for mine, its in ((found.read, expected.read), (found.refined, expected.refined)):
        its = its.double().mean(1).sum() if isinstance(its, torch.Tensor) else torch.tensor(its * len(q))
        torch.testing.assert_close(mine.double().mean(1).sum(), its.double(), rtol=1e-6, atol=1e-4)
    return found, chosen


@every_pair((("dtype", "same"), [(torch.float32, False), (torch.float16, True)]), SPLITS, indirect=["splits"])
def test_few_pages(dtype, same, splits):
    check(Problem(dtype=dtype, same=same), ops.summaries.Refinement())
    check(Problem(pages=(70, 33), allowed=(5,), dtype=dtype, same=same), ops.summaries.Refinement())


@pytest.mark.parametrize("allowed", [0, 1, 0.4, 1.0])
def test_budgets(allowed):
    check(Problem(pages=(40, 13), allowed=(allowed,)), ops.summaries.Refinement())


@every_pair(
    (
        ("sizes", "pages", "score"),
        [
            ((2, 8), (32, 12), "spread"),
            ((4, 8, 32), (40, 24, 0), "summary"),
            ((3, 12), (40, 8), "spread"),
            ((2, 8), (32, 12), "lowrank"),
            ((4, 8, 32), (40, 24, 0), "lowrank"),
        ],
    ),
    HALF,
    SPLITS,
    indirect=["splits"],
)
def test_levels(dtype, sizes, pages, score, splits):
    how = ops.summaries.Refinement(score=score)
    check(Problem(pages, sizes, (5, *[2] * (len(sizes) - 1)), dtype=dtype), how)
    check(Problem(pages, sizes, (0.3, *[0.5] * (len(sizes) - 1)), dtype=dtype, same=True), how)


@pytest.mark.parametrize("score", ["summary", "spread", "lowrank"])
def test_scores(score):
    check(Problem(dtype=torch.float16), ops.summaries.Refinement(score=score))


@every_pair(("score", ["summary", "spread", "lowrank"]), ("softcap", [1.5, 5.0, 50.0]))
def test_capped_logits(score, softcap):
    """Those of raw tokens, of summaries, of what is a deviation away and of refined tokens."""
    how = ops.summaries.Refinement(score=score)
    (found, _), (without, _) = check(Problem(), how, softcap), check(Problem(), how)
    assert not torch.allclose(found.out, without.out, rtol=1e-3, atol=1e-3)
    how = ops.summaries.Refinement(score=score, prior=0.3)
    check(Problem(pages=(32, 12), sizes=(2, 8), allowed=(3, 2), dtype=torch.float16), how, softcap)


@pytest.mark.parametrize("need_lse", [False, True])
@pytest.mark.parametrize("run", [launch.attend_summaries, reference.attend_summaries], ids=["kernels", "reference"])
def test_learned_sinks(run, need_lse):
    """They take their share of the output of the cover."""
    problem, how, sinks = Problem(seed=3), ops.summaries.Refinement(), torch.linspace(-2.0, 3.0, 4)
    given = (problem.arguments[0], problem.finite(), problem.looked_at(how, True), how)
    alone = run(*given, logits=Logits(0.3), need_lse=True)
    expected = ops.with_sinks(ops.Attended(alone.out, alone.lse), sinks)
    found = run(*given, logits=Logits(0.3, sinks), need_lse=need_lse)
    torch.testing.assert_close(found.out, expected.out)
    assert (found.lse is None) != need_lse
    if need_lse:
        torch.testing.assert_close(found.lse, expected.lse)


@pytest.mark.parametrize("prior", [0.5, 0.3, 0.0])
def test_recent_attention(prior):
    how = ops.summaries.Refinement(prior=prior)
    check(Problem(pages=(40, 13), allowed=(6,)), how)
    check(Problem(pages=(32, 12), sizes=(2, 8), allowed=(5, 3)), how)


@pytest.mark.parametrize(("dim", "value_dim"), [(5, 5), (24, 64), (80, 64), (192, 128), (256, 256)])
def test_head_dims(dim, value_dim):
    check(Problem(dim=dim, value_dim=value_dim, loudness=1.0), ops.summaries.Refinement(score="spread"))


@every_pair(("nodes", [[7], [7, 8, 39]]), HALF)
def test_summaries_that_seem_far_heavier_than_their_keys(dtype, nodes):
    """Nothing of them may be left in the output."""
    problem = Problem((90, 9), sizes=(4,), dtype=dtype, loudness=1.0)
    problem.overrate(nodes, 15.0, 0.3)
    assert set(nodes) <= set(check(problem, ops.summaries.Refinement())[1][0][0, 0].tolist())
    problem = Problem((180, 20), sizes=(2, 4), allowed=(5, 40), dtype=dtype, loudness=1.0)
    problem.overrate(nodes, 25.0, 0.3)  # so that their children are looked at
    problem.overrate([2 * node + 1 for node in nodes], 15.0, 0.3, level=0)
    above, below = (chosen[0, 0] for chosen in check(problem, ops.summaries.Refinement())[1])
    below = below[below >= 0]
    assert {2 * node + 1 for node in nodes} <= set((above[below // 2] * 2 + below % 2).tolist())


@pytest.mark.parametrize("prior", [0.0, 0.5])
def test_ranks_of_one_head_after_the_other(prior, monkeypatch):
    """Where those of all heads are too many to be read at once."""
    monkeypatch.setattr(launch, "_RANKED", 1)
    check(Problem(pages=(70, 33), heads=14, kv_heads=2), ops.summaries.Refinement(prior=prior))
    check(
        Problem(pages=(32, 12), sizes=(2, 8), allowed=(3, 2), heads=14, kv_heads=2),
        ops.summaries.Refinement(prior=prior),
    )


@pytest.mark.parametrize("prior", [0.3, 0.9])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (10, 2), (7, 1), (6, 6), (14, 2), (32, 2), (130, 1)])
def test_groups(heads, kv_heads, prior):
    """Of any size, a node's mass is the mean over its group: beside a prior, its scale decides."""
    check(Problem(heads=heads, kv_heads=kv_heads), ops.summaries.Refinement(prior=prior))
    check(Problem(pages=(40, 13), allowed=(6,), heads=heads, kv_heads=kv_heads), ops.summaries.Refinement(prior=prior))


@pytest.mark.parametrize("page", [1, 5, 16, 40])
def test_page_sizes(page):
    check(Problem(sizes=(page,)), ops.summaries.Refinement())


@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
def test_strides_among_nan(layout):
    problem = Problem(value_dim=24)
    problem.k, problem.v = in_buffer(problem.k, layout), in_buffer(problem.v, layout)
    levels = [
        of._replace(
            nodes=of.nodes._replace(**{x: in_buffer(getattr(of.nodes, x), layout) for x in ("k", "v", "spread")})
        )
        for of in problem.tree.levels
    ]
    problem.tree = problem.tree._replace(levels=tuple(levels))
    check(problem, ops.summaries.Refinement(score="spread"))


def test_pages_that_are_not_refined_are_not_read():
    problem, how = Problem(), ops.summaries.Refinement()
    found, (chosen,) = check(problem, how)
    slots = torch.arange(problem.k.shape[2])
    for b in range(3):
        start = int(problem.tree.rows.numbers[1, b])
        for head in range(2):
            pages = chosen[b, head][chosen[b, head] >= 0]
            read = (slots < 2) | (slots >= start) | torch.isin((slots - 2) // 4, pages)
            problem.k[b, head, ~read], problem.v[b, head, ~read] = torch.nan, torch.nan
    again = launch.attend_summaries(
        *problem.arguments, problem.looked_at(how, False), how, logits=Logits(0.3), need_lse=True
    )
    assert torch.equal(again.out, found.out)


def test_room_for_more_than_rows_have():
    """As in a step that is replayed while rows grow: what is on the device counts."""
    problem, how = Problem(pages=(40, 13), allowed=(0.1,)), ops.summaries.Refinement(prior=0.5)
    (found, (chosen,)), rows = check(problem, how), problem.tree.rows
    problem.tree = problem.tree._replace(
        rows=dataclasses.replace(rows, places=rows.places + 4, width=rows.width + 30, most=(rows.most[0] + 2,))
    )
    steps = launch.SummariesLaunch(*problem.arguments, problem.looked_at(how, False), how, Logits(0.3), None)
    roomy, mine = steps.run(True), steps.space.visits[0].selection.chosen
    torch.testing.assert_close(roomy.out, found.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(roomy.lse, found.lse, rtol=1e-5, atol=1e-6)
    assert torch.equal(mine[..., : rows.most[0]], chosen)
    assert (mine[..., rows.most[0] :] == -1).all()
    assert torch.equal(roomy.read, found.read)


def test_ties_go_to_the_smaller_index():
    problem = Problem(pages=(40, 13), allowed=(5,))
    problem.tree.levels[0].nodes.k[0, :, 7:31] = problem.tree.levels[0].nodes.k[0, :, 7:8]
    problem.q.zero_()
    _, (chosen,) = check(problem, ops.summaries.Refinement())
    assert (chosen == torch.arange(5)).all()


def test_the_heaviest_lie_behind_more_ties_than_are_chosen():
    problem = Problem(pages=(40, 13), allowed=(5,))
    problem.q.zero_()
    recent = problem.tree.levels[0].recent
    recent.zero_()
    for row, places in enumerate(([20, 37], [10, 12])):
        recent[row, :, places] = 0.5
    _, (chosen,) = check(problem, ops.summaries.Refinement(prior=0.5))
    expected = torch.tensor([[0, 1, 2, 20, 37], [0, 1, 2, 10, 12]])
    assert torch.equal(chosen, expected[:, None].expand_as(chosen))


def test_what_it_refuses():
    def run(problem, how=None):
        how = how or ops.summaries.Refinement()
        return launch.attend_summaries(*problem.arguments, problem.looked_at(how, False), how, logits=Logits(1.0))

    for option in ({"score": "bound"}, {"pool": "layer"}, {"bias": "none"}, {"bias": "entropy"}, {"mass": "preserve"}):
        with pytest.raises(UnsupportedError, match="{}={} of summaries".format(*next(iter(option.items())))):
            run(Problem(), ops.summaries.Refinement(**option))
    with pytest.raises(UnsupportedError, match="float64"):
        run(Problem(dtype=torch.float64))
    with pytest.raises(UnsupportedError, match="head dims above 256"):
        run(Problem(dim=257))


def test_what_cannot_be():
    problem, how = Problem(), ops.summaries.Refinement()
    q, kv = problem.arguments
    for queries, keys, why in (
        (torch.zeros(3, 4, 2, 16), kv, "one query a row, not 2"),
        (torch.zeros(3, 4, 1, 8), kv, "shapes do not fit"),
        (q, ops.KV(kv.k), "values"),
        (q, ops.KV(kv.k, kv.v, lengths=torch.ones(3, dtype=torch.int64)), "in one piece"),
    ):
        with pytest.raises(ValueError, match=why):
            ops.summaries.attend_summaries(queries, keys, problem.tree, how, logits=Logits(0.3))
