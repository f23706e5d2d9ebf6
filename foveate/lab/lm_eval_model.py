"""The model `foveate` of lm-eval (lm-evaluation-harness): its Hugging Face model with a method attached.

Importing this module registers the model; `python -m foveate.lab.lm_eval` is lm-eval's command line with it.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from foveate import methods
from foveate.integrations.transformers import Cache, attach, releases, stats

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"lm-eval's model needs {error.name.partition('.')[0]}, which is not installed: pip install 'foveate[eval]'",
        name=error.name,
    ) from error

_log = logging.getLogger("lm_eval.foveate")  # lm-eval prints what is below its own name
_OF_HFLM = inspect.signature(HFLM.__init__).parameters.keys()
Request = tuple[Any, list[int], list[int]]
"""A request of lm-eval for a likelihood: its strings (or None), the ids of the context, the ids of the continuation."""
Row = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a request that the model reads: the context, and the continuation without its last token."""


@register_model("foveate")
class FoveateLM(HFLM):
    """A causal language model with a method attached.

    Generation is `generate` of the attached model. How a log-likelihood is read depends on the method, and is logged:

    - `dense`: as HFLM reads it, to the bit;
    - a method that is sparse in prompts: context and continuation in one forward pass, as a prompt;
    - a method that acts in decoding alone, or evicts while a prompt is read: the context as a prompt, then the
      continuation token by token.

    Padding is masked, so that a row of a batch is read as it is alone.
    """

    def __init__(
        self, pretrained: Any, method: str | methods.Method = "dense", dense_below: int | str = 0, **options: Any
    ) -> None:
        """Load a model and attach a method to it.

        Args:
            pretrained: see HFLM: a name, a folder, or a model.
            method: see :func:`foveate.attach`. `;` may stand for the commas of a spec, at which lm-eval would split.
            dense_below: see :func:`foveate.attach`.
            options: options of HFLM; weights are read from safetensors alone by default.

        Raises `ValueError` as :func:`foveate.attach`; a bad method is refused before anything is loaded.
        """
        method = methods.make(method.replace(";", ",") if isinstance(method, str) else method)
        split = {field.name for field in dataclasses.fields(method)} & options.keys() - _OF_HFLM
        if split:
            name = min(split)
            raise ValueError(
                f"{name} is a setting of {method.name}, and lm-eval splits its arguments at commas: write the spec "
                f"with semicolons, method={method.spec.replace(',', ';')}{';' if ':' in method.spec else ':'}{name}=..."
            )
        super().__init__(pretrained, **{"use_safetensors": True} | options)
        self.attachment = attach(self.model, method, dense_below=dense_below)
        if self.attachment.sparse_prompt and not self.attachment.evicts_in_prompt:
            self.likelihoods = "context and continuation in one forward pass, as a prompt"
        elif self.attachment.evicts_in_prompt or self.attachment.decodes_alone:
            self.likelihoods = "the context as a prompt, then the continuation token by token"
        else:
            self.likelihoods = "as model 'hf' reads them"
        _log.info("%s: log-likelihoods: %s", self.attachment.method.spec, self.likelihoods)

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's entries of the results' `config`, and `foveate`: the method, and :meth:`Stats.summary` of all tasks.

        `keys_read_share` is None where no token was decoded.
        """
        found = stats(self.model)
        summary = found.summary()
        if not summary["decode_steps"]:
            summary["keys_read_share"] = None
        _log.info("%s: %s", self.attachment.method.spec, found)
        own = {"method": self.attachment.method.spec, "loglikelihood": self.likelihoods, **summary}
        return super().get_model_info() | {"foveate": own}

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods (nats) of whole texts, as HFLM cuts them into windows.

        A method that acts in decoding alone decodes a text from its first token on. Raises `ValueError` for a method
        that evicts when a prompt ends: what it keeps depends on a prompt.
        """
        evicting = [one.method for one in self.attachment.policies.values() if one.method.evicts]
        if evicting and (self.attachment.decodes_alone or self.attachment.evicts_in_prompt):
            raise ValueError(
                f"{evicting[0].spec} evicts, and what it keeps depends on where a prompt ends; a rolling likelihood "
                "is that of a whole text, without a prompt: choose tasks with a context, or `foveate compare --task "
                "perplexity`"
            )
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """The log-likelihood (nats) of each continuation, and whether each of its tokens is the likeliest."""
        if not (self.attachment.sparse_prompt or self.attachment.decodes_alone):
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        if self.attachment.decodes_alone and requests and override_bs is None:
            self._check_decoded(requests)
        same: dict[Row, list[int]] = {}  # requests that differ in their last token alone
        for number, (asked, context, continuation) in enumerate(requests):
            if not continuation:
                raise ValueError(f"no token is left of the continuation of {asked}")
            same.setdefault((tuple(context), tuple(continuation[:-1])), []).append(number)
        rows = sorted(same, key=lambda row: (-len(row[0]) - len(row[1]), row))
        answers: list[Any] = [None] * len(requests)
        for row, log_probs in self._log_probs(rows, override_bs, disable_tqdm):
            for number in same[row]:
                asked, _, continuation = requests[number]
                target = torch.tensor(continuation, device=log_probs.device)
                likelihood = log_probs.gather(-1, target[:, None]).sum()
                answers[number] = float(likelihood), bool((log_probs.argmax(-1) == target).all())
                if asked is not None:  # as in HFLM: a window of a text is no answer
                    self.cache_hook.add_partial("loglikelihood", asked, answers[number])
        return answers

    def _check_decoded(self, requests: Sequence[Request]) -> None:
        """Refuse continuations that are all one token, and tell of some: the prompt decides those, read densely."""
        spec, short = self.attachment.method.spec, sum(len(continuation) < 2 for *_, continuation in requests)
        if short == len(requests):
            raise ValueError(
                f"{spec} would change no log-likelihood: all continuations are one token, which the prompt decides, "
                "and the method is dense in prompts; choose a method with sparse prompts, or tasks with longer answers"
            )
        if short:
            _log.warning("%s acts on none of the %d continuations of %d that are one token", spec, short, len(requests))

    def _log_probs(
        self, rows: Sequence[Row], override_bs: int | None, disable_tqdm: bool
    ) -> Iterator[tuple[Row, Tensor]]:
        """Each row with the log-probabilities ``[T, V]`` of its continuation's T tokens."""
        size = override_bs or self.batch_size
        if size == "auto":
            context, fed = rows[0]
            size = self._detect_batch_size([(None, list(context), [*fed, 0])])
        autocast = {"dtype": self.mixed_precision_dtype, "enabled": self.mixed_precision_dtype is not None}
        bar = tqdm(total=len(rows), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        with bar, torch.no_grad(), torch.autocast(self.device.type, **autocast):
            for start in range(0, len(rows), size):
                batch = rows[start : start + size]
                for row, logits in zip(batch, self._logits([self._cut(*row) for row in batch])):
                    yield row, F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
                bar.update(len(batch))

    def _cut(self, context: tuple[int, ...], fed: tuple[int, ...]) -> Row:
        """The row without the tokens on its left for which the model has no positions."""
        over = len(context) + len(fed) - self.max_length
        if over >= len(context):
            raise ValueError(f"a continuation of {len(fed) + 1} tokens is longer than max_length={self.max_length}")
        if over > 0:
            _log.warning("%d tokens on the left of a context are left out: max_length is %d", over, self.max_length)
        return context[max(over, 0) :], fed

    def _logits(self, rows: Sequence[Row]) -> list[Tensor]:
        """Logits ``[T, V]`` of the T tokens of each row's continuation."""
        steps = max(len(fed) for _, fed in rows)
        if self.attachment.sparse_prompt and not self.attachment.evicts_in_prompt:
            ids, placed = self._padded([context + fed for context, fed in rows])
            logits = self.model(ids, use_cache=False, logits_to_keep=steps + 1, **placed).logits
            return [one[steps - len(fed) :] for one, (_, fed) in zip(logits, rows)]
        ids, placed = self._padded([context for context, _ in rows], after=steps)
        width = ids.shape[1]
        cache = {releases.CACHE: Cache(self.model, prompt_length=width)}
        out = self.model(ids, use_cache=True, logits_to_keep=1, **cache, **_columns(placed, 0, width))
        logits = out.logits[:, -1:]
        if steps:
            fed = torch.tensor([[*fed, *[0] * (steps - len(fed))] for _, fed in rows], device=self.device)
            given = {releases.CACHE: releases.returned_cache(out), "use_cache": True}
            more = self.model(fed, **given, **_columns(placed, width, width + steps)).logits
            logits = torch.cat([logits, more], 1)
        return [one[: len(fed) + 1] for one, (_, fed) in zip(logits, rows)]

    def _padded(self, rows: Sequence[tuple[int, ...]], after: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Ids of rows padded on the left ``[B, L]``, their mask and their positions ``[B, L + after]``.

        There are no mask and positions where no row is padded, as the model is called then by HFLM.
        """
        width = max(map(len, rows))
        padding = torch.tensor([[width - len(row)] for row in rows], device=self.device)
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=self.device)
        if not bool(padding.any()):
            return ids, {}
        positions = torch.arange(width + after, device=self.device) - padding
        return ids, {"attention_mask": (positions >= 0).long(), "position_ids": positions.clamp_min(0)}


def _columns(placed: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """Mask and positions of the columns `start` to `end`; the mask is of all columns up to the end."""
    return {name: value[:, :end] if name == "attention_mask" else value[:, start:end] for name, value in placed.items()}
