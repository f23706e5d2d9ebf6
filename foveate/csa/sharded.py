"""The lightning indexer over ranks of torch.distributed: queries are sharded, and selections equal one rank's.

Any partition of the keys gives the same set (docs/papers/streamindex.md). A rank can therefore select from the keys of
one rank after the other and merge the selections.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from foveate import ops
from foveate.csa.indexer import DTYPES, check, refusal, select

KEYS = ("replicated", "gather", "ring")
_TOGETHER = 8192
"""Queries whose selections are merged at once."""
_SHARED = ("keys", "batch", "heads", "dim", "dtype", "key_scales", "top_k", "ratio")
"""Arguments that must be the same on all ranks; ranks exchange them as integers."""
_SAID = {"keys": KEYS, "dtype": DTYPES, "key_scales": ("none", "some")}
"""Values that the integers of some arguments encode."""


def pieces(length: int, rank: int, world: int) -> list[tuple[int, int]]:
    """A rank's share of the queries of a sequence: one piece of the first half and one of the second, so that all
    ranks score about equally many keys.

    Returns:
        ``(start, stop)`` of each, ascending; a piece may be empty.
    """
    ends = [length * i // (2 * world) for i in range(2 * world + 1)]
    return [(ends[i], ends[i + 1]) for i in (rank, 2 * world - 1 - rank)]


@torch.no_grad()
def sharded_lightning_indexer(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int,
    *,
    pieces: Sequence[tuple[int, int]],
    ratio: int = 1,
    key_scales: Tensor | None = None,
    keys: str = "replicated",
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """:func:`lightning_indexer` for a rank's share of the queries; all ranks of the group call it.

    Args:
        q: ``[B, S, H, D]``: the queries of the pieces, concatenated.
        k: ``[B, T, D]``: all keys, or this rank's share; shares are in the order of the ranks.
        weights: ``[B, S, H]``.
        pieces: the positions ``(start, stop)`` of this rank's queries, as :func:`pieces` gives them.
        key_scales: ``[B, T]``, of the keys in ``k``.
        keys: ``replicated``: every rank has all keys; ``gather``: each rank has a share and gathers the others;
            ``ring``: ranks pass their shares around, and each holds at most three: its own, the one that it selects
            from, and the one that it receives.
        group: ranks; None for all.

    Returns:
        int32 ``[B, S, top_k]``: the same as on one rank, up to the rounding of products.

    Raises:
        ValueError: as :func:`lightning_indexer`; for pieces that do not add up to the queries; for ranks that differ in
            shapes, dtype, scales or settings. An error on one rank raises on all.
    """
    lengths = _agreed(q, k, weights, top_k, pieces, ratio, key_scales, keys, group)
    weights = weights.float()
    share = _Share(k, None if key_scales is None else key_scales.float(), 0)
    if keys == "replicated":
        found, lost = _selected(q, share, weights, top_k, pieces, ratio)
    elif keys == "gather":
        found, lost = _selected(q, _gathered(share, lengths, group), weights, top_k, pieces, ratio)
    else:
        found, lost = _around(q, share, lengths, weights, top_k, pieces, ratio, group)
    flag = lost.to(torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    if bool(flag):
        raise refusal(q, k, weights, share.scales, "q, k, weights and key_scales of all ranks must be finite")
    return found


def _agreed(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int,
    pieces: Sequence[tuple[int, int]],
    ratio: int,
    key_scales: Tensor | None,
    keys: str,
    group: dist.ProcessGroup | None,
) -> list[int]:
    """Check the arguments of all ranks and return the number of keys of each; raises on all ranks or on none."""
    error, numbers = None, [0] * (len(_SHARED) + 2)
    try:
        if keys not in KEYS:
            raise ValueError(f"keys must be one of {', '.join(KEYS)}, not {keys!r}")
        check(q, k, weights, top_k, ratio, 0, None, key_scales, "auto")
        if any(not 0 <= start <= stop for start, stop in pieces) or sum(b - a for a, b in pieces) != q.shape[1]:
            raise ValueError(f"pieces must be (start, stop) of {q.shape[1]} queries in all, not {list(pieces)}")
        shape = q.shape[0], q.shape[2], q.shape[3]
        settings = KEYS.index(keys), *shape, DTYPES.index(q.dtype), int(key_scales is not None), top_k, ratio
        numbers = [1, *settings, k.shape[1]]
    except (TypeError, ValueError) as wrong:
        error = wrong
    if not dist.is_initialized():
        raise error or ValueError("torch.distributed must be initialised: torchrun starts the ranks of a group")
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    own = torch.tensor(numbers, device=q.device if isinstance(q, Tensor) and q.device.type == device else device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group)
    every = torch.stack(every).tolist()
    if error is not None:
        raise error
    for rank, other in enumerate(every):
        if not other[0]:
            raise ValueError(f"arguments of rank {rank} are not valid: it says which")
        for name, mine, its in zip((*_SHARED, "keys in all"), numbers[1:], other[1:]):
            if mine != its and (name in _SHARED or keys == "replicated"):
                mine, its = (_SAID[name][value] if name in _SAID else value for value in (mine, its))
                raise ValueError(f"all ranks must have the same {name}, not {mine} here and {its} on rank {rank}")
    return [other[-1] for other in every]


class _Share(NamedTuple):
    """The keys of one rank."""

    k: Tensor
    scales: Tensor | None
    first: int
    """Keys of the ranks before."""


def _selected(
    q: Tensor,
    share: _Share,
    weights: Tensor,
    top_k: int,
    pieces: Sequence[tuple[int, int]],
    ratio: int,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The selection among this share alone, and bool ``[1]``: whether a score is NaN."""
    found = torch.full((*q.shape[:2], top_k), -1, dtype=torch.int32, device=q.device)
    lost = torch.zeros(1, dtype=torch.bool, device=q.device)
    if scores is not None:
        scores.fill_(float("-inf"))
    place = 0
    for start, stop in pieces:
        first = min(max(start, (share.first + 1) * ratio - 1), stop)  # the first query that sees one of them
        some = slice(place + first - start, place + stop - start)
        offset = first - share.first * ratio
        place += stop - start
        if some.start == some.stop:
            continue
        of_some = None if scores is None else torch.empty_like(found[:, some], dtype=torch.float32)
        chosen, nan = select(
            q[:, some], share.k, weights[:, some], top_k, ratio, offset, None, share.scales, "auto", of_some
        )
        found[:, some] = torch.where(chosen < 0, chosen, chosen + share.first)
        if scores is not None:
            scores[:, some] = of_some
        lost |= nan
    return found, lost


