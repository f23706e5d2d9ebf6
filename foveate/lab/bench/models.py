"""Models whose steps and prompts are timed: of a folder, or of a known shape with random weights."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    StoppingCriteria,
)

import foveate
from foveate.errors import UserError, unknown
from foveate.integrations.transformers import loading, model_folder
from foveate.integrations.transformers.attachment import Attachment
from foveate.lab.bench import breakdown
from foveate.lab.bench.plan import check, parsed, share_of, specs

_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SHAPES: dict[str, PreTrainedConfig] = {
    "llama-3.1-8b": LlamaConfig(intermediate_size=14336, num_hidden_layers=32, vocab_size=128256, **_8B),
    "qwen3-8b": Qwen3Config(intermediate_size=12288, num_hidden_layers=36, head_dim=128, vocab_size=151936, **_8B),
}


class ModelPlan:
    """What plans of a whole model share: dataclasses with model, methods, contexts, dtype, seed (of random weights and
    of prompts) and device."""

    tokens = 0  # what is generated after a prompt; a model needs positions for it
    needs = "context and steps need"  # what the model's positions are for, in words

    def check(self) -> None:
        """Raise UserError that names an option, its value, and what is allowed."""
        check(self)
        if self.model not in SHAPES and not Path(self.model).is_dir():
            raise unknown("model", self.model, (*SHAPES, "a model folder"))
        facts = {"max_positions": self._config().max_position_embeddings}
        model_folder.check_positions(max(self.contexts) + self.tokens, facts, self.needs)

    def specs(self) -> list[str]:
        """The methods as :func:`foveate.lab.bench.plan.specs` spells them, settled for a folder's weights."""
        if self.model in SHAPES:
            return specs(self.methods)
        return specs([model_folder.method_for(Path(self.model), parsed(spec)).spec for spec in self.methods])

    def case(self, spec: str, context: int, batch: int, **more: Any) -> dict[str, Any]:
        """The case of a row. ``more`` are the row's own fields; the model's name is the name of the shape or folder."""
        shape = self.model in SHAPES
        of = {"method": spec, "context": context, "batch": batch, "share": share_of(spec), "level": "model"}
        of |= {"model": self.model if shape else Path(self.model).resolve().name}
        return of | {"weights": "random" if shape else "trained"} | more

    def load(self) -> PreTrainedModel:
        if self.model not in SHAPES:
            return loading.load_model(Path(self.model), self.dtype, self.device)
        torch.manual_seed(self.seed)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(
                self._config(), dtype=getattr(torch, self.dtype), trust_remote_code=False
            )
        model.generation_config = GenerationConfig(do_sample=False)
        return model.eval()

    def prompts(self, model: PreTrainedModel, batch: int, context: int) -> torch.Tensor:
        """Random tokens, ``[B, L]``."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        shape = (batch, context)
        return torch.randint(0, model.config.vocab_size, shape, generator=generator, device=self.device)

    def _config(self) -> PreTrainedConfig:
        """The model's configuration. A shape gets enough positions for the bench."""
        if self.model not in SHAPES:
            return AutoConfig.from_pretrained(self.model, local_files_only=True, trust_remote_code=False)
        config = SHAPES[self.model]
        positions = max(max(self.contexts) + self.tokens, config.max_position_embeddings)
        return type(config)(**{**config.to_dict(), "max_position_embeddings": positions})


class Clock(StoppingCriteria):
    """Notes when each token is there: `generate` waits for every one before it asks for the next.

    And what kernels take in the last ``watched`` steps, after the first ``tokens``: ``kernels``, milliseconds a step.
    """

    def __init__(self, tokens: int = 0, watched: int = 0) -> None:
        self.ticks = [time.perf_counter()]  # of the beginning, and of each token
        self.kernels: dict[str, float] | None = None
        self._tokens, self._watched = tokens, watched
        self._goes_on: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self._goes_on is None:
            self._goes_on = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
            if input_ids.is_cuda:  # the prompt's time ends here
                torch.cuda.synchronize(input_ids.device)
        self.ticks.append(time.perf_counter())
        made = len(self.ticks) - 1
        if self._watched and made == self._tokens:
            self._stop = breakdown.start()
        elif self._watched and made == self._tokens + self._watched:
            self.kernels = {kernel: ms / self._watched for kernel, ms in self._stop().items()}
        return self._goes_on

    @property
    def prefill_ms(self) -> float:
        return 1e3 * (self.ticks[1] - self.ticks[0])

    def steps(self, first: int, number: int) -> list[float]:
        """Milliseconds from each token to the next, of ``number`` tokens after the ``first`` ones."""
        ticks = self.ticks[1 + first : 2 + first + number]
        return [1e3 * (after - before) for before, after in itertools.pairwise(ticks)]


def attach(model: PreTrainedModel, plan: ModelPlan, spec: str, **how: Any) -> Attachment:
    """As `foveate.attach`. Raises UserError that names the model for a method that it cannot have."""
    try:
        return foveate.attach(model, spec, **how)
    except ValueError as error:
        raise UserError(f"{plan.model}: {error}") from None


def generate(model: PreTrainedModel, ids: torch.Tensor, tokens: int, chunk: int, **more: Any) -> Any:
    """The output of `generate` for prompts ``ids [B, L]``: ``tokens`` tokens, greedily and without an end token.

    Args:
        tokens: number of new tokens.
        chunk: tokens of a prompt that are read at once; 0: all.
        more: other arguments of `generate`.
    """
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=False,
        prefill_chunk_size=chunk or None,
        **more,
    )
