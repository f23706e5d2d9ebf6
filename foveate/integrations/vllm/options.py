"""Options of vLLM's command as they are typed, and the model that it names; known without torch and vLLM."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from foveate.integrations import early

OTHERWISE = {"trust_remote_code", "enable_lora", "hf_overrides", "hf_config_path", "config_format", "load_format"}
"""Options that change what an engine does in a way that a folder's configuration does not show."""


def plain(option: str) -> str:
    """An option's name as vLLM takes it: underscores may be hyphens, and a key of its value may follow a dot."""
    name = option.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("-") else ""


def tells_all(options: Sequence[str]) -> bool:
    """Whether a folder's configuration alone determines what an engine with these options does."""
    return not OTHERWISE & {plain(option).lstrip("-").replace("-", "_") for option in options}


def check_there(model: str) -> None:
    """Raise ValueError for a path that does not exist. A name of the hub has one slash, or is of a .gguf file."""
    local = model.startswith((".", "/", "~")) or (model.count("/") > 1 and not model.endswith(".gguf"))
    if local and "://" not in model and not Path(model).expanduser().exists():
        raise ValueError(f"{model}: no such folder")


def check_early(model: str, options: Sequence[str]) -> None:
    """Refuse what a command line shows without torch: no model, a missing path, and a folder of an unknown type.

    Raises:
        ValueError: with the reason. :class:`foveate.errors.UserError` for a folder.
    """
    if model.startswith("-"):
        raise ValueError(f"the model comes first, then options: not {model!r}")
    check_there(model)
    if Path(model).is_dir() and tells_all(options):
        early.check_model(Path(model), served=True)


class Typed(NamedTuple):
    """What options of vLLM's command say of sizes; what a command leaves out is None, or vLLM's default."""

    tokens: int | None
    """The longest request, ``--max-model-len``."""
    ranks: int
    """``--tensor-parallel-size``."""
    kv_cache_dtype: str
    dtype: str


_DTYPES = {"half": "float16", "float": "float32"}


def typed(options: Sequence[str]) -> Typed:
    """The sizes that options name, without vLLM; values that only vLLM reads, such as ``128k``, count as left out."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--max-model-len", default="")
    parser.add_argument("--tensor-parallel-size", "-tp", default="1")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--dtype", default="auto")
    names = [plain(one) + one[len(one.partition("=")[0]) :] if one.startswith("--") else one for one in options]
    try:
        found, _ = parser.parse_known_args(names)
    except (argparse.ArgumentError, SystemExit):  # an option without its value, which vLLM tells
        found = parser.parse_args([])
    tokens = int(found.max_model_len) if found.max_model_len.isdecimal() else None
    ranks = int(found.tensor_parallel_size) if found.tensor_parallel_size.isdecimal() else 1
    return Typed(tokens or None, ranks or 1, found.kv_cache_dtype, _DTYPES.get(found.dtype, found.dtype))
