"""The loop: batches made ahead, a device that is waited for only where the loss is read, exact resumption."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foveate.errors import UserError
from foveate.hybrids.training import checkpoints, finished, journal, network, prepare, probes
from foveate.hybrids.training.checks import check_sparsity
from foveate.hybrids.training.configuration import TrainingConfig
from foveate.hybrids.training.distributed import Parallel, Rank, joined
from foveate.hybrids.training.held_out import HeldOut
from foveate.hybrids.training.mixture import Mixture, batches, open_store
from foveate.hybrids.training.opening import Opening, far_recall
from foveate.hybrids.training.optim import adamw, learning_rate
from foveate.hybrids.training.sparsity import SparsityFeedback
from foveate.hybrids.training.stop import Stop
from foveate.hybrids.training.tokens import META, TokenStore
from foveate.io import circumstances

Say = Callable[[str], None]
Progress = Callable[[int, int, dict[str, float]], None]
MODEL = "model"
"""The folder of the finished model in a run's folder."""
_FEEDBACK = "sparsity_feedback/"
_WAITS = 0.2
"""A run says once that it waits for batches if that takes more than this share of its time."""


class DivergedError(ArithmeticError):
    """The loss or the weights are not finite; the checkpoint before is kept."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: steps done.
        finished: whether those are all; else the run was stopped, and its checkpoint is written.
        signal: the number of the signal that stopped it; None if none did.
        missed: what the model has not learned, in a sentence, where `sparsity.recall` asks for it; None if nothing.
        loss: mean loss of the last reading.
        held_out: loss on the held-out text, if it was measured.
        tokens_per_second: median over the readings, checkpoints and held-out text left out; None if nothing was run.
    """

    step: int
    finished: bool
    loss: float | None
    held_out: float | None
    tokens_per_second: float | None
    signal: int | None = None
    missed: str | None = None


def train(
    config: TrainingConfig,
    out: Path,
    resume: bool = False,
    minutes: float | None = None,
    say: Say = print,
    progress: Progress | None = None,
) -> Outcome:
    """Trains by a configuration; `out` holds checkpoints, the log and at the end the model.

    Under torchrun every process calls this. `resume` goes on from the newest whole checkpoint, or begins if there is
    none. After `minutes`, or at a SIGINT or SIGTERM, the step in progress is ended and a checkpoint written.

    Raises `UserError` for bad input and where another process trains into `out`, `DivergedError` if the loss is not
    finite.
    """
    out = Path(out)
    note = check_sparsity(config)
    with joined(config.run.device) as place, contextlib.ExitStack() as held:
        quiet = say if place.first else (lambda text: None)
        if place.first:
            held.enter_context(checkpoints.run_folder(out, resume))
        place.wait()
        if note:
            quiet(note)
        plan = config.data.preparation()
        if plan is not None and place.first:
            prepare.prepare(plan, config.data.folder, quiet)
        place.wait()
        run = _Run(config, out, place, quiet, progress if place.first else None)
        return run.go(resume, minutes)


