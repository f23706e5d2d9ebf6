"""A plan in words: a line each for what fits, the method, the time of a step, and what to type."""

from __future__ import annotations

import shlex

from foveate.methods.base import NEVER_FASTER, Method
from foveate.planning.gpus import MEASURED, Gpu
from foveate.planning.plan import Decoding, Plan, room_of
from foveate.runtime import SHORT_SEQUENCE
from foveate.runtime.offload import MARGIN


def lines_of(plan: Plan, model: str, dtype: str = "auto") -> list[str]:
    """The lines of a plan.

    Args:
        model, dtype: as the user gave them, for the command lines.
    """
    engines = [one for one in (plan.transformers, plan.vllm) if not one.refused]
    return [
        *_sizes(plan),
        _verdict(plan),
        *_remedies(plan),
        f"method: {plan.why}",
        *_bounds(plan, engines),
        *_times(plan, engines),
        *_types(plan, model, dtype),
    ]


def _sizes(plan: Plan) -> list[str]:
    model, asked, memory = plan.model, plan.asked, plan.memory
    shape, each = model.shape, " on each GPU" if asked.ranks > 1 else ""
    heads = f"{shape['heads']} query heads and {shape['kv_heads']} KV heads of {shape['head_dim']}"
    parts = [f"{shape['layers']} layers", f"{len(model.chosen)} of them hold all keys"]
    if model.windows:
        windows = sorted({window for _, window in model.windows.values()})
        parts.append(f"{len(model.windows)} a window of {' or '.join(f'{one:,}' for one in windows)} tokens")
    if len(model.chosen) == shape["layers"]:
        del parts[1]
    held = "as stored" if model.quantised else str(model.dtype).removeprefix("torch.")
    cached = held if asked.kv_cache_dtype == "auto" else asked.kv_cache_dtype
    cached = str(model.dtype).removeprefix("torch.") if cached == "as stored" else cached
    grows = "" if plan.transformers.refused else ", and room to grow"
    taken = plan.transformers if not plan.transformers.refused else plan.vllm
    name = _name_of(taken.method) if taken.method is not None else "no method"
    share = f", {memory.summaries / memory.kept:.1%} of these" if memory.summaries else ""
    whole = f"; what {name} evicts is not taken off" if _evicts(taken) else ""
    contexts = f"{asked.sequences:,} × {asked.context:,} tokens, {cached}{grows}{whole}"
    return [
        f"model: {shape['model_type']}, {model.parameters / 1e9:.2f} billion parameters, {', '.join(parts)}, {heads}",
        f"weights: {gigabytes(memory.weights)} ({held}){each}",
        f"keys and values: {gigabytes(memory.kept)} ({contexts}){each}",
        f"summaries: {gigabytes(memory.summaries)} ({name}{share}){each}",
    ]


def _verdict(plan: Plan) -> str:
    memory, gpu = plan.memory, plan.asked.gpu
    has = room_line(gpu)
    if memory.fits:
        return f"fits: {gigabytes(memory.total)} of {has}; at most {plan.most_sequences:,} sequences of this length"
    return f"does not fit: {gigabytes(memory.total)}, {gigabytes(memory.total - memory.room)} more than {has}"


def room_line(gpu: Gpu) -> str:
    """What a GPU has for weights and contexts, in words; a part of its memory is left free for activations."""
    return f"{gigabytes(room_of(gpu))} ({gpu.name}, {_whole_gigabytes(gpu.memory)}, {MARGIN:.0%} of it left free)"


def _remedies(plan: Plan) -> list[str]:
    memory, ways = plan.memory, []
    if memory.fits:
        return []
    if memory.weights > memory.room:
        return ["instead: more GPUs (--tp), a GPU with more memory, or a quantised model: the weights alone do not fit"]
    if plan.most_sequences:
        ways.append(f"{plan.most_sequences:,} sequences at once (--sequences {plan.most_sequences})")
    if plan.fits_fp8:
        ways.append("keys and values in fp8, with vLLM (--kv-cache-dtype fp8)")
    if (found := plan.offloaded) is not None:
        what = "offload=True" if found.spec == "auto" else f"{found.spec} with offload=True"
        ways.append(f"{what} ({gigabytes(found.device)} beside the weights, {gigabytes(found.host)} of host memory)")
    if _evicts(plan.transformers):
        own = _name_of(plan.transformers.method)
        ways.append(f"{own} itself, if the tokens that it keeps fit: a plan does not know how many it evicts")
    else:
        ways.append("a method that evicts (docs/guide/choose.md)")
    return [f"instead: {'; or '.join(ways)}"]


def _bounds(plan: Plan, engines: list[Decoding]) -> list[str]:
    """From how many tokens each engine's steps are sparse; one line where they agree."""
    found: dict[str, list[str]] = {}
    for one in engines:
        found.setdefault(_bound(plan, one), []).append(one.engine.name)
    lines = []
    for text, names in found.items():
        where = f" ({names[0]})" if len(found) > 1 else ""
        lines.append(f"acts{where}: {text}")
    return lines


