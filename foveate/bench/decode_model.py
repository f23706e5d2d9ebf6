"""Tokens a second of `generate`: a model with dense attention, with sparse attention, and on Transformers' own path.

The model is a folder's, or one of a known shape with random weights: what a step costs does not depend on them. Prompts
are random tokens, read in chunks; a step takes the mean time from one token to the next, everything included: also
what happens at some steps alone. Methods take turns, round after round, so that what slows the host for a while falls
on all of them. On a GPU some more steps of the last round are watched: what their kernels are for, and how long none
runs.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    StoppingCriteria,
    StoppingCriteriaList,
)

import foveate
from foveate.bench import breakdown, cold
from foveate.bench.decode import BENCH, command
from foveate.inputs import loading, model_folder
from foveate.results import circumstances
from foveate.results.errors import UserError, unknown
from foveate.results.measurements import TRANSFORMERS

METHODS = ("dense", "kascade:decode_only=true", "luka")
SHAPES: dict[str, PreTrainedConfig] = {
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "qwen3-8b": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=131072,
    ),
}
_DTYPES = ("bfloat16", "float16", "float32")
_CHUNK = 8192
"""Tokens of a prompt, all sequences together, that are read at once."""
_WARM_UP = 40
"""Steps that are not timed: the first ones compile kernels and record graphs, also of what LuKA does every 16th."""
_WATCHED = 16
"""Steps behind the timed ones whose kernels are watched."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure."""

    model: str = "llama-3.1-8b"
    """A folder, or the name of one of :data:`SHAPES`."""
    methods: Sequence[str] = METHODS
    contexts: Sequence[int] = (32768,)
    batches: Sequence[int] = (1,)
    steps: int = 64
    """Timed tokens of a round."""
    rounds: int = 1
    """How often every method generates."""
    liger: bool = False
    """Whether norms, rotations and MLPs of the model run on Liger's kernels, under every method alike."""
    dense_below: int | str = 0
    """See :func:`foveate.attach`."""
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "cuda"

    def check(self) -> None:
        """Raises UserError naming what cannot be."""
        if self.model not in SHAPES and not Path(self.model).is_dir():
            raise unknown("model", self.model, (*SHAPES, "a model folder"))
        for name, least in (("contexts", 1), ("batches", 1)):
            numbers = getattr(self, name)
            if not numbers or min(numbers) < least:
                raise UserError(f"{name} must be at least {least}, not {min(numbers, default='none')}")
        for name in ("steps", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dense_below != "auto" and not (isinstance(self.dense_below, int) and self.dense_below >= 0):
            raise UserError(f"dense-below must be a number of tokens, at least 0, or auto, not {self.dense_below}")
        if self.dtype not in _DTYPES:
            raise UserError(f"dtype must be one of {', '.join(_DTYPES)}, not '{self.dtype}'")
        loading.choose_device(self.device)
        for spec in self.methods:
            try:
                foveate.methods.parse(spec)
            except ValueError as error:
                raise UserError(str(error)) from None
        if self.liger:
            self._check_liger()
        facts = {"max_positions": self.config().max_position_embeddings}
        model_folder.check_positions(max(self.contexts) + self.tokens, facts, "context and steps need")

    def _check_liger(self) -> None:
        if find_spec("liger_kernel") is None:
            raise UserError("--liger needs Liger's kernels: pip install liger-kernel")
        if self.device == "cpu":
            raise UserError("--liger needs a CUDA device, not cpu")
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        kind = self.config().model_type
        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise UserError(f"--liger: Liger has no kernels for models of type {kind}")

    def command(self) -> str:
        """The command line that makes the rows, a folder shortened to its last name."""
        sizes = {"method": self.methods, "context": self.contexts, "batch": self.batches}
        rest = {name: getattr(self, name) for name in ("steps", "rounds", "dense_below", "dtype", "seed", "device")}
        return command({"level": "model", "model": self.name, **sizes, **rest}) + " --liger" * self.liger

    @property
    def watched(self) -> int:
        """Steps whose kernels are watched."""
        return _WATCHED if self.device == "cuda" else 0

    @property
    def tokens(self) -> int:
        """What is generated behind the first token."""
        return _WARM_UP + self.steps + self.watched

    @property
    def name(self) -> str:
        return self.model if self.model in SHAPES else Path(self.model).resolve().name

    def config(self) -> PreTrainedConfig:
        if self.model in SHAPES:
            longest = max(self.contexts) + self.tokens
            config = SHAPES[self.model]
            return type(config)(
                **{**config.to_dict(), "max_position_embeddings": max(longest, config.max_position_embeddings)}
            )
        return AutoConfig.from_pretrained(self.model, local_files_only=True)


@torch.inference_mode()
def run(
    plan: Plan,
    say: Callable[[str], None] = print,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """A row for each method, at every context and batch size; the baseline is foveate's own dense.

    Args:
        say: told of each.
        keep: given the rows of one context and batch size as soon as they are there.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    specs = list(dict.fromkeys(["dense", *(foveate.methods.parse(spec).spec for spec in plan.methods)]))
    cold.settle(plan.device)
    rate = cold.memory_rate(plan.device)
    say(f"device memory: {rate:,.1f} GB/s")
    model = load(plan)
    rows: list[dict[str, Any]] = []
    for batch in plan.batches:
        for context in plan.contexts:
            generator = torch.Generator(plan.device).manual_seed(plan.seed)
            shape = (batch, context)
            ids = torch.randint(0, model.config.vocab_size, shape, generator=generator, device=plan.device)
            rounds: dict[str, list[_Round]] = {spec: [] for spec in (*specs, TRANSFORMERS)}
            for number in range(plan.rounds):
                for spec in rounds:
                    rounds[spec].append(one := _generated(plan, model, spec, ids, number + 1 == plan.rounds))
                    ms = statistics.fmean(one.steps)
                    say(f"{spec} at {context:,} × {batch}: {ms:.2f} ms a step, {1e3 * batch / ms:,.1f} tokens/s")
            found = {spec: _together(plan, those) for spec, those in rounds.items()}
            fresh = [_row(plan, model, spec, context, batch, one, found["dense"], rate) for spec, one in found.items()]
            for row in fresh:
                if row["below_floor"]:
                    name, floor = row["case"]["method"], row["floor_ms"]
                    say(f"{name}: BELOW THE FLOOR of {floor:.2f} ms, so not read from memory")
            keep(fresh)
            rows += fresh
    return rows


def load(plan: Plan) -> PreTrainedModel:
    model = _loaded(plan)
    if plan.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    return model


def _loaded(plan: Plan) -> PreTrainedModel:
    if plan.model not in SHAPES:
        return loading.load_model(Path(plan.model), plan.dtype, plan.device)
    torch.manual_seed(plan.seed)
    with torch.device(plan.device):
        model = AutoModelForCausalLM.from_config(plan.config(), dtype=getattr(torch, plan.dtype))
    model.generation_config = GenerationConfig(do_sample=False)
    return model.eval()


class _Clock(StoppingCriteria):
    """Notes when each token is there: `generate` waits for every one before it asks for the next.

    And what kernels take in the last ``watched`` steps, behind the first ``tokens``: ``kernels``, milliseconds a step.
    """

    def __init__(self, tokens: int, watched: int) -> None:
        self.ticks: list[float] = []
        self.kernels: dict[str, float] | None = None
        self._tokens, self._watched = tokens, watched
        self._goes_on: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self._goes_on is None:
            self._goes_on = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if not self.ticks and input_ids.is_cuda:  # the prompt's time ends here
            torch.cuda.synchronize(input_ids.device)
        self.ticks.append(time.perf_counter())
        if self._watched and len(self.ticks) == self._tokens:
            self._stop = breakdown.start()
        elif self._watched and len(self.ticks) == self._tokens + self._watched:
            self.kernels = {kernel: ms / self._watched for kernel, ms in self._stop().items()}
        return self._goes_on


class _Round(NamedTuple):
    """What a method did once."""

    steps: list[float]
    """Milliseconds from a token to the next."""
    prefill_ms: float
    kernels: dict[str, float] | None
    """Milliseconds a watched step, by kernel."""
    peak_bytes: int
    peak_kind: str
    stats: dict[str, Any] | None


def _generated(plan: Plan, model: PreTrainedModel, spec: str, ids: torch.Tensor, last: bool) -> _Round:
    """One call of `generate`; of the last one of a method some steps are watched."""
    clock = _Clock(_WARM_UP + plan.steps + 1, plan.watched if last else 0)
    memory = circumstances.PeakMemory(plan.device)
    whole = False
    if spec != TRANSFORMERS:
        try:
            whole = foveate.attach(model, spec, dense_below=plan.dense_below).whole_prompt
        except ValueError as error:
            raise UserError(f"{plan.model}: {error}") from None
    memory.start()
    begin = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=plan.tokens + 1,
        eos_token_id=None,
        pad_token_id=0,
        prefill_chunk_size=None if whole else max(1, _CHUNK // len(ids)),
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    steps = [1e3 * (after - before) for before, after in zip(clock.ticks, clock.ticks[1:])]
    prefill = 1e3 * (clock.ticks[0] - begin)
    stats = None
    if spec != TRANSFORMERS:
        stats = foveate.stats(model).summary()
        foveate.detach(model)
    timed = steps[_WARM_UP : _WARM_UP + plan.steps]
    return _Round(timed, prefill, clock.kernels, memory.peak(), memory.kind, stats)


def _together(plan: Plan, rounds: Sequence[_Round]) -> dict[str, Any]:
    """What the rounds of a method say of its steps, of the prompt, and of what it read."""
    steps, last = [ms for one in rounds for ms in one.steps], rounds[-1]
    ms = statistics.fmean(steps)
    return {
        "ms": ms,
        "ms_median": statistics.median(steps),
        "ms_quartiles": statistics.quantiles(steps, n=4) if len(steps) > 1 else steps * 3,
        "ms_rounds": [statistics.fmean(one.steps) for one in rounds],
        "parts_ms": None if last.kernels is None else _parts(ms, last.kernels),
        "prefill_ms": statistics.median(one.prefill_ms for one in rounds),
        "peak_bytes": max(one.peak_bytes for one in rounds),
        "peak_kind": last.peak_kind,
        "stats": last.stats,
    }


def _parts(ms: float, kernels: dict[str, float]) -> dict[str, float]:
    """What a step's time goes to: by what kernels are for, and how long none of them runs."""
    parts = breakdown.by_part(kernels)
    return parts | {"idle": max(0.0, ms - sum(parts.values()))}


def _row(
    plan: Plan,
    model: PreTrainedModel,
    spec: str,
    context: int,
    batch: int,
    one: dict[str, Any],
    dense: dict[str, Any],
    rate: float,
) -> dict[str, Any]:
    share = None if spec == TRANSFORMERS else getattr(foveate.methods.parse(spec), "top_k", None)
    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.get_input_embeddings().weight.nbytes
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        weights += model.get_output_embeddings().weight.nbytes
    read = None if one["stats"] is None else weights + batch * one["stats"]["kv_bytes_per_step"]
    floor = None if read is None else read / rate / 1e6
    return {
        "bench": BENCH,
        "case": {
            "method": spec,
            "context": context,
            "batch": batch,
            "share": share if isinstance(share, float) else None,
            "level": "model",
            "model": plan.name,
            "weights": "random" if plan.model in SHAPES else "trained",
            "dtype": plan.dtype,
            "liger": plan.liger,
            "dense_below": plan.dense_below,
            "steps": plan.steps,
            "rounds": plan.rounds,
            "seed": plan.seed,
        },
        **one,
        "floor_ms": floor,
        "floor_counts": "weights, keys and values, over the fastest read or copy measured",
        "below_floor": floor is not None and one["ms"] < floor,
        "memory_gb_per_s": rate,
        "tokens_per_s": 1e3 * batch / one["ms"],
        "baseline": "dense",
        "baseline_ms": dense["ms"],
        "speedup": dense["ms"] / one["ms"],
        "gb_per_s": None if read is None else read / one["ms"] / 1e6,
        "gb_counts": "weights but for the embedding of tokens, and keys and values",
        "tflop_per_s": None,
        **circumstances.of(plan.device),
        "command": plan.command(),
    }
