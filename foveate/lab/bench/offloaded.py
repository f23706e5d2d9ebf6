"""Tokens a second of `generate` with keys and values in host memory, beside what is there without foveate.

Each method decodes with ``offload=True``, and once more with its cache on the device, where that fits. Transformers'
own offloaded cache (on a CPU its ordinary one) is the baseline. What is in host memory runs under a limit of device
memory, if one is given; the caches on the device run without it. The baseline reads its prompt in smaller chunks where
it does not fit otherwise, and runs without the limit where no chunk fits.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

import foveate
from foveate.errors import UserError
from foveate.integrations.transformers import loading
from foveate.io import circumstances
from foveate.io.reading import read_text
from foveate.lab.bench.models import SHAPES, Clock, ModelPlan, attach, generate
from foveate.lab.bench.plan import Keep, Row, Say, command, parsed
from foveate.lab.results.measurements import speed_row
from foveate.runtime.offload import DoesNotFitError, parse_budget

BENCH = "offload"
TRANSFORMERS = "transformers-offloaded"  # the name of the baseline among the methods
_CHUNKS = (16384, 4096, 1024)
"""Tokens of a prompt, all sequences together, that are read at once; the baseline takes fewer if it must."""
_WARM_UP, _FEW = 8, 4
"""Number of steps that are not timed, and of timed steps of the baseline, which moves the whole cache for each
token."""


@dataclasses.dataclass(frozen=True)
class Plan(ModelPlan):
    """What to measure."""

    model: str
    methods: Sequence[str]
    contexts: Sequence[int]
    batches: Sequence[int]
    steps: int
    memory: str  # device memory that the process may take, such as ``24GB``; empty: all
    gpu_budget: str  # as `attach` takes it; empty: what is free
    prompt_file: str  # text whose tokens are the prompts, one after the other; empty: random tokens
    no_baseline: bool  # Transformers' cache is left out, and the first method is the baseline
    dtype: str
    seed: int
    device: str

    def check(self) -> None:
        super().check()
        if self.memory and self.device != "cuda":
            raise UserError(f"memory={self.memory} is a limit of a GPU's memory, and the device is {self.device}")
        for name, given in (("memory", self.memory), ("gpu-budget", self.budget)):
            try:
                parse_budget(given or None)
            except ValueError as error:
                raise UserError(f"{name}: {error}") from None
        if not any(parsed(one).name != "dense" for one in self.methods):
            raise UserError("method: --offload needs a method that reads pages, such as pages")
        if self.prompt_file:
            if self.model in SHAPES:
                raise UserError(f"prompt-file: {self.model} has random weights and no tokenizer; name a model folder")
            self._text()

    def prompts(self, model: PreTrainedModel, batch: int, context: int) -> torch.Tensor:
        """Random tokens, or the first tokens of the text, ``[B, L]``."""
        if not self.prompt_file:
            return super().prompts(model, batch, context)
        return torch.tensor(self._text()[: batch * context], device=self.device).view(batch, context)

    def _text(self) -> list[int]:
        ids = loading.load_tokenizer(Path(self.model))(read_text(Path(self.prompt_file)))["input_ids"]
        needed = max(self.batches) * max(self.contexts)
        if len(ids) < needed:
            raise UserError(f"prompt-file: {self.prompt_file} has {len(ids):,} tokens, and prompts need {needed:,}")
        return ids

    @property
    def tokens(self) -> int:
        return _WARM_UP + self.steps + 1

    @property
    def budget(self) -> str | float | None:
        """A share where the text is a number up to 1."""
        text = self.gpu_budget
        return float(text) if text.startswith(("0.", "1.0")) and text.replace(".", "").isdecimal() else text or None


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each method in host memory and on the device, and for the baseline, at every context and batch size.

    Raises `UserError` for a plan that cannot be.
    """
    plan.check()
    model = plan.load()
    specs = [spec for spec in plan.specs() if spec != "dense"]
    cases = [] if plan.no_baseline else [(TRANSFORMERS, "host")]
    cases += [(spec, where) for spec in specs for where in ("host", "device")]
    rows: list[Row] = []
    for batch, context in ((batch, context) for batch in plan.batches for context in plan.contexts):
        ids, base = plan.prompts(model, batch, context), None
        for spec, where in cases:
            at = f"{spec} at {context:,} × {batch}, {where} memory"
            try:
                one, limit = _fitting(plan, model, spec, where, ids)
            except (torch.cuda.OutOfMemoryError, DoesNotFitError) as error:
                say(f"{at}: does not fit{f' ({error})' if isinstance(error, DoesNotFitError) else ''}")
                continue
            base = base or (spec, one["ms"])
            rows.append(_row(plan, spec, where, limit, context, batch, one, base))
            keep(rows[-1:])
            without = (
                ", without the limit, within which it does not fit" if where == "host" and limit != plan.memory else ""
            )
            say(f"{at}: {one['ms']:.2f} ms a step{without}")
    return rows