def _bound(plan: Plan, decoding: Decoding) -> str:
    context, begins = plan.asked.context, decoding.sparse_from
    if decoding.method.name == "dense":
        return "no, dense attention reads everything"
    if begins >= NEVER_FASTER:
        return "no, it is not faster on a GPU at any length; dense_below=0 makes it sparse"
    if not begins:
        return "yes, at any length"
    many = f" with {plan.asked.sequences:,} at once" if begins > SHORT_SEQUENCE and plan.asked.sequences > 1 else ""
    return f"{'yes' if decoding.acts else 'no'}, from {begins:,} tokens a sequence{many}; these have {context:,}"


def _times(plan: Plan, engines: list[Decoding]) -> list[str]:
    gpu, lines = plan.asked.gpu, []
    if not plan.memory.fits:
        return ["a step: not estimated, because this does not fit"]
    if gpu.bandwidth is None:
        return ["a step: not estimated, because the GPU's bandwidth is not known; name the GPU (--gpu)"]
    for one in engines:
        times = f"dense {one.dense_ms:.1f} ms"
        if one.sparse_ms is not None:
            times += f", sparse {one.sparse_ms:.1f} ms: {one.gain:.2f} times as fast"
            times += "" if one.acts else ", if dense_below=0 made it act"
        elif one.method.name != "dense":
            times += f"; what {_name_of(one.method)} reads is not known before a step, so its time is not estimated"
        lines.append(f"a step in {one.engine.name}, estimated: {times}")
    if gpu.name != MEASURED:
        lines.append(
            f"estimates: fitted to an {MEASURED}, and scaled to the {gpu.name} by the bandwidth of its data sheet"
        )
    if plan.model.experts:
        lines.append("estimates: experts are taken to be chosen at random; no model with experts was measured")
    return lines


def _types(plan: Plan, model: str, dtype: str) -> list[str]:
    spec, lines = plan.asked.method, []
    first, second, found = plan.transformers, plan.vllm, plan.offloaded
    if first.refused:
        lines.append(f"Transformers: no, {first.refused}")
    elif not plan.memory.fits:
        what = "does not fit" if found is None else f"foveate.attach(model{_named(found.spec)}, offload=True)"
        lines.append(f"Transformers: {what}")
    else:
        lines.append(f"Transformers: {f'foveate.attach(model{_named(spec)})' if first.pays else _stay(first)}")
    arguments = ["foveate", "serve", model, *(["--method", spec] if spec != "auto" else [])]
    if second.refused:
        lines.append(f"vLLM: no, {second.refused}")
    elif not second.pays:
        arguments = ["vllm", "serve", model]
    arguments += ["--max-model-len", str(plan.asked.context), "--max-num-seqs", str(plan.asked.sequences)]
    arguments += ["--tensor-parallel-size", str(plan.asked.ranks)] if plan.asked.ranks > 1 else []
    arguments += ["--kv-cache-dtype", plan.asked.kv_cache_dtype] if plan.asked.kv_cache_dtype != "auto" else []
    arguments += ["--dtype", dtype] if dtype != "auto" else []
    if not second.refused:
        stays = "" if second.pays else f"{_stay(second)}: "
        lines.append(f"vLLM: {stays}{shlex.join(arguments)}" if plan.memory.fits else "vLLM: does not fit")
    return lines


def _named(spec: str) -> str:
    """A method as an argument after the model; none for ``auto``."""
    if spec == "auto":
        return ""
    return f", {spec!r}" if '"' in spec else f', "{spec}"'


def _stay(decoding: Decoding) -> str:
    """Advice not to take the method, with the reason."""
    if decoding.method.name == "dense":
        return "stay with dense attention, as asked"
    if decoding.sparse_from >= NEVER_FASTER:
        return "stay with dense attention, because the method is not faster on a GPU at any length"
    if not decoding.acts:
        return f"stay with dense attention, because the method acts from {decoding.sparse_from:,} tokens on"
    return "stay with dense attention, because sparse steps are estimated to be no faster"


def _evicts(decoding: Decoding) -> bool:
    """Whether some layer evicts, so that a cache holds fewer tokens than the plan counts."""
    return any(one.evicts for one in (decoding.layers or {}).values())


def gigabytes(count: int) -> str:
    """Bytes in words, in units of 10^9 or 10^6."""
    return f"{count / 1e9:.1f} GB" if count >= 5e7 or not count else f"{count / 1e6:.1f} MB"


def _whole_gigabytes(count: int) -> str:
    return f"{count / 1e9:g} GB"


def _name_of(method: Method) -> str:
    """The name of a method; of a composition the names of both, joined as in a spec."""
    return "+".join(one.name for one in method.parts)
