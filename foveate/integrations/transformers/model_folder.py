"""A model folder without its weights in memory: its configuration, what it says of the architecture, a fingerprint."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foveate.errors import UserError, first_line
from foveate.integrations.early import HYBRID
from foveate.integrations.transformers.facts import folder_weights, head_dim
from foveate.integrations.transformers.positions import max_positions
from foveate.integrations.transformers.support import choosing_layers
from foveate.io import infile
from foveate.io.infolder import NO_WEIGHTS, WEIGHT_NAMES, config_of
from foveate.io.infolder import weight_files as weight_files
from foveate.methods import Method, check_made_for

_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Ends of the settings that name kernels, of a model or of its parts."""
_FLASH_ATTENTION = ("flash_attn", "flash_attn_interface", "flash_attn_3")
_NUMBERS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def model_facts(folder: Path) -> dict[str, Any]:
    """Architecture facts from a model folder's config.json; facts that it leaves out have Transformers' defaults.

    Raises `UserError` if the folder has no such file, or Transformers does not know the model.
    """
    config, decoder = read_config(folder), _decoder_config(folder)
    text = decoder.to_dict()
    for name in _NUMBERS:
        if isinstance(value := text.get(name), (str, float, bool)):
            raise UserError(f"{folder / 'config.json'}: {name} must be a whole number, not {value!r}")
    return architecture(config.get("model_type"), decoder)


def architecture(model_type: str | None, decoder: Any) -> dict[str, Any]:
    """The same of a decoder's configuration."""
    text = decoder.to_dict()
    heads = text.get("num_attention_heads")
    hidden = text.get("hidden_size")
    facts = {
        "model_type": model_type,
        "layers": text.get("num_hidden_layers"),
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": text.get("num_key_value_heads") or heads,
        "head_dim": head_dim(decoder) if heads and (hidden or text.get("head_dim")) else None,
        "max_positions": max_positions(text) or None,
    }
    return {key: value for key, value in facts.items() if value is not None}


def attention_layers(folder: Path) -> tuple[int, ...]:
    """The layers of a model folder's model that keep all keys. Raises `UserError` as :func:`model_facts` does."""
    return choosing_layers(_decoder_config(folder))


def method_for(folder: Path, method: Method) -> Method:
    """A method as :func:`foveate.attach` settles it for a model folder's weights, before they are loaded.

    Raises ValueError for one that a file names for another model.
    """
    check_made_for(method, model_facts(folder))
    return method.for_model(lambda: model_facts(folder) | {"weights": folder_weights(folder, attention_layers(folder))})


def _decoder_config(folder: Path) -> Any:
    return whole_config(folder)[1]


def whole_config(folder: Path) -> tuple[Any, Any]:
    """The configuration of a folder's model, and the configuration of its decoder, which may be the same object.

    Raises `UserError` for a model that Transformers does not know.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return config, config.get_text_config(decoder=True)
    except Exception as error:  # a damaged configuration may raise any error, also in Transformers' own checks
        raise UserError(
            f"{folder / 'config.json'}: not the configuration of a known model ({first_line(error)})"
        ) from None


def check_positions(needed: int, facts: Mapping[str, Any], what: str) -> None:
    """Raises `UserError` if `needed` tokens are more than the model has positions for; `what` begins the message."""
    limit = facts.get("max_positions")
    if limit and needed > limit:
        raise UserError(f"{what} {needed:,} positions, the model has {limit:,}; ask for less")


def read_config(folder: Path, needs_weights: bool = True) -> dict[str, Any]:
    """A model folder's config.json. One of a hybrid makes Transformers know hybrids.

    Raises `UserError` if the folder, the file or (unless ``needs_weights`` is false) the weights are missing, the
    weights are not the folder's own, or the configuration names kernels of a hub.
    """
    folder = Path(folder)
    path, config = folder / "config.json", config_of(folder)
    if named := config.get("transformers_weights"):
        raise UserError(f"{path}: transformers_weights must not be set, got {named!r}; the weights are {WEIGHT_NAMES}")
    _check_implementations(path, config)
    if needs_weights and not weight_files(folder):
        raise UserError(f"{folder}: {NO_WEIGHTS}")
    if config.get("model_type") == HYBRID:
        importlib.import_module("foveate.hybrids.models")
    return config


def _check_implementations(path: Path, value: Any) -> None:
    """Refuses kernels that Transformers would load, as code, from a hub: by a repository's name, or for want of a
    package."""
    for name, one in value.items() if isinstance(value, dict) else ():
        if not name.removesuffix("_internal").endswith(_IMPLEMENTATIONS):
            _check_implementations(path, one)
            continue
        for kernel in one.values() if isinstance(one, dict) else [one]:
            missing = "flash" in str(kernel) and not any(map(importlib.util.find_spec, _FLASH_ATTENTION))
            if kernel is not None and ("/" in str(kernel) or missing):
                raise UserError(
                    f"{path}: {name} must not be {kernel!r}, for which Transformers would load code from a hub; "
                    "remove it"
                )


def model_digest(folder: Path, samples: int = 64, sample_bytes: int = 1 << 16) -> str:
    """A fingerprint of a model folder (16 hex digits): its config, and its weights' names, sizes and sampled content.

    Each file gives its header and `samples` evenly spaced pieces of `sample_bytes` bytes, so that large models take
    no longer than small ones.
    """
    config = {key: value for key, value in read_config(folder).items() if not key.startswith(("_", "transformers_"))}
    total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in weight_files(folder):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with infile.opened(path) as file:
            for sample in range(samples):
                file.seek(max(0, size - sample_bytes) * sample // (samples - 1))
                total.update(file.read(sample_bytes))
    return total.hexdigest()[:16]
