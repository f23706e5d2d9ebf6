"""Asking a model a batch of items, for answers or teacher-forced, with the time of prefill and decode.

A batch is asked in two steps: the prompt is read, and what follows is generated or scored. So one reading can serve
several methods, each of which goes on from it exactly as if it had read the prompt alone, or along the answers that
another has given.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from foveate.evaluation import data
from foveate.evaluation.model_folder import read_config, weight_files
from foveate.evaluation.tasks.base import Item, Output
from foveate.integrations.transformers import releases
from foveate.results.errors import DataError, UserError, unknown

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
GENERATE, TEACHER_FORCED, SHARED = "generate", "teacher-forced", ", shared prompt"
"""How a batch was timed, and what is added where its prompt was read for several methods at once."""
ALONG = "tokens given, decode not timed"
"""The same of a batch that went along answers given before."""
_FORWARD_TOKENS, _SHORTEST_CHUNK = 1 << 18, 512
"""Tokens of a forward pass over prompts: more are read in chunks, whose activations fit beside a large cache."""
_TOKENIZER_FILES = {"tokenizer.json": "model", "tokenizer_config.json": None}
"""Of a tokenizer, and the object that each has to hold."""
_TARGET_BLOCK = 64  # teacher-forced tokens a call: bounds the logits, [B, 64, vocabulary]


@dataclasses.dataclass
class Batch:
    """A batch's outputs, one per item, and its times (ms). `cache` keeps the model's cache alive for its statistics."""

    outputs: list[Output]
    prefill_ms: float | None
    decode_ms_per_token: float | None
    decode_steps: int
    timing: str
    cache: Any


@dataclasses.dataclass(frozen=True)
class Trace:
    """Answers to a batch of items, and the distributions that they were chosen from."""

    tokens: torch.Tensor
    """int64 [B, T], padded behind a row's end."""
    lengths: torch.Tensor
    """int64 [B]: tokens of each answer, its end among them."""
    logits: list[torch.Tensor]
    """T of them, [B, vocabulary]."""


def choose_device(device: str) -> str:
    """ "cpu" or "cuda" from the user's choice; "auto" is the GPU if there is one. Raises `UserError`."""
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; use --device cpu or auto")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def choose_dtype(dtype: str, folder: Path, device: str) -> str:
    """A torch dtype's name; "auto" is the checkpoint's own on a GPU and float32 on a CPU. Raises `UserError`."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    config = read_config(folder)
    config = config.get("text_config", config)
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Raises `UserError` if there is none, or one of its files is damaged."""
    read_config(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # KeyError, TypeError and what tokenizers raises: a damaged file leads to any of them
        for name, needed in _TOKENIZER_FILES.items():
            if (Path(folder) / name).exists():
                _check_object(Path(folder) / name, needed)
        raise UserError(f"{folder}: no usable tokenizer in the model folder ({_first_line(error)})") from None


def load_model(folder: Path, dtype: str, device: str) -> PreTrainedModel:
    """The causal language model of a folder, in eval mode, its generation defaults cleared to plain greedy decoding.

    Raises `UserError` if Transformers cannot load it as such, a file of weights is damaged, or the weights are not
    those of the configuration: some are missing (tied ones need not be there), unexpected or of another shape.
    """
    read_config(folder)
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: a damaged file of weights ({_first_line(error)})") from None
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder}: not loadable as a causal language model ({_first_line(error)})") from None
    _check_loaded(folder, loaded)
    ends = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=ends, do_sample=False)
    return model.to(device).eval()


def _check_loaded(folder: Path, loaded: Mapping[str, Any]) -> None:
    """Refuses weights that Transformers would make up, leave out or replace without a word."""
    faults = []
    for kind, what in (("missing_keys", "missing from the files"), ("unexpected_keys", "unknown to the model")):
        if names := sorted(loaded[kind]):
            faults.append(f"{len(names)} {what}, such as {names[0]}")
    if others := sorted(loaded["mismatched_keys"]):
        name, there, wanted = others[0]
        faults.append(f"{len(others)} of another shape, such as {name}, {list(there)} and not {list(wanted)}")
    if faults:
        raise UserError(f"{folder}: the weights are not those of config.json: {'; '.join(faults)}")


def _check_object(path: Path, needed: str | None) -> None:
    """Raises `DataError` if a file is no JSON object, or has no object `needed`."""
    value = data.read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected an object")
    if needed is not None:
        data.field(value, needed, dict, str(path))


def run_batch(model: PreTrainedModel, tokenizer: Any, items: Sequence[Item]) -> Batch:
    """Puts items to a model: answers them, or scores their targets or options if they have them."""
    return read_prompt(model, tokenizer, items).go_on(model)


