"""`generate` by drafts that read few keys and passes over all keys that verify them, see :mod:`foveate.runtime.drafts`.

Rows of a batch accept drafts of their own number, so that they hold different numbers of tokens; positions are given to
the model, and no mask. A cycle waits for the device once, to read what was accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode, LogitsProcessorList, StoppingCriteriaList

from foveate.integrations.transformers import releases
from foveate.integrations.transformers.attachment import OfModel
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.layers import CacheLayer
from foveate.integrations.transformers.positions import length_kinds
from foveate.methods import Method, sparse_prompt
from foveate.runtime.drafts import LONGEST, DraftLength, DraftUse, accept_greedy, accept_sampled, obstacle

STANDS_IN = ("generate", "_extract_generation_mode_kwargs")
"""What :class:`Generate` and :class:`ModeArguments` stand in for."""
_OF_SCORES_ALONE = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
)
"""Processors that do not look at the tokens so far, so that all positions go through them at once."""
_RUNS_THE_MODEL = "UnbatchedClassifierFreeGuidanceLogitsProcessor"
_NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass
class Lossless:
    """That an attached model decodes losslessly, and what that has done."""

    length: int | None
    """Tokens of a draft; None: as many as are likely to be accepted."""
    use: DraftUse = field(default_factory=DraftUse)

    @classmethod
    def of(cls, asked: bool | int, methods: Mapping[int, Method], offload: bool) -> Lossless | None:
        """What the argument ``lossless`` of :func:`~foveate.attach` asks for; None: nothing.

        Raises:
            ValueError: for another length, or methods, that cannot draft.
        """
        if asked is False:
            return None
        if asked is not True and not (isinstance(asked, int) and 1 <= asked <= LONGEST):
            raise ValueError(f"lossless must be True, False or a number of tokens from 1 to {LONGEST}, not {asked!r}")
        for layer, method in methods.items():
            reason = obstacle(method) or ("its prompts are sparse" if sparse_prompt(method) else "")
            if reason:
                raise ValueError(
                    f"lossless={asked}: {method.name} cannot draft in layer {layer}, because {reason}; take kascade, "
                    "pages, quest, locks, twilight, omnikv or lessismore"
                )
        if all(method.role.reads_all for method in methods.values()):
            raise ValueError(f"lossless={asked} needs a method that reads few keys, to draft by")
        if offload:
            raise ValueError(f"lossless={asked} and offload=True: a verifying pass reads every key; leave one out")
        return cls(None if asked is True else asked)

    def check_model(self, config: transformers.PreTrainedConfig, unchanged: Mapping[int, str], keeps: bool) -> None:
        """Refuse a model whose tokens cannot be taken back, or whose positions are not a token's number.

        Args:
            unchanged: layers without a method, with the reason.
            keeps: whether the model keeps offsets of positions, as those that read images do.
        """
        if unchanged:
            layer, reason = next(iter(unchanged.items()))
            raise ValueError(f"lossless decoding takes rejected drafts back, and layer {layer} is {reason}")
        if kinds := length_kinds(config):
            raise ValueError(
                f"lossless decoding does not know {min(kinds)} rotary positions, which depend on the length"
            )
        if keeps:
            raise ValueError("lossless decoding does not know the positions of models that read images (M-RoPE)")


class Generate(OfModel):
    """Stands in for the model's ``generate``: drafts and verifies where one token follows the other."""

    def __call__(self, inputs: Tensor | None = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        for name in ("custom_generate", "assistant_model"):
            if kwargs.get(name) is not None:
                raise ValueError(f"lossless decoding drafts for itself: leave {name} out, or attach without lossless")
        own = type(self.model)
        return own.generate(self.model, inputs, generation_config, *args, custom_generate=self._decode, **kwargs)

    @torch.no_grad()
    def _decode(
        self,
        model: transformers.PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: transformers.GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """What `generate` calls to decode, with arguments as of Transformers' ``_sample``."""
        _check(generation_config, logits_processor, synced_gpus)
        lossless = self.attachment.lossless
        model.get_compiled_call(generation_config.compile_config)
        out = model._prefill(input_ids, generation_config, model_kwargs)
        cache = releases.returned_cache(out)
        _check_layers(cache)
        rows = _Rows(input_ids, stopping_criteria, generation_config)
        scored = _Scores(logits_processor, rows)
        scores = scored(out.logits[:, -1:], [[]] * len(rows.tokens))
        first = _drawn(scores[:, 0], generation_config.do_sample)[0]
        rows.take([[token] for token in first.tolist()])
        _stream(streamer, rows, [1])
        passes = _Passes(model, cache)
        length = DraftLength(lossless.length)
        while rows.unfinished:
            number = min(length.next(), rows.most_left() - 1)
            if passes.short():
                number = 0
            taken, tried = self._cycle(passes, rows, scored, number, generation_config.do_sample, lossless.use)
            for accepted in tried:
                length.learn(accepted, min(accepted + 1, number))
            _stream(streamer, rows, taken)
        if streamer is not None:
            streamer.end()
        sequences = rows.sequences()
        whole = passes.finish(sequences)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences, **{releases.CACHE: cache if whole else None})

    def _cycle(
        self, passes: _Passes, rows: _Rows, scored: _Scores, number: int, sampled: bool, use: DraftUse
    ) -> tuple[list[int], list[int]]:
        """Draft ``number`` tokens, verify them and take what was accepted.

        Returns:
            How many tokens each row has taken, and how many drafts were accepted in the rows that went on.
        """
        newest = rows.newest(passes.device)
        drafts, drawn_from = newest.new_empty(len(newest), 0), []
        for n in range(number):
            logits = passes.draft(drafts[:, -1:] if n else newest[:, None], n)
            following, share = _drawn(scored(logits, drafts.tolist() if scored.by_tokens else None)[:, 0], sampled)
            drafts = torch.cat([drafts, following[:, None]], 1)
            drawn_from.append(share)
        logits = passes.verify(torch.cat([newest[:, None], drafts], 1))
        scores = scored(logits, drafts.tolist() if scored.by_tokens else None)
        if not sampled:
            accepted, following = accept_greedy(drafts, scores)
        elif number:
            accepted, following = accept_sampled(drafts, torch.stack(drawn_from, 1), scores)
        else:
            accepted, following = newest.new_zeros(len(newest)), _drawn(scores[:, 0], True)[0]
        best = scores.topk(2, -1).values
        near = (best[..., 0] - best[..., 1]) <= best[..., 0].abs() * 4 * torch.finfo(logits.dtype).eps
        here = torch.cat([drafts, following[:, None]], 1).scatter(1, accepted[:, None], following[:, None])
        at_once = torch.cat([here, accepted[:, None], near.long()], 1).tolist()  # waits for the device
        tokens = [line[: line[number + 1] + 1] for line in at_once]
        went_on = [not done for done in rows.finished]
        taken = rows.take(tokens)
        passes.keep(taken)
        tried = [len(one) - 1 for one, go in zip(tokens, went_on) if go]
        use.cycles += len(tried)
        use.drafted += number * len(tried)
        use.accepted += sum(tried)
        use.ties += sum(sum(line[number + 2 :][:count]) for line, count in zip(at_once, taken))
        return taken, tried


class ModeArguments(OfModel):
    """Stands in for the model's ``_extract_generation_mode_kwargs``, which would drop a streamer and a tokenizer."""

    def __call__(self, custom_generate: Any, *args: Any) -> dict[str, Any]:
        return type(self.model)._extract_generation_mode_kwargs(self.model, None, *args)


class _Rows:
    """The rows of a batch: the tokens of each, and whether it has ended."""

    def __init__(self, ids: Tensor, criteria: StoppingCriteriaList, generation_config: transformers.GenerationConfig):
        self._prompt, self._pad = ids, generation_config._pad_token_tensor
        self.tokens: list[list[int]] = [[] for _ in range(len(ids))]
        self.finished = [False] * len(ids)
        self._stopped_at = [0] * len(ids)
        self._most = min(criteria.max_length or 2**62, 2**62) - ids.shape[1]
        ends = [one.eos_token_id for one in criteria if hasattr(one, "eos_token_id")]
        self._ends = {int(token) for one in ends for token in one.flatten().tolist()}
        plain = (transformers.generation.MaxLengthCriteria, transformers.generation.EosTokenCriteria)
        self._others = [one for one in criteria if not isinstance(one, plain)]

    @property
    def unfinished(self) -> bool:
        """Whether a row goes on."""
        return not all(self.finished)

    def most_left(self) -> int:
        """Tokens that the row that goes on for the longest may still get."""
        return max(self._most - len(one) for one, done in zip(self.tokens, self.finished) if not done)

    def newest(self, device: torch.device) -> Tensor:
        """The last token of each row, int64 ``[B]``."""
        return torch.tensor([one[-1] for one in self.tokens], device=device)

    def take(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Add tokens to the rows that go on, up to where each ends; returns how many each has got."""
        taken = [0 if self.finished[row] else self._take(row, some) for row, some in enumerate(tokens)]
        if not self._ends:
            before = list(map(len, self.tokens))
            self._end_together()
            taken = [count - was + len(one) for count, was, one in zip(taken, before, self.tokens)]
        return taken

    def _take(self, row: int, tokens: Sequence[int]) -> int:
        own = self.tokens[row]
        for count, token in enumerate(tokens, 1):
            own.append(token)
            if token in self._ends or len(own) >= self._most or self._stopped(row):
                self._stopped_at[row] = len(own)
                if self._ends or len(own) >= self._most:
                    self.finished[row] = True
                    return count
        return len(tokens)

    def _stopped(self, row: int) -> bool:
        if not self._others or self._stopped_at[row]:
            return False
        ids = self.prefix(row, [])
        return any(bool(one(ids, None)[0]) for one in self._others)

    def _end_together(self) -> None:
        """Without a token that ends a row, `generate` goes on in all rows until each has stopped once."""
        if all(self._stopped_at) and all(len(one) >= max(self._stopped_at) for one in self.tokens):
            self.finished = [True] * len(self.tokens)
            self.tokens = [one[: max(self._stopped_at)] for one in self.tokens]

    def prefix(self, row: int, more: Sequence[int]) -> Tensor:
        """The ids of a row so far and some more, int64 ``[1, n]``."""
        ids = self._prompt[row : row + 1]
        return torch.cat([ids, torch.tensor([[*self.tokens[row], *more]], dtype=ids.dtype, device=ids.device)], 1)

    def sequences(self) -> Tensor:
        """Prompts and tokens, int64 ``[B, n]``; rows that ended early go on with padding."""
        longest = max(map(len, self.tokens))
        pad = 0 if self._pad is None else int(self._pad)
        ids = torch.tensor([[*one, *[pad] * (longest - len(one))] for one in self.tokens], device=self._prompt.device)
        return torch.cat([self._prompt, ids.to(self._prompt.dtype)], 1)


class _Scores:
    """Logits after the processors and warpers of a call of `generate`, in fp32 as there."""

    def __init__(self, processors: LogitsProcessorList, rows: _Rows):
        self._processors, self._rows = processors, rows
        self.by_tokens = any(type(one).__name__ not in _OF_SCORES_ALONE for one in processors)
        """Whether scores depend on the tokens so far."""

    def __call__(self, logits: Tensor, drafts: Sequence[Sequence[int]] | None) -> Tensor:
        """``[B, n, V]`` of tokens that follow the last one, or (the last n - 1) drafts after it."""
        logits = logits.float()
        if not self._processors:
            return logits
        if not self.by_tokens:
            flat = logits.flatten(0, 1)
            return self._processors(torch.zeros(len(flat), 1, dtype=torch.long, device=flat.device), flat).view_as(
                logits
            )
        lines = []
        for row, (own, one) in enumerate(zip(drafts, logits)):
            for n in range(len(one)):
                before = own[: len(own) - len(one) + 1 + n]
                prefix = self._rows.prefix(row, before).expand(len(logits), -1)  # some processors know the batch
                lines.append(self._processors(prefix, one[n].repeat(len(logits), 1))[row])
        return torch.stack(lines).view_as(logits)


class _Passes:
    """Decoding passes of the model over its cache, whose rows hold different numbers of tokens."""

    def __init__(self, model: transformers.PreTrainedModel, cache: Cache):
        self._model, self._cache, self.device = model, cache, model.device
        self._layers = cache.layers
        self._positioned = releases.takes(model, "position_ids")
        self._drafted = self._verified = 0

    def short(self) -> bool:
        """Whether the context is so short that a step by the method is no faster than a dense one."""
        return all(
            layer.decodes_densely(layer.store.used + 1)
            for layer in self._layers
            if layer.method.sparse_from_tokens is not None
        )

    def draft(self, ids: Tensor, number: int) -> Tensor:
        """Logits ``[B, 1, V]`` after one token of each row, which is number ``number`` of its draft."""
        self._drafted += 1
        with self._pass(draft=number):
            return self._run(ids)

    def verify(self, ids: Tensor) -> Tensor:
        """Logits ``[B, n, V]`` after each of n tokens, which read all keys; what was drafted is taken out before."""
        if self._drafted:
            self.keep_none(self._drafted)
        self._drafted, self._verified = 0, ids.shape[1]
        with self._pass(verifying=True):
            return self._run(ids)

    def keep(self, kept: Sequence[int]) -> None:
        """Keep the first so many tokens of the last verifying pass, of each row."""
        if min(kept) < self._verified:
            with self._cache.phase.change():
                for layer in self._layers:
                    layer.keep_newest(kept, self._verified)

    def keep_none(self, of: int) -> None:
        """Take the last tokens out of every row."""
        with self._cache.phase.change():
            for layer in self._layers:
                layer.keep_newest([0] * layer.store.batch_size, of)

    def finish(self, sequences: Tensor) -> bool:
        """Leave the cache as `generate` leaves it, without the last token; False where rows hold different tokens."""
        lengths = {tuple(layer.store.rows["counts"]) for layer in self._layers}
        prompt = self._layers[0].store.rows["prompt"]
        decoded = {count - before for one in lengths for count, before in zip(one, prompt)}
        if len(decoded) > 1:
            self._cache.phase.changing = True  # rows end at different columns, which no later turn could go on from
            return False
        seen = self._cache.get_seq_length()
        self._cache.ids.write(0, sequences[:, :seen])
        return True

    @contextmanager
    def _pass(self, draft: int | None = None, verifying: bool = False) -> Iterator[None]:
        phase = self._cache.phase
        with phase.change(), phase.step():
            phase.draft, phase.verifying = draft, verifying
            try:
                yield
            finally:
                phase.draft, phase.verifying = None, False

    def _run(self, ids: Tensor) -> Tensor:
        given = {releases.CACHE: self._cache, "use_cache": True}
        if self._positioned:
            first = torch.tensor(self._layers[0].store.lengths, device=ids.device)
            given["position_ids"] = first[:, None] + torch.arange(ids.shape[1], device=ids.device)
        return self._model(ids, return_dict=True, **given).logits


def _check(
    generation_config: transformers.GenerationConfig, processors: LogitsProcessorList, synced_gpus: bool
) -> None:
    """Refuse, before the prompt is read, what lossless decoding does not do."""
    mode = generation_config.get_generation_mode()
    if mode not in _MODES:
        raise ValueError(f"lossless decoding is greedy or sampled, not {mode.value}: attach without lossless for it")
    if generation_config.use_cache is False:
        raise ValueError("lossless decoding needs its cache: leave use_cache=False out")
    if wanted := [name for name in _NOT_RETURNED if getattr(generation_config, name, None)]:
        raise ValueError(f"lossless decoding does not return {wanted[0]}: leave it out, or attach without lossless")
    if any(type(one).__name__ == _RUNS_THE_MODEL for one in processors):
        raise ValueError("lossless decoding does not run guidance, which calls the model for each token")
    if generation_config.is_assistant:
        raise ValueError("a model that decodes losslessly drafts for itself, not for another: attach without lossless")
    if synced_gpus:
        raise ValueError("lossless decoding does not run with synced_gpus, where processes decode in step")


def _check_layers(cache: Cache) -> None:
    other = next((layer for layer in cache.layers if type(layer) is not CacheLayer), None)
    if other is not None:
        raise ValueError(f"lossless decoding takes tokens back, which a {type(other).__name__} cannot")


def _drawn(scores: Tensor, sampled: bool) -> tuple[Tensor, Tensor | None]:
    """A token of each row, int64 ``[B]``, and the probabilities ``[B, V]`` that it was drawn from if it is sampled."""
    if not sampled:
        return scores.argmax(-1), None
    share = scores.softmax(-1)
    return torch.multinomial(share, 1)[:, 0], share


def _stream(streamer: Any, rows: _Rows, taken: Sequence[int]) -> None:
    if streamer is not None and taken[0]:
        streamer.put(torch.tensor(rows.tokens[0][-taken[0] :]))
