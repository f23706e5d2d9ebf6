"""Calibrating Kascade for a model on the prompts of a task: resumable prompt by prompt, one artefact at the end.

What each prompt shows is written to the folder `OUT.partial` as soon as it has been read. The artefact is made from
these files, some times over them and one in memory at a time, so that memory does not grow with the number of prompts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import foveate
from foveate.calibration import (
    BY,
    OVER,
    WEIGHTS,
    Calibration,
    Choice,
    Measured,
    check_number,
    choose,
    counterparts,
    grown,
    improved,
    least_tokens,
    load,
)
from foveate.calibration.similarity import COVERAGE_KEYS
from foveate.evaluation import accounting, data, divergence, inference, layer_costs
from foveate.evaluation.calibration_parts import drop_others, partial_folder, read, take_up, write
from foveate.evaluation.errors import UserError, unknown
from foveate.evaluation.tasks.base import Item, Task, items_digest
from foveate.integrations.transformers.facts import model_facts
from foveate.integrations.transformers.study import Study, attention_modules
from foveate.methods.base import budget
from foveate.methods.kascade import Kascade

KEYS, TILE = 64, 128
"""Keys that a tile chooses, and queries in a tile (Kascade, sections 3.3 and 3.4)."""
_PROMPT, _ANSWERS = "prompt-{:04d}.safetensors", "answers-{:04d}.safetensors"
_TRIED = "tried-{:02d}-{:04d}.safetensors"
_FEWEST_PROMPTS, _FEWEST_TOKENS, _ANSWER_TOKENS, _ROUNDS = 2, 2, 16, 1
_UNMOVED = "no prediction moves, whichever layer reads another's choice: are all answers one token?"

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to calibrate: `limit` prompts of a task, and of each of the tasks `also`, and how many anchors to choose.

    `by`, `over` and `weights` are what the choice goes by (:func:`foveate.calibration.choose`): the paper's similarity,
    or the same with the mean over a prompt's tiles, and all layers alike; or the divergence of predictions along dense
    attention's answers of at most `answer_tokens` tokens, `batch_size` prompts at a time, when keys are chosen as by
    `method`: with `divergence` the sum of what each layer loses that alone reads another's choice, with `together` what
    is lost when all layers read theirs, for anchors added one by one (:func:`foveate.calibration.grown`) and then, up
    to `rounds` times, each tried in every other place (:func:`foveate.calibration.improved`). `time_share`, if given,
    stands for `anchors`: as many as keep the attention of a decode step at `time_context` tokens and `time_batch`
    sequences within this share of dense attention's time, by costs measured on the device.
    """

    model: Path
    task: Task
    data: Path
    out: Path
    also: tuple[Task, ...] = ()
    anchors: int = 5
    limit: int = 20
    keys: int = KEYS
    tile: int = TILE
    by: str = BY[0]
    over: str = OVER[0]
    weights: str = WEIGHTS[0]
    method: Kascade = dataclasses.field(default_factory=Kascade)
    answer_tokens: int = _ANSWER_TOKENS
    batch_size: int = 1
    rounds: int = _ROUNDS
    time_share: float | None = None
    time_context: int = 32768
    time_batch: int = 1
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("anchors", "keys", "tile", "answer_tokens", "batch_size", "time_context", "time_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.rounds < 0:
            raise UserError(f"rounds must be at least 0, got {self.rounds}")
        for name, allowed in (("by", BY), ("over", OVER), ("weights", WEIGHTS)):
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed)
        self._check_effect()
        if self.diverges and self.answer_tokens < _FEWEST_TOKENS:
            raise UserError(
                f"answer-tokens must be at least {_FEWEST_TOKENS}, got {self.answer_tokens}: the first is predicted by "
                "the prompt, which is dense"
            )
        if self.limit < 1 or self.limit * len(self.tasks) < _FEWEST_PROMPTS:
            least = 1 if self.also else _FEWEST_PROMPTS
            raise UserError(f"limit must be at least {least}, got {self.limit}: one prompt shows too little")
        if self.time_share is not None and not 0 < self.time_share <= 1:
            raise UserError(f"time-share must be a share in (0, 1], got {self.time_share}")

    def _check_effect(self) -> None:
        """Refuses settings that would change nothing, and a method whose anchors are chosen already."""
        idle: dict[str, Any] = {"over": OVER[0], "weights": WEIGHTS[0]}
        if self.by != "together":
            idle["rounds"] = _ROUNDS
        if not self.diverges:
            idle = {"answer_tokens": _ANSWER_TOKENS, "batch_size": 1, "rounds": _ROUNDS}
            if self.time_share is None:
                idle["method"] = Kascade()
        for name, default in idle.items():
            if getattr(self, name) != default:
                raise UserError(f"{name.replace('_', '-')} has no effect when anchors are chosen by {self.by}")
        method = self.method
        if not isinstance(method, Kascade):
            raise UserError(f"method must be kascade with its settings, not {method.spec}")
        if (method.anchors, method.heads, method.calibration) != (Kascade.anchors, None, ""):
            raise UserError(f"method must leave out anchors, heads and calibration, which are chosen: {method.spec}")
        for name in ("tile", "rest", "exact_anchors"):
            if getattr(method, name) != getattr(Kascade, name):
                raise UserError(
                    f"{name} has no effect: what is measured is decoding behind dense prompts: {method.spec}"
                )

    @property
    def diverges(self) -> bool:
        """Whether predictions are compared."""
        return self.by != "similarity"

    @property
    def tasks(self) -> tuple[Task, ...]:
        return (self.task, *self.also)

    def command(self) -> str:
        """The command line, paths shortened to their last names."""
        arguments = [argument for task in self.tasks for argument in task.arguments()]
        parts = ["foveate calibrate", f"--model {self.model.name}", *arguments, f"--data {self.data.name}"]
        parts += [f"--{name} {getattr(self, name)}" for name in ("anchors", "limit", "keys", "tile", "by")]
        if self.method != Kascade():
            parts += [f'--method "{self.method.spec}"']
        if self.diverges:
            how = ("answer_tokens", "batch_size", *(("rounds",) if self.by == "together" else ()))
            parts += [f"--{name.replace('_', '-')} {getattr(self, name)}" for name in how]
        else:
            parts += [f"--over {self.over} --weights {self.weights}"]
        if self.time_share is not None:
            parts += [f"--{name.replace('_', '-')} {getattr(self, name)}" for name in _TIMES]
        parts += [f"--seed {self.seed}", f"--dtype {self.dtype}", f"--device {self.device}", f"--out {self.out.name}"]
        return " ".join(parts)


