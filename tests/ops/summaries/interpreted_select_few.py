"""The few heaviest of many nodes by bounds of blocks of them, against all masses, under Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl

from foveate.ops.summaries import select_few_kernel
from foveate.ops.summaries.ranks_kernel import all_log_sums
from foveate.ops.summaries.select_few_kernel import heaviest_few

BLOCK, ROOM, FEW = 16, 4, 3


@pytest.fixture(autouse=True, params=[0, 128], ids=["found in turn", "put in order"])
def compared(request, monkeypatch):
    """How the blocks with the largest bounds are found."""
    monkeypatch.setattr(select_few_kernel, "_COMPARED", tl.constexpr(request.param))


@triton.jit
def few_of(
    rank_ptr,
    lse_ptr,
    others_ptr,
    recent_ptr,
    bound_ptr,
    list_ptr,
    found_ptr,
    order_ptr,
    picked_ptr,
    bound_places,
    count,
    allowed,
    rank_places,
    prior,
    BRANCH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FEW: tl.constexpr,
    ROOM: tl.constexpr,
):
    member = tl.arange(0, triton.next_power_of_2(GROUP))
    exist = member < GROUP
    lse = all_log_sums(lse_ptr, others_ptr, tl.where(exist, member, 0), exist, 1, 1, GROUP, 1, 1)
    places, order, picked = heaviest_few(
        lse,
        rank_ptr,
        recent_ptr,
        1,
        bound_ptr,
        bound_places,
        list_ptr,
        count,
        allowed,
        0,
        rank_places,
        prior,
        BRANCH,
        True,
        GROUP,
        FEW,
        ROOM,
        BLOCKS,
        BLOCK_N,
        AT_ONCE,
    )
    few = tl.arange(0, ROOM)
    tl.store(found_ptr + few, places)
    tl.store(order_ptr + few, order)
    tl.store(picked_ptr, picked)


class Nodes:
    """Ranks to the base 2 of one group's heads, and recent attention, in rooms that are larger than needed."""

    def __init__(self, count=150, group=3, scale=3.0, prior=0.0, branch=0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.count, self.group, self.prior, self.branch = count, group, prior, branch
        self.ranks = scale * torch.randn(group, count, generator=generator)
        self.of_lists = torch.arange(0, 3 * count, 3)[: -(-count // max(branch, 1))]
        nodes = torch.arange(count)
        self.nodes = self.of_lists[nodes // branch] * branch + nodes % branch if branch else nodes
        self.recent = torch.rand(int(self.nodes.max()) + 1, generator=generator)
        self.rest = torch.randn(group, generator=generator)

    def lse(self):
        """Of a head's nodes, and of those and the rest."""
        own = torch.logsumexp(self.ranks * 0.6931471805599453, 1) / 0.6931471805599453
        return own, torch.logaddexp2(own, self.rest)

    def masses(self):
        mass = (self.ranks - self.lse()[1][:, None]).exp2().sum(0) / self.group
        mass = mass + self.prior * (self.recent[self.nodes] - mass)
        return mass.nan_to_num(-1.0)

    def bounds(self):
        """As :func:`score_nodes` writes them, with garbage behind them."""
        blocks = -(-self.count // BLOCK)
        found = torch.full((2 * self.group + 2, blocks + 3), 1e9)
        for block in range(blocks):
            some = slice(block * BLOCK, min((block + 1) * BLOCK, self.count))
            ranks = self.ranks[:, some]
            peak = ranks.amax(1)
            shares = (ranks - peak.clamp_min(-3.4e38)[:, None]).exp2()
            total = shares.sum(1)
            found[: self.group, block], found[self.group : -2, block] = peak, total
            found[-2, block] = (shares / total.where(total > 0, 1.0)[:, None]).sum(0).amax()
            found[-1, block] = self.recent[self.nodes[some]].nan_to_num(0.0).amax()
        return found

    def few(self, allowed=FEW, at_once=2, ranks=None):
        places = -(-self.count // 16) * 16 + 16
        given = torch.full((self.group, places), torch.nan)
        given[:, : self.count] = self.ranks if ranks is None else ranks
        bounds = self.bounds()
        found, order = torch.zeros(ROOM, dtype=torch.int32), torch.zeros(ROOM, dtype=torch.int32)
        picked, blocks = torch.zeros(1, dtype=torch.int32), triton.next_power_of_2(bounds.shape[1])
        few_of[(1,)](
            given,
            self.lse()[0],
            self.rest,
            self.recent,
            bounds,
            self.of_lists,
            found,
            order,
            picked,
            bounds.shape[1],
            self.count,
            allowed,
            places,
            self.prior,
            self.branch,
            self.group,
            blocks,
            BLOCK,
            at_once,
            FEW,
            ROOM,
        )
        expected = self.masses().sort(descending=True, stable=True).indices[: min(allowed, FEW)]
        return found[found >= 0], order, int(picked), expected


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 12.0])
@pytest.mark.parametrize("at_once", [1, 2, 8])
@pytest.mark.parametrize("how", [{}, {"prior": 0.5}, {"branch": 4, "prior": 0.3}])
def test_the_few_heaviest(scale, at_once, how):
    for seed, (count, allowed) in enumerate([(150, 3), (16, 3), (17, 1), (2, 3), (150, 2), (150, 0), (161, 9)]):
        found, order, picked, expected = Nodes(count, scale=scale, seed=seed, **how).few(allowed, at_once)
        expected = expected[:count]
        assert picked == len(expected) == len(found)
        assert set(found.tolist()) == set(expected.tolist())
        assert order[: len(found)].tolist() == expected.argsort().argsort().tolist()


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("offset", [0.0, 5000.0, -8000.0, 20000.0])
def test_ranks_far_from_zero(offset, at_once):
    """Which are rounded to a thousandth: bounds are not rounded apart from them."""
    for seed in range(25):
        nodes = Nodes(150, group=1 + seed % 3, scale=0.001, seed=seed)
        nodes.ranks += offset
        nodes.rest += offset
        nodes.ranks[:, 5], nodes.ranks[:, 20] = offset + 9.0, offset + 9.0
        found, _, _, expected = nodes.few(1, at_once)
        assert found.tolist() == expected.tolist() == [5]


def test_nodes_that_weigh_nothing_are_taken_from_the_first_on():
    nodes = Nodes(150)
    nodes.ranks[:] = -torch.inf
    nodes.ranks[:, 100] = 2.0
    assert nodes.few(at_once=1)[0].tolist() == [100, 0, 1]
    nodes.ranks[:, :] = -400.0
    nodes.ranks[:, 100] = 2.0
    assert nodes.few(at_once=1)[0].tolist() == [100, 0, 1]


def test_equal_nodes_are_taken_from_the_first_on():
    nodes = Nodes(150)
    nodes.ranks[:] = 1.0
    nodes.ranks[:, 40:60] = 5.0
    assert nodes.few()[0].tolist() == [40, 41, 42]


def test_blocks_that_cannot_have_one_are_not_read():
    """Their ranks could as well be anything."""
    nodes = Nodes(400, scale=0.1)
    nodes.ranks[:, 200], nodes.ranks[:, 210], nodes.ranks[:, 330] = 9.0, 8.0, 10.0
    others = nodes.ranks.clone()
    for block in set(range(25)) - {200 // BLOCK, 210 // BLOCK, 330 // BLOCK}:
        others[:, block * BLOCK : (block + 1) * BLOCK] = 99.0
    assert nodes.few(at_once=1, ranks=others)[0].tolist() == [330, 200, 210]


def test_nodes_without_a_mass_are_not_taken():
    nodes = Nodes(150, prior=0.5)
    best = int(nodes.masses().argmax())
    nodes.recent[best] = torch.nan
    found, _, picked, expected = nodes.few()
    assert picked == FEW
    assert best not in found.tolist()
    assert set(found.tolist()) == set(expected.tolist())
