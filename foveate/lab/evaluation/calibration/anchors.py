"""From what prompts show to anchors: head maps, the layers' similarity, and the dynamic program over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.errors import UserError


def pair_similarity(captured: Tensor) -> Tensor:
    """Equation 3 for pairs of heads, mean over tiles: ``[T, L, H, L, H] -> [L, H, L, H]``, 0 for a > b."""
    return (captured / _own(captured)[:, None, None]).mean(0)


def head_map(pairs: Tensor) -> Tensor:
    """For each head of layer b the most similar head of layer a, ``[L, H, L, H] -> int64 [L, L, H]``.

    Many to one (Kascade, section 3.5); of heads as similar, the one of the same number, else the first.
    """
    heads = pairs.shape[1]
    tie = 1e-6 * torch.eye(heads, dtype=pairs.dtype)[:, None]
    return (pairs + tie).argmax(1)


def layer_similarity(captured: Tensor, maps: Tensor) -> Tensor:
    """Of the layers of one prompt, tile by tile, ``[T, L, H, L, H] -> [T, L, L]``; equation 3 takes the least of them.

    The attention of layer b's heads on the keys that their counterparts in layer a choose, over that on the keys that
    they would choose themselves; 0 for a > b.

    `maps`: ``[L, L, H]``: each head's counterpart.
    """
    at = maps[None, :, None].expand(captured.shape[0], -1, -1, -1, -1)
    held = captured.gather(2, at)[:, :, 0].sum(-1)
    return held / _own(captured).sum(-1)[:, None]


def _own(captured: Tensor) -> Tensor:
    """What each head's own choice holds: ``[T, L, H]``."""
    own = captured.diagonal(dim1=1, dim2=3).diagonal(dim1=1, dim2=2)
    return own.clamp_min(torch.finfo(captured.dtype).tiny)


def best_anchors(similarity: Tensor, most: int) -> list[tuple[list[int], float]]:
    """The best anchors among L layers, for one anchor, two, … up to ``most`` (Kascade, algorithm 1).

    The first layer is always an anchor. Each layer reads the choice of the last anchor up to itself.

    `similarity`: ``[L, L]``: what layer j is worth if it reads the choice of layer i, for i <= j. Returns for each
    number of anchors their indices, ascending, and the sum over layers that they reach. Raises `UserError` unless ``1
    <= most <= L``, or for similarities that are not finite.
    """
    layers = similarity.shape[0]
    check_number(most, layers)
    if not bool(torch.isfinite(similarity).all()):
        raise UserError("the similarity or divergence of layers is not finite")
    upto = torch.cat([similarity.new_zeros(layers, 1, dtype=torch.float64), similarity.double().triu().cumsum(1)], 1)
    segment = upto - upto.gather(1, torch.arange(layers)[:, None])  # [i, j]: layers i .. j - 1 read the choice of i
    best = torch.full((layers + 1,), float("-inf"), dtype=torch.float64)  # of the layers before j
    best[0] = 0.0
    came, found = [], []
    for _ in range(most):
        reached = best[:-1, None] + segment
        reached[torch.ones_like(reached, dtype=torch.bool).tril()] = float("-inf")  # j comes after i
        best, last = reached.max(0)
        came.append(last)
        anchors, end = [], layers
        for step in reversed(came):
            end = int(step[end])
            anchors.append(end)
        found.append((anchors[::-1], float(best[layers])))
    return found


Losses = Callable[[int, list[list[int]]], Sequence[float]]
"""Of a turn's number and some anchors, how much is lost with each."""


def grown(layers: int, losses: Losses, most: int) -> list[tuple[list[int], float]]:
    """Anchors among L layers one after another: the first layer, and then the one with which least is lost.

    Returns for one anchor, two, … up to ``most`` their indices, ascending, and what is lost with them. Raises
    `ValueError` unless ``1 <= most <= L``.
    """
    check_number(most, layers)
    path: list[tuple[list[int], float]] = []
    for turn in range(most):
        before = path[-1][0] if path else []
        free = [layer for layer in range(layers) if layer not in before] if path else [0]
        tried = [sorted([*before, layer]) for layer in free]
        path.append(_least(tried, losses(turn, tried)))
    return path


