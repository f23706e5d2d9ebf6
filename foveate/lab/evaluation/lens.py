"""Recording a lens: which tokens the first decoded tokens read, as the verbs of attention get them, and their recall.

The *recall* of a step is the share of exact attention, over all tokens so far, that the tokens which were read hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import foveate
from foveate.errors import UserError
from foveate.lab.evaluation import generation
from foveate.lab.evaluation.tasks.base import Item
from foveate.lab.results.lens import STATES, pattern, texts, write
from foveate.ops import KV, Logits, first_keys, fold_group, key_logits
from foveate.ops.attend import page_slots
from foveate.ops.attend.gather import membership_mask
from foveate.ops.dispatch import reference_only, watched
from foveate.ops.summaries.reference import with_masses

STEPS = 8  # decoded tokens that are recorded
MOST_TOKENS = 16384  # tokens of the longest prompt that is recorded
_EVICTED, _UNREAD, _SUMMARISED, _READ, _REUSED = range(len(STATES))


class Recorder:
    """What the decode steps of one sequence read on an attached model; :func:`recording` makes it.

    `model`: the attached model.
    """

    def __init__(self, model: nn.Module):
        self._attachment = model.foveate
        self._found: dict[tuple[int, int], Tensor] = {}
        self._at: tuple[int, int] | None = None
        self._keys: dict[int, list[Tensor]] = {}
        """For each layer, the keys of all tokens so far, including the keys of tokens that the method evicts."""
        self._mass: dict[tuple[int, int], Tensor] = {}
        """By step and layer, exact attention to each token, fp32 ``[Hkv, L]``: the mean over the heads of a group."""

    @property
    def decoded(self) -> bool:
        """Whether a token was decoded."""
        return bool(self._found)

    def layers(self) -> list[dict[str, Any]]:
        """The layers, as :func:`foveate.lab.results.lens.write` takes them."""
        methods = {index: policy.method for index, policy in self._attachment.policies.items()}
        found = [
            {"layer": index, "method": method.spec, "reads_choice_of": method.role.reads_choice_of}
            for index, method in methods.items()
        ]
        found += [{"layer": index, "unchanged": reason} for index, reason in self._attachment.unchanged.items()]
        return sorted(found, key=lambda one: one["layer"])

    def steps(self) -> list[list[list[str]]]:
        """A pattern for each step, layer and KV head, as :func:`foveate.lab.results.lens.write` takes them.

        Raises `UserError` when no token was decoded, or a layer attended without the verbs of :mod:`foveate.ops`.
        """
        numbers, names = self._steps(), "".join(STATES)

        def patterns(step: int, layer: int) -> list[str]:
            return [pattern("".join(names[code] for code in head)) for head in self._found[step, layer].tolist()]

        layers = self.layers()
        return [[[] if "unchanged" in one else patterns(step, one["layer"]) for one in layers] for step in numbers]

    def recall(self) -> list[list[list[float]]]:
        """For each step, layer and KV head the share of exact attention that the tokens which were read hold, 0 to 1.

        Tokens that are read through a summary alone do not count. An unchanged layer has no heads. Raises `UserError`
        as :meth:`steps` does, and where recording began after the prompt.
        """
        numbers = self._steps()
        missing = [index for step, index in self._found if (step, index) not in self._mass]
        if missing:
            raise UserError(f"recording began after layer {missing[0]} had read the prompt: recall needs its keys, too")

        def shares(step: int, layer: int) -> list[float]:
            mass, codes = self._mass[step, layer], self._found[step, layer]
            read = mass.masked_fill(codes < _READ, 0.0).sum(-1) / mass.sum(-1)
            return [round(share, 4) for share in read.tolist()]

        layers = self.layers()
        return [[[] if "unchanged" in one else shares(step, one["layer"]) for one in layers] for step in numbers]

    def _steps(self) -> list[int]:
        """The steps that were recorded. Raises `UserError` as :meth:`steps` does."""
        numbers = sorted({step for step, _ in self._found})
        if not numbers:
            raise UserError("the lens is of decoded tokens, and none was decoded: the first token ended the answer")
        for index, policy in self._attachment.policies.items():
            if any((step, index) not in self._found for step in numbers):
                name = policy.method.name
                raise UserError(f"layer {index} ({name}) attends without foveate's verbs, of which the lens is made")
        return numbers

    def save(self, out: Path, tokenizer: Any, tokens: Sequence[int], prompt_tokens: int, **facts: Any) -> None:
        """Write the recorded steps as a lens of ``tokens``. The first ``prompt_tokens`` of them are the prompt.

        `facts` is as in :func:`foveate.lab.results.lens.write`. Raises what that function and :meth:`steps` raise.
        """
        steps = self.steps()
        words = texts(tokenizer, tokens[: prompt_tokens + len(steps)])
        facts = {"method": self._attachment.method.spec} | facts
        write(out, words, prompt_tokens, self.layers(), steps, recall=self.recall(), **facts)

    def look(self, layer: int, q: Tensor, k: Tensor, logits: Logits) -> None:
        """Called before a layer attends: note which layer it is, whether it decodes, and its exact attention."""
        one = self._attachment.cache.layers[layer]
        step = 0 if one.phase.prompt_end is None else one.seen - one.phase.prompt_end
        self._at = (step, layer) if 1 <= step <= STEPS else None
        if step > STEPS:
            self._keys.pop(layer, None)
            return
        keys = self._keys.setdefault(layer, [])
        keys.append(k[0])
        if self._at is None or sum(part.shape[1] for part in keys) != one.seen:
            return
        keys[:] = [torch.cat(keys, 1)]
        scores = key_logits(fold_group(q[:, :, -1:], k.shape[1]), keys[0][None], logits)[0]  # [Hkv, G, L]
        sinks = None if logits.sinks is None else logits.sinks.view(*scores.shape[:2], 1).float()
        scores = scores if sinks is None else torch.cat([scores, sinks], -1)
        self._mass[self._at] = scores.softmax(-1)[..., : keys[0].shape[1]].mean(1)

    def note(self, verb: str, arguments: Mapping[str, Any]) -> None:
        """Called before each verb: note the tokens that a verb of attention reads."""
        if self._at is None or verb not in _READS:
            return
        one = self._attachment.cache.layers[self._at[1]]
        slots, rest, state = _READS[verb](**arguments), _UNREAD, _READ
        if verb == "attend_summaries":  # a cover stands for every token once
            rest = _SUMMARISED
        if verb == "attend_indices" and one.method.role.reads_choice_of is not None:
            state = _REUSED
        positions = one.cache.positions[0].long()
        heads, places = (positions >= 0).nonzero(as_tuple=True)
        codes = torch.full((len(positions), one.cache.lengths[0]), _EVICTED, dtype=torch.int8, device=positions.device)
        codes[heads, positions[heads, places]] = torch.where(slots, state, rest).to(torch.int8)[heads, places]
        before = self._found.get(self._at)  # parts of one step, which are merged
        self._found[self._at] = codes if before is None else codes.maximum(before)


def of_layers(recall: Sequence[Sequence[Sequence[float]]]) -> dict[int, float]:
    """The mean recall of each layer that has any, by its place, over steps and KV heads."""
    by_layer = {place: [share for step in recall for share in step[place]] for place in range(len(recall[0]))}
    return {place: sum(shares) / len(shares) for place, shares in by_layer.items() if shares}


def recall_of(
    model: nn.Module, tokenizer: Any, method: Any, item: Item, dense_below: int | str = 0
) -> dict[str, float] | None:
    """The recall of a method on one item, 0 to 1, by the index of the layer, written as JSON writes it.

    The item is answered once more, by the references of all verbs. The recall is the mean over KV heads and the first
    decoded tokens.

    Args:
        model: without a method.
        method: a :class:`foveate.methods.Method`.
        dense_below: as :func:`foveate.attach` takes it.

    Returns:
        None where no token was decoded alone, as in tasks whose answers are given.

    Raises:
        UserError: where a layer attends without the verbs of :mod:`foveate.ops`.
    """
    with foveate.attached(model, method, dense_below=dense_below, cuda_graph=False), recording(model) as recorder:
        generation.run_batch(model, tokenizer, [item])
        if not recorder.decoded:
            return None
        return {str(layer): share for layer, share in of_layers(recorder.recall()).items()}


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Record the decode steps inside the block, of one sequence, by the references of all verbs.

    `model`: an attached model, whose decode steps are not replayed as CUDA graphs.
    """
    recorder = Recorder(model)
    policies = model.foveate.policies.values()
    for policy in policies:
        policy.on_attention = recorder.look
    try:
        with reference_only(), watched(recorder.note):
            yield recorder
    finally:
        for policy in policies:
            policy.on_attention = None


