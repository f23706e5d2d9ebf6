"""The passes of lossless decoding, which draft tokens or verify them: one by one, or replayed from CUDA graphs."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
import transformers
from torch import Tensor

from foveate.integrations.transformers import releases
from foveate.integrations.transformers.attachment import Attachment
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.decode_calls import can_replay, replayed
from foveate.runtime import CaptureError
from foveate.state.step_plan import on_device

_FIRST, _DRAFT = "first of a draft", "of a draft"
"""Kinds of steps: a draft's first token chooses keys, and its later tokens read the same keys again."""


class Passes:
    """Decoding passes of the model over its cache, whose rows hold different numbers of tokens."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        attachment: Attachment,
        cache: Cache,
        positions: Tensor | None,
        device: torch.device,
    ):
        self._model, self._attachment, self._cache, self._layers = model, attachment, cache, cache.layers
        self._positioned, self.device = releases.takes(model, "position_ids"), device
        self._lengths = list(self._layers[0].cache.lengths)
        first = torch.tensor(self._lengths, device=self.device)
        self._first = first if positions is None else first.copy_(positions[:, -1] + 1)
        """The position of each row's newest token, which the cache does not hold yet, int64 ``[B]``."""
        self._verified, self._short, self._steady = 0, True, True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All passes as one change of the cache: if it is interrupted, drafts may be left, and the cache is refused."""
        try:
            with self._cache.phase.change(), self._cache.phase.step():
                yield
        finally:  # the next answer checks what its first draft chooses, in a pass that is not replayed
            for layer in self._layers:
                layer.drafting = None
            if self._cache.steps is not None:
                self._cache.steps.forget((_FIRST, _DRAFT))

    def short(self) -> bool:
        """Whether the context is so short that a layer reads it whole: within a draft no layer begins to choose."""
        if self._short:
            able = (layer for layer in self._layers if layer.method.sparse_from_tokens is not None)
            self._short = any(layer.decodes_densely(max(self._lengths) + 1) for layer in able)
        return self._short

    def steady(self) -> bool:
        """Whether all passes since the last call ran as they will run from now on: none was captured, or ran to warm up
        before it is captured."""
        steady, self._steady = self._steady, True
        return steady

    def draft(self, ids: Tensor, number: int) -> Tensor:
        """Logits ``[B, 1, V]`` after one token of each row, which is number ``number`` of its draft."""
        self._cache.phase.draft = number
        try:
            return self._run(ids, number, kind=_DRAFT if number else _FIRST, after=_FIRST if number else None)
        finally:
            self._cache.phase.draft = None

    def verify(self, ids: Tensor) -> Tensor:
        """Logits ``[B, n, V]`` after each row's newest token and its draft of n - 1 tokens, which all read all keys."""
        self._verified = ids.shape[1]
        self._cache.phase.verifying = True
        try:
            return self._run(ids, 0, kind=("verify", ids.shape[1]))
        finally:
            self._cache.phase.verifying = False

    def keep(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[b]`` tokens that the last verifying pass read in row b."""
        back = [self._verified - number for number in kept]
        if (steps := self._cache.steps) is not None and any(back):
            steps.take_back(self._layers, back)
        elif any(back):
            for layer in self._layers:
                layer.take_back(back)
        self._lengths = list(map(operator.add, self._lengths, kept))
        self._first = self._first + on_device(tuple(kept), self.device)

    def finish(self, tokens: Tensor) -> bool:
        """Leave the cache as `generate` leaves it, without the last of the ``tokens [B, n]``; False where its rows hold
        different numbers of them."""
        rows, phase = self._layers[0].cache.rows, self._cache.phase
        decoded = set(map(operator.sub, rows["lengths"], rows["prompt"]))
        if len(decoded) > 1:
            phase.unusable = (
                "the rows of this cache end after different numbers of tokens, as lossless decoding leaves them, and "
                "no later turn can go on from there; start a new cache"
            )
            return False
        if number := decoded.pop():
            self._cache.ids.write(phase.prompt_end, tokens[:, :number])
        return True

    def _run(self, ids: Tensor, number: int, **kind: Hashable) -> Tensor:
        """Logits of ``ids [B, n]``, which come after ``number`` tokens of a draft; ``kind``: see `ReplayedSteps`."""
        given, options = {"input_ids": ids}, {"use_cache": True, "return_dict": True}
        if self._positioned:
            given["position_ids"] = self._first[:, None] + torch.arange(
                number, number + ids.shape[1], device=self.device
            )
        checked = kind["kind"] is _FIRST and any(layer.first_step for layer in self._layers)  # runs by itself
        if not checked and can_replay(self._model, self._attachment, self._cache, given):
            use = self._attachment.graphs.use
            replayed_before, captured_before = use.replayed, use.captured
            try:
                logits = replayed(self._model, self._cache, given, options, **kind).logits
                self._steady &= (use.replayed, use.captured) == (replayed_before + 1, captured_before)
                return logits.to(self.device)
            except CaptureError as error:
                self._attachment.graphs.broke(error)
        self._steady &= not checked
        return self._model(**given, **options, **{releases.CACHE: self._cache}).logits.to(self.device)
