"""Models whose steps and prompts are timed: of a folder, or of a known shape with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from foveate.errors import unknown
from foveate.lab.bench.plan import parsed, specs
from foveate.lab.inputs import loading, model_folder

SHAPES: dict[str, PreTrainedConfig] = {
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "qwen3-8b": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=131072,
    ),
}


class TimedModel(NamedTuple):
    """A model, and how it is loaded."""

    model: str
    """A folder, or the name of one of :data:`SHAPES`."""
    positions: int
    """Tokens that it has to have positions for."""
    dtype: str
    seed: int
    """Of random weights."""
    device: str

    @property
    def name(self) -> str:
        """That of the shape, or the folder's last one."""
        return self.model if self.model in SHAPES else Path(self.model).resolve().name

    @property
    def weights(self) -> str:
        return "random" if self.model in SHAPES else "trained"

    def specs(self, methods: Sequence[str]) -> list[str]:
        """The methods as :func:`foveate.lab.bench.plan.specs` spells them, settled for a folder's weights."""
        if self.model in SHAPES:
            return specs(methods)
        return specs([model_folder.method_for(Path(self.model), parsed(spec)).spec for spec in methods])

    def check(self, needs: str) -> None:
        """Raise UserError for a model that there is not, or that has too few positions; ``needs`` says what for."""
        if self.model not in SHAPES and not Path(self.model).is_dir():
            raise unknown("model", self.model, (*SHAPES, "a model folder"))
        facts = {"max_positions": self.config().max_position_embeddings}
        model_folder.check_positions(self.positions, facts, needs)

    def config(self) -> PreTrainedConfig:
        """A shape's has as many positions as are needed."""
        if self.model not in SHAPES:
            return AutoConfig.from_pretrained(self.model, local_files_only=True, trust_remote_code=False)
        config = SHAPES[self.model]
        positions = max(self.positions, config.max_position_embeddings)
        return type(config)(**{**config.to_dict(), "max_position_embeddings": positions})

    def load(self) -> PreTrainedModel:
        if self.model not in SHAPES:
            return loading.load_model(Path(self.model), self.dtype, self.device)
        torch.manual_seed(self.seed)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(
                self.config(), dtype=getattr(torch, self.dtype), trust_remote_code=False
            )
        model.generation_config = GenerationConfig(do_sample=False)
        return model.eval()


def generate(model: PreTrainedModel, ids: torch.Tensor, tokens: int, chunk: int, **more: Any) -> Any:
    """What `generate` makes of prompts ``ids [B, L]``: so many tokens, greedily and without an end.

    Args:
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
