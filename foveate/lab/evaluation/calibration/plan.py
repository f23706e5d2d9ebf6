"""Options of a calibration of Kascade: prompts, number of anchors, criterion; checked when made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from foveate.calibration import kept_path
from foveate.errors import UserError, check_seed, require, unknown
from foveate.integrations.transformers.model_folder import model_digest, model_facts
from foveate.lab.evaluation.calibration.anchors import BY
from foveate.lab.evaluation.tasks.base import Task
from foveate.lab.evaluation.tasks.probes import SHORTEST, TEXT, USUAL, Probes
from foveate.methods.kascade import CALIBRATED_SETTINGS, Kascade
from foveate.methods.kascade_paper import KascadePaper

KEYS, TILE = 64, 128  # keys that a tile chooses, and queries in a tile (Kascade, sections 3.3 and 3.4)
FEWEST_PROMPTS = 2
_FEWEST_TOKENS, _ANSWER_TOKENS, _BATCH_SIZE = 2, 16, 8
_ANCHOR_SHARE, _ANCHORS_OF_PAPER = 10 / 28, 5  # anchors among the layers, and by similarity (docs/guide/calibrate.md)
_LENGTH, _ROOM = 4096, 64  # without data: tokens of a prompt and of an answer
PROMPTS = ("dense", "sparse")  # how prompts are read before answers are compared
_OF_PROMPTS = ("tile", "rest", "dense_anchor_prefill")
TIMES = ("time_share", "time_context", "time_batch")  # the settings of a budget of time


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to calibrate, and how anchors are chosen.

    `by` is the measure by which anchors are chosen. Two measures are divergences of predictions along dense attention's
    answers. `together` measures the divergence while all layers read their anchors' choice; anchors are added one by
    one (:func:`.anchors.grown`) and then moved (:func:`.anchors.improved`). `divergence` measures one layer at a time,
    while this layer alone reads another layer's choice, and adds the losses up. The third measure, `similarity`, is the
    paper's (:func:`.anchors.choose`).
    """

    model: Path
    task: Task
    data: Path
    out: Path
    also: tuple[Task, ...] = ()
    anchors: int | None = None  # None: ten for every 28 layers that can be one, or by similarity five
    limit: int = 20  # prompts of each task
    keys: int = KEYS
    tile: int = TILE
    by: str = BY[0]
    method: Kascade = None  # type: ignore[assignment]  # how keys are chosen; None: kascade, by similarity kascade_paper
    answer_tokens: int = _ANSWER_TOKENS
    batch_size: int = _BATCH_SIZE  # prompts answered together
    rounds: int = 0  # together: how often each anchor is tried in every other place, at most
    prompts: str = PROMPTS[0]  # together: sparse ones are read by `method`, too
    time_share: float | None = None  # instead of `anchors`: largest time of a step's attention, as a share of dense's
    time_context: int = 32768
    time_batch: int = 1
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    kept: bool = False  # `out` is :func:`kept_at`, where a newer calibration replaces an older one

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", self._usual_method)
        for name in ("anchors", "keys", "tile", "answer_tokens", "batch_size", "time_context", "time_batch"):
            value = getattr(self, name)
            require(value is None or value >= 1, option(name), "at least 1", value)
        require(self.rounds >= 0, "rounds", "at least 0", self.rounds)
        check_seed(self.seed)
        for name, allowed in (("by", BY), ("prompts", PROMPTS)):
            if getattr(self, name) not in allowed:
                raise unknown("value", getattr(self, name), allowed, f"--{name}")
        share = self.time_share
        require(share is None or 0 < share <= 1, "time-share", "a share in (0, 1]", share)
        self._check_effect()
        if self.diverges and self.answer_tokens < _FEWEST_TOKENS:
            raise UserError(
                f"answer-tokens must be at least {_FEWEST_TOKENS}, got {self.answer_tokens}: the first is predicted by "
                "the prompt, which is dense"
            )
        if self.limit < 1 or self.limit * len(self.tasks) < FEWEST_PROMPTS:
            least = 1 if self.also else FEWEST_PROMPTS
            raise UserError(f"limit must be at least {least}, got {self.limit}: one prompt shows too little")

    def _check_effect(self) -> None:
        """Refuses settings that would change nothing, and a method whose anchors are chosen already."""
        idle: dict[str, Any] = {} if self.by == "together" else {"rounds": 0, "prompts": PROMPTS[0]}
        if not self.diverges:
            idle |= {"answer_tokens": _ANSWER_TOKENS, "batch_size": _BATCH_SIZE}
        for name, default in idle.items():
            if getattr(self, name) != default:
                raise UserError(f"{option(name)} has no effect when anchors are chosen by {self.by}")
        if self.time_share is not None and self.anchors is not None:
            raise UserError("anchors has no effect beside time-share, which says how many; leave one of them out")
        for name in TIMES[1:] if self.time_share is None else ():
            if getattr(self, name) != getattr(Plan, name):
                raise UserError(f"{option(name)} has no effect without time-share")
        method = self.method
        if not isinstance(method, Kascade):
            raise UserError(f"method must be kascade with its settings, not {method.spec}")
        if (method.anchors, method.heads, method.calibration) != (Kascade.anchors, None, ""):
            raise UserError(f"method must leave out anchors, heads and calibration, which are chosen: {method.spec}")
        if not self.diverges and self.time_share is None:
            usual = dataclasses.replace(self._usual_method, pool=method.pool)
            if method != usual:
                raise UserError(
                    f"method has no effect when anchors are chosen by {self.by}, but for its pool: {method.spec}; "
                    f"{usual.spec} is possible"
                )
        if self.prompts == "sparse" and method.decode_only:
            raise UserError(f"method must be sparse in prompts, too, with prompts sparse: {method.spec}")
        for name in _OF_PROMPTS if self.prompts == "dense" else ():
            if getattr(method, name) != getattr(type(method), name):
                raise UserError(
                    f"{name} has no effect: what is measured is decoding after dense prompts: {method.spec}"
                )
        if self.by == "divergence" and method.about.chooses_by_estimates(method):
            raise UserError(f"method must score all keys exactly, as divergence does, such as kascade: {method.spec}")

    @property
    def dense_method(self) -> Kascade:
        """The method after dense prompts."""
        return dataclasses.replace(self.method, decode_only=True, rest="none")

    @property
    def diverges(self) -> bool:
        """Whether predictions are compared."""
        return self.by != "similarity"

    @property
    def _usual_method(self) -> Kascade:
        return Kascade() if self.diverges else KascadePaper()

    @property
    def in_use(self) -> Kascade:
        """The method that the anchors are for, without them."""
        return self.dense_method if self.diverges and self.prompts == "dense" else self.method

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the anchors are for; what is similar in prompts is so for sparse and dense ones alike."""
        names = [name for name in CALIBRATED_SETTINGS if self.diverges or name != "decode_only"]
        return {name: getattr(self.in_use, name) for name in names}

    def with_anchors(self, layers: int) -> Plan:
        """The plan with the usual number of anchors for this number of layers, if it has no number of its own."""
        if self.anchors is not None or self.time_share is not None:
            return self
        usual = max(1, round(_ANCHOR_SHARE * layers)) if self.diverges else min(_ANCHORS_OF_PAPER, layers)
        return dataclasses.replace(self, anchors=usual)

    @property
    def tasks(self) -> tuple[Task, ...]:
        return (self.task, *self.also)

    def command(self) -> str:
        """The command line, paths shortened to their last names."""
        arguments = [argument for task in self.tasks for argument in task.arguments()]
        if self.data == TEXT:
            arguments = [f"--length {self.task.length}"]  # type: ignore[attr-defined]
        else:
            arguments.append(f"--data {self.data.name}")
        parts = ["foveate calibrate", f"--model {self.model.name}", *arguments]
        parts += [f"--anchors {self.anchors}"] if self.time_share is None else []
        parts += [f"--{name} {getattr(self, name)}" for name in ("limit", "keys", "tile", "by")]
        if self.method != self._usual_method:
            parts += [f'--method "{self.method.spec}"']
        if self.diverges:
            how = ("answer_tokens", "batch_size", *(("rounds",) if self.by == "together" else ()))
            parts += [f"--{option(name)} {getattr(self, name)}" for name in how]
            parts += [] if self.prompts == "dense" else [f"--prompts {self.prompts}"]
        if self.time_share is not None:
            parts += [f"--{option(name)} {getattr(self, name)}" for name in TIMES]
        parts += [f"--seed {self.seed}", f"--dtype {self.dtype}", f"--device {self.device}"]
        return " ".join(parts if self.kept else [*parts, f"--out {self.out.name}"])


def kept_at(plan: Plan) -> Path:
    """The file in the user's cache folder by which `attach` finds a plan's calibration again.

    Raises `UserError` for a folder that holds no model.
    """
    return kept_path(model_facts(plan.model), model_digest(plan.model), plan.settings)


def without_data(model: Path, length: int | None = None) -> list[Task]:
    """The tasks that calibrate a model folder by the package's own prompts of ``length`` tokens.

    None: 4,096 tokens, or fewer if the model has no positions for these and an answer. Raises `UserError` for a folder
    that holds no model, and for a length that is too short.
    """
    facts = model_facts(model)
    room = facts.get("max_positions") or _LENGTH + _ROOM
    length = min(_LENGTH, room - _ROOM) if length is None else length
    if length < SHORTEST:
        raise UserError(
            f"{model}: prompts without data take {SHORTEST} tokens or more, and {_ROOM} for answers; {room} positions"
        )
    return [Probes(split=split, length=length) for split in USUAL]


def option(name: str) -> str:
    """A setting as the command line calls it."""
    return name.replace("_", "-")
