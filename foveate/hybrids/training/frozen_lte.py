"""Training LTE's module alone on a frozen model: forward passes of the model, gradients of the module.

The model reads sequences of :mod:`foveate.hybrids.training.lte_sequences`. For every layer, KV head and token of a
document, the module predicts the logarithm of the largest attention probability that a query beyond the window gives
the token, times the length of its value in the layer's output over the length of the residual stream. The loss is
SmoothL1 on the standardised logarithm, and a logistic loss on pairs of a token among the tenth worth most and any
other.

A run is resumable to the same curve: sequences are functions of seed and step, and `OUT.partial` holds the module, the
optimizer's moments and the step. Each reading of the loss is a row of `OUT.log.jsonl`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from foveate.calibration.eviction_scores import LEVELS, EvictionScores
from foveate.errors import DataError, UserError, check_seed, require
from foveate.hybrids.training.lte_sequences import Drawn, Sequences
from foveate.hybrids.training.lte_targets import FrozenModel, Seen
from foveate.hybrids.training.stop import Stop
from foveate.integrations.transformers import loading, model_folder
from foveate.integrations.transformers.facts import model_facts, rotary_facts
from foveate.io import outfile, reading
from foveate.io.digest import digest
from foveate.io.json_text import parse_json
from foveate.io.outfile import locked

_KIND = "foveate.lte_training"
_SINKS = 4
"""First tokens of a sequence, which draw attention whatever they are: they are always kept, and never learned from."""
_LEAST = -24.0
"""Logarithms of worth are cut here: less is nothing."""
_DEEPEST = 4.0
"""Deviations below a head's mean at which the standardised target is cut."""
_TOP = 0.1
"""The share of tokens that count as worth most."""
_CLIP = 1.0
_RANKING = 0.5
"""Weight of the loss on pairs beside SmoothL1."""
_HELD_OUT = 8
"""Sequences that are not learned from: they set scales, and heads' budgets."""
_EVERY = 25
"""Steps between readings of the loss, which also save the run."""