# Which slots a verb reads: bool [Hkv, Lk], of its arguments


def _all(kv: KV, mask: Tensor | None = None, **_: Any) -> Tensor:
    k = kv.k
    there = torch.ones(k.shape[1:3], dtype=torch.bool, device=k.device)
    if kv.lengths is not None:
        there = there & first_keys(kv.lengths, k.shape[2])[0]
    return there if mask is None else there & mask.expand(1, k.shape[1], -1, k.shape[2])[0].any(1)


def _indices(kv: KV, indices: Tensor, counts: Tensor | None = None, heads: Tensor | None = None, **_: Any) -> Tensor:
    indices = indices if heads is None else indices.index_select(1, heads)
    if counts is not None:
        indices = indices.where(first_keys(counts, indices.shape[2]), -1)
    return membership_mask(indices, kv.num_keys)[0]


def _pages(kv: KV, pages: Tensor, page_size: int, **_: Any) -> Tensor:
    read = membership_mask(page_slots(pages, page_size).flatten(2), kv.num_keys)[0]  # of KV heads, or of query heads
    return read.unflatten(0, (kv.k.shape[1], -1)).any(1) & _all(kv)


def _summaries(kv: KV, tree: Any, need_lse: bool = False, sums: Any = None, **arguments: Any) -> Tensor:
    """Sinks, tail, and the tokens of refined pages; the choice is made once more, of the same numbers."""
    k, (*_, lowest) = kv.k, with_masses(kv=kv, tree=tree, **arguments)[2]
    read = torch.zeros(k.shape[1:3], dtype=torch.bool, device=k.device)
    read[:, : tree.sinks] = True
    read[:, tree.rows.start :] = True
    if lowest.level == 0:
        pages = lowest.chosen
        if lowest.index is not None:
            pages = lowest.index.gather(2, pages.clamp_min(0)).masked_fill(pages < 0, -1)
        slots = page_slots(pages, tree.width).flatten(2)
        read |= membership_mask(slots.add(tree.sinks).masked_fill(slots < 0, -1), k.shape[2])[0]
    return read


_READS = {
    "attend": _all,
    "attend_pooled": _all,
    "attend_indices": _indices,
    "attend_pages": _pages,
    "attend_summaries": _summaries,
}
