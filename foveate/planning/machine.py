"""What fits on a machine and what acts there, by a plan's arithmetic: for `foveate doctor` and `serve --check`."""

from __future__ import annotations

from pathlib import Path

from foveate.integrations.transformers.model_folder import check_positions
from foveate.methods import make
from foveate.planning.gpus import Gpu
from foveate.planning.lines import gigabytes, room_line
from foveate.planning.model import model_of
from foveate.planning.plan import Asked, in_vllm, memory_of
from foveate.runtime import SHORT_SEQUENCE, sparse_from_length
from foveate.state import Geometry

_USUAL = Geometry(32, 8, 128, 128)
"""Heads of an 8B, such as Llama-3.1."""
_METHODS = ("kascade", "pages")
_NO_GPU = Gpu("no GPU", 0)


def machine_facts(gpu: Gpu | None) -> dict[str, str]:
    """What a machine has for a model, and from how many tokens methods act there, in words by name.

    Args:
        gpu: the GPU of the machine; None: it has none.
    """
    ask = "foveate plan --model DIR says it for a model"
    if gpu is None:
        return {"memory": "no GPU: foveate plan --gpu NAME says what fits on one", "acts": f"at any length; {ask}"}
    bounds = {name: sparse_from_length([make(name)], _USUAL) for name in _METHODS}
    found = ", ".join(f"{name} from {tokens:,} tokens" for name, tokens in bounds.items())
    heads = f"{_USUAL.num_kv_heads} KV heads of {_USUAL.head_dim}"
    acts = f"with {heads}, all sequences together: {found}; below {SHORT_SEQUENCE:,} a sequence no method; {ask}"
    return {"memory": f"{room_line(gpu)} for weights, keys and values", "acts": acts}


def served_lines(
    folder: Path,
    tokens: int | None,
    gpu: Gpu | None,
    *,
    method: str = "auto",
    ranks: int = 1,
    kv_cache_dtype: str = "auto",
    dtype: str = "auto",
) -> list[str]:
    """What a served model takes of a GPU, with one request, and how many requests fit, a line each.

    Args:
        folder: folder of the model.
        tokens: tokens of a request, its answer included; None: the number of the model's positions.
        gpu: the GPU; None: the lines give sizes alone.
        method: a spec, or "auto".
        ranks: number of GPUs that share each layer.
        kv_cache_dtype, dtype: as vLLM takes them.

    Raises:
        ValueError: as :func:`foveate.planning.plan.plan_of`.
    """
    model = model_of(folder, dtype)
    tokens = tokens or model.positions or SHORT_SEQUENCE
    check_positions(tokens, {"max_positions": model.positions}, "a request needs")
    asked = Asked(tokens, 1, gpu or _NO_GPU, ranks, kv_cache_dtype, method)
    memory = memory_of(model, asked, in_vllm(model, asked).layers or {}, tokens)
    each = " on each GPU" if ranks > 1 else ""
    besides = f", and {gigabytes(memory.summaries)} of summaries" if memory.summaries else ""
    lines = [
        f"weights: {gigabytes(memory.weights)}{each}",
        f"a request of {tokens:,} tokens: {gigabytes(memory.kept)} of keys and values{besides}{each}",
    ]
    if gpu is not None:
        most = max(memory.room - memory.weights, 0) // max(memory.kept + memory.summaries, 1)
        found = f"fits: at most {most:,} such requests at once, in" if most else "does not fit: no such request fits in"
        lines.append(f"{found} {room_line(gpu)}")
    return lines