Progress = Callable[[int, int, dict[str, float]], None]
"""Called with steps done, steps in all, and the row that was logged last."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Options of a training of eviction scores. `dtype` and `device` may be "auto"."""

    model: Path
    text: Path
    out: Path
    steps: int = 1000
    minutes: float | None = None
    length: int = 4096
    window: int = 32
    lr: float = 2e-3
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "window"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        check_seed(self.seed)
        for name in ("lr", "minutes"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, name, "above 0", value)
        quarter = self.length // 4
        require(self.window < quarter, "window", f"below a quarter of the length, {quarter}", self.window)

    @property
    def partial(self) -> Path:
        """Where an unfinished run is kept."""
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def log(self) -> Path:
        """The rows of the loss."""
        return self.out.with_name(f"{self.out.name}.log.jsonl")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run has come to. `recall`: see :func:`recall`; both on sequences that it did not learn from.

    `signal`: the number of the signal that stopped it; None if it is finished.
    """

    step: int
    loss: float
    recall: float
    finished: bool
    signal: int | None = None


def train(plan: Plan, say: Callable[[str], None], progress: Progress = lambda *_: None) -> Outcome:
    """Trains, or goes on where an interrupted run of the same plan has stopped, and writes the file.

    A signal ends a run after its step, with `OUT.partial`; `minutes` end it with the file, as `steps` do.

    Raises:
        UserError: for text, a model or a file that cannot be used, and where another process trains into the file.
    """
    outfile.check(plan.out)
    facts = model_folder.model_facts(plan.model)
    model_folder.check_positions(plan.length, facts, "sequences of training need")
    device = loading.choose_device(plan.device)
    dtype = loading.choose_dtype(plan.dtype, plan.model, device)
    tokenizer = loading.load_tokenizer(plan.model)
    sequences = Sequences(plan.text, tokenizer, plan.length, plan.seed)
    network = loading.load_model(plan.model, dtype, device)
    with outfile.writing(plan.out):
        plan.out.parent.mkdir(parents=True, exist_ok=True)
    with locked(plan.out.with_name(f"{plan.out.name}.lock")):
        return _Run(plan, network, sequences, say).train(progress)


class _Run:
    """A run: the frozen model, the module, and where it stands."""

    def __init__(self, plan: Plan, network: Any, sequences: Sequences, say: Callable[[str], None]):
        self._plan, self._sequences, self._say = plan, sequences, say
        self._device = network.device
        self._model = FrozenModel(network.requires_grad_(False), plan.window)
        config = network.config.get_text_config(decoder=True)
        facts = model_facts(config, self._model.modules) | {"rope": rotary_facts(config)}
        say("measuring keys and values")
        held_out = [self._sequences.draw(f"held out {number}") for number in range(_HELD_OUT)]
        self._held_out = [(*self._model.read_with_lengths(self._ids(one)), one) for one in held_out]
        first = self._held_out[0][0][self._model.layers[0]]
        torch.manual_seed(plan.seed)
        self._scores = EvictionScores(
            facts,
            self._model.layers,
            first.k.shape[1],
            first.k.shape[3],
            first.v.shape[3],
            self._model.inv_freq,
            self._model.rotary_scaling,
            plan.window,
            plan.length,
        ).to(self._device)
        self._standardise()
        self._optimizer = torch.optim.AdamW(self._scores.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self._step, self._seconds, self._began = 0, 0.0, time.monotonic()
        self._mark = self._fingerprint(facts)

    def train(self, progress: Progress) -> Outcome:
        plan = self._plan
        rows = self._resume()
        self._began, before, stop, losses = time.monotonic(), self._seconds, Stop(None), []
        with stop.on_signals():
            while self._step < plan.steps and not stop.asked and self._spent < 1:
                losses.append(self._learn())
                self._step += 1
                self._seconds = before + time.monotonic() - self._began
                if self._step % _EVERY == 0:
                    rows.append(self._row(losses))
                    self._keep(rows)
                    losses = []
                progress(self._step, plan.steps, rows[-1] if rows else {})
            if losses:
                rows.append(self._row(losses))
                self._keep(rows)
                progress(self._step, plan.steps, rows[-1])
            if self._step < plan.steps and self._spent < 1:
                self._say(f"stopped; {plan.partial} holds step {self._step}, and the same command goes on from there")
                return Outcome(self._step, *self._measured(), finished=False, signal=stop.signal)
        return self._finish()

    @property
    def _spent(self) -> float:
        """Of the minutes, if the run has some."""
        return 0.0 if self._plan.minutes is None else self._seconds / (60 * self._plan.minutes)

    def _learn(self) -> float:
        """One step on one sequence; the mean loss of the layers."""
        drawn = self._sequences.draw(f"step {self._step}")
        seen = self._model.read(self._ids(drawn))
        rate = self._plan.lr * _schedule(max(self._step / self._plan.steps, self._spent))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(hash_of(self._plan.seed, self._step))
        total = torch.zeros((), device=self._device)
        for index, layer in enumerate(self._model.layers):
            loss = self._loss(index, seen[layer], drawn, generator)
            loss.backward()  # layers share nothing: their graphs need not be there at once
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._scores.parameters(), _CLIP * math.sqrt(len(self._model.layers)))
        self._optimizer.step()
        mean = float(total) / len(self._model.layers)
        if not math.isfinite(mean):
            raise UserError(f"the loss of step {self._step} is not finite; try a lower --lr than {self._plan.lr:g}")
        return mean

    def _loss(self, index: int, seen: Seen, drawn: Drawn, generator: torch.Generator) -> Tensor:
        predicted, target = self._pair(index, seen, drawn)
        return F.smooth_l1_loss(predicted, target, beta=0.5) + _RANKING * ranking_loss(predicted, target, generator)

    def _pair(self, index: int, seen: Seen, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """Predicted and true standardised worth of the document's tokens, fp32 ``[Hkv, N]``."""
        at = torch.arange(seen.k.shape[2], device=self._device)[None, None]
        predicted = self._scores.standard(index, *self._scores.features(index, seen.k, seen.v, at))
        part = self._part(drawn, seen.k.shape[2])
        target = (seen.worth[0, :, part] - self._residual[index]).clamp_min(_LEAST)
        target = (target - self._scores.offset[index][:, None]) / self._scores.scale[index][:, None]
        return predicted[0, :, part], target.clamp_min(-_DEEPEST)

    def _part(self, drawn: Drawn, length: int) -> slice:
        """The document's tokens that some query beyond the window follows."""
        last = min(drawn.end, length - self._plan.window - self._scores.reach)
        return slice(max(drawn.begin, _SINKS), last)

    # Measuring

    @torch.no_grad()
    def _standardise(self) -> None:
        """Brings inputs and targets to mean 0 and deviation 1, head by head, on the sequences that are held out."""
        scores, residual = self._scores, []
        for index, layer in enumerate(self._model.layers):
            lengths = [lengths[layer][self._part(drawn, len(lengths[layer]))] for _, lengths, drawn in self._held_out]
            residual.append(torch.cat(lengths).mean())
            inputs, targets = [], []
            for seen, _, drawn in self._held_out:
                one = seen[layer]
                part = self._part(drawn, one.k.shape[2])
                at = torch.arange(one.k.shape[2], device=self._device)[None, None]
                inputs.append(torch.cat(scores.features(index, one.k, one.v, at), -1)[0, :, part])
                targets.append((one.worth[0, :, part] - residual[index]).clamp_min(_LEAST))
            x, y = torch.cat(inputs, 1), torch.cat(targets, 1)
            if not (bool(x.isfinite().all()) and bool(y.isfinite().all())):
                raise UserError(f"layer {layer}: keys, values or attention are not finite (NaN or infinite)")
            scores.centre[index], scores.spread[index] = x.mean(1), x.std(1).clamp_min(1e-3)
            scores.offset[index], scores.scale[index] = y.mean(1), y.std(1).clamp_min(1e-3)
        self._residual = torch.stack(residual)

    @torch.no_grad()
    def _measured(self) -> tuple[float, float]:
        """Loss and recall on the sequences that are held out."""
        losses, recalls = [], []
        for index, layer in enumerate(self._model.layers):
            for seen, _, drawn in self._held_out:
                pair = self._pair(index, seen[layer], drawn)
                losses.append(F.smooth_l1_loss(*pair, beta=0.5))
                recalls.append(recall(*pair))
        return float(torch.stack(losses).mean()), float(torch.stack(recalls).mean())

    @torch.no_grad()
    def _finish(self) -> Outcome:
        """Takes the quantiles by which heads share a budget, and writes the file."""
        levels = torch.linspace(0, 1, LEVELS, device=self._device)
        for index, layer in enumerate(self._model.layers):
            found = []
            for seen, _, drawn in self._held_out:
                one = seen[layer]
                at = torch.arange(one.k.shape[2], device=self._device)[None, None]
                found.append(self._scores.score(layer, one.k, one.v, at)[0, :, self._part(drawn, one.k.shape[2])])
            self._scores.quantiles[index] = torch.cat(found, 1).quantile(levels, dim=1).T
        measured = self._measured()
        outfile.write(self._plan.out, self._scores.content())
        self._plan.partial.unlink(missing_ok=True)
        return Outcome(self._step, *measured, finished=True)

    def _row(self, losses: list[float]) -> dict[str, Any]:
        held_out, found = self._measured()
        return {
            "step": self._step,
            "loss": sum(losses) / len(losses),
            "held_out_loss": held_out,
            "recall": found,
            "lr": self._optimizer.param_groups[0]["lr"],
            "seconds": round(self._seconds, 3),
        }

    def _ids(self, drawn: Drawn) -> Tensor:
        return torch.tensor([drawn.ids], device=self._device)

    # Resuming

    def _fingerprint(self, facts: dict[str, Any]) -> dict[str, Any]:
        plan = dataclasses.asdict(self._plan)
        own = {name: plan[name] for name in plan if name not in ("model", "text", "out", "minutes", "device")}
        return {**own, "facts": facts, "text": digest(self._sequences.files)}

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        tensors = {f"module.{name}": value for name, value in self._scores.named_parameters()}
        for name, parameter in self._scores.named_parameters():
            state = self._optimizer.state[parameter]
            tensors |= {f"{key}.{name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        kept = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        about = {"step": self._step, "seconds": self._seconds, "run": self._mark}
        outfile.write(self._plan.partial, save(kept, {_KIND: json.dumps(about)}))
        outfile.write(self._plan.log, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def _resume(self) -> list[dict[str, Any]]:
        """Goes back to what an earlier run has left, and returns its rows."""
        plan = self._plan
        if not plan.partial.exists():
            return []
        try:
            with safe_open(plan.partial, "pt") as file:
                about = parse_json((file.metadata() or {})[_KIND])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            step, seconds, mark = about["step"], about["seconds"], about["run"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{plan.partial}: not an unfinished training of LTE ({error}); remove it") from None
        differ = [name for name in self._mark if mark.get(name) != json.loads(json.dumps(self._mark[name]))]
        if differ:
            raise UserError(
                f"{plan.partial} is of another run: {', '.join(differ)} differ; remove it, or choose another --out"
            )
        for name, parameter in self._scores.named_parameters():
            parameter.data.copy_(tensors[f"module.{name}"])
            moments = {key: tensors[f"{key}.{name}"].to(self._device) for key in ("exp_avg", "exp_avg_sq")}
            self._optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
        self._step, self._seconds = step, seconds
        self._say(f"going on from step {step} of {plan.steps}")
        rows = [row for _, row in reading.read_jsonl(plan.log)] if plan.log.exists() else []
        return [row for row in rows if row["step"] <= step]


def ranking_loss(predicted: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
    """How often, and by how much, a token among those worth most is not above another that is worth less.

    Args:
        predicted, target: ``[H, N]``.
        generator: of the CPU; draws the others.
    """
    heads, number = target.shape
    top = max(1, int(_TOP * number))
    best = target.topk(top, 1).indices
    other = torch.randint(number, (heads, top), generator=generator).to(target.device)
    apart = (target.gather(1, best) - target.gather(1, other)).clamp(0.0, 1.0)
    return (apart * F.softplus(predicted.gather(1, other) - predicted.gather(1, best))).mean()


def recall(predicted: Tensor, target: Tensor) -> Tensor:
    """How much of the tenth of the tokens worth most is in the tenth predicted to be: the mean over heads, ``[]``.

    Args:
        predicted, target: ``[H, N]``.
    """
    top = max(1, int(_TOP * target.shape[1]))
    chosen, wanted = (torch.zeros_like(target).scatter(1, x.topk(top, 1).indices, 1.0) for x in (predicted, target))
    return (chosen * wanted).sum(1).mean() / top


def hash_of(seed: int, step: int) -> int:
    """A seed for the draws of one step."""
    return (seed * 1_000_003 + step) % (1 << 63)


def _schedule(done: float) -> float:
    """Warm-up over 2 %, then a cosine to a tenth."""
    warm = min(1.0, (done + 0.002) / 0.02)
    return warm * (0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0))))