def improved(anchors: Sequence[int], layers: int, losses: Losses, rounds: int) -> list[tuple[list[int], float]]:
    """Better and better anchors among L layers, from ``anchors`` on, ascending.

    Each of at most ``rounds`` rounds tries to move each anchor but the first to every other place. It keeps the best of
    these moves, unless the move wins less than a hundredth of the loss.

    Returns the anchors after each round with their loss, beginning with the given anchors; empty if there is nothing to
    try.
    """
    path: list[tuple[list[int], float]] = []
    for number in range(rounds):
        tried = [list(anchors), *_neighbours(anchors, layers)]
        if len(tried) == 1:
            break
        lost = [float(loss) for loss in losses(number, tried)]
        path = path or [(tried[0], lost[0])]
        best = _least(tried, lost)
        if best[1] >= 0.99 * lost[0]:
            break
        anchors = best[0]
        path.append(best)
    return path


def _least(tried: list[list[int]], lost: Sequence[float]) -> tuple[list[int], float]:
    """The first of those with which least is lost, and how much."""
    best = min(range(len(tried)), key=lambda index: float(lost[index]))
    return tried[best], float(lost[best])


def _neighbours(anchors: Sequence[int], layers: int) -> list[list[int]]:
    """All ways of moving one anchor other than the first."""
    free = [layer for layer in range(anchors[0] + 1, layers) if layer not in anchors]
    return [sorted({*anchors} - {one} | {layer}) for one in anchors[1:] for layer in free]


BY = ("together", "divergence", "similarity")
"""What anchors can be chosen by; the first is usual."""


def check_number(number: int, layers: int) -> None:
    """Raises `UserError` unless a model with ``layers`` possible anchors can have this number of anchors."""
    if not 1 <= number <= layers:
        raise UserError(f"anchors must be a number from 1 to {layers}, the layers that can be one, not {number}")


class AnchorChoice(NamedTuple):
    """The anchors chosen among L layers, and what they were chosen by."""

    anchors: list[int]
    heads: dict[int, list[int]]
    """For each layer after an anchor that is not one itself: the anchor's head for each of its own."""
    similarity: Tensor  # fp32 ``[L, L]``: equation 3, least over a prompt's tiles, mean over prompts
    mean_similarity: Tensor  # the same with the mean over a prompt's tiles
    worth: Tensor
    """What the anchors were chosen by: `similarity`, column j weighted by the importance of layer j; or minus the
    divergence."""
    by_number: list[tuple[list[int], float]]  # the best anchors for every number of them, and the sum that they reach
    maps: Tensor  # int64 ``[L, L, H]``: for each head of layer b its counterpart in layer a

    def of(self, number: int) -> AnchorChoice:
        """The same with another number of anchors."""
        return self.at(self.by_number[number - 1][0])

    def at(self, anchors: list[int]) -> AnchorChoice:
        """The same with other anchors."""
        found = {}
        for layer in range(anchors[0], len(self.maps)):
            anchor = max(one for one in anchors if one <= layer)
            if anchor != layer:
                found[layer] = self.maps[anchor, layer].tolist()
        return self._replace(anchors=anchors, heads=found)


def counterparts(prompts: Iterable[Tensor]) -> Tensor:
    """For each head of layer b the head of layer a that is most similar on some prompts: ``int64 [L, L, H]``.

    `prompts` are ``[T, L, H, L, H]`` of each prompt (:class:`.similarity.Measured`).
    """
    pairs, count = torch.zeros(()), 0
    for captured in prompts:
        pairs, count = pairs + pair_similarity(captured), count + 1
    return head_map(pairs / count)


def choose(
    prompts: Callable[[], Iterable[Tensor]],
    importance: Tensor,
    number: int,
    divergence: Tensor | None = None,
) -> AnchorChoice:
    """The best ``number`` anchors, from 1 to L, for some prompts (Kascade, section 3).

    Args:
        prompts: gives ``[T, L, H, L, H]`` of each prompt (:class:`.similarity.Measured`); called twice.
        importance: fp32 ``[L]``: 1 - cosine of a layer's input and the same with its attention added.
        divergence: ``[L, L]``, instead of similarity: what is lost if layer j alone reads the choice of layer i <= j.

    Raises `UserError` for a number out of range, or values that are not finite.
    """
    check_number(number, len(importance))
    maps, count = counterparts(prompts()), 0
    least = mean = torch.zeros(())
    for captured in prompts():
        of_tiles = layer_similarity(captured, maps)
        least, mean, count = least + of_tiles.amin(0), mean + of_tiles.mean(0), count + 1
    least, mean = least / count, mean / count
    worth = least * importance if divergence is None else -divergence
    return AnchorChoice([], {}, least, mean, worth, best_anchors(worth, len(importance)), maps).of(number)
