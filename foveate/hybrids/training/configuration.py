"""The configuration of a training run: a TOML or JSON file, and settings given as `NAME=VALUE` over it.

Every unknown name and every value of a wrong kind is a `UserError` that names the setting and what is allowed.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from foveate.errors import DataError, UserError, require, unknown
from foveate.hybrids.training.mixture import Shape, TrainingPhase
from foveate.hybrids.training.prepare import Preparation
from foveate.hybrids.training.settings import setting
from foveate.hybrids.training.sources import Source
from foveate.hybrids.training.sparsity import SPARED, SparsitySettings
from foveate.hybrids.training.synthetic import SOURCES
from foveate.io import reading
from foveate.io.json_text import parse_json

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}


@dataclass(frozen=True)
class ModelSettings:
    """Either a folder or a preset. A folder with weights goes on from them; without, weights are drawn by the seed."""

    folder: Path | None = setting(None, "folder with a config.json of a causal language model, perhaps with weights")
    preset: str | None = setting(None, "name of a hybrid, such as lalte")
    size: str | None = setting(None, "size of the preset, such as 27M")
    changes: dict[str, Any] = setting(dict, "fields of the model's configuration to set otherwise")

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.preset is None):
            raise UserError("model needs either folder, or preset and size")
        if (self.preset is None) != (self.size is None):
            raise UserError("model.preset and model.size go together")


@dataclass(frozen=True)
class DataSettings:
    """Tokenised text, or the text it is made of."""

    folder: Path = setting(None, "folder of tokenised text; it is written if `text` is given and it is not there")
    text: Path | None = setting(None, "folder of text to tokenise into `folder`, once")
    prepare: dict[str, Any] = setting(dict, "how to tokenise it: tokenizer, vocab_size, limit, leave_out, …")

    def __post_init__(self) -> None:
        require(self.folder is not None, "data.folder", "a folder", "nothing")
        if self.prepare and self.text is None:
            raise UserError("data.prepare does nothing without data.text")
        self.preparation()

    def preparation(self) -> Preparation | None:
        """How to tokenise `text`; None without a text."""
        if self.text is None:
            return None
        if "text" in self.prepare:
            raise UserError("data.prepare.text: the text is data.text")
        return build(Preparation, {"text": str(self.text), **self.prepare}, "data.prepare")


@dataclass(frozen=True)
class BatchSettings:
    """Tokens of a step and of a forward pass, and the length of the rows."""

    tokens: int = setting(131_072, "tokens of an optimiser's step, of all devices together")
    device_tokens: int = setting(65_536, "tokens of one forward pass on one device; the rest is accumulated")
    length: int = setting(2048, "tokens of a row")
    longer: int | None = setting(None, "tokens of a row in the last steps; none: as before")
    longer_from: float = setting(0.85, "share of the steps after which rows are longer")

    def __post_init__(self) -> None:
        for name in ("tokens", "device_tokens", "length", *(() if self.longer is None else ("longer",))):
            require(getattr(self, name) >= 2, f"batch.{name}", "at least 2", getattr(self, name))
        require(0 < self.longer_from < 1, "batch.longer_from", "between 0 and 1", self.longer_from)
        if self.tokens % self.device_tokens:
            raise UserError(
                f"batch.tokens must be a multiple of batch.device_tokens ({self.device_tokens:,}), got {self.tokens:,}"
            )
        for length in filter(None, (self.length, self.longer)):
            if self.device_tokens % length:
                raise UserError(
                    f"batch.device_tokens must be a multiple of a row's {length:,} tokens, got {self.device_tokens:,}"
                )

    def shape(self, steps: int, world: int, rank: int) -> Shape:
        """Which rows a rank reads. Raises `UserError` if the ranks do not share a step's tokens evenly."""
        if self.tokens % (self.device_tokens * world):
            raise UserError(
                f"batch.tokens ({self.tokens:,}) must be a multiple of batch.device_tokens ({self.device_tokens:,}) "
                f"times the {world} processes"
            )
        turn = steps if self.longer is None else round(self.longer_from * steps)
        spans = [(0, turn, self.length), (turn, steps, self.longer)]
        phases = tuple(TrainingPhase(a, b, length, self.tokens // length) for a, b, length in spans if a < b)
        return Shape(phases, world, rank, self.tokens // (self.device_tokens * world))


@dataclass(frozen=True)
class OptimSettings:
    """AdamW with a linear warm-up and a cosine decay. Vectors and scalars (norms, biases, gates) do not decay."""

    lr: float = setting(3e-4, "highest learning rate")
    scores: float = setting(1.0, "share of it by which retention scores learn; below 1 where heads fall silent")
    final: float = setting(0.1, "share of it at the end")
    warmup: float = setting(0.05, "share of the steps over which it rises")
    weight_decay: float = setting(0.1, "of matrices")
    answers: float = setting(1.0, "weight in the loss of a token of an answer, beside 1 of any other")
    clip: float = setting(1.0, "largest norm of the gradient; 0: not clipped")

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", "above 0", self.lr)
        require(0 < self.scores <= 1, "optim.scores", "in (0, 1]", self.scores)
        require(0 <= self.final <= 1, "optim.final", "in [0, 1]", self.final)
        require(0 <= self.warmup < 1, "optim.warmup", "in [0, 1)", self.warmup)
        require(self.weight_decay >= 0, "optim.weight_decay", "at least 0", self.weight_decay)
        require(self.answers > 0, "optim.answers", "above 0", self.answers)
        require(self.clip >= 0, "optim.clip", "at least 0", self.clip)


@dataclass(frozen=True)
class CheckpointSettings:
    """When checkpoints are written, which are kept, and the model that is written at the end."""

    every: int = setting(500, "steps between two checkpoints")
    keep: int = setting(2, "newest checkpoints that are kept; the one of the lowest held-out loss is, too")
    export_shard: str = setting("5GB", "largest file of the model at the end, such as 50MB")

    def __post_init__(self) -> None:
        require(self.every >= 1, "checkpoints.every", "at least 1", self.every)
        require(self.keep >= 1, "checkpoints.keep", "at least 1", self.keep)


@dataclass(frozen=True)
class LogSettings:
    """What is said and written on the way."""

    every: int = setting(10, "steps between two readings of the loss; a device is waited for at no other step")
    held_out: int = setting(131_072, "held-out tokens on which the loss is measured with every checkpoint; 0: none")
    answers: int = setting(
        0, "steps between two measurements of the answers to rows of the mixture, near and far; a multiple of log.every"
    )
    far: int = setting(400, "tokens between an answer and its source from which it counts as far: above every window")

    def __post_init__(self) -> None:
        require(self.every >= 1, "log.every", "at least 1", self.every)
        require(self.far >= 1, "log.far", "at least 1", self.far)
        right = self.answers >= 0 and self.answers % self.every == 0
        require(right, "log.answers", f"a multiple of log.every ({self.every}), or 0", self.answers)
        require(self.held_out >= 0, "log.held_out", "at least 0", self.held_out)


@dataclass(frozen=True)
class RunSettings:
    """Where and how to compute. These settings change results only by rounding and by the random numbers of dropout."""

    device: str = setting("auto", "cpu, cuda, or auto: a GPU if there is one")
    compile: bool = setting(False, "compile the model with torch.compile")
    workers: int | None = setting(None, "processes that make batches; none: 4 with a GPU, else 0")

    def __post_init__(self) -> None:
        if self.device not in (devices := ("auto", "cpu", "cuda")):
            raise unknown("device", self.device, devices, "run")
        require(self.workers is None or self.workers >= 0, "run.workers", "at least 0", self.workers)


@dataclass(frozen=True)
class TrainingConfig:
    """A whole run."""

    steps: int = setting(0, "steps of the optimiser")
    seed: int = setting(0, "seed of weights, data and dropout")
    model: ModelSettings = None
    data: DataSettings = None
    mixture: dict[str, Source] = None
    batch: BatchSettings = setting(BatchSettings, "")
    optim: OptimSettings = setting(OptimSettings, "")
    sparsity: SparsitySettings = setting(SparsitySettings, "")
    checkpoints: CheckpointSettings = setting(CheckpointSettings, "")
    log: LogSettings = setting(LogSettings, "")
    run: RunSettings = setting(RunSettings, "")

    def __post_init__(self) -> None:
        for name in ("model", "data", "mixture"):
            if getattr(self, name) is None:
                raise UserError(f"the configuration lacks [{name}]")
        require(self.steps >= 1, "steps", "at least 1", self.steps)
        require(self.seed >= 0, "seed", "at least 0", self.seed)
        if self.sparsity.budget is not None:  # which counts all tokens of a row but the last ones
            require(
                self.batch.length > SPARED, "batch.length", f"above {SPARED} with a sparsity.budget", self.batch.length
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON values, as a file could hold them."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    def fingerprint(self) -> dict[str, Any]:
        """What the curve depends on, name by name. Paths are not among them: the place of data does not matter.

        Neither are `batch.device_tokens` and the number of processes, which change rounding. The draws of dropout
        depend on both: each micro-batch of each rank has its own.
        """
        whole = self.to_dict()
        kept = {name: whole[name] for name in ("steps", "seed", "batch", "optim", "sparsity", "mixture")}
        kept["batch"].pop("device_tokens")
        kept["model"] = {name: whole["model"][name] for name in ("preset", "size", "changes")}
        return dict(_flat(kept))


def load(path: Path, changes: Sequence[str] = ()) -> TrainingConfig:
    """The configuration of a file, `NAME=VALUE` settings over it. Raises `UserError` that names the file or setting."""
    path = Path(path)
    values = _read(path)
    for change in changes:
        _change(values, change)
    return parse(values)


def parse(values: Mapping[str, Any]) -> TrainingConfig:
    """A configuration from nested mappings. Raises `UserError`."""
    values = dict(values)
    if "mixture" in values:
        values["mixture"] = _mixture(values["mixture"])
    return build(TrainingConfig, values, "")


def settings() -> Iterator[tuple[str, Any, str]]:
    """Every setting: its name, its default, and what it is."""
    yield from _settings(TrainingConfig, "")
    for name, kind in (("model", ModelSettings), ("data", DataSettings), *_PER_SOURCE):
        yield from _settings(kind, f"{name}.")


_PER_SOURCE = tuple((f"mixture.{kind}", source) for kind, source in SOURCES.items())


def _settings(kind: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
    for one in dataclasses.fields(kind):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if dataclasses.is_dataclass(default):
            yield from _settings(type(default), f"{prefix}{one.name}.")
        elif text := one.metadata.get("help"):
            yield f"{prefix}{one.name}", default, text


def build(kind: Any, values: Any, where: str) -> Any:
    """A dataclass from a mapping, checked field by field. Raises `UserError`."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where or 'the configuration'}: expected settings, got {values!r}")
    fields = {one.name: one for one in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise unknown("setting", str(name), fields, where or "the configuration")
    hints = typing.get_type_hints(kind)
    made = {name: _value(hints[name], value, f"{where}.{name}".lstrip(".")) for name, value in values.items()}
    for name, one in fields.items():
        if name not in made and one.default is MISSING and one.default_factory is MISSING:
            raise UserError(f"{where}.{name} is missing")
    return kind(**made)


def _value(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):  # X | None
        inner = next(part for part in typing.get_args(kind) if part is not type(None))
        return None if value is None or value == "none" else _value(inner, value, where)
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else build(kind, value, where)
    if typing.get_origin(kind) is tuple:
        return _tuple(typing.get_args(kind), value, where)
    if typing.get_origin(kind) is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: expected settings, got {value!r}")
        return dict(value)
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where}: expected {_NAMES[kind]}, got {value!r}")
    return value


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{where}: expected a list, got {value!r}")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise UserError(f"{where}: expected {len(kinds)} values, got {list(value)}")
    return tuple(_value(kind, one, f"{where}[{number}]") for number, (kind, one) in enumerate(zip(kinds, value)))


def _mixture(values: Any) -> dict[str, Source]:
    if not isinstance(values, Mapping):
        raise UserError(f"mixture: expected sources with their settings, got {values!r}")
    made = {}
    for kind, settings in values.items():
        if kind not in SOURCES:
            raise unknown("source", str(kind), SOURCES, "mixture")
        made[kind] = build(SOURCES[kind], settings, f"mixture.{kind}")
    return made


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        values = reading.read_json(path)
    elif path.suffix == ".toml":
        try:
            import tomllib
        except ImportError:  # Python 3.10
            try:
                import tomli as tomllib
            except ImportError:
                raise UserError(
                    f"{path}: TOML needs Python 3.11 or later, or the package tomli; JSON works, too"
                ) from None
        try:
            values = tomllib.loads(reading.read_text(path))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise DataError(f"{path}: malformed TOML: {error}") from None
    else:
        raise UserError(f"{path}: a configuration is a .toml or .json file")
    if not isinstance(values, dict):
        raise DataError(f"{path}: expected settings, got {type(values).__name__}")
    return values


def _change(values: dict[str, Any], change: str) -> None:
    """Sets one `NAME=VALUE` in nested mappings; the value is JSON, else a text."""
    name, equals, text = change.partition("=")
    if not equals or not name.strip():
        raise UserError(f"--set {change}: expected NAME=VALUE, such as optim.lr=0.001")
    try:
        value = parse_json(text)
    except json.JSONDecodeError:
        value = text
    *parents, last = name.strip().split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {change}: {parent} has no settings of its own")
    values[last] = value


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
