"""Asking a model a batch of items, for answers or teacher-forced, with the time of prefill and decode.

A batch is asked in two steps: the prompt is read, and what follows is generated or scored. So one reading can serve
several methods. Each continues exactly as if it had read the prompt alone, or along the answers of another run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import LinearAttentionLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from foveate.integrations.transformers import releases
from foveate.integrations.transformers.attachment import Attachment
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.positions import rotated_otherwise
from foveate.lab.evaluation.decoding import Along, Clock, Greedy, Paused, Sampled, Trace, check_finite, decode, kl
from foveate.lab.evaluation.tasks.base import Item, Output
from foveate.prompting import answer_text, end_tokens, pad_token

GENERATE, TEACHER_FORCED, SHARED = "generate", "teacher-forced", ", shared prompt"
"""How a batch was timed, and what is added where its prompt was read for several methods at once."""
ALONG = "tokens given, decode not timed"  # the same for a batch decoded along answers given before
_FORWARD_TOKENS, _SHORTEST_CHUNK = 1 << 18, 512
"""Tokens of a forward pass over prompts: more are read in chunks, whose activations fit beside a large cache."""
_TARGET_BLOCK = 64  # teacher-forced tokens a call: bounds the logits, [B, 64, vocabulary]


@dataclasses.dataclass
class Batch:
    """A batch's outputs, one per item, and its times (ms). `cache` keeps the model's cache alive for its statistics.

    `request_ms` is of prompt and answer, with all that was done once; None of a batch decoded along given answers.
    """

    outputs: list[Output]
    prefill_ms: float | None
    request_ms: float | None
    decode_ms_per_token: float | None
    decode_steps: int
    timing: str
    cache: Any


def run_batch(model: PreTrainedModel, tokenizer: Any, items: Sequence[Item]) -> Batch:
    """Puts items to a model: answers them, or scores their targets or options if they have them."""
    return read_prompt(model, tokenizer, items).decode(model)


@torch.no_grad()
def read_prompt(model: PreTrainedModel, tokenizer: Any, items: Sequence[Item]) -> Prompt:
    """The first half of :func:`run_batch`."""
    return (_Texts if items[0].texts else _Questions)(model, tokenizer, items)


def batches(items: Sequence[Item], size: int) -> list[list[Item]]:
    """The items in batches of at most `size`, in order, each of items that can run together."""
    groups: list[list[Item]] = []
    for item in items:
        if groups and len(groups[-1]) < size and _kind(groups[-1][0]) == _kind(item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _kind(item: Item) -> tuple[Any, ...]:
    scored = (bool(item.target_ids), bool(item.options))
    return (item.max_new_tokens, item.stop, item.sampling is None, item.context_tokens > 0, *scored)


class Prompt:
    """The prompts of a batch of items, read by a model."""

    timing: str
    cache: Any
    prefill_ms: float

    @torch.no_grad()
    def decode(self, model: PreTrainedModel, shared: bool = False, along: Trace | None = None) -> Batch:
        """What follows the prompts: the model's own answers, or what it makes of those in `along`.

        `shared`: `methods.SharedPrompt` has read the prompts, and one of its methods is attached now. That is possible
        for each of them, one after the other; otherwise once. Raises `UserError` for predictions that are not finite.
        """
        cache = self.cache.branch(model) if shared else self.cache
        clock, whole = Clock(model.device), Clock(model.device)
        whole.tick()
        if along is None:
            (outputs, steps), timing = self._follow(model, cache, clock), self.timing
        else:
            outputs, steps, timing = self._compare(model, cache, along), along.tokens.shape[1] - 1, ALONG
        whole.tick()
        return Batch(
            outputs=outputs,
            prefill_ms=None if shared else self.prefill_ms,
            request_ms=self.prefill_ms + whole.elapsed_ms if along is None else None,
            decode_ms_per_token=clock.step_ms(steps) if steps and along is None else None,
            decode_steps=steps,
            timing=timing + (SHARED if shared else ""),
            cache=cache,
        )

    def trace(self, model: PreTrainedModel, shared: bool = False) -> Trace:
        """The model's answers with their distributions; `shared` and errors as above. Raises TypeError for texts."""
        raise TypeError("texts whose continuation is given have no answers to trace")

    def divergence(self, model: PreTrainedModel, trace: Trace, shared: bool = False) -> torch.Tensor:
        """How far predictions along a trace are from its own: mean KL divergence, nats a token, float64 [B].

        `shared` as above. The answers are read in one forward pass. Raises TypeError for scored texts.
        """
        raise TypeError("texts whose continuation is given have no answers to go along")

    def _follow(self, model: PreTrainedModel, cache: Any, clock: Clock) -> tuple[list[Output], int]:
        """Outputs and the number of decode steps; the clock ticks when the first step begins and when the last ends."""
        raise NotImplementedError


