"""`generate` with drafts that read few keys, verified by passes over all keys; see :mod:`foveate.runtime.drafts`.

A row of a batch accepts the drafts that equal the tokens of dense attention, so rows come to hold different numbers of
tokens. The model gets positions and no mask. A cycle waits for the device once, to read how many drafts were accepted,
and more often if logits processors depend on the order of the tokens so far.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode, LogitsProcessorList, StoppingCriteriaList

from foveate.integrations.transformers import releases
from foveate.integrations.transformers.attachment import OfModel
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.lossless_passes import Passes
from foveate.integrations.transformers.positions import length_kinds
from foveate.integrations.transformers.support import cache_layers
from foveate.methods import Method, sparse_prompt
from foveate.runtime.drafts import LONGEST, DraftLength, DraftUse, accept_greedy, accept_sampled, obstacle
from foveate.state.step_plan import on_device

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
"""Processors that do not look at the tokens so far."""
_OF_ANY_ORDER = ("RepetitionPenaltyLogitsProcessor",)
"""Processors that ask which tokens a row holds, and not where or how often."""
_OF_LENGTH = {"MinLengthLogitsProcessor": "min_length", "MinNewTokensLengthLogitsProcessor": "min_new_tokens"}
"""Processors that only compare a row's number of tokens with the attribute of this name."""
_ONE_BY_ONE = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance, which calls the model for each token",
    "SynthIDTextWatermarkLogitsProcessor": "SynthID's watermark, which counts the tokens that it is given",
}
"""Processors that must see each token of the answer once, in order."""
_PLAIN = (transformers.generation.MaxLengthCriteria, transformers.generation.EosTokenCriteria)
_PASSED = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "inputs_embeds", releases.CACHE)
"""Arguments of `generate` that decoding passes do not need, or get."""
_NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass
class Lossless:
    """That an attached model decodes losslessly, and what that has done."""

    length: int | None
    """Tokens of a draft; None: :class:`DraftLength` chooses the length by time."""
    use: DraftUse = field(default_factory=DraftUse)
    before: Any = None
    """What the model itself had as ``generate``; None: nothing."""

    def __getstate__(self) -> dict[str, Any]:  # copies and pickles count anew
        return self.__dict__ | {"use": DraftUse()}

    @classmethod
    def of(cls, asked: bool | int, methods: Mapping[int, Method], fetching: str) -> Lossless | None:
        """What the argument ``lossless`` of :func:`~foveate.attach` asks for; None: nothing.

        Args:
            fetching: the option by which steps fetch the keys that they read; empty: they view all keys.

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
                    "pages, quest, locks, omnikv or lessismore"
                )
        if all(method.role.reads_all for method in methods.values()):
            raise ValueError(f"lossless={asked} needs a method that reads few keys, to draft by")
        if fetching:
            raise ValueError(f"lossless={asked} and {fetching}: a verifying pass reads every key; leave one out")
        return cls(None if asked is True else asked)

    def check_model(self, config: transformers.PreTrainedConfig, unchanged: Mapping[int, str], keeps: bool) -> None:
        """Refuse a model whose tokens cannot be taken back, or whose positions differ from the tokens' numbers.

        Args:
            unchanged: layers without a method, with the reason.
            keeps: whether the model keeps offsets of positions, as models that read images do.
        """
        recurrent = [n for n, one in enumerate(cache_layers(config)) if isinstance(one, LinearAttentionLayer)]
        if other := unchanged or dict.fromkeys(recurrent, "recurrent"):
            layer, reason = next(iter(other.items()))
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
        """The function that `generate` calls to decode. It takes the arguments of Transformers' ``_sample``."""
        cache, lossless = model_kwargs.get(releases.CACHE), self.attachment.lossless
        try:
            _check(generation_config, logits_processor, synced_gpus, model_kwargs)
        except ValueError:
            if isinstance(cache, Cache):
                cache.cancel()
            raise
        model.get_compiled_call(generation_config.compile_config)
        out = model._prefill(input_ids, generation_config, model_kwargs)
        cache = releases.returned_cache(out)
        rows = _Rows(input_ids, stopping_criteria, generation_config)
        scored = _Scores(logits_processor, rows)
        scores = scored(out.logits[:, -1:].to(input_ids.device), input_ids.new_empty(len(input_ids), 0))
        first = _drawn(scores[:, 0], generation_config.do_sample)[0]
        rows.take([[token] for token in first.tolist()])
        _stream(streamer, rows, [1])
        passes = Passes(model, self.attachment, cache, model_kwargs.get("position_ids"), input_ids.device)
        length = DraftLength(lossless.length)
        with model._optimize_model_for_decode(), passes.whole():
            while rows.unfinished:
                number = length.next(0 if passes.short() else rows.most_left() - 1)
                taken, accepted = self._cycle(passes, rows, scored, number, generation_config.do_sample, lossless.use)
                length.learn(sum(accepted), sum(min(one + 1, number) for one in accepted), passes.steady())
                _stream(streamer, rows, taken)
        if streamer is not None:
            streamer.end()
        sequences = rows.sequences()
        whole = passes.finish(sequences[:, input_ids.shape[1] :])
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences, **{releases.CACHE: cache if whole else None})

    def _cycle(
        self, passes: Passes, rows: _Rows, scored: _Scores, number: int, sampled: bool, use: DraftUse
    ) -> tuple[list[int], list[int]]:
        """Draft ``number`` tokens, verify them and take what was accepted.

        Returns:
            How many tokens each row has taken, and how many drafts were accepted in each row that had not ended.
        """
        newest = rows.newest(passes.device)
        drafts, drawn_from = newest.new_empty(len(newest), 0), []
        for n in range(number):
            logits = passes.draft(drafts[:, -1:] if n else newest[:, None], n)
            following, share = _drawn(scored(logits, drafts)[:, 0], sampled)
            drafts = torch.cat([drafts, following[:, None]], 1)
            drawn_from.append(share)
        logits = passes.verify(torch.cat([newest[:, None], drafts], 1))
        scores = scored(logits, drafts)
        if not sampled:
            accepted, following = accept_greedy(drafts, scores)
        elif number:
            accepted, following = accept_sampled(drafts, torch.stack(drawn_from, 1), scores)
        else:
            accepted, following = newest.new_zeros(len(newest)), _drawn(scores[:, 0], True)[0]
        verifies = number and not sampled  # a pass over one token is what dense decoding runs
        near = _ties(scores, logits.dtype) if verifies else scores.new_zeros(scores.shape[:2])
        here = torch.cat([drafts, following[:, None]], 1).scatter(1, accepted[:, None], following[:, None])
        at_once = torch.cat([here, accepted[:, None], near.long()], 1).tolist()  # waits for the device
        tokens = [line[: line[number + 1] + 1] for line in at_once]
        went_on = [not done for done in rows.finished]
        taken = rows.take(tokens)
        passes.keep(taken)
        written = [max(count, 0) for count in taken]  # rows that end together are cut
        accepted = [len(one) - 1 for one, goes_on in zip(tokens, went_on) if goes_on]
        use.cycles += len(accepted)
        use.drafted += number * len(accepted)
        use.accepted += sum(min(len(one) - 1, count) for one, count in zip(tokens, written))
        use.ties += sum(sum(line[number + 2 :][:count]) for line, count in zip(at_once, written))
        return written, accepted


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
        ends = [one.eos_token_id for one in criteria if type(one) is transformers.generation.EosTokenCriteria]
        self.ends = {int(token) for one in ends for token in one.flatten().tolist()}
        self._pads = any(hasattr(one, "eos_token_id") for one in criteria)
        """Whether rows that have stopped are padded; else they go on until all have stopped."""
        self._others = [one for one in criteria if type(one) not in _PLAIN]
        self._sent: tuple[int, Tensor] | None = None
        """The number of tokens when :meth:`before` last sent the answers to the device, and the answers there."""

    @property
    def unfinished(self) -> bool:
        """Whether a row goes on."""
        return not all(self.finished)

    def most_left(self) -> int:
        """Tokens that the row that goes on for the longest may still get."""
        return max(self._most - len(one) for one, done in zip(self.tokens, self.finished) if not done)

    def newest(self, device: torch.device) -> Tensor:
        """The last token of each row, int64 ``[B]``."""
        return on_device(tuple(one[-1] for one in self.tokens), device)

    def take(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Add tokens to the rows that go on, up to where each ends; returns how many each has got."""
        taken = [0 if self.finished[row] else self._take(row, some) for row, some in enumerate(tokens)]
        if not self._pads:
            before = list(map(len, self.tokens))
            self._end_together()
            taken = [count - was + len(one) for count, was, one in zip(taken, before, self.tokens)]
        return taken

    def _take(self, row: int, tokens: Sequence[int]) -> int:
        own = self.tokens[row]
        for count, token in enumerate(tokens, 1):
            own.append(token)
            if token in self.ends or len(own) >= self._most or self._stopped(row):
                self._stopped_at[row] = self._stopped_at[row] or len(own)
                if self._pads or len(own) >= self._most:
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

    def lengths(self) -> list[int]:
        """Tokens of each row so far, prompt and padding included."""
        return [self._prompt.shape[1] + len(one) for one in self.tokens]

    def before(self, drafts: Tensor, number: int) -> Tensor:
        """The tokens before each of ``number`` positions, int64 ``[B, number, n]``.

        The first position follows the newest token or one of the drafts ``[B, k]``, and the last position follows the
        last draft. Shorter lines repeat the first token of the row's answer.
        """
        count = sum(map(len, self.tokens))
        if self._sent is None or self._sent[0] != count:
            longest = max(map(len, self.tokens))
            lines = [[*one, *one[:1] * (longest - len(one))] for one in self.tokens]
            self._sent = count, torch.tensor(lines, dtype=torch.long).view(len(lines), -1).to(self._prompt.device)
        own, tried = self._sent[1], drafts.shape[1]
        places = torch.arange(tried, device=drafts.device)
        seen = places < torch.arange(tried - number + 1, tried + 1, device=drafts.device)[:, None]
        tokens = drafts[:, None].where(seen, own[:, None, :1]) if tried else drafts[:, None].expand(-1, number, -1)
        ids = torch.cat([self._prompt, own], 1)
        return torch.cat([ids[:, None].expand(-1, number, -1), tokens], 2)

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
        names, known = {type(one).__name__ for one in processors}, {*_OF_SCORES_ALONE, *_OF_ANY_ORDER, *_OF_LENGTH}
        self._at_once = names <= known
        """Whether all positions go through the processors together."""
        self._by_tokens = not names.isdisjoint(_OF_ANY_ORDER)

    def __call__(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """``[B, n, V]`` of tokens that follow the last one, or (the last n - 1) drafts ``[B, k]`` after it."""
        logits = logits.float()
        if not self._processors:
            return logits
        if not self._at_once:
            return self._one_by_one(logits, drafts.tolist())
        (rows, number), scores = logits.shape[:2], logits.flatten(0, 1)
        ids = self._rows.before(drafts, number).flatten(0, 1) if self._by_tokens else None
        for one in self._processors:
            name = type(one).__name__
            if name in _OF_ANY_ORDER:
                scores = _of_positions(one, number)(ids, scores)
            elif name in _OF_LENGTH:
                skipped = getattr(one, "prompt_length_to_skip", 0)
                first = drafts.shape[1] - number + 1 - skipped
                few = [
                    length + first + n < getattr(one, _OF_LENGTH[name])
                    for length in self._rows.lengths()
                    for n in range(number)
                ]
                if any(few):
                    held_back = one(torch.zeros(len(scores), skipped, dtype=torch.long, device=scores.device), scores)
                    scores = held_back.where(torch.tensor(few, device=scores.device)[:, None], scores)
            else:
                scores = one(torch.zeros(len(scores), 1, dtype=torch.long, device=scores.device), scores)
        return scores.view(rows, number, -1)

    def _one_by_one(self, logits: Tensor, drafts: Sequence[Sequence[int]]) -> Tensor:
        """Each row and position by itself, with the tokens before it."""
        lines = []
        for row, (own, one) in enumerate(zip(drafts, logits)):
            for n in range(len(one)):
                before = own[: len(own) - len(one) + 1 + n]
                if self._rows.finished[row] or not self._rows.ends.isdisjoint(before):  # no answer goes on so
                    lines.append(one[n])
                    continue
                prefix = self._rows.prefix(row, before).expand(len(logits), -1)  # some processors know the batch
                lines.append(self._processors(prefix, one[n].repeat(len(logits), 1))[row])
        return torch.stack(lines).view_as(logits)


def _check(
    generation_config: transformers.GenerationConfig,
    processors: LogitsProcessorList,
    synced_gpus: bool,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Refuse, before the prompt is read, what lossless decoding does not do."""
    mode = generation_config.get_generation_mode()
    if mode not in _MODES:
        raise ValueError(f"lossless decoding is greedy or sampled, not {mode.value}: attach without lossless for it")
    if generation_config.use_cache is False:
        raise ValueError("lossless decoding needs its cache: leave use_cache=False out")
    if wanted := [name for name in _NOT_RETURNED if getattr(generation_config, name, None)]:
        raise ValueError(f"lossless decoding does not return {wanted[0]}: leave it out, or attach without lossless")
    if found := [type(one).__name__ for one in processors if type(one).__name__ in _ONE_BY_ONE]:
        raise ValueError(f"lossless decoding does not run {_ONE_BY_ONE[found[0]]}")
    if unknown := [name for name, value in model_kwargs.items() if value is not None and name not in _PASSED]:
        raise ValueError(f"lossless decoding does not hand {unknown[0]} on to the model: attach without lossless")
    if generation_config.is_assistant:
        raise ValueError("a model that decodes losslessly drafts for itself, not for another: attach without lossless")
    if synced_gpus:
        raise ValueError("lossless decoding does not run with synced_gpus, where processes decode in step")


def _of_positions(processor: transformers.LogitsProcessor, number: int) -> transformers.LogitsProcessor:
    """A processor of a batch, for ``number`` positions of each row: some releases tell it how long prompts are."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    of_positions = copy.copy(processor)
    of_positions.prompt_ignore_length = ignored.repeat_interleave(number)
    return of_positions


def _ties(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the two best scores ``[..., V]`` differ by at most four units in the last place of logits of a dtype."""
    best, at = scores.max(-1, keepdim=True)
    second = scores.scatter(-1, at, -torch.inf).amax(-1)
    return best[..., 0] - second <= 4 * torch.finfo(dtype).eps * best[..., 0].abs()


def _drawn(scores: Tensor, sampled: bool) -> tuple[Tensor, Tensor | None]:
    """A token of each row, int64 ``[B]``, and the probabilities ``[B, V]`` that it was drawn from if it is sampled."""
    if not sampled:
        return scores.argmax(-1), None
    share = scores.softmax(-1)
    return torch.multinomial(share, 1)[:, 0], share


def _stream(streamer: Any, rows: _Rows, taken: Sequence[int]) -> None:
    if streamer is not None and taken[0]:
        streamer.put(torch.tensor(rows.tokens[0][-taken[0] :]))
