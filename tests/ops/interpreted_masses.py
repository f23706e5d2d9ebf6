"""The kernels of running sums of attention against the reference, under Triton's interpreter."""

import pytest
import torch

from foveate import ops
from foveate.ops._dispatch import UnsupportedError
from foveate.ops.attend import masses, masses_kernel, summaries
from tests.trees import Problem

pytestmark = pytest.mark.usefixtures("poisoned")


def parts(problem, how):
    """What was looked at, and sums to add to, of each of two that are alike."""
    q, k, v = problem.arguments
    tree = problem.looked_at(how, True)
    covered = summaries.attend_summaries(
        q, k.nan_to_num(0.0), v.nan_to_num(0.0), tree, how, scaling=0.3, need_masses=True
    )
    generator = torch.Generator().manual_seed(1)
    sums = torch.rand(2, *k.shape[:3], generator=generator)
    before = [torch.rand(level.recent.shape, generator=generator) for level in tree.levels]
    for _ in range(2):
        own = tree._replace(levels=tuple(x._replace(recent=y.clone()) for x, y in zip(tree.levels, before)))
        yield covered._replace(masses=tuple(x.clone() for x in covered.masses)), own, *sums.clone()


def check(problem, how=None, total=True, recent=True):
    (covered, tree, *sums), (its_covered, its_tree, *its_sums) = parts(problem, how or ops.Refinement(prior=0.5))
    for run, what, of, kept in (
        (masses_kernel.note_masses, covered, tree, sums),
        (masses.note_masses, its_covered, its_tree, its_sums),
    ):
        given = {name: x for name, x, wanted in zip(("total", "recent"), kept, (total, recent)) if wanted}
        run(what, of, group=problem.q.shape[1] // problem.kv_heads, share=0.2, **given)
    for mine, its in zip(sums, its_sums):
        torch.testing.assert_close(mine, its)
    for mine, its in zip(tree.levels, its_tree.levels):
        torch.testing.assert_close(mine.recent, its.recent)


@pytest.mark.parametrize(("total", "recent"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("same", [False, True])
def test_one_level(same, total, recent):
    check(Problem(same=same), total=total, recent=recent)
    check(Problem(pages=(700, 33, 0), allowed=(0.3,), sinks=0, same=same), total=total, recent=recent)


@pytest.mark.parametrize(("sizes", "pages"), [((2, 8), (32, 12)), ((4, 8, 32), (40, 24, 0)), ((3, 12), (40, 8))])
@pytest.mark.parametrize("allowed", [1, 0.5])
@pytest.mark.parametrize("same", [False, True])
def test_levels(sizes, pages, allowed, same):
    check(Problem(pages, sizes, (allowed,) * len(sizes), same=same))


@pytest.mark.parametrize("pool", ["kv_head", "layer"])
def test_what_is_refined(pool):
    """Nothing, by a rule that refines fewer than it may, and pages of varied sizes."""
    check(Problem(allowed=(0,)))
    check(Problem(pages=(40, 13), allowed=(0.9,), loudness=1.0), ops.Refinement("top_p", 0.3, pool, prior=0.5))
    check(Problem(pages=(30, 12), varied=True), ops.Refinement(pool=pool, prior=0.5))
    check(Problem(pages=(30, 12), dim=32, heads=14, kv_heads=2), ops.Refinement(pool=pool, prior=0.5))


def test_what_is_refused():
    covered, tree, total, _ = next(parts(Problem(), ops.Refinement(prior=0.5)))
    with pytest.raises(UnsupportedError, match="float32"):
        masses_kernel.note_masses(covered, tree, group=2, share=0.2, total=total.double())