class _Run:
    """Everything of one run."""

    def __init__(self, config: TrainingConfig, out: Path, place: Rank, say: Say, progress: Progress | None):
        self.config, self.out, self.place, self.say, self.progress = config, out, place, say, progress
        self.store = open_store(config.data.folder) if place.first else TokenStore(config.data.folder)
        sources, answers = list(config.mixture.values()), config.optim.answers
        self.mixture = Mixture(self.store, sources, config.seed, config.steps, answers)
        self.shape = config.batch.shape(config.steps, place.world, place.rank)
        self.tokens = config.batch.tokens
        self.half = place.device.type == "cuda"
        longest = max(phase.length for phase in self.shape.phases)
        made = network.build(config.model, self.store.vocab_size, self.store.end, longest, config.seed)
        if answers != 1 and "label_weights" not in inspect.signature(type(made).forward).parameters:
            raise UserError(
                f"optim.answers is {answers:g}, and {type(made).__name__} weighs all tokens alike; only foveate's "
                "models take weights"
            )
        made.to(place.device).train()
        self.parallel = Parallel(made, place)
        if config.run.compile:
            made.compile()
        self.opening = Opening(config.sparsity, config.steps)
        self.opened = network.open_layers(made) if self.opening.share else None
        self.optimizer = adamw(made, config.optim)
        self.feedback = None if config.sparsity.budget is None else SparsityFeedback(config.sparsity)
        self.forward_options: dict[str, Any] = {"use_cache": False}
        if self.feedback:
            if "output_retention" not in inspect.signature(type(made).forward).parameters:
                raise UserError(
                    f"sparsity.budget is set, and {type(made).__name__} has no layer that evicts by learned scores"
                )
            self.forward_options["output_retention"] = True
        self.held_out = HeldOut(self.store, config) if config.log.held_out else None
        self.step = 0
        self.stats: list[Tensor] = []  # of the steps since the last reading, on the device
        self.loss: float | None = None
        self.last_held_out: float | None = None
        self.speeds: list[float] = []
        self.waited, self.said_waiting = 0.0, False  # seconds for batches, since the last reading
        self.writing: Future | None = None
        self.good: Path | None = None
        self.probes = probes.Probes(self.mixture, config.batch.length, config.log.far) if config.log.answers else None
        if self.opening.bound is not None:
            self.probes.require_far_recall()

    # A run

    def go(self, resume: bool, minutes: float | None) -> Outcome:
        if resume:
            self._resume()
        if self.step >= self.config.steps:
            self.say(f"{self.out} is complete; nothing to train")
            if self._agreed(self.place.first and not (self.out / MODEL).is_dir()):  # killed before it was written
                self._export()
            return dataclasses.replace(self._outcome(), missed=self.opening.missed)
        stop = Stop(minutes)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._journal()) if self.place.first else None
            stack.enter_context(stop.on_signals())
            writer = stack.enter_context(ThreadPoolExecutor(1, "checkpoint"))
            self._steps(stop, log, writer)
            if self.writing:
                self.writing.result()
        if self.step == self.config.steps:
            self._export()
        over = self.step == self.config.steps or self.opening.failed
        return dataclasses.replace(self._outcome(), signal=stop.signal, missed=self.opening.missed if over else None)

    def _steps(self, stop: Stop, log: journal.Journal | None, writer: ThreadPoolExecutor) -> None:
        every, save = self.config.log.every, self.config.checkpoints.every
        source = self._batches()
        begun, since = time.perf_counter(), self.step
        while self.step < self.config.steps:
            self._step(source)
            last = self.step == self.config.steps
            reading = self.step % every == 0 or self.opening.failed
            # Processes agree on when to stop, and so ask each other only where they wait anyway.
            stopping = (reading or self.place.world == 1) and self._agreed(stop.asked)
            saving = self.step % save == 0 or last or stopping
            if reading or saving:
                row = self._read()
                now = time.perf_counter()
                row["tokens_per_s"] = self.tokens * (self.step - since) / (now - begun)
                row["waited"] = self.waited / (now - begun)
                self._say_waiting(row["waited"])
                self.speeds.append(row["tokens_per_s"])
                if log:
                    log.add(row)
                if self.progress:
                    self.progress(self.step, self.config.steps, row)
                if self.probes and (last or self.step % self.config.log.answers == 0):
                    self._answer(log)
                if self.opening.failed:
                    break
                if saving:
                    self._save(log, writer)
                begun, since, self.waited = time.perf_counter(), self.step, 0.0
            if stopping and not last:
                self.say(f"stopped after step {self.step}; --resume goes on from there")
                break

    def _answer(self, log: journal.Journal | None) -> None:
        """Measures the answers. Until the release is over it measures them in open rows, which decide when it ends."""
        share, inference = self.opening.share, self.opening.over
        if self.opened is not None:
            self.opened.fill_(1)
        answered = self.probes.measure(self.parallel.network, self.place.device, self._autocast, not inference)
        self.say(
            f"step {self.step:,} · {probes.line(answered)}{'' if inference else f' · {share:.0%} of the rows open'}"
        )
        if log:
            log.add({"step": self.step, "answers": answered, "opened": share})
        if self.opening.bound is not None:
            recall = far_recall(answered) * self.place.first
            if self.place.world > 1:  # rounding may tell the processes' answers apart
                recall = self.place.sum(torch.tensor(recall, device=self.place.device)).item()
            if note := self.opening.read(recall):
                self.say(f"step {self.step:,}: {note}")

    def _say_waiting(self, share: float) -> None:
        if share > _WAITS and self.speeds and not self.said_waiting:  # the first batches are always waited for
            self.said_waiting = True
            self.say(f"step {self.step:,}: {share:.0%} of the time goes to waiting for batches; raise run.workers")

    def _step(self, source: Iterator[dict[str, Tensor]]) -> None:
        """One step of the optimiser. Nothing here waits for the device."""
        asked = time.perf_counter()
        made = [next(source) for _ in range(self.shape.accumulate)]
        self.waited += time.perf_counter() - asked
        parts = [
            {name: value.to(self.place.device, non_blocking=True) for name, value in part.items()} for part in made
        ]
        weights = network.token_weights(parts, self.place)
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * learning_rate(self.step, self.config.steps, self.config.optim)
        opened, biased = self.opening.share > 0, self.opening.length > 0
        total, penalties, lessons = 0, *torch.zeros(2, device=self.place.device)
        for micro, (part, weight) in enumerate(zip(parts, weights)):
            torch.manual_seed(_seed(self.config.seed, self.step, micro, self.place.rank))  # dropout's
            if self.opened is not None:
                first = (self.place.rank * len(parts) + micro) * len(part["input_ids"])
                network.open_rows(self.opened, self.opening.share, self.step, first)
            with self.parallel.accumulating(micro == len(parts) - 1):
                with self._autocast():
                    made = self.parallel.model(**part, **self.forward_options)
                loss = made.loss * weight
                total = total + loss.detach()
                if self.feedback:
                    self.feedback.observe(made.retention, biased)
                if self.feedback and not opened:
                    penalty = self.feedback.penalty(made.retention) / len(parts)
                    penalties = penalties + penalty.detach()
                    loss = loss + penalty
                if (lesson := getattr(made, "lesson", None)) is not None:
                    lessons = lessons + lesson.detach() / len(parts)
                    loss = loss + lesson / len(parts)
                loss.backward()
        clip = self.config.optim.clip
        norm = self.parallel.clip(clip) if clip else torch.zeros((), device=self.place.device)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.feedback:
            self.feedback.step(opened)
            if biased:
                network.lower_scores(self.parallel.network, self.feedback.excess)
        self.stats.append(torch.stack([total.float(), norm.float(), penalties, lessons]))
        self.opening.step()
        self.step += 1

    def _read(self) -> dict[str, Any]:
        """Reads the losses since the last reading. Raises `DivergedError` at the first that is not finite."""
        rows = self.place.sum(torch.stack(self.stats)) / self.place.world
        self.stats.clear()
        values = rows.tolist()
        for number, (loss, norm, *_) in enumerate(values):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
                self._diverged(self.step - len(values) + 1 + number, what)
        losses, norms, penalties, lessons = zip(*values)
        self.loss = statistics.fmean(losses)
        row = {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": statistics.fmean(norms),
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens": self.step * self.tokens,
        }
        if self.feedback:
            row |= {"penalty": statistics.fmean(penalties), "lesson": statistics.fmean(lessons)}
            row |= self.feedback.summary()
            if warning := self.feedback.warning():
                self.say(f"step {self.step}: {warning}")
        return row

    def _diverged(self, step: int, what: str) -> None:
        if self.writing:
            self.writing.result()
        kept = f"the last good checkpoint is {self.good}" if self.good else "there was no checkpoint yet"
        raise DivergedError(
            f"step {step}: {what}; stopped, and {kept}. Try a lower optim.lr; "
            "model.folder can name a checkpoint to go on from its weights with other settings"
        )

    # Checkpoints

    def _save(self, log: journal.Journal | None, writer: ThreadPoolExecutor) -> None:
        """Takes a snapshot, which is written while training goes on."""
        if not self.parallel.finite():
            self._diverged(self.step, "weights are not finite")
        if self.held_out:
            self.last_held_out = self.held_out.measure(self.parallel.network, self.place.device, self._autocast)
            if not math.isfinite(self.last_held_out):
                self._diverged(self.step, f"the held-out loss is {self.last_held_out}")
            if log:
                log.add({"step": self.step, "held_out": self.last_held_out})
        if not self.place.first:
            return
        if self.writing:
            self.writing.result()  # so that the host holds one snapshot at a time
        weights, tensors = self.parallel.weights(), self.parallel.moments(self.optimizer)
        if self.feedback:
            state = self.feedback.state_dict()
            tensors |= {f"{_FEEDBACK}{name}": value.detach().cpu().clone() for name, value in state.items()}
        snapshot = checkpoints.Snapshot(
            self.step,
            weights,
            tensors,
            self._fingerprint(),
            self.last_held_out,
            {"loss": self.loss, "shared": self._shared(), "opening": self.opening.state()},
        )
        self.writing = writer.submit(self._write, snapshot)

    def _write(self, snapshot: checkpoints.Snapshot) -> None:
        describe = functools.partial(finished.describe, self.parallel.network, self.store.folder)
        self.good = checkpoints.write(self.out, snapshot, describe)
        checkpoints.prune(self.out, self.config.checkpoints.keep)

    def _resume(self) -> None:
        """Goes on from the newest whole checkpoint. The first process chooses, so that all take the same."""
        found = checkpoints.newest(self.out, self.say) if self.place.first else None
        names = [None if found is None else found[0].name]
        if self.place.world > 1:
            torch.distributed.broadcast_object_list(names)
        if names[0] is None:
            self.say(f"{self.out} has no checkpoint; training begins")
            return
        folder = self.out / names[0]
        state = found[1] if found else checkpoints.read_state(folder)
        checkpoints.check_fingerprint(folder, state["fingerprint"], self._fingerprint())
        weights, tensors = checkpoints.read_tensors(folder)
        self.parallel.load_weights(weights)
        fed = {name.removeprefix(_FEEDBACK): tensors.pop(name) for name in [*tensors] if name.startswith(_FEEDBACK)}
        self.parallel.load_moments(self.optimizer, tensors)
        if self.feedback:
            self.feedback.load_state_dict(fed)
        self.step, self.good = state["step"], folder
        self.loss, self.last_held_out = state["extra"].get("loss"), state["held_out"]
        self.opening.load(state["extra"]["opening"])
        self.say(f"going on from {folder.name}")
        theirs, ours = state["extra"].get("shared", {}), self._shared()
        if parts := [
            f"{name} was {theirs[name]:,}, is {ours[name]:,}" for name in theirs if theirs[name] != ours[name]
        ]:
            self.say(f"{'; '.join(parts)}: rounding and the draws of dropout differ from the run so far")

    def _fingerprint(self) -> dict[str, Any]:
        """What the curve depends on: settings, the model's configuration, text and precision."""
        shards = {part: [shard["sha256"][:16] for shard in found] for part, found in self.store.meta["parts"].items()}
        return {
            **self.config.fingerprint(),
            **network.fingerprint(self.parallel.network.config),
            "text": shards["train"],
            "bf16": self.half,
        }

    def _shared(self) -> dict[str, int]:
        """How a step is cut up: it changes rounding and the draws of dropout, and is no part of the fingerprint."""
        return {"batch.device_tokens": self.config.batch.device_tokens, "processes": self.place.world}

    def _export(self) -> None:
        """Writes the finished model."""
        if self.place.first:
            weights, shard = self.parallel.weights(), self.config.checkpoints.export_shard
            finished.write(self.out / MODEL, self.parallel.network, weights, self.store.folder, shard)

    # Parts

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        on_gpu = self.place.device.type == "cuda"
        workers = (4 if on_gpu else 0) if self.config.run.workers is None else self.config.run.workers
        return batches(self.mixture, self.shape, self.step, workers, on_gpu)

    def _autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.place.device.type, torch.bfloat16) if self.half else contextlib.nullcontext()

    def _agreed(self, asked: bool) -> bool:
        if self.place.world == 1:
            return asked
        return bool(self.place.sum(torch.tensor(float(asked), device=self.place.device)).item())

    def _journal(self) -> journal.Journal:
        header = {
            "kind": "log of foveate train",
            "config": self.config.to_dict(),
            "parameters": sum(p.numel() for p in self.parallel.network.parameters()),
            "text": {"documents": self.store.meta["documents"], "file": META},
            "processes": self.place.world,
            **circumstances.of(str(self.place.device)),
        }
        found = journal.Journal(self.out, header, self.step)
        if not found.has_events:
            self.say("tensorboard cannot be imported; the log is in log.jsonl alone (pip install 'foveate[train]')")
        return found

    def _outcome(self) -> Outcome:
        timed = self.speeds[1:] or self.speeds  # the first steps compile and warm up
        speed = statistics.median(timed) if timed else None
        finished = self.step >= self.config.steps
        return Outcome(self.step, finished, self.loss, self.last_held_out, speed)


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