@contextmanager
def _limited(memory: str) -> Iterator[None]:
    """A block in which this process may take so much of the GPU."""
    if not memory:
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, parse_budget(memory) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _fitting(
    plan: Plan, model: PreTrainedModel, spec: str, where: str, ids: torch.Tensor
) -> tuple[dict[str, Any], str]:
    """What one call of `generate` takes, and the limit that it ran under."""
    limit = plan.memory if where == "host" else ""
    ways = [(chunk, limit) for chunk in _CHUNKS] + [(_CHUNKS[0], "")] * bool(limit)
    if spec != TRANSFORMERS:
        ways = ways[:1]
    for chunk, limit in ways:
        try:
            with _limited(limit):
                return _generated(plan, model, spec, where, ids, chunk), limit
        except torch.cuda.OutOfMemoryError:
            if (chunk, limit) == ways[-1]:
                raise
    raise AssertionError


def _generated(
    plan: Plan, model: PreTrainedModel, spec: str, where: str, ids: torch.Tensor, chunk: int
) -> dict[str, Any]:
    """What one call of `generate` takes, with the prompt."""
    own, warm_up, steps, more = spec != TRANSFORMERS, _WARM_UP, _timed(plan, spec), {}
    if own:
        how = {"offload": True, "gpu_budget": plan.budget} if where == "host" else {"dense_below": 0}
        attach(model, plan, spec, **how)
    else:
        warm_up = 1
        more = {"cache_implementation": "offloaded"} if plan.device == "cuda" else {}
    memory = circumstances.PeakMemory(plan.device)
    memory.start()
    try:
        more["stopping_criteria"] = StoppingCriteriaList([clock := Clock()])
        try:
            generate(model, ids, warm_up + steps + 1, max(1, chunk // len(ids)), **more)
        except DoesNotFitError:
            raise
        except ValueError as error:
            raise UserError(f"{plan.model}: {error}") from None
        times = clock.steps(warm_up, steps)
        return {
            "ms": statistics.fmean(times),
            "ms_median": statistics.median(times),
            "prefill_ms": clock.prefill_ms,
            "chunk": chunk,
            "peak_bytes": memory.peak(),
            "peak_kind": memory.kind,
            "stats": foveate.stats(model).summary() if own else None,
        }
    finally:
        if own:
            foveate.detach(model)


def _timed(plan: Plan, spec: str) -> int:
    """How many steps are timed."""
    return min(plan.steps, _FEW) if spec == TRANSFORMERS else plan.steps


def _row(
    plan: Plan,
    spec: str,
    where: str,
    limit: str,
    context: int,
    batch: int,
    one: dict[str, Any],
    base: tuple[str, float],
) -> Row:
    more = {"memory": where, "limit": limit, "gpu_budget": plan.gpu_budget if where == "host" else ""}
    more |= {"prompts": Path(plan.prompt_file).name if plan.prompt_file else "random"}
    more |= {"dtype": plan.dtype, "steps": _timed(plan, spec), "seed": plan.seed}
    return speed_row(
        BENCH,
        plan.case(spec, context, batch, **more),
        plan.device,
        baseline=base,
        **one,
        tokens_per_s=1e3 * batch / one["ms"],
        command=command("foveate bench decode-model --offload", plan),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    from foveate.lab.report.markdown import columns, context_length

    def stat(name: str, unit: float, digits: int) -> Any:
        def cell(row: Row) -> str:
            value = (row["stats"] or {}).get(name)
            return "" if value is None else f"{value / unit:.{digits}f}"

        return cell

    return columns(
        rows,
        {
            "method": lambda row: f"`{row['case']['method']}`",
            "keys in": lambda row: f"{row['case']['memory']} memory",
            "tokens": lambda row: context_length(row["case"]["context"]),
            "batch": lambda row: str(row["case"]["batch"]),
            "ms a token": lambda row: f"{row['ms']:.2f}",
            "over the baseline": lambda row: f"{row['speedup']:.2f}×",
            "prompt, s": lambda row: f"{row['prefill_ms'] / 1e3:.2f}",
            "pages on the GPU, %": stat("pages_hot_share", 0.01, 1),
            "fetched, MB a token": stat("fetched_bytes_per_step", 1e6, 1),
            "host, GB": stat("host_bytes", 1e9, 1),
            "peak, GB": lambda row: f"{row['peak_bytes'] / 1e9:.2f}",
        },
    )