def _around(
    q: Tensor,
    share: _Share,
    lengths: list[int],
    weights: Tensor,
    top_k: int,
    pieces: Sequence[tuple[int, int]],
    ratio: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Select from the share of one rank after the other, while the next share is in transfer."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    firsts = [sum(lengths[:i]) for i in range(world)]
    share = share._replace(first=firsts[rank])
    best = of_best = lost = None
    for turn in range(world):
        held = (rank - turn) % world
        waiting, following = [], share
        if turn + 1 < world:
            coming = (held - 1) % world
            following, waiting = _pass_on(share, lengths[coming], firsts[coming], rank, world, group)
        scores = torch.empty(*q.shape[:2], top_k, device=q.device)
        found, nan = _selected(q, share, weights, top_k, pieces, ratio, scores)
        if best is None:
            best, of_best, lost = found, scores, nan
        else:
            lost |= nan
            for first in range(0, q.shape[1], _TOGETHER):
                some = slice(first, first + _TOGETHER)
                _merge(best[:, some], of_best[:, some], found[:, some], scores[:, some])
        for request in waiting:
            request.wait()
        share = following
    return best, lost


def _merge(best: Tensor, of_best: Tensor, found: Tensor, scores: Tensor) -> None:
    """Merge a selection into ``best`` and ``of_best``, in place: indices and scores ``[B, S, k]`` of disjoint keys."""
    indices, values = torch.cat([best, found], -1), torch.cat([of_best, scores], -1)
    order = indices.where(indices >= 0, torch.iinfo(torch.int32).max).argsort(-1)
    indices, values = indices.gather(-1, order), values.gather(-1, order)
    places = ops.topk(values, best.shape[-1])  # ascending, as the indices are
    none = places < 0
    places = places.clamp_min(0)
    best.copy_(indices.gather(-1, places).masked_fill_(none, -1))
    of_best.copy_(values.gather(-1, places).masked_fill_(none, float("-inf")))


def _gathered(share: _Share, lengths: list[int], group: dist.ProcessGroup | None) -> _Share:
    """The keys of all ranks."""

    def whole(x: Tensor) -> Tensor:
        padded = x.new_zeros(x.shape[0], max(lengths), *x.shape[2:])
        padded[:, : x.shape[1]] = x
        every = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather([_bytes(one) for one in every], _bytes(padded), group)
        return torch.cat([one[:, :length] for one, length in zip(every, lengths)], 1)

    return _Share(whole(share.k), None if share.scales is None else whole(share.scales), 0)


def _pass_on(
    share: _Share, length: int, first: int, rank: int, world: int, group: dist.ProcessGroup | None
) -> tuple[_Share, list[dist.Work]]:
    """Send a share to the next rank and receive the previous rank's share, which is complete when the requests are."""
    after, before = (dist.get_global_rank(group, one % world) if group else one % world for one in (rank + 1, rank - 1))
    operations, got = [], []
    for x in (share.k, share.scales):
        if x is None:
            got.append(None)
            continue
        got.append(torch.empty(x.shape[0], length, *x.shape[2:], dtype=x.dtype, device=x.device))
        operations.append(dist.P2POp(dist.isend, _bytes(x.contiguous()), after, group))
        operations.append(dist.P2POp(dist.irecv, _bytes(got[-1]), before, group))
    return _Share(got[0], got[1], first), dist.batch_isend_irecv(operations)


def _bytes(x: Tensor) -> Tensor:
    """The same memory as bytes, because not every backend supports every dtype."""
    return x.view(torch.uint8)
