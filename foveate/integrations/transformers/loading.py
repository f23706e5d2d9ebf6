"""Loading a model folder: device, number format, tokenizer, and a causal language model whose weights are checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from foveate.errors import DataError, UserError, first_line, unknown
from foveate.integrations.transformers.model_folder import read_config, weight_files
from foveate.io import reading

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
_TOKENIZER_FILES = {"tokenizer.json": "model", "tokenizer_config.json": None}
"""The files of a tokenizer, and the object that each has to hold."""


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
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # KeyError, TypeError and what tokenizers raises: a damaged file leads to any of them
        for name, needed in _TOKENIZER_FILES.items():
            if (path := Path(folder) / name).exists():
                if not isinstance(value := reading.read_json(path), dict):
                    raise DataError(f"{path}: expected an object") from None
                if needed is not None:
                    reading.field(value, needed, dict, str(path))
        raise UserError(f"{folder}: no usable tokenizer in the model folder ({first_line(error)})") from None


def load_model(folder: Path, dtype: str, device: str) -> PreTrainedModel:
    """The causal language model of a folder, in eval mode, its generation defaults cleared to plain greedy decoding.

    Raises `UserError` if Transformers cannot load it as such, a file of weights is damaged, or the weights do not match
    the configuration: some are missing (tied weights may be), unexpected or of another shape.
    """
    read_config(folder)
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: a damaged file of weights ({first_line(error)})") from None
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except Exception as error:  # such as ImportError: what a quantised model needs is not installed
        raise UserError(f"{folder}: not loadable as a causal language model ({first_line(error)})") from None
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