@torch.inference_mode()
def read_prompt(model: PreTrainedModel, tokenizer: Any, items: Sequence[Item]) -> Prompt:
    """The first half of :func:`run_batch`."""
    return (_Texts if items[0].texts else _Questions)(model, tokenizer, items)


def pad_token(model: PreTrainedModel, tokenizer: Any) -> int:
    """The id to pad with: the tokenizer's, else an end token, else 0."""
    ends = _as_list(model.generation_config.eos_token_id)
    return next(token for token in (tokenizer.pad_token_id, *ends, 0) if token is not None)


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

    @torch.inference_mode()
    def go_on(self, model: PreTrainedModel, shared: bool = False, along: Trace | None = None) -> Batch:
        """What follows the prompts: the model's own answers, or what it makes of those in `along`.

        `shared`: `methods.Together` has read the prompts, and one of its methods is attached now. That is possible for
        each of them, one after the other; otherwise once. Raises `UserError` for predictions that are not finite.
        """
        cache = self.cache.branch(model) if shared else self.cache
        clock = _Clock(model.device)
        if along is None:
            outputs, steps = self._follow(model, cache, clock)
        else:
            outputs, steps = self._compare(model, cache, along), 0
        return Batch(
            outputs=outputs,
            prefill_ms=None if shared else self.prefill_ms,
            decode_ms_per_token=clock.elapsed_ms / steps if steps else None,
            decode_steps=steps if along is None else along.tokens.shape[1] - 1,
            timing=(self.timing if along is None else ALONG) + (SHARED if shared else ""),
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

    def _follow(self, model: PreTrainedModel, cache: Any, clock: _Clock) -> tuple[list[Output], int]:
        """Outputs and the number of decode steps; the clock ticks when the first step begins and when the last ends."""
        raise NotImplementedError

    def _compare(self, model: PreTrainedModel, cache: Any, trace: Trace) -> list[Output]:
        """Outputs along a trace."""
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
        self._ends = _as_list(model.generation_config.eos_token_id)
        self._pad = pad_token(model, tokenizer)
        cuts = [item.context_tokens for item in items]
        contexts = [item.prompt_ids[: cut or None] for item, cut in zip(items, cuts)]
        ids, mask = _padded(contexts, self._pad, model.device)
        self._context = ids, mask
        self._asked: tuple[torch.Tensor, torch.Tensor] | None = None
        if any(cuts):  # columns of both turns, each padded on its left
            more = _padded([item.prompt_ids[cut:] for item, cut in zip(items, cuts)], self._pad, model.device)
            self._asked = torch.cat([ids, more[0]], 1), torch.cat([mask, more[1]], 1)
        self._width = (self._context if self._asked is None else self._asked)[0].shape[1]
        clock = _Clock(model.device)
        clock.tick()
        self._paused = self._read(model, *self._context)
        clock.tick()
        self.prefill_ms, self.cache = clock.elapsed_ms, self._paused.cache

    def _read(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: Any = None) -> _Paused:
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

    def _ask(self, model: PreTrainedModel, cache: Any) -> _Paused:
        """Before the first token of the answers: a question that comes after the context is read now, on `cache`."""
        if self._asked is None:
            return dataclasses.replace(self._paused, cache=cache)
        return self._read(model, *self._asked, cache)

    @torch.inference_mode()
    def trace(self, model: PreTrainedModel, shared: bool = False) -> Trace:
        paused = self._ask(model, self.cache.branch(model) if shared else self.cache)
        chooser = self._chooser(paused, keep=True)
        ids = _decode(model, paused, chooser)
        _check_finite(model, self._items, chooser.finite)
        return Trace(ids[:, self._width :], chooser.lengths, chooser.logits)

    @torch.inference_mode()
    def divergence(self, model: PreTrainedModel, trace: Trace, shared: bool = False) -> torch.Tensor:
        paused = self._ask(model, self.cache.branch(model) if shared else self.cache)
        of_prompt, steps = _kl(trace.logits[0], paused.logits[:, -1]), trace.tokens.shape[1] - 1
        if not steps:
            return of_prompt
        ids, kwargs = torch.cat([paused.ids, trace.tokens[:, :steps]], 1), dict(paused.kwargs)
        out = CausalLMOutputWithPast(logits=paused.logits, **{releases.CACHE: paused.cache})
        kwargs = model._update_model_kwargs_for_generation(out, kwargs, num_new_tokens=steps) | {
            "logits_to_keep": steps
        }
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=steps, **kwargs)
        with model._optimize_model_for_decode():
            out = model(**inputs, return_dict=True)
        divergence = torch.stack([_kl(*pair) for pair in zip(trace.logits[1:], out.logits.unbind(1), strict=True)], 1)
        outside = torch.arange(1, steps + 1, device=ids.device) >= trace.lengths[:, None]
        return (of_prompt + divergence.masked_fill(outside, 0.0).sum(1)) / trace.lengths

    def _follow(self, model: PreTrainedModel, cache: Any, clock: _Clock) -> tuple[list[Output], int]:
        paused = self._ask(model, cache)
        chooser = self._chooser(paused)
        rows = _decode(model, paused, chooser, clock)[:, self._width :].tolist()
        _check_finite(model, self._items, chooser.finite)
        outputs = [Output(text=self._text(row), tokens=n) for row, n in zip(rows, chooser.lengths.tolist())]
        return outputs, len(rows[0]) - 1

    def _compare(self, model: PreTrainedModel, cache: Any, trace: Trace) -> list[Output]:
        along = _Along(trace)
        _decode(model, self._ask(model, cache), along)
        _check_finite(model, self._items, along.divergence.isfinite())
        columns = (trace.tokens, trace.lengths, along.divergence, along.agreed)
        return [
            Output(text=self._text(row[:length]), tokens=length, divergence=divergence, agreed=agreed)
            for row, length, divergence, agreed in zip(*(column.tolist() for column in columns))
        ]

    def _chooser(self, paused: _Paused, keep: bool = False) -> _Greedy:
        if self._items[0].sampling is None:
            return _Greedy(paused, keep)
        return _Sampled(paused, self._items, keep)

    def _text(self, row: list[int]) -> str:
        return _text(self._tokenizer, row, self._ends, self._stop)


