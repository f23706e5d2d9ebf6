"""What a calibration of Kascade is to be: the prompts, the anchors, what they are chosen by; checked as it is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from foveate.calibration import BY, OVER, WEIGHTS
from foveate.evaluation.tasks.base import Task
from foveate.evaluation.tasks.probes import SHORTEST, TEXT, Probes
from foveate.inputs.model_folder import model_facts
from foveate.methods.kascade import Kascade
from foveate.results.errors import UserError, check_seed, unknown

KEYS, TILE = 64, 128
"""Keys that a tile chooses, and queries in a tile (Kascade, sections 3.3 and 3.4)."""
FEWEST_PROMPTS = 2
_FEWEST_TOKENS, _ANCHORS, _ANSWER_TOKENS, _ROUNDS = 2, 5, 16, 1
_LENGTH, _ROOM, _ANCHOR_SHARE = 4096, 64, 10 / 28
"""Without data: tokens of a prompt and of an answer, and anchors among the layers (docs/guide/calibrate.md)."""
PROMPTS = ("dense", "sparse")
"""How prompts are read before answers are compared."""
_OF_PROMPTS = ("tile", "dense_anchor_prefill")
TIMES = ("time_share", "time_context", "time_batch")
"""The settings of a budget of time."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to calibrate: `limit` prompts of a task, and of each of the tasks `also`, and how many anchors to choose,
    five if `anchors` is None.

    `by`, `over` and `weights` are what the choice goes by (:func:`foveate.calibration.choose`): the paper's similarity,
    or the same with the mean over a prompt's tiles, and all layers alike; or the divergence of predictions along dense
    attention's answers of at most `answer_tokens` tokens, `batch_size` prompts at a time, when keys are chosen as by
    `method`: with `divergence` the sum of what each layer loses that alone reads another's choice, with `together` what
    is lost when all layers read theirs, for anchors added one by one (:func:`foveate.calibration.grown`) and then, up
    to `rounds` times, each tried in every other place (:func:`foveate.calibration.improved`). With `together`,
    `prompts` may be sparse: `method` then reads the prompts as well, and not only decodes. `time_share`, if given,
    stands for `anchors`: as many as keep the attention of a decode step at `time_context` tokens and `time_batch`
    sequences within this share of dense attention's time, by costs measured on the device.
    """

    model: Path
    task: Task
    data: Path
    out: Path
    also: tuple[Task, ...] = ()
    anchors: int | None = None
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
    prompts: str = PROMPTS[0]
    time_share: float | None = None
    time_context: int = 32768
    time_batch: int = 1
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("anchors", "keys", "tile", "answer_tokens", "batch_size", "time_context", "time_batch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{option(name)} must be at least 1, got {getattr(self, name)}")
        if self.rounds < 0:
            raise UserError(f"rounds must be at least 0, got {self.rounds}")
        check_seed(self.seed)
        for name, allowed in (("by", BY), ("over", OVER), ("weights", WEIGHTS), ("prompts", PROMPTS)):
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed)
        if self.time_share is not None and not 0 < self.time_share <= 1:
            raise UserError(f"time-share must be a share in (0, 1], got {self.time_share}")
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
        idle: dict[str, Any] = {"over": OVER[0], "weights": WEIGHTS[0]}
        if self.by != "together":
            idle |= {"rounds": _ROUNDS, "prompts": PROMPTS[0]}
        if not self.diverges:
            idle = {"answer_tokens": _ANSWER_TOKENS, "batch_size": 1, "rounds": _ROUNDS, "prompts": PROMPTS[0]}
            if self.time_share is None:
                idle["method"] = Kascade()
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
        if self.prompts == "sparse" and method.decode_only:
            raise UserError(f"method must be sparse in prompts, too, with prompts sparse: {method.spec}")
        for name in _OF_PROMPTS if self.prompts == "dense" else ():
            if getattr(method, name) != getattr(Kascade, name):
                raise UserError(
                    f"{name} has no effect: what is measured is decoding after dense prompts: {method.spec}"
                )
        if self.by == "divergence" and method.score_keys != "exact":
            raise UserError(f"score_keys has no effect by divergence, of keys that are scored exactly: {method.spec}")

    @property
    def dense_method(self) -> Kascade:
        """The method after dense prompts."""
        return dataclasses.replace(self.method, decode_only=True)

    @property
    def diverges(self) -> bool:
        """Whether predictions are compared."""
        return self.by != "similarity"

    @property
    def number(self) -> int:
        """How many anchors, unless `time_share` says."""
        return _ANCHORS if self.anchors is None else self.anchors

    @property
    def tasks(self) -> tuple[Task, ...]:
        return (self.task, *self.also)

    def command(self) -> str:
        """The command line, paths shortened to their last names."""
        arguments = [argument for task in self.tasks for argument in task.arguments()]
        if self.data == TEXT:
            arguments = [f"--length {self.task.length} --batch-size {self.batch_size}"]  # type: ignore[attr-defined]
        else:
            arguments.append(f"--data {self.data.name}")
        parts = ["foveate calibrate", f"--model {self.model.name}", *arguments]
        parts += [f"--anchors {self.number}"] if self.time_share is None else []
        parts += [f"--{name} {getattr(self, name)}" for name in ("limit", "keys", "tile", "by")]
        if self.method != Kascade():
            parts += [f'--method "{self.method.spec}"']
        if self.diverges:
            how = ("answer_tokens", "batch_size", *(("rounds",) if self.by == "together" else ()))
            parts += [f"--{option(name)} {getattr(self, name)}" for name in how]
            parts += [] if self.prompts == "dense" else [f"--prompts {self.prompts}"]
        else:
            parts += [f"--over {self.over} --weights {self.weights}"]
        if self.time_share is not None:
            parts += [f"--{option(name)} {getattr(self, name)}" for name in TIMES]
        parts += [f"--seed {self.seed}", f"--dtype {self.dtype}", f"--device {self.device}", f"--out {self.out.name}"]
        return " ".join(parts)


def without_data(model: Path, length: int | None = None) -> tuple[list[Task], dict[str, Any]]:
    """The tasks, and the other arguments of a :class:`Plan`, of a calibration by the package's own prompts.

    Args:
        model: a model folder.
        length: tokens of a prompt; None: 4,096, or as many as the model has positions for, with an answer.

    Raises:
        UserError: for a folder that holds no model.
    """
    facts = model_facts(model)
    room = facts.get("max_positions") or _LENGTH + _ROOM
    length = min(_LENGTH, room - _ROOM) if length is None else length
    if length < SHORTEST:
        raise UserError(
            f"{model}: prompts without data take {SHORTEST} tokens or more, and {_ROOM} for answers; {room} positions"
        )
    how = {"anchors": max(1, round(_ANCHOR_SHARE * facts["layers"])), "limit": 8, "by": "together", "batch_size": 8}
    return [Probes(split=split, length=length) for split in Probes.splits], how | {
        "rounds": 0,
        "method": Kascade(pool="layer", pooling="sqrt"),
    }


def option(name: str) -> str:
    """A setting as the command line calls it."""
    return name.replace("_", "-")