def _padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of rows padded on the left, and the mask of real tokens: both [B, width]."""
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class _Questions(Prompt):
    """Questions of any lengths, padded on the left, answered: `generate`, with a pause after the prompt.

    Where items have their context as a turn of its own, the pause is after the context, and the questions are read when
    a method goes on: on what it has kept of the context.
    """

    timing = GENERATE

    def __init__(self, model: PreTrainedModel, tokenizer: Any, items: Sequence[Item]):
        self._tokenizer, self._items, self._stop = tokenizer, items, items[0].stop
        self._ends = end_tokens(model)
        self._pad = pad_token(model, tokenizer)
        cuts = [item.context_tokens for item in items]
        contexts = [item.prompt_ids[: cut or None] for item, cut in zip(items, cuts)]
        ids, mask = _padded(contexts, self._pad, model.device)
        self._asked: tuple[torch.Tensor, torch.Tensor] | None = None
        self._width = ids.shape[1]
        if any(cuts):  # columns of both turns, each padded on its left
            more = _padded([item.prompt_ids[cut:] for item, cut in zip(items, cuts)], self._pad, model.device)
            self._asked = torch.cat([ids, more[0]], 1), torch.cat([mask, more[1]], 1)
            self._width = self._asked[0].shape[1]
        clock = Clock(model.device)
        clock.tick()
        self._paused = self._read(model, ids, mask)
        clock.tick()
        self.prefill_ms, self.cache = clock.elapsed_ms, self._paused.cache

    def _read(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: Any = None) -> Paused:
        """Reads a turn, up to the first token of its answer; `cache` holds the turns before it."""
        stops = [_StopAt(self._tokenizer, self._stop, self._width)] if self._stop else []
        return model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=self._items[0].max_new_tokens,
            do_sample=False,
            pad_token_id=self._pad,
            stopping_criteria=StoppingCriteriaList(stops),
            custom_generate=_pause,
            **({} if cache is None else {releases.CACHE: cache}),
        )

    def _ask(self, model: PreTrainedModel, cache: Any) -> Paused:
        """Before the first token of the answers: a question after the context is read now, on `cache`."""
        if self._asked is None:
            return dataclasses.replace(self._paused, cache=cache)
        return self._read(model, *self._asked, cache)

    @torch.no_grad()
    def trace(self, model: PreTrainedModel, shared: bool = False) -> Trace:
        paused = self._ask(model, self.cache.branch(model) if shared else self.cache)
        chooser = self._chooser(paused, keep=True)
        ids = decode(model, paused, chooser)
        check_finite(model, self._items, chooser.finite)
        return Trace(ids[:, self._width :], chooser.lengths, chooser.logits)

    @torch.no_grad()
    def divergence(self, model: PreTrainedModel, trace: Trace, shared: bool = False) -> torch.Tensor:
        paused = self._ask(model, self.cache.branch(model) if shared else self.cache)
        of_prompt, steps = kl(trace.logits[0], paused.logits[:, -1]), trace.tokens.shape[1] - 1
        if not steps:
            return of_prompt
        ids, kwargs = torch.cat([paused.ids, trace.tokens[:, :steps]], 1), dict(paused.kwargs)
        out = CausalLMOutputWithPast(logits=paused.logits, **{releases.CACHE: paused.cache})
        kwargs = model._update_model_kwargs_for_generation(out, kwargs, num_new_tokens=steps)
        kwargs["logits_to_keep"] = steps
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=steps, **kwargs)
        with model._optimize_model_for_decode():
            out = model(**inputs, return_dict=True)
        divergence = torch.stack([kl(*pair) for pair in zip(trace.logits[1:], out.logits.unbind(1), strict=True)], 1)
        outside = torch.arange(1, steps + 1, device=ids.device) >= trace.lengths[:, None]
        return (of_prompt + divergence.masked_fill(outside, 0.0).sum(1)) / trace.lengths

    def _follow(self, model: PreTrainedModel, cache: Any, clock: Clock) -> tuple[list[Output], int]:
        paused = self._ask(model, cache)
        chooser = self._chooser(paused)
        rows = decode(model, paused, chooser, clock)[:, self._width :].tolist()
        check_finite(model, self._items, chooser.finite)
        outputs = [Output(text=self._text(row), tokens=n) for row, n in zip(rows, chooser.lengths.tolist())]
        return outputs, len(rows[0]) - 1

    def _compare(self, model: PreTrainedModel, cache: Any, trace: Trace) -> list[Output]:
        along = Along(trace)
        decode(model, self._ask(model, cache), along)
        check_finite(model, self._items, along.divergence.isfinite())
        columns = (trace.tokens, trace.lengths, along.divergence, along.agreed)
        return [
            Output(text=self._text(row[:length]), tokens=length, divergence=divergence, agreed=agreed)
            for row, length, divergence, agreed in zip(*(column.tolist() for column in columns))
        ]

    def _chooser(self, paused: Paused, keep: bool = False) -> Greedy:
        return Greedy(paused, keep) if self._items[0].sampling is None else Sampled(paused, self._items, keep)

    def _text(self, row: list[int]) -> str:
        return answer_text(self._tokenizer, row, self._ends, self._stop)


def _pause(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **kwargs: Any,
) -> Paused:
    """Takes the place of `generate`'s decoding loop, and only reads the prompt."""
    chunk = max(_SHORTEST_CHUNK, _FORWARD_TOKENS // len(input_ids))
    attachment = getattr(model, "foveate", None)
    if attachment:  # tiles stay whole; only tiles of padded rows are cut, because each row begins elsewhere
        chunk = max(chunk // attachment.prompt_tile, 1) * attachment.prompt_tile
    layers = () if kwargs.get(releases.CACHE) is None else kwargs[releases.CACHE].layers
    anew = any(isinstance(layer, LinearAttentionLayer) for layer in layers)  # Jamba's begin each pass with no state
    length, config = input_ids.shape[1], model.config.get_text_config(decoder=True)
    anew = anew or bool(rotated_otherwise(config, chunk, length))
    if chunk < length and not anew and not (attachment and attachment.whole_prompt):
        generation_config.prefill_chunk_size = chunk
    out = model._prefill(input_ids, generation_config, kwargs)
    cache, pad = releases.returned_cache(out), generation_config.pad_token_id
    return Paused(input_ids, out.logits, cache, logits_processor, stopping_criteria, pad, kwargs)


class _Texts(Prompt):
    """Texts whose continuations are scored teacher-forced: prompts padded on the left, targets after them."""

    timing = TEACHER_FORCED

    def __init__(self, model: PreTrainedModel, tokenizer: Any, items: Sequence[Item]):
        self._items = items
        texts = [text for item in items for text in item.texts]
        pad, device = pad_token(model, tokenizer), model.device
        self._lengths = torch.tensor([len(text.prompt_ids) for text in texts], device=device)
        self._counts = [len(text.target_ids) for text in texts]
        prompt, self._mask = _padded([text.prompt_ids for text in texts], pad, device)
        width, count = prompt.shape[1], max(self._counts)
        targets = [list(text.target_ids) + [pad] * (count - len(text.target_ids)) for text in texts]
        self._target = torch.tensor(targets, device=device)
        self._uneven = any(len(text.prompt_ids) < width for text in texts)
        clock, fed = Clock(device), {"use_cache": True, **self._placed(-width, 0)}
        if isinstance(getattr(model, "foveate", None), Attachment):
            fed[releases.CACHE] = Cache(model, prompt_length=width)
        clock.tick()
        out = model(prompt, logits_to_keep=1, **fed)
        clock.tick()
        self.prefill_ms, self.cache, self._logits = clock.elapsed_ms, releases.returned_cache(out), out.logits[:, -1:]

    def _placed(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Mask and positions of tokens `start` to `end` after the prompts; nothing where no prompt is padded."""
        if not self._uneven:
            return {}
        mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), max(end, 0))], 1)
        positions = self._lengths[:, None] + torch.arange(start, end, device=mask.device)
        return {"attention_mask": mask, "position_ids": positions.clamp_min(0)}

    def _follow(self, model: PreTrainedModel, cache: Any, clock: Clock) -> tuple[list[Output], int]:
        target, steps = self._target, self._target.shape[1] - 1
        clock.tick()
        scores = [_scores(self._logits, target[:, :1])]
        for start in range(0, steps, _TARGET_BLOCK):
            end = min(start + _TARGET_BLOCK, steps)
            fed = {releases.CACHE: cache, "use_cache": True, **self._placed(start, end)}
            scores.append(_scores(model(target[:, start:end], **fed).logits, target[:, start + 1 : end + 1]))
        clock.tick()
        nll, hits = (torch.cat(parts, 1) for parts in zip(*scores))
        rows = list(zip(nll.tolist(), hits.tolist(), self._counts))
        sums = iter([(math.fsum(row[:count]), tuple(hit[:count])) for row, hit, count in rows])
        by_item = [[next(sums) for _ in item.texts] for item in self._items]
        finite = [all(math.isfinite(nll) for nll, _ in of_item) for of_item in by_item]
        check_finite(model, self._items, torch.tensor(finite))
        outputs = [
            Output(option_nlls=tuple(nll for nll, _ in of_item))
            if item.options
            else Output(nll=of_item[0][0], hits=of_item[0][1])
            for item, of_item in zip(self._items, by_item)
        ]
        return outputs, steps


def _scores(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood (nats, float64 [B, T]) of `target` [B, T] under `logits` [B, T, V], and whether it has
    the largest logit (bool [B, T])."""
    chosen = logits.gather(-1, target[..., None])[..., 0].float()
    nll = (torch.logsumexp(logits.float(), dim=-1) - chosen).double()
    return nll, logits.argmax(-1) == target


class _StopAt(StoppingCriteria):
    """Ends a sequence once its text, leading white space apart, contains `stop`."""

    def __init__(self, tokenizer: Any, stop: str, prompt_width: int):
        self._tokenizer, self._stop, self._width = tokenizer, stop, prompt_width

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._width :], skip_special_tokens=True)
        return torch.tensor([self._stop in text.lstrip() for text in texts], device=input_ids.device)
