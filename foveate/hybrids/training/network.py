"""The model that is trained: a folder's, or a preset of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from foveate.errors import UserError, first_line
from foveate.hybrids.training.configuration import ModelSettings
from foveate.hybrids.training.distributed import Rank
from foveate.hybrids.training.mixture import IGNORED
from foveate.integrations.transformers.model_folder import weight_files

_PLASTIC = 0.7548776662
"""Steps times this, modulo one, spread evenly; so do rows by the golden ratio, and both together fill the plane."""


def configuration(settings: ModelSettings, **of_text: Any) -> Any:
    """The configuration of the model, with `model.changes`.

    Args:
        settings: folder or preset, and changes.
        of_text: fields that the text decides, for a preset; changes go over them.

    Raises `UserError` for a folder without a model, and for an unknown preset, size or field.
    """
    if settings.folder is not None:
        return _of_folder(settings.folder, settings.changes)
    from huggingface_hub.errors import StrictDataclassError

    from foveate.hybrids.models import make_config

    try:
        return make_config(settings.preset, settings.size, **(of_text | settings.changes))
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise UserError(f"model: {_line(error)}") from None


def _of_folder(folder: Path, changes: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    import foveate.hybrids.models  # noqa: F401  (registers the hybrids' configurations)

    if not (folder / "config.json").is_file():
        raise UserError(f"model.folder {folder}: no config.json there")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder / 'config.json'}: not the configuration of a known model ({first_line(error)})"
        ) from None
    for name in changes:
        if not hasattr(config, name) or callable(getattr(config, name)):
            raise UserError(f"model.changes.{name}: a configuration of type {config.model_type} has no such field")
    if not changes:
        return config
    try:  # made anew, so that the class checks the changes and derives fields from them
        return type(config).from_dict(config.to_dict() | changes)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise UserError(f"model.changes: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def fingerprint(config: Any) -> dict[str, Any]:
    """A model's configuration field by field, as JSON values; without what depends on place and version."""
    fields = json.loads(config.to_json_string(use_diff=False))
    left_out = ("transformers_version", "_name_or_path", "architectures", "dtype")
    return {f"model.config.{name}": value for name, value in fields.items() if name not in left_out}


def build(settings: ModelSettings, vocab_size: int, end: int, longest: int, seed: int) -> Any:
    """A causal language model in fp32 on the host; its weights are the folder's, or drawn by the seed.

    A preset's vocabulary and end token are the text's, and its positions the longest row's.

    Raises `UserError` for a folder without a model, a vocabulary that is too small, or rows longer than its positions.
    """
    from transformers import AutoModelForCausalLM

    weights = settings.folder is not None and bool(weight_files(settings.folder))
    of_text = {"vocab_size": vocab_size, "eos_token_id": end, "max_position_embeddings": longest}
    config = configuration(settings, **of_text)
    if config.vocab_size < vocab_size:
        raise UserError(f"the model has {config.vocab_size:,} tokens, the text {vocab_size:,}; use its tokenizer")
    limit = getattr(config, "max_position_embeddings", None)
    if limit and limit < longest:
        raise UserError(f"rows of {longest:,} tokens are longer than the model's {limit:,} positions")
    torch.manual_seed(seed)
    if weights:
        return AutoModelForCausalLM.from_pretrained(
            settings.folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def evicting_layers(network: Any) -> list[torch.nn.Module]:
    """The layers of a hybrid that retain tokens by learned scores."""
    from foveate.hybrids.layers import LearnedEviction  # here, as other models need no layers of the hybrids

    return [module for module in network.modules() if isinstance(module, LearnedEviction)]


@torch.no_grad()
def lower_scores(network: Any, excess: torch.Tensor) -> None:
    """Lowers the scores of each layer's heads, before the sigmoid, by `[layers, heads]`: their last bias."""
    for layer, much in zip(evicting_layers(network), excess):
        layer.scores.head.bias.sub_(much)


def open_layers(network: Any) -> torch.Tensor:
    """Opens the rows of all layers with learned scores. Returns their shared `LearnedEviction.opened`, fp32 `[2]`.

    Raises `UserError` for a network without such layers.
    """
    if not (layers := evicting_layers(network)):
        name = type(network).__name__
        raise UserError(f"sparsity.hold or sparsity.release is set, and {name} has no scores of foveate's layers")
    opened = torch.ones(2, device=layers[0].scores.head.weight.device)
    for layer in layers:
        layer.opened = opened
    return opened


def open_rows(opened: torch.Tensor, share: float, step: int, first: int) -> None:
    """Opens a share of a step's rows. A micro-batch has the rows from `first` on.

    The choice of open rows moves on evenly from step to step. It follows from the numbers of step and row alone.
    """
    from foveate.hybrids.layers.lte import GOLDEN  # here, as other models need no layers of the hybrids

    opened[0].fill_(share)
    opened[1].fill_((step * _PLASTIC + first * GOLDEN) % 1)


def token_weights(parts: list[dict[str, torch.Tensor]], place: Rank) -> list[torch.Tensor | float]:
    """What each micro-batch's mean loss is multiplied with, so that every counted token of a step weighs alike."""
    if len(parts) == 1 and place.world == 1:
        return [1.0]
    counted = [(part["labels"][:, 1:] != IGNORED).float() for part in parts]
    if "label_weights" in parts[0]:
        counted = [some * part["label_weights"][:, 1:] for some, part in zip(counted, parts)]
    counts = torch.stack([some.sum() for some in counted])
    return list(counts * place.world / place.sum(counts.sum()))  # gradients are averaged over the processes
