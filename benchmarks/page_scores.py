"""Which score of a page misses the least attention at the same number of keys read? Behind LuKA's defaults.

A model reads the prompt and the gold answer of each item once, with plain attention. In every layer, for a few of the
answer's tokens, the prompt's pages are ranked by each score, as many are refined as the budget leaves room for, and
the attention that this misses, and the error of the attention's output, are compared with the truth. `page-scores.sh`
asks for the rows that benchmarks/tables/luka.md shows.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import page_estimates, table_kinds
from benchmarks.page_estimates import LIMIT, SINKS, TAIL, Case, Measures
from benchmarks.probe import Seen, watched
from foveate.cli.quiet import quiet
from foveate.errors import UserError
from foveate.integrations.transformers import loading, model_folder
from foveate.io import circumstances
from foveate.lab.bench.plan import Keep, Row, Say, measure
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.metrics import Mean, columns, estimate
from foveate.lab.evaluation.tasks import Item, Task

BASELINE = "spread+prior"
"""The score with which the others are compared: that of LuKA without low-rank summaries."""
MEASURES = ("missed_mass", "lost_heads", "output_error", "refined_share", "read_share")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to look at: ``limit`` items (wikisalad: examples) of each task, ``tokens`` answer tokens of each item."""

    model: Path
    data: Path
    tasks: Sequence[str]
    page_sizes: Sequence[int] = (8, 16, 32)
    budgets: Sequence[float] = (0.06, 0.1, 0.15, 0.2, 0.25)
    """Shares of the keys read."""
    limit: int = 6
    tokens: int = 3
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    @property
    def parsed(self) -> list[Task]:
        """The tasks. Raises UserError for one that there is not."""
        return [tasks.parse(spec) for spec in self.tasks]

    def command(self) -> str:
        """The command line that makes the rows: tasks with all of their settings, folders by their last names."""
        parts = [f"python -m benchmarks.page_scores {self.model.name} {self.data.resolve().name}"]
        for task in self.parsed:
            settings = ",".join(f"{key}={value}" for key, value in task.settings().items())
            parts.append(f"--task {shlex.quote(f'{task.name}:{settings}')}")
        return " ".join([*parts, f"--limit {self.limit} --dtype {self.dtype}"])


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """Measure and return one row for each task and case.

    Raises:
        UserError: for items without answers, prompts beyond the model, or a model whose layers all have a window.
    """
    facts, device = model_folder.model_facts(plan.model), loading.choose_device(plan.device)
    dtype = loading.choose_dtype(plan.dtype, plan.model, device)
    plan = dataclasses.replace(plan, model=plan.model.resolve(), dtype=dtype, device=device)
    tokenizer = loading.load_tokenizer(plan.model)
    of_tasks = [_items(plan, task, tokenizer, facts) for task in plan.parsed]
    model = loading.load_model(plan.model, dtype, device)
    rows: list[Row] = []
    for task, items in zip(plan.parsed, of_tasks):
        found = []
        for number, (item, answer) in enumerate(items, 1):
            start = time.perf_counter()
            found.append(_measured(plan, model, item, answer))
            took = f"{time.perf_counter() - start:.1f} s"
            say(f"{task.name} {task.split}, {len(item.prompt_ids):,} tokens: item {number} of {len(items)}, {took}")
        keep(fresh := _rows(plan, task, [item for item, _ in items], found))
        rows += fresh
    return rows


def _items(plan: Plan, task: Task, tokenizer: Any, facts: dict[str, Any]) -> list[tuple[Item, list[int]]]:
    """The answerable items of a task with the tokens of their first gold answer."""
    items = [item for item in task.items(plan.data, tokenizer, plan.limit, plan.seed) if any(item.answers)]
    if not items:
        raise UserError(f"task '{task.name}': no item has an answer to read; use niah or wikisalad_long")
    found = []
    for item in items:
        text = (" " if item.answer_prefix else "") + item.answers[0]
        found.append((item, tokenizer.encode(text, add_special_tokens=False)))
    longest = max(len(item.prompt_ids) + len(answer) for item, answer in found)
    model_folder.check_positions(longest, facts, f"task '{task.name}' (prompt and answer) needs")
    return found


def _measured(plan: Plan, model: torch.nn.Module, item: Item, answer: list[int]) -> dict[Case, Measures]:
    """The measures of one item: means over layers and some answer tokens, of the cases that all of them have."""
    ids, prompt = [*item.prompt_ids, *answer], len(item.prompt_ids)
    queries = torch.linspace(prompt, len(ids) - 1, min(plan.tokens, len(answer))).round().int().tolist()
    found: dict[Case, list[Measures]] = defaultdict(list)

    def look(seen: Seen) -> None:
        if seen.mask is None or bool(seen.mask[..., -1, :].all()):  # not a layer with a sliding window
            for case, values in page_estimates.measure(seen, prompt, queries, plan.page_sizes, plan.budgets):
                found[case].append(values)

    with watched(model, look):
        model(torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1)
    if not found:
        raise UserError(f"{plan.model.name}: no layer attends to all tokens")
    most = max(map(len, found.values()))
    return {
        case: {name: float(column.mean()) for name, column in columns(values).items()}
        for case, values in found.items()
        if len(values) == most
    }


def _rows(plan: Plan, task: Task, items: list[Item], found: list[dict[Case, Measures]]) -> list[dict[str, Any]]:
    context = getattr(task, "length", 0) or round(sum(len(item.prompt_ids) for item in items) / len(items))
    rows = []
    for case in (case for case in found[0] if all(case in measures for measures in found)):
        values = columns(measures[case] for measures in found)
        measures = {name: dataclasses.asdict(estimate(Mean(name, 1.0), values, plan.seed)) for name in MEASURES}
        rows.append(
            {
                "bench": "page-scores",
                "case": {
                    "task": task.name,
                    "split": task.split,
                    "model": plan.model.name,
                    "context": context,
                    "dtype": plan.dtype,
                    "page_size": case.page_size,
                    "budget": case.budget,
                    "max_missed_mass": LIMIT if case.budget is None else None,
                    "score": case.score,
                },
                "n": len(found),
                **measures,
                "baseline": BASELINE,
                "summary_cost": values["summary_cost"][0],
                "sinks": SINKS,
                "tail": TAIL,
                "item_values": {name: [round(float(x), 6) for x in values[name]] for name in MEASURES[:3]},
                "seed": plan.seed,
                **circumstances.of(plan.device),
                "command": plan.command(),
            }
        )
    return rows


def main(
    model: Path,
    data: Path,
    task: Annotated[list[str], typer.Option(help="Such as niah:split=multi,length=4096; may be repeated.")],
    limit: int = Plan.limit,
    dtype: str = Plan.dtype,
    out: Path | None = None,
) -> None:
    """Measure every score on some tasks."""
    quiet()
    measure("page-scores", run, Plan(model, data, task, limit=limit, dtype=dtype), out, table_kinds.page_scores)


if __name__ == "__main__":
    typer.run(main)
