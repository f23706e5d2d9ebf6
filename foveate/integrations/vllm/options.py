"""Options of vLLM's command as they are typed, and the model that it names; known without torch and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foveate.integrations import early

OTHERWISE = {"trust_remote_code", "enable_lora", "hf_overrides", "hf_config_path", "config_format", "load_format"}
"""Options with which a folder's configuration alone does not tell what an engine would do."""


def plain(option: str) -> str:
    """An option's name as vLLM takes it: underscores may be hyphens, and a key of its value may follow a dot."""
    name = option.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("-") else ""


def tells_all(options: Sequence[str]) -> bool:
    """Whether a folder's configuration tells what an engine with these options would do."""
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
