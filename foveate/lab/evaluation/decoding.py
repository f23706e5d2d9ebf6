"""Decoding an answer token by token: greedily, by sampling, or along an answer that another run has given."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from foveate.errors import UserError
from foveate.integrations.transformers import releases
from foveate.integrations.transformers.attachment import Attachment
from foveate.integrations.transformers.decode_calls import DecodeCall
from foveate.lab.evaluation.tasks.base import Item


class Trace(NamedTuple):
    """Answers to a batch of items, and the distributions that they were chosen from."""

    tokens: torch.Tensor  # int64 [B, T], padded after a row's end
    lengths: torch.Tensor  # int64 [B]: tokens of each answer, its end among them
    logits: list[torch.Tensor]  # T of them, [B, vocabulary]


@dataclasses.dataclass(frozen=True)
class Paused:
    """A call of `generate` before its first token: the prompt's ids and logits, and what was prepared for decoding."""

    ids: torch.Tensor
    logits: torch.Tensor
    cache: Any
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    pad: int
    kwargs: dict[str, Any]


def decode(model: PreTrainedModel, paused: Paused, chooser: Greedy | Along, clock: Clock | None = None) -> torch.Tensor:
    """Ids [B, prompt and answer]: `generate`'s decoding loop, step for step, from a cache that holds the prompt.

    As in `generate`, the steps of an attached model are replays of CUDA graphs where they can be.
    """
    ids, kwargs = paused.ids, dict(paused.kwargs)
    attachment = getattr(model, "foveate", None)
    step = DecodeCall(model, attachment) if isinstance(attachment, Attachment) else model
    out = CausalLMOutputWithPast(logits=paused.logits, **{releases.CACHE: paused.cache})
    with model._optimize_model_for_decode():
        while True:
            if clock is not None:
                clock.tick()
            token = chooser.choose(ids, out.logits[:, -1])
            ids = torch.cat([ids, token[:, None]], 1)
            if chooser.ended(ids):
                return ids
            kwargs = model._update_model_kwargs_for_generation(out, kwargs)
            out = step(**model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs), return_dict=True)


class Greedy:
    """`generate`'s greedy choice, step for step; `keep` the logits that it was made from."""

    def __init__(self, paused: Paused, keep: bool = False):
        self._paused, self._has_ends = paused, any(hasattr(criterion, "eos_token_id") for criterion in paused.criteria)
        self._unfinished = torch.ones_like(paused.ids[:, 0])
        self.lengths = torch.zeros_like(self._unfinished)
        self.finite = torch.ones_like(self._unfinished, dtype=torch.bool)
        """Whether the logits of each answer had a finite maximum; stays on the device."""
        self.logits: list[torch.Tensor] | None = [] if keep else None

    def choose(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The next token, [B], of the ids so far, [B, n], and the logits, [B, vocabulary]."""
        if self.logits is not None:
            self.logits.append(logits.clone())  # the next replay writes to the same memory
        self.finite &= logits.amax(-1).isfinite() | (self._unfinished == 0)
        token = self._pick(self._paused.processors(ids, logits.float()))
        return token.where(self._unfinished > 0, self._paused.pad) if self._has_ends else token

    def ended(self, ids: torch.Tensor) -> bool:
        """Whether nothing follows these ids."""
        self.lengths += self._unfinished
        self._unfinished = self._unfinished & ~self._paused.criteria(ids, None)
        return not self._unfinished.any()

    def _pick(self, scores: torch.Tensor) -> torch.Tensor:
        """A token each, [B], by the scores, float32 [B, vocabulary]."""
        return scores.argmax(-1)


class Sampled(Greedy):
    """Tokens drawn as the items' `sampling` says.

    Every token of every item has a number in [0, 1), drawn beforehand. The number is looked up in the cumulated
    probabilities, in the order of the vocabulary. Distributions that differ little therefore give the same token,
    except for a small share of numbers.
    """

    def __init__(self, paused: Paused, items: Sequence[Item], keep: bool = False):
        super().__init__(paused, keep)
        rngs = [random.Random(item.sampling.seed) for item in items]
        draws = [[rng.random() for _ in range(item.max_new_tokens)] for rng, item in zip(rngs, items)]
        bounds = [[item.sampling.temperature, item.sampling.top_p] for item in items]
        device = paused.ids.device
        self._draws = iter(torch.tensor(draws, dtype=torch.float64, device=device).T[..., None])
        self._temperature, self._top_p = torch.tensor(bounds, dtype=torch.float64, device=device).T[..., None]

    def _pick(self, scores: torch.Tensor) -> torch.Tensor:
        probabilities = (scores.double() / self._temperature).softmax(-1)
        falling, order = probabilities.sort(dim=-1, descending=True, stable=True)
        outside = falling.cumsum(-1) - falling >= self._top_p
        kept = probabilities.masked_fill(outside.scatter(-1, order, outside), 0.0).cumsum(-1)
        drawn = torch.searchsorted(kept, next(self._draws) * kept[:, -1:], right=True)[:, 0]
        return drawn.clamp_max(scores.shape[-1] - 1)  # NaN sorts last


class Along:
    """The choices of a trace, and how the logits found on the way compare with its own."""

    def __init__(self, trace: Trace):
        self._trace, self._step = trace, 0
        self.divergence = trace.lengths.double() * 0.0
        self.agreed = torch.zeros_like(trace.lengths)

    def choose(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        inside, theirs = self._step < self._trace.lengths, self._trace.logits[self._step]
        self.agreed += (logits.argmax(-1) == theirs.argmax(-1)) & inside
        self.divergence += kl(theirs, logits).masked_fill(~inside, 0.0)
        self._step += 1
        return self._trace.tokens[:, self._step - 1]

    def ended(self, ids: torch.Tensor) -> bool:
        return self._step == self._trace.tokens.shape[1]


def check_finite(model: PreTrainedModel, items: Sequence[Item], finite: torch.Tensor) -> None:
    """Refuses NaN and infinite predictions, from which greedy decoding would silently make an answer. `finite`: bool
    [B]."""
    strange = [item.id for item, fine in zip(items, finite.tolist()) if not fine]
    if strange:
        method = getattr(getattr(model, "foveate", None), "method", None)
        who = f"method '{method.spec}', " if method else ""
        raise UserError(
            f"{who}item {strange[0]}: the predictions of the model are not finite (NaN or infinite); is a weight so, "
            f"or does {str(model.dtype).removeprefix('torch.')} not hold its activations?"
        )


def kl(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """KL divergence (nats) of distributions from others, by their logits [B, vocabulary]: float64 [B]."""
    theirs, ours = theirs.float().log_softmax(-1), ours.float().log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1).clamp_min(0.0).double()  # below 0 by rounding alone


class Clock:
    """Notes times, waiting for the device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._ticks: list[float] = []

    def tick(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ticks.append(time.perf_counter())

    @property
    def elapsed_ms(self) -> float:
        """From the first tick to the last."""
        return 1e3 * (self._ticks[-1] - self._ticks[0])

    def step_ms(self, steps: int) -> float:
        """Milliseconds of one step out of ``steps``: the median if there was a tick between any two, which leaves the
        recording of CUDA graphs out; else the mean."""
        if len(self._ticks) != steps + 1:
            return self.elapsed_ms / steps
        return 1e3 * statistics.median(end - start for start, end in itertools.pairwise(self._ticks))
