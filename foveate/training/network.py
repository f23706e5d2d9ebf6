"""The model that is trained: a folder's, or a preset of ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from foveate.evaluation.errors import UserError
from foveate.training.configuration import ModelSettings

_PEAKS = (  # dense bf16 FLOP/s by what the device's name contains
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165e12),
)


def build(settings: ModelSettings, vocab_size: int, end: int, longest: int, seed: int) -> Any:
    """A causal language model in fp32 on the host; its weights are the folder's, or drawn by the seed.

    Raises `UserError` for a folder without a model, a vocabulary that is too small, or rows longer than its positions.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if importlib.util.find_spec("foveate.models"):
        import foveate.models  # noqa: F401  (registers the hybrids' configurations)
    weights = settings.folder is not None and any(Path(settings.folder).glob("*.safetensors"))
    if settings.folder is None:
        from foveate.models.presets import make_config

        config = make_config(settings.preset, settings.size, vocab_size=vocab_size)
        config.eos_token_id = end
    else:
        if not (settings.folder / "config.json").is_file():
            raise UserError(f"model.folder {settings.folder}: no config.json there")
        try:
            config = AutoConfig.from_pretrained(settings.folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{settings.folder / 'config.json'}: not the configuration of a known model ({reason})"
            ) from None
    for name, value in settings.changes.items():
        if not hasattr(config, name):
            raise UserError(f"model.changes.{name}: a configuration of type {config.model_type} has no such field")
        setattr(config, name, value)
    if config.vocab_size < vocab_size:
        raise UserError(f"the model has {config.vocab_size:,} tokens, the text {vocab_size:,}; use its tokenizer")
    limit = getattr(config, "max_position_embeddings", None)
    if limit and limit < longest:
        raise UserError(f"rows of {longest:,} tokens are longer than the model's {limit:,} positions")
    torch.manual_seed(seed)
    if weights:
        return AutoModelForCausalLM.from_pretrained(
            settings.folder, config=config, dtype=torch.float32, local_files_only=True
        )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def matmul_parameters(network: Any) -> int:
    """Weights that multiply each token: matrices, without the embedding unless it is the head as well."""
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    left_out = embedding.weight.numel() if head is None or head.weight is not embedding.weight else 0
    return sum(parameter.numel() for parameter in network.parameters() if parameter.ndim >= 2) - left_out


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device; None where they are not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in _PEAKS if part in name), None)