@dataclasses.dataclass(frozen=True)
class _Paused:
    """A call of `generate` before its first token: the prompt's ids and logits, and what was prepared for decoding."""

    ids: torch.Tensor
    logits: torch.Tensor
    cache: Any
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    pad: int
    kwargs: dict[str, Any]


def _pause(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **kwargs: Any,
) -> _Paused:
    """Takes the place of `generate`'s decoding loop, and only reads the prompt."""
    chunk = max(_SHORTEST_CHUNK, _FORWARD_TOKENS // len(input_ids))
    attachment = getattr(model, "foveate", None)
    if attachment:  # tiles stay whole, but for those of padded rows, which begin elsewhere in each
        chunk = max(chunk // attachment.prompt_tile, 1) * attachment.prompt_tile
    if chunk < input_ids.shape[1] and not (attachment and attachment.whole_prompt):
        generation_config.prefill_chunk_size = chunk
    out = model._prefill(input_ids, generation_config, kwargs)
    cache, pad = releases.returned_cache(out), generation_config.pad_token_id
    return _Paused(input_ids, out.logits, cache, logits_processor, stopping_criteria, pad, kwargs)


class _Greedy:
    """`generate`'s greedy choice, step for step; `keep` the logits that it was made from."""

    def __init__(self, paused: _Paused, keep: bool = False):
        self._paused, self._has_ends = paused, any(hasattr(criterion, "eos_token_id") for criterion in paused.criteria)
        self._unfinished = torch.ones_like(paused.ids[:, 0])
        self.lengths = torch.zeros_like(self._unfinished)
        self.finite = torch.ones_like(self._unfinished, dtype=torch.bool)
        """Whether the logits of each answer had a finite maximum; stays on the device."""
        self.logits: list[torch.Tensor] | None = [] if keep else None

    def choose(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The next token, [B], of the ids so far, [B, n], and the logits, [B, vocabulary]."""
        if self.logits is not None:
            self.logits.append(logits)
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


class _Sampled(_Greedy):
    """Tokens drawn as the items' `sampling` says.

    A number of [0, 1) for every token of every item, drawn beforehand, is looked up in the cumulated probabilities, in
    the order of the vocabulary: distributions that differ little give the same token but for a small share of numbers.
    """

    def __init__(self, paused: _Paused, items: Sequence[Item], keep: bool = False):
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
        return drawn.clamp_max(scores.shape[-1] - 1)  # NaN is behind all


class _Along:
    """The choices of a trace, and how the logits found on the way compare with its own."""

    def __init__(self, trace: Trace):
        self._trace, self._step = trace, 0
        self.divergence = trace.lengths.double() * 0.0
        self.agreed = torch.zeros_like(trace.lengths)

    def choose(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        inside, theirs = self._step < self._trace.lengths, self._trace.logits[self._step]
        self.agreed += (logits.argmax(-1) == theirs.argmax(-1)) & inside
        self.divergence += _kl(theirs, logits).masked_fill(~inside, 0.0)
        self._step += 1
        return self._trace.tokens[:, self._step - 1]

    def ended(self, ids: torch.Tensor) -> bool:
        return self._step == self._trace.tokens.shape[1]


def _check_finite(model: PreTrainedModel, items: Sequence[Item], finite: torch.Tensor) -> None:
    """Refuses NaN and infinite predictions, of which greedy answers are made without a word; `finite`: bool [B]."""
    strange = [item.id for item, fine in zip(items, finite.tolist()) if not fine]
    if strange:
        method = getattr(getattr(model, "foveate", None), "method", None)
        who = f"method '{method.spec}', " if method else ""
        raise UserError(
            f"{who}item {strange[0]}: the predictions of the model are not finite (NaN or infinite); is a weight so, "
            f"or does {str(model.dtype).removeprefix('torch.')} not hold its activations?"
        )


def _kl(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """KL divergence (nats) of distributions from others, by their logits [B, vocabulary]: float64 [B]."""
    theirs, ours = theirs.float().log_softmax(-1), ours.float().log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1).clamp_min(0.0).double()  # below 0 by rounding alone


def _decode(
    model: PreTrainedModel, paused: _Paused, chooser: _Greedy | _Along, clock: _Clock | None = None
) -> torch.Tensor:
    """Ids [B, prompt and answer]: `generate`'s decoding loop, step for step, from a cache that holds the prompt."""
    ids, kwargs = paused.ids, dict(paused.kwargs)
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
            out = model(**model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs), return_dict=True)


class _Texts(Prompt):
    """Texts with their continuations, which are scored teacher-forced: prompts padded on the left, targets behind."""

    timing = TEACHER_FORCED

    def __init__(self, model: PreTrainedModel, tokenizer: Any, items: Sequence[Item]):
        self._items = items
        texts = [text for item in items for text in item.texts]
        pad, device = pad_token(model, tokenizer), model.device
        self._lengths = torch.tensor([len(text.prompt_ids) for text in texts], device=device)
        self._counts = [len(text.target_ids) for text in texts]
        width, count = max(len(text.prompt_ids) for text in texts), max(self._counts)
        rows = [[pad] * (width - len(text.prompt_ids)) + list(text.prompt_ids) for text in texts]
        targets = [list(text.target_ids) + [pad] * (count - len(text.target_ids)) for text in texts]
        self._target = torch.tensor(targets, device=device)
        self._mask = torch.arange(width, device=device) >= width - self._lengths[:, None]
        self._padded = any(len(text.prompt_ids) < width for text in texts)
        prompt = torch.tensor(rows, device=device)
        clock = _Clock(device)
        clock.tick()
        out = model(prompt, use_cache=True, logits_to_keep=1, **self._placed(-width, 0))
        clock.tick()
        self.prefill_ms, self.cache, self._logits = clock.elapsed_ms, releases.returned_cache(out), out.logits[:, -1:]

    def _placed(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Mask and positions of tokens `start` to `end` behind the prompts; nothing where no prompt is padded."""
        if not self._padded:
            return {}
        mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), max(end, 0))], 1)
        positions = self._lengths[:, None] + torch.arange(start, end, device=mask.device)
        return {"attention_mask": mask.long(), "position_ids": positions.clamp_min(0)}

    def _follow(self, model: PreTrainedModel, cache: Any, clock: _Clock) -> tuple[list[Output], int]:
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
        _check_finite(model, self._items, torch.tensor(finite))
        return [_scored(item, of_item) for item, of_item in zip(self._items, by_item)], steps


def _scored(item: Item, texts: Sequence[tuple[float, tuple[bool, ...]]]) -> Output:
    """The output of an item by the likelihood (nats) and hits of each of its texts."""
    if item.options:
        return Output(option_nlls=tuple(nll for nll, _ in texts))
    return Output(nll=texts[0][0], hits=texts[0][1])


def _scores(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood (nats, float64 [B, T]) of `target` [B, T] under `logits` [B, T, V], and whether it has
    the largest logit (bool [B, T])."""
    chosen = logits.gather(-1, target[..., None])[..., 0].float()
    nll = (torch.logsumexp(logits.float(), dim=-1) - chosen).double()
    return nll, logits.argmax(-1) == target


class _Clock:
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


class _StopAt(StoppingCriteria):
    """Ends a sequence once its text, leading white space apart, contains `stop`."""

    def __init__(self, tokenizer: Any, stop: str, prompt_width: int):
        self._tokenizer, self._stop, self._width = tokenizer, stop, prompt_width

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._width :], skip_special_tokens=True)
        return torch.tensor([self._stop in text.lstrip() for text in texts], device=input_ids.device)


def _text(tokenizer: Any, ids: list[int], ends: Sequence[int], stop: str) -> str:
    """The answer: what comes before the first end token and the stop string, without surrounding white space."""
    length = next((n for n, token in enumerate(ids) if token in ends), len(ids))
    text = tokenizer.decode(ids[:length], skip_special_tokens=True).strip()
    return text.split(stop, 1)[0].rstrip() if stop else text


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
