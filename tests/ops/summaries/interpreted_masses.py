"""The kernel of running sums of attention against the reference, under Triton's interpreter."""

import pytest
import torch

from foveate import ops
from foveate.ops import Logits
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.summaries import launch, reference
from tests.trees import Problem, recent_attention

pytestmark = pytest.mark.usefixtures("poisoned")


def check(problem, how=None):
    how = how or ops.summaries.Refinement(prior=0.5)
    q, kv = problem.arguments
    tree, generator = problem.looked_at(how, True), torch.Generator().manual_seed(1)
    first = torch.rand(kv.k.shape[:3], generator=generator)
    before = [torch.rand(level.recent.shape, generator=generator) for level in tree.levels]
    kept = []
    for run, given in ((launch.attend_summaries, kv), (reference.attend_summaries, problem.finite())):
        own = tree._replace(levels=tuple(x._replace(recent=y.clone()) for x, y in zip(tree.levels, before)))
        sums = ops.summaries.Sums(0.2, recent=first.clone())
        run(q, given, own, how, logits=Logits(0.3), sums=sums)
        kept.append([sums.recent, *recent_attention(own)])
    for mine, its in zip(*kept, strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("same", [False, True])
def test_one_level(same):
    check(Problem(same=same))
    check(Problem(pages=(700, 33, 0), allowed=(0.3,), sinks=0, same=same))


@pytest.mark.parametrize(("sizes", "pages"), [((2, 8), (32, 12)), ((4, 8, 32), (40, 24, 0)), ((3, 12), (40, 8))])
@pytest.mark.parametrize("allowed", [1, 0.5])
@pytest.mark.parametrize("same", [False, True])
def test_levels(sizes, pages, allowed, same):
    check(Problem(pages, sizes, (allowed,) * len(sizes), same=same))


def test_what_is_refined():
    """Nothing, and most pages."""
    check(Problem(allowed=(0,)))
    check(Problem(pages=(40, 13), allowed=(0.9,), loudness=1.0))
    check(Problem(pages=(30, 12), dim=32, heads=14, kv_heads=2))


@pytest.mark.parametrize("page", [1, 7, 16, 40])
def test_page_sizes(page):
    """Of a page's tokens one number is kept, or one of each block's."""
    check(Problem(sizes=(page,)))
    check(Problem(sizes=(page,), dtype=torch.float16, allowed=(2,)))


def test_what_is_refused():
    problem, how = Problem(), ops.summaries.Refinement()
    some = torch.zeros(problem.k.shape[:3])
    for sums, what in (
        (ops.summaries.Sums(0.2, recent=some.double()), "fp32"),
        (ops.summaries.Sums(0.2, recent=some.mT.contiguous().mT), "contiguous along"),
        (ops.summaries.Sums(0.2, some, some), "running totals"),
        (ops.summaries.Sums(0.2, some), "running totals"),
    ):
        with pytest.raises(UnsupportedError, match=what):
            launch.attend_summaries(
                *problem.arguments, problem.looked_at(how, True), how, logits=Logits(0.3), sums=sums
            )
