"""Calibrating Kascade for a model on the prompts of a task: resumable prompt by prompt, one artefact at the end.

What each prompt shows is written to the folder `OUT.partial` as soon as it has been read. The artefact is made from
these files, some times over them and one in memory at a time, so that memory does not grow with the number of prompts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import foveate
from foveate.calibration import Calibration, load
from foveate.errors import UserError
from foveate.integrations.transformers import loading, model_folder
from foveate.integrations.transformers.facts import model_facts
from foveate.io import circumstances, outfile
from foveate.io.digest import digest
from foveate.lab.evaluation.calibration import layer_costs
from foveate.lab.evaluation.calibration.anchors import AnchorChoice, check_number, choose, counterparts
from foveate.lab.evaluation.calibration.answers import Answers, named
from foveate.lab.evaluation.calibration.partial_results import GOES_ON, differing, partial_folder, read, take_up, write
from foveate.lab.evaluation.calibration.plan import FEWEST_PROMPTS, TIMES, Plan, kept_at, option
from foveate.lab.evaluation.calibration.similarity import COVERAGE_KEYS, Measured, least_tokens
from foveate.lab.evaluation.calibration.study import Study, attention_modules
from foveate.lab.evaluation.tasks.base import Item, Task, items_digest
from foveate.methods.budgets import budget
from foveate.runtime import Policy

_PROMPT = "prompt-{:04d}.safetensors"

Say = Callable[[str], None]


def run(plan: Plan, progress: Callable[[int, int], None] = lambda done, of: None, say: Say = print) -> Calibration:
    """Reads the prompts that are missing, chooses the anchors and writes the artefact.

    Args:
        progress: called with the steps done, and all of them: prompts read, pairs of layers compared, anchors tried.
        say: called with what a user should know.

    Raises `UserError` for prompts that are too few, too short or beyond the model, more anchors than layers, an `out`
    that cannot be written to, results of another run in the way, or attention or predictions that are not finite.
    """
    outfile.check(plan.out)
    facts = model_folder.model_facts(plan.model)
    device = loading.choose_device(plan.device)
    dtype = loading.choose_dtype(plan.dtype, plan.model, device)
    plan = dataclasses.replace(plan, model=plan.model.resolve(), dtype=dtype, device=device)
    plan = plan.with_anchors(number := len(model_folder.attention_layers(plan.model)))
    if plan.time_share is None:
        check_number(plan.anchors, number)
    files = list(dict.fromkeys(file for task in plan.tasks for file in task.files(plan.data)))
    tokenizer = loading.load_tokenizer(plan.model)
    items = [item for task in plan.tasks for item in _items(plan, task, tokenizer, facts)]
    if len(items) < FEWEST_PROMPTS:
        raise UserError(f"limit {plan.limit} gives one prompt, which shows too little: the others are the same")
    mark = {
        "schema": 2,  # methods by former defaults in 1
        "tasks": [{"task": task.name, "settings": task.settings()} for task in plan.tasks],
        "limit": plan.limit,
        "seed": plan.seed,
        "keys": plan.keys,
        "tile": plan.tile,
        "model": plan.model.name,
        "weights": model_folder.model_digest(plan.model),
        "data": digest(files),
        "items": items_digest(items),
        "tokens": [len(item.prompt_ids) + len(item.target_ids) for item in items],
        "dtype": plan.dtype,
        "device": device,
    }
    if plan.tile == 1:
        mark["own_key"] = True  # which is left out of older ones
    if plan.diverges:
        how = {"max_new_tokens": plan.answer_tokens, "stop": "", "sampling": None}  # as far as answers are compared
        items = [dataclasses.replace(item, **how) for item in items]
        about = {"method": plan.method.spec, "answer_tokens": plan.answer_tokens, "batch_size": plan.batch_size}
        about |= {} if plan.prompts == "dense" else {"prompts": plan.prompts}
        answers = {"answers": about}
    else:
        answers = {}
    chosen_by = {"anchors": plan.anchors, **{name: getattr(plan, name) for name in ("by", *TIMES)}}
    chosen_by |= {"over": "least", "weights": "importance", "method": plan.method.spec}
    if plan.by == "together":
        chosen_by["rounds"] = plan.rounds
    mark, chosen_by = json.loads(json.dumps([mark, chosen_by]))  # as they are read back
    if plan.out.exists():
        try:
            return _finished(plan.out, mark | answers, chosen_by, say)
        except UserError as error:
            if not plan.kept:
                raise UserError(f"{error}; choose another --out, or move it away") from None
            say(f"{error}, and is replaced when this one is complete")
    with take_up(partial_folder(plan.out), mark):
        return _calibrated(plan, items, tokenizer, mark | answers, chosen_by, progress, say)


def keep(plan: Plan, artefact: Calibration) -> Path:
    """Writes an artefact to the user's cache folder as well, and returns where.

    Raises `UserError` if it cannot be written there.
    """
    place = kept_at(plan)
    outfile.write(place, artefact.text().encode())
    return place


def _calibrated(
    plan: Plan,
    items: list[Item],
    tokenizer: Any,
    mark: dict[str, Any],
    chosen_by: dict[str, Any],
    progress: Callable[[int, int], None],
    say: Say,
) -> Calibration:
    """Reads what is missing in the folder of partial results, and makes the artefact of it."""
    folder = partial_folder(plan.out)
    paths = [folder / _PROMPT.format(number) for number in range(len(items))]
    answers = Answers(plan, items, mark.get("answers"))
    files, tried = [*paths, *answers.paths], len(answers.tried())
    if kept := sum(path.exists() for path in files):
        what = "files of prompts and answers" if answers.paths else "prompts"
        more = f" and {tried} files of anchors tried" if tried else ""
        say(f"resuming: {kept} of {len(files)} {what}{more} are there")
    model = loading.load_model(plan.model, plan.dtype, plan.device)
    with foveate.attached(model, "dense") as attachment:
        layers = sorted(attachment.policies)
        if plan.time_share is None:
            check_number(plan.anchors, len(layers))
        shape = model_facts(attachment.config, attention_modules(model, layers))
        costs, number = None, plan.anchors
        if plan.time_share is not None:
            costs = _costs(plan, shape)
            number = layer_costs.affordable(costs, plan.time_share, layers, plan.time_context)
        steps = len(items) + answers.steps(layers, number)
        for done, (path, item) in enumerate(zip(paths, items)):
            progress(done, steps)
            if not path.exists():
                start = time.perf_counter()
                measured, importance = _studied(plan, model, attachment.policies, [*item.prompt_ids, *item.target_ids])
                write(path, {**measured._asdict(), "importance": importance}, start)

    def beyond(done: int) -> None:
        progress(min(len(items) + done, steps), steps)

    lost = None
    if plan.by == "divergence":
        lost = answers.compare(model, tokenizer, layers, counterparts(_captured(paths)), beyond)
    choice, found = _chosen(plan, paths, lost, layers, number)
    if plan.by == "together":
        tried = answers.search(model, tokenizer, layers, choice, number, beyond)
        found["seconds"] = _number(found["seconds"] + tried.seconds)
        found["by_number"] = _listed(layers, tried.alone, "objective", -1)
        found["together"] = _listed(layers, tried.moved, "divergence")
        choice = choice.at(tried.moved[-1][0])
    progress(steps, steps)
    found |= {
        "layer_ms": None if costs is None else {name: _number(value) for name, value in costs.items()},
        "run": mark,
        "chosen_by": chosen_by,
        **circumstances.of(plan.device),
        "command": plan.command(),
    }
    anchors = tuple(layers[one] for one in choice.anchors)
    artefact = Calibration(shape, anchors, named(choice, layers), found, plan.settings)
    outfile.write(plan.out, artefact.text().encode(), f"; {GOES_ON}")
    shutil.rmtree(folder)
    return artefact


def _items(plan: Plan, task: Task, tokenizer: Any, facts: dict[str, Any]) -> list[Item]:
    """A task's prompts, each once."""
    items = task.items(plan.data, tokenizer, plan.limit, plan.seed)
    least = least_tokens(plan.keys, plan.tile, facts["heads"] // facts["kv_heads"])
    answer = plan.answer_tokens if plan.diverges else 0
    for item in items:
        tokens = len(item.prompt_ids) + len(item.target_ids)
        if plan.diverges and item.target_ids:
            raise UserError(f"task '{task.name}' has no questions to answer: choose its anchors by similarity (--by)")
        if plan.diverges and budget(plan.method.top_k, tokens, plan.method.min_k) >= tokens:
            raise UserError(
                f"task '{task.name}', item {item.id}: all keys of a prompt of {tokens:,} tokens are read under "
                f"{plan.method.spec} (min_k {plan.method.min_k}); choose longer ones, or fewer keys"
            )
        if tokens < least:
            raise UserError(
                f"task '{task.name}', item {item.id}: a prompt of {tokens:,} tokens is too short to calibrate on, "
                f"which takes at least {least:,} (keys {plan.keys}, tile {plan.tile}); choose longer ones"
            )
        model_folder.check_positions(tokens + answer, facts, f"task '{task.name}', item {item.id} needs")
    distinct = {(item.prompt_ids, item.target_ids): item for item in reversed(items)}
    return list(distinct.values())[::-1]  # without the other samples of a question


@torch.inference_mode()
def _studied(
    plan: Plan, model: Any, policies: Mapping[int, Policy], prompt: list[int]
) -> tuple[Measured, torch.Tensor]:
    pools_layer = plan.by == "similarity" and plan.method.pools_layer  # else heads are mapped to each other
    study = Study(model, policies, plan.keys, plan.tile, pools_layer)
    try:
        model(torch.tensor([prompt], device=model.device), use_cache=False, logits_to_keep=1)
        return study.result()
    finally:
        study.end()


def _finished(out: Path, mark: dict[str, Any], chosen_by: dict[str, Any], say: Say) -> Calibration:
    """The artefact that an earlier run of the same plan has written. Raises `UserError` if it is another one."""
    try:
        artefact = load(out)
    except ValueError:
        raise UserError(f"{out} is another file") from None
    differ = differing(mark, artefact.found.get("run") or {})
    idle = ("anchors",) if chosen_by["time_share"] else TIMES[1:]  # older files may record options without an effect
    other = differing(chosen_by, artefact.found.get("chosen_by") or {})
    differ += [f"--{option(name)}" for name in other if name not in idle]
    if differ:
        raise UserError(f"{out} is another calibration (it differs in {', '.join(differ)})")
    shutil.rmtree(partial_folder(out), ignore_errors=True)  # a run that was killed while it tidied up
    say(f"{out} is complete; nothing to run")
    return artefact


def _captured(paths: list[Path]) -> Iterator[torch.Tensor]:
    for path in paths:
        yield from read(path, "captured")


def _chosen(
    plan: Plan, paths: list[Path], lost: tuple[torch.Tensor, torch.Tensor] | None, layers: list[int], number: int
) -> tuple[AnchorChoice, dict[str, Any]]:
    """The best anchors by similarity, or by the sum of divergences in `lost`, and what that was found by."""
    shown = zip(*(read(path, "importance", "coverage", "seconds") for path in paths))
    importance, coverage, seconds = (torch.stack(one) for one in shown)
    importance, diverged = importance.mean(0), None
    if lost is not None:
        diverged, more = lost
        seconds = torch.cat([seconds, more])
    choice = choose(lambda: _captured(paths), importance, number, diverged)
    if plan.time_share is not None:  # the best that time allows: more anchors may lose more
        worth = [value for _, value in choice.by_number[:number]]
        choice = choice.of(worth.index(max(worth)) + 1)
    return choice, {
        "importance": _rounded(importance),
        "similarity": _rounded(choice.similarity),
        "mean_similarity": _rounded(choice.mean_similarity),
        "divergence": None if diverged is None else _rounded(diverged),
        "layers": layers,
        "by_number": _listed(layers, choice.by_number, "objective"),
        "coverage_keys": COVERAGE_KEYS,
        "coverage": _rounded(coverage.nanmean(0)),
        "seconds": _number(float(seconds.sum())),
    }


def _listed(layers: list[int], path: list[tuple[list[int], float]], name: str, sign: int = 1) -> list[dict[str, Any]]:
    """Anchors by the layers' own numbers, with a value of this name."""
    return [{"anchors": [layers[one] for one in anchors], name: _number(sign * value)} for anchors, value in path]


def _costs(plan: Plan, shape: dict[str, Any]) -> dict[str, float]:
    how = {name: shape[name] for name in ("heads", "kv_heads", "head_dim")}
    how |= {"context": plan.time_context, "batch": plan.time_batch, "device": plan.device}
    try:
        return layer_costs.measure(plan.method, dtype=getattr(torch, plan.dtype), **how)
    except torch.OutOfMemoryError:
        raise UserError(
            f"out of memory: the keys of {plan.time_batch:,} sequences of {plan.time_context:,} tokens, which "
            "time-share is measured on, do not fit beside the model; choose a smaller time-batch or time-context"
        ) from None


def _rounded(values: torch.Tensor) -> Any:
    return [_rounded(one) for one in values] if values.dim() else _number(float(values))


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
