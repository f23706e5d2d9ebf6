"""Which score of a page misses the least attention at the same number of keys read? Behind LuKA's defaults.

A model reads the prompt and the gold answer of each item once, with plain attention. In every layer, for a few of the
answer's tokens, the prompt's pages are ranked by each score, as many are refined as the budget leaves room for, and
the attention that this misses, and the error of the attention's output, are compared with the truth.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from foveate.bench import options
from foveate.bench._page_estimates import LIMIT, SINKS, TAIL, Case, Measures, measure
from foveate.bench.plan import Keep, Row, Say
from foveate.evaluation import tasks
from foveate.evaluation.metrics import bootstrap, columns, mean
from foveate.evaluation.tasks import Item, Task
from foveate.inputs import loading, model_folder
from foveate.integrations.transformers.probe import Seen, watched
from foveate.results import circumstances
from foveate.results.errors import UserError

BASELINE = "spread+prior"
"""The score with which the others are compared: that of LuKA without low-rank summaries."""
MEASURES = ("missed_mass", "lost_heads", "output_error", "refined_share", "read_share")


class Plan(options.PageScores):
    def check(self) -> None:
        """Raise UserError that names an option, its value, and what is allowed."""
        super().check()
        if not self.budgets or not min(self.budgets) > 0:
            raise UserError(f"budgets must be above 0, not {', '.join(map(str, self.budgets))}")
        self.parsed()

    def parsed(self) -> list[Task]:
        """The tasks. Raises UserError for one that there is not."""
        return [tasks.parse(spec) for spec in self.tasks]

    def words(self) -> Iterator[tuple[str, Any]]:
        """Tasks have all of their settings."""
        specs = []
        for task in self.parsed():
            settings = ",".join(f"{key}={value}" for key, value in task.settings().items())
            specs.append(f"{task.name}:{settings}")
        for flag, value in super().words():
            yield flag, specs if flag == "task" else value


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """Measure and return one row for each task and case.

    Raises:
        UserError: for items without answers, prompts without pages or beyond the model, or a model that has no layer
            with attention to all tokens.
    """
    plan.check()
    facts, device = model_folder.model_facts(plan.model), loading.choose_device(plan.device)
    dtype = loading.choose_dtype(plan.dtype, plan.model, device)
    plan = dataclasses.replace(plan, model=plan.model.resolve(), dtype=dtype, device=device)
    tokenizer = loading.load_tokenizer(plan.model)
    of_tasks = [_items(plan, task, tokenizer, facts) for task in plan.parsed()]
    model = loading.load_model(plan.model, dtype, device)
    rows: list[Row] = []
    for task, items in zip(plan.parsed(), of_tasks):
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
    shortest, least = min(len(item.prompt_ids) for item in items), SINKS + TAIL + max(plan.page_sizes)
    if shortest < least:
        raise UserError(
            f"task '{task.name}': a prompt of {shortest:,} tokens has no page of {max(plan.page_sizes)} between "
            f"{SINKS} sinks and a tail of {TAIL}; at least {least:,} tokens are needed"
        )
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
            for case, values in measure(seen, prompt, queries, plan.page_sizes, plan.budgets):
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
        measures = {name: dataclasses.asdict(bootstrap(mean(name, 1.0), values, plan.seed)) for name in MEASURES}
        rows.append(
            {
                "bench": plan.bench,
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
