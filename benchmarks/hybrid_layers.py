"""What whole layers of hybrids take: norms, projections, mixer and MLP, beside a layer with a sliding window.

Each layer is of a model of two, of which the first is Gated DeltaNet, with random weights. It reads what a model would
hand it: the first layer the embeddings of a novel's bytes, the second what the first makes of them. LTE retains what
its random scores let it: a row says how many tokens. Shapes and batch size are those of the paper (laLTE, section 4.3),
and nothing is compiled. A decode step is the mean of as many as one round of LTE's scores is for. Its time includes the
host's, so the row has the time of its kernels, too. Full attention reads prompts only, by PyTorch's SDPA.

    python -m benchmarks.hybrid_layers --out benchmarks/results/hybrids-speed.jsonl
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from benchmarks import breakdown, hybrid_tables
from foveate.hybrids.models import HybridCache, HybridForCausalLM, make_config
from foveate.io import circumstances
from foveate.lab.bench.plan import Keep, Row, Say, measure
from foveate.lab.results import timing
from foveate.lab.results.measurements import speed_row

BASELINE = "swa"
_TEXT = Path(__file__).resolve().parents[1] / "examples" / "data" / "books" / "moby_dick.txt"
_PRESETS = {"swa": "gdn_swa", "lte": "lalte", "gdn": "gdn", "nsa": "lansa", "attn": "gdn_attn"}
"""The model whose second layer is of a kind, the baseline's first."""
_ROWS = 4
"""Rows that the first layer reads at once."""
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure: prompts of several lengths, and ``steps`` tokens after those of some."""

    kinds: Sequence[str] = tuple(_PRESETS)
    size: str = "1.4B"
    contexts: Sequence[int] = (1024, 2048, 4096, 8192)
    decoded: Sequence[int] = (1024, 4096)
    """Contexts after which tokens are decoded."""
    batch: int = 32
    steps: int = 756
    """LTE's window of 768 tokens less the reach of its scores on both sides: so many it scores at once."""
    repeats: int = 5
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "cuda"


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each kind of layer, context and phase."""
    rows: list[Row] = []
    base: dict[tuple[str, int], float] = {}
    for kind in sorted(plan.kinds, key=lambda kind: kind != BASELINE):
        layer = _Layer(plan, kind)
        found = [("layer prompt", context, layer.prompt(context)) for context in plan.contexts]
        found += [("layer decode", context, layer.decode(context)) for context in plan.decoded if kind != "attn"]
        mine = []
        for phase, context, measured in found:
            if kind == BASELINE:
                base[phase, context] = measured["ms"]
            mine.append(_row(plan, kind, phase, context, measured, base.get((phase, context))))
            say(f"{phase}, {plan.batch} × {context:,} tokens: {kind} {measured['ms']:,.3f} ms")
        keep(mine)
        rows += mine
        del layer
    return rows


class _Layer:
    """The second layer of a model, and what it reads."""

    def __init__(self, plan: Plan, kind: str):
        self.plan, self.kind = plan, kind
        torch.manual_seed(plan.seed)
        config = make_config(_PRESETS[kind], plan.size, num_hidden_layers=2)
        self.model = HybridForCausalLM(config).model.to(plan.device, getattr(torch, plan.dtype)).eval()
        self.layer = self.model.layers[1]

    def prompt(self, context: int) -> dict[str, Any]:
        """Milliseconds of a prompt, and without LTE's scores; tokens retained."""
        hidden = self._hidden(context)
        step = functools.partial(self._read, hidden, self._inputs(hidden))
        memory = circumstances.PeakMemory(self.plan.device)
        memory.start()
        cache = step()  # compiles
        found = {"peak_bytes": memory.added(), "ms": self._ms(step)}
        if self.kind == "lte":
            kept = cache.layers[1].memory.tensors["kept"]
            with self._scored(step):
                found |= {"without_scores_ms": self._ms(step), "retained": kept.float().mean().item()}
        return found

    def decode(self, context: int) -> dict[str, Any]:
        """Milliseconds of a step after a prompt, on average, and of its kernels."""
        number, device = self.plan.steps, self.plan.device
        hidden = self._hidden(context + number)
        prompt, *tokens = hidden.split([context, *[1] * number], 1)
        given = [(one.contiguous(), self._inputs(one, context + at)) for at, one in enumerate(tokens)]
        first = self._inputs(prompt)

        def after_prompt() -> Step:
            cache = self._read(prompt, first)

            def steps() -> None:
                for one, inputs in given:
                    self.layer(one, inputs, cache)

            return steps

        memory = circumstances.PeakMemory(device)
        memory.start()
        after_prompt()()  # compiles
        found = {"peak_bytes": memory.added(), "steps": number}
        found["ms"] = timing.milliseconds(after_prompt(), device) / number
        return found | {"kernels_ms": breakdown.total(after_prompt()) / number if device == "cuda" else None}

    def _hidden(self, tokens: int) -> Tensor:
        """What the layer reads, ``[B, tokens, hidden_size]``: rows begin at places of the novel far apart."""
        text = torch.frombuffer(bytearray(_TEXT.read_bytes()), dtype=torch.uint8).long()
        starts = torch.arange(self.plan.batch) * (len(text) // self.plan.batch)
        ids = text[(starts[:, None] + torch.arange(tokens)) % len(text)] % self.model.config.vocab_size
        hidden = self.model.embed_tokens(ids.to(self.plan.device))
        inputs, rows = self._inputs(hidden), hidden.split(_ROWS)
        return torch.cat([self.model.layers[0](some, inputs, None)[0] for some in rows])

    def _inputs(self, hidden: Tensor, first: int = 0) -> Any:
        """What the layers of a pass share, of tokens from position ``first`` on."""
        positions = torch.arange(first, first + hidden.shape[1], device=hidden.device)[None]
        return self.model._inputs(hidden, None, positions, None, False, {})

    def _read(self, hidden: Tensor, inputs: Any) -> HybridCache | None:
        """Let the layer read a prompt, with a cache of its own."""
        cache = None if self.kind == "attn" else HybridCache(self.model.config)
        self.layer(hidden, inputs, cache)
        return cache

    @contextlib.contextmanager
    def _scored(self, step: Step) -> Iterator[None]:
        """Within the block tokens have the scores of a run before it, which cost nothing."""
        mixer, found = self.layer.mixer, []
        real = mixer._margins

        def noted(*args: Any) -> Tensor:
            found.append(real(*args))
            return found[-1]

        try:
            mixer._margins = noted
            step()
            calls = iter(found * (self.plan.repeats + 1))
            mixer._margins = lambda *args: next(calls)
            yield
        finally:
            del mixer._margins

    def _ms(self, step: Step) -> float:
        """Median of some runs."""
        return statistics.median(timing.milliseconds(step, self.plan.device) for _ in range(self.plan.repeats))


def _row(plan: Plan, kind: str, phase: str, context: int, measured: dict[str, Any], base: float | None) -> Row:
    case = {"what": kind, "phase": phase, "batch": plan.batch, "context": context, "size": plan.size}
    return speed_row(
        "hybrids",
        case | {name: getattr(plan, name) for name in ("dtype", "seed", "device")},
        plan.device,
        baseline=(BASELINE if base else kind, base or measured["ms"]),
        peak_kind="above weights and input" if plan.device == "cuda" else "process",
        **measured,
    )


def main(size: str = Plan.size, out: Path | None = None) -> None:
    """Measure the layers."""
    measure("hybrids", run, Plan(size=size), out, hybrid_tables.layers)


if __name__ == "__main__":
    typer.run(main)