_TIMES = ("time_share", "time_context", "time_batch")


def run(plan: Plan, progress: Callable[[int, int], None] = lambda done, of: None, say: Say = print) -> Calibration:
    """Reads the prompts that are missing, chooses the anchors and writes the artefact.

    Args:
        progress: called with the steps done, and all of them: prompts read, pairs of layers compared, anchors tried.
        say: called with what a user should know.

    Raises:
        UserError: for prompts that are too few, too short or beyond the model, more anchors than layers, results of
            another run in the way, or attention or predictions that are not finite.
    """
    facts = accounting.model_facts(plan.model)
    device = inference.choose_device(plan.device)
    dtype = inference.choose_dtype(plan.dtype, plan.model, device)
    plan = dataclasses.replace(plan, model=plan.model.resolve(), dtype=dtype, device=device)
    _check_anchors(plan, facts["layers"])
    files = list(dict.fromkeys(file for task in plan.tasks for file in task.files(plan.data)))
    tokenizer = inference.load_tokenizer(plan.model)
    items = [item for task in plan.tasks for item in _items(plan, task, tokenizer, facts)]
    if len(items) < _FEWEST_PROMPTS:
        raise UserError(f"limit {plan.limit} gives one prompt, which shows too little: the others are the same")
    mark = {
        "schema": 1,
        "tasks": [{"task": task.name, "settings": task.settings()} for task in plan.tasks],
        "limit": plan.limit,
        "seed": plan.seed,
        "keys": plan.keys,
        "tile": plan.tile,
        "model": plan.model.name,
        "weights": accounting.model_digest(plan.model),
        "data": data.digest(files),
        "items": items_digest(items),
        "tokens": [len(item.prompt_ids) + len(item.target_ids) for item in items],
        "dtype": plan.dtype,
        "device": device,
    }
    if plan.diverges:
        about = {"method": plan.method.spec, "answer_tokens": plan.answer_tokens, "batch_size": plan.batch_size}
        answers = {"answers": about}
    else:
        answers = {}
    chosen_by = {name: getattr(plan, name) for name in ("anchors", "by", "over", "weights", *_TIMES)}
    chosen_by["method"] = plan.method.spec
    if plan.by == "together":
        chosen_by["rounds"] = plan.rounds
    mark, chosen_by = json.loads(json.dumps([mark, chosen_by]))  # as they are read back
    if plan.out.exists():
        return _finished(plan.out, mark | answers, chosen_by, say)
    with take_up(partial_folder(plan.out), mark):
        return _calibrated(plan, items, tokenizer, mark | answers, chosen_by, progress, say)


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
    batches = inference.batches(items, plan.batch_size) if plan.diverges else []
    answers = [folder / _ANSWERS.format(number) for number in range(len(batches))] if plan.by == "divergence" else []
    how = json.dumps(mark.get("answers"))
    drop_others(folder.glob(_ANSWERS.format(0).replace("0000", "*")), how)
    kept, of = sum(path.exists() for path in (*paths, *answers)), len(paths) + len(answers)
    if kept:
        say(f"resuming: {kept} of {of} " + ("files of prompts and answers" if answers else "prompts") + " are there")
    model = inference.load_model(plan.model, plan.dtype, plan.device)
    with foveate.attached(model, "dense") as attachment:
        layers = sorted(attachment.policies)
        _check_anchors(plan, len(layers))
        shape = model_facts(attachment.config, attention_modules(model, layers))
        costs = None if plan.time_share is None else _costs(plan, shape)
        number = (
            plan.anchors if costs is None else layer_costs.affordable(costs, plan.time_share, layers, plan.time_context)
        )
        pairs = len(divergence.pairs(layers))
        each = pairs if answers else _tries(len(layers), number, plan.rounds)
        steps = len(items) + len(batches) * each
        for done, (path, item) in enumerate(zip(paths, items)):
            progress(done, steps)
            if not path.exists():
                start = time.perf_counter()
                measured, importance = _studied(plan, model, attachment, [*item.prompt_ids, *item.target_ids])
                write(path, {**measured._asdict(), "importance": importance}, start)
    if answers:
        maps = counterparts(_captured(paths))
        for index, (path, batch) in enumerate(zip(answers, batches)):
            done = itertools.count(len(items) + index * pairs)
            if not path.exists():
                start = time.perf_counter()
                lost = _told(
                    divergence.measure,
                    model,
                    tokenizer,
                    batch,
                    plan.method,
                    layers,
                    maps,
                    lambda done=done: progress(next(done), steps),
                )
                write(path, {"divergence": lost * len(batch)}, start, how)
    choice, found = _chosen(plan, paths, answers, layers, number)
    if plan.by == "together":

        def told(done: int) -> None:
            progress(min(len(items) + done, steps), steps)

        alone, better = _tried(plan, model, tokenizer, batches, layers, choice, number, how, told)
        spent = (read(path, "seconds")[0] for path in folder.glob(_TRIED.format(0, 0).replace("00-0000", "*")))
        found["seconds"] = _number(found["seconds"] + float(sum(spent)))
        found["by_number"] = [
            {"anchors": [layers[one] for one in anchors], "objective": _number(-lost)} for anchors, lost in alone
        ]
        found["together"] = [
            {"anchors": [layers[one] for one in anchors], "divergence": _number(lost)} for anchors, lost in better
        ]
        choice = choice.at(better[-1][0])
    progress(steps, steps)
    heads = _named(choice, layers)
    artefact = Calibration(shape, tuple(layers[one] for one in choice.anchors), heads, found)
    about = {
        "layer_ms": None if costs is None else {name: _number(value) for name, value in costs.items()},
        "run": mark,
        "chosen_by": chosen_by,
        "device": accounting.device_name(plan.device),
        "versions": accounting.versions(),
        "commit": accounting.commit(),
        "command": plan.command(),
    }
    artefact = dataclasses.replace(artefact, found={**artefact.found, **about})
    artefact.write(plan.out)
    shutil.rmtree(folder)
    return artefact


