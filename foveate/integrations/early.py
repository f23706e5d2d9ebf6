"""What a model's config.json tells without torch and Transformers, whose import takes seconds.

Only what is certain is refused here. Commands that go on check the model again once it is built
(:mod:`foveate.integrations.transformers.support`), with the same words.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foveate.errors import UserError
from foveate.io.infolder import NO_WEIGHTS, config_of, weight_files

HYBRID = "foveate_hybrid"
"""The type of the models of :mod:`foveate.hybrids.models`, which Transformers knows by that package alone."""

LATENT = "its cache holds a compressed vector for each token (latent attention), not the keys of each head"
ENCODER = "it has an encoder; foveate attaches to decoder-only models"
SHARED = "some of its layers share the keys and values of others"
NOT_CAUSAL = "not a causal language model"


def all_unchanged(kinds: str) -> str:
    """The reason for a model whose layers are all of kinds that foveate leaves alone."""
    return f"all of its layers are {kinds} layers, so there is no long context to make cheaper"


_WINDOWS = ("mistral", "mixtral", "phi3", "starcoder2")
"""Types whose layers all have sliding windows where ``sliding_window`` is a number and no ``layer_types`` are given."""
_OWN = (
    *("axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text"),
    *("glm5_next_text", "glm_moe_dsa", "hy_v4", "mistral_large4_text"),
)
"""Types whose own sparse attention foveate runs (:mod:`foveate.integrations.transformers.csa`)."""
_MAPPINGS = ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py")
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check_model(folder: Path, needs_weights: bool = False, served: bool = False, attached: bool = True) -> None:
    """Refuse a model folder as far as its config.json shows that the model cannot be attached to.

    Args:
        needs_weights: also refuse a folder without weights.
        served: by vLLM, which runs more models than causal language models: refuse unknown types and latent attention
            alone.
        attached: False for a model that runs without any method: refuse only what Transformers knows no causal language
            model of.

    Raises:
        UserError: for a folder that does not exist, a missing or damaged config.json, a type of model that the
            installed Transformers does not know, and a model that :func:`foveate.attach` refuses, with its reason.
    """
    folder = Path(folder)
    config = config_of(folder)
    kind = config.get("model_type")
    if "transformers" not in sys.modules and isinstance(kind, str) and kind != HYBRID:
        _check_type(folder, kind, served)
    if attached and (reason := refusal(config)) and (not served or reason == LATENT):
        name = _known()[1].get(kind, kind) if isinstance(kind, str) else "the model"
        raise UserError(f"{folder}: {name} is not supported: {reason}")
    if needs_weights and not weight_files(folder):
        raise UserError(f"{folder}: {NO_WEIGHTS}")


def refusal(config: Mapping[str, Any]) -> str:
    """Why :func:`foveate.attach` refuses the model of a configuration, as far as its settings tell; else empty.

    Args:
        config: a config.json.
    """
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    if config.get("is_encoder_decoder") is True:
        return ENCODER
    if _counts(text.get("num_kv_shared_layers")):
        return SHARED
    if _counts(text.get("kv_lora_rank")) and text.get("model_type") not in _OWN and "index_topk" not in text:
        return LATENT
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    windowed = bool(kinds) and isinstance(kinds, list) and all(one == "sliding_attention" for one in kinds)
    if _counts(window) and (windowed or (kinds is None and text.get("model_type") in _WINDOWS)):
        return all_unchanged("sliding-window")
    return ""


def _counts(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _check_type(folder: Path, kind: str, served: bool) -> None:
    """Refuses a type that the installed Transformers does not know, or knows no causal language model of.

    Once Transformers is imported, a program may have told it more types; it is then asked itself.
    """
    types, causal = _known()
    if not types:
        return
    if kind not in types:
        raise UserError(
            f"{folder / 'config.json'}: not the configuration of a known model (the installed Transformers does not "
            f"know the model_type {kind!r})"
        )
    if not served and causal and types[kind] not in {types.get(one) for one in causal}:
        raise UserError(f"{folder}: {NOT_CAUSAL} (Transformers has none of model_type {kind!r})")


@functools.cache
def _known() -> tuple[dict[str, str], dict[str, str]]:
    """The types of models that the installed Transformers knows, with the names of their configurations, and of its
    causal language models, with the names of these: read in its source; empty where that is written otherwise."""
    try:
        found = find_spec("transformers")
    except (ImportError, ValueError):
        found = None
    places = () if found is None else found.submodule_search_locations or ()
    types, causal = {}, {}
    for path in (Path(place) / "models" / "auto" / name for place in places for name in _MAPPINGS):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        if path.name != "modeling_auto.py":
            types.update(_pairs(tree))
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(getattr(one, "id", None) == _CAUSAL for one in node.targets):
                causal.update(_pairs(node))
    return types, causal


def _pairs(tree: ast.AST) -> dict[str, str]:
    """The pairs of strings that stand in a source, as tuples or in dictionaries; the first of a name counts."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        pairs = []
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            pairs = [tuple(node.elts)]
        elif isinstance(node, ast.Dict):
            pairs = [pair for pair in zip(node.keys, node.values) if pair[0] is not None]
        for pair in pairs:
            name, value = (getattr(one, "value", None) for one in pair)
            if isinstance(name, str) and isinstance(value, str):
                found.setdefault(name, value)
    return found