def _check_anchors(plan: Plan, layers: int) -> None:
    if plan.time_share is None:
        try:
            check_number(plan.anchors, layers)
        except ValueError as error:
            raise UserError(str(error)) from None


def _items(plan: Plan, task: Task, tokenizer: Any, facts: dict[str, Any]) -> list[Item]:
    """A task's prompts; where they are to be answered, as greedily and as far as answers are compared."""
    items = task.items(plan.data, tokenizer, plan.limit, plan.seed)
    least = least_tokens(plan.keys, plan.tile, facts["heads"] // facts["kv_heads"])
    answer = plan.answer_tokens if plan.diverges else 0
    for item in items:
        tokens = len(item.prompt_ids) + len(item.target_ids)
        if plan.diverges and item.target_ids:
            raise UserError(f"task '{task.name}' has no questions to answer: its anchors are chosen by similarity")
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
        accounting.check_positions(tokens + answer, facts, f"task '{task.name}', item {item.id} needs")
    distinct = {(item.prompt_ids, item.target_ids): item for item in reversed(items)}
    items = list(distinct.values())[::-1]  # without the other samples of a question
    if not plan.diverges:
        return items
    return [dataclasses.replace(item, max_new_tokens=answer, stop="", sampling=None) for item in items]


@torch.inference_mode()
def _studied(plan: Plan, model: Any, attachment: Any, prompt: list[int]) -> tuple[Measured, torch.Tensor]:
    study = Study(model, attachment, plan.keys, plan.tile)
    try:
        model(torch.tensor([prompt], device=model.device), use_cache=False, logits_to_keep=1)
        return study.result()
    except ValueError as error:
        raise UserError(str(error)) from None
    finally:
        study.end()


def _tries(layers: int, number: int, rounds: int) -> int:
    """How many anchors are tried together, at most."""
    return 1 + sum(layers - count for count in range(1, number)) + rounds * (1 + (number - 1) * (layers - number))


def _tried(
    plan: Plan,
    model: Any,
    tokenizer: Any,
    batches: list[list[Item]],
    layers: list[int],
    choice: Choice,
    number: int,
    how: str,
    progress: Callable[[int], None],
) -> tuple[list[tuple[list[int], float]], list[tuple[list[int], float]]]:
    """Anchors added one by one, and what they come to when they are moved; each with what is lost. What a batch shows
    is kept in a file."""
    folder, begun = partial_folder(plan.out), itertools.count()
    held: dict[int, divergence.Answered] = {}  # of one batch, so that memory does not grow with their number

    def compared(index: int, methods: list[Kascade]) -> torch.Tensor:
        if index not in held:
            held.clear()
            held[index] = divergence.answer(model, tokenizer, batches[index])
        return _told(divergence.together, model, held[index], methods, lambda: progress(next(begun)))

    def losses(turn: int, tried: list[list[int]]) -> torch.Tensor:
        methods = [
            dataclasses.replace(plan.method, anchors=[layers[one] for one in anchors], heads=_named(other, layers))
            for anchors, other in ((anchors, choice.at(anchors)) for anchors in tried)
        ]
        summed = torch.zeros(len(tried))
        for index, batch in enumerate(batches):
            path, of = folder / _TRIED.format(turn, index), json.dumps([how, tried])
            drop_others(filter(Path.exists, [path]), of)
            if path.exists():
                progress([next(begun) for _ in tried][-1])
            else:
                start = time.perf_counter()
                write(path, {"divergence": compared(index, methods) * len(batch)}, start, of)
            summed += read(path, "divergence")[0]
        if turn == 0 and not summed[0] > 0:
            raise UserError(_UNMOVED)
        return summed / sum(map(len, batches))

    alone = grown(len(layers), losses, number)
    if plan.time_share is not None:  # the best that time allows: more anchors may lose more
        alone = alone[: 1 + min(range(len(alone)), key=lambda index: alone[index][1])]
    moved = improved(alone[-1][0], len(layers), lambda turn, tried: losses(number + turn, tried), plan.rounds)
    return alone, moved or alone[-1:]


def _told(work: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """What it returns; predictions that are not finite are the user's to know."""
    try:
        return work(*arguments)
    except ValueError as error:
        raise UserError(str(error)) from None


def _named(choice: Choice, layers: list[int]) -> dict[str, list[int]]:
    """The heads' maps by the layers' own numbers."""
    return {str(layers[layer]): heads for layer, heads in choice.heads.items()}


def _finished(out: Path, mark: dict[str, Any], chosen_by: dict[str, Any], say: Say) -> Calibration:
    """The artefact that an earlier run of the same plan has written."""
    try:
        artefact = load(out)
    except ValueError:
        raise UserError(f"{out} is another file; choose another --out, or move it away") from None
    if artefact.found.get("run") != mark or artefact.found.get("chosen_by") != chosen_by:
        raise UserError(f"{out} is another calibration; choose another --out, or move it away")
    shutil.rmtree(partial_folder(out), ignore_errors=True)  # a run that was killed while it tidied up
    say(f"{out} is complete; nothing to run")
    return artefact


def _captured(paths: list[Path]) -> Iterator[torch.Tensor]:
    for path in paths:
        yield from read(path, "captured")


def _chosen(
    plan: Plan, paths: list[Path], answers: list[Path], layers: list[int], number: int
) -> tuple[Choice, dict[str, Any]]:
    """The best anchors by similarity, or by the sum of divergences, and what that was found by."""
    shown = zip(*(read(path, "importance", "coverage", "seconds") for path in paths))
    importance, coverage, seconds = (torch.stack(one) for one in shown)
    importance, diverged = importance.mean(0), None
    if answers:
        shown = zip(*(read(path, "divergence", "seconds") for path in answers))
        summed, more = (torch.stack(one) for one in shown)
        diverged, seconds = summed.sum(0) / len(paths), torch.cat([seconds, more])
        if not bool((diverged > 0).any()):
            raise UserError(_UNMOVED)
    try:
        choice = choose(lambda: _captured(paths), importance, number, plan.over, plan.weights, diverged)
        if plan.time_share is not None:  # the best that time allows: more anchors may lose more
            worth = [value for _, value in choice.by_number[:number]]
            choice = choice.of(worth.index(max(worth)) + 1)
    except ValueError as error:
        raise UserError(str(error)) from None
    return choice, {
        "importance": _rounded(importance),
        "similarity": _rounded(choice.similarity),
        "mean_similarity": _rounded(choice.mean_similarity),
        "divergence": None if diverged is None else _rounded(diverged),
        "layers": layers,
        "by_number": [
            {"anchors": [layers[one] for one in anchors], "objective": _number(value)}
            for anchors, value in choice.by_number
        ],
        "coverage_keys": COVERAGE_KEYS,
        "coverage": _rounded(coverage.nanmean(0)),
        "seconds": _number(float(seconds.sum())),
    }


def _costs(plan: Plan, shape: dict[str, Any]) -> dict[str, float]:
    try:
        return layer_costs.measure(
            plan.method,
            heads=shape["heads"],
            kv_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            context=plan.time_context,
            batch=plan.time_batch,
            dtype=getattr(torch, plan.dtype),
            device=plan.device,
        )
    except torch.OutOfMemoryError:
        raise UserError(
            f"out of memory: the keys of {plan.time_batch:,} sequences of {plan.time_context:,} tokens, which "
            "time-share is measured on, do not fit beside the model; choose a smaller time-batch or time-context"
        ) from None


def _rounded(values: torch.Tensor) -> Any:
    return [_rounded(one) for one in values] if values.dim() else _number(float(values))


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
