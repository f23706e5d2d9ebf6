"""The loop: exact resumption, accumulation, divergence, early ends, the finished model."""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from foveate.errors import UserError
from foveate.hybrids.layers import lte
from foveate.hybrids.training import checkpoints, journal, loop, network, optim
from foveate.hybrids.training.configuration import OptimSettings
from foveate.hybrids.training.held_out import HeldOut
from foveate.hybrids.training.loop import DivergedError, train
from foveate.hybrids.training.tokens import TokenStore
from tests.problems import Waits


def quiet(text):
    pass


def curve(out):
    """Everything that a run computed, by step: no times."""
    return [
        {name: value for name, value in row.items() if name not in ("tokens_per_s", "waited")}
        for row in journal.read(out)
    ]


def weights(out):
    return checkpoints.read_tensors(checkpoints.folders(out)[-1])


def same(one, other):
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(one, other)
    )


EVICTING = {
    "sparsity.budget": 20,
    "sparsity.interval": 2,
    "sparsity.start": 0.1,
}


TINY = {"preset": "lalte", "size": "tiny"}


class Killed(BaseException):
    """Stands for a process that ends at once."""


def interrupted(config, out, killed_after):
    """A run of which the process ends after so many steps."""

    def kill(step, steps, row):
        if step == killed_after:
            raise Killed

    with pytest.raises(Killed):
        train(config, out, say=quiet, progress=kill)


@pytest.mark.parametrize("evicting", [False, True])
@pytest.mark.parametrize(("killed_after", "goes_on_from"), [(5, 4), (9, 8)])
def test_kill_and_resume_give_the_same_curve(make, evicting_folder, tmp_path, evicting, killed_after, goes_on_from):
    config = make({**EVICTING, "model.folder": str(evicting_folder)} if evicting else {})
    whole = train(config, tmp_path / "whole", say=quiet)
    assert whole.finished
    assert whole.step == 12

    said = []
    interrupted(config, tmp_path / "parts", killed_after)
    assert train(config, tmp_path / "parts", resume=True, say=said.append).finished
    assert f"going on from step-{goes_on_from:08d}" in said
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    losses = [row["loss"] for row in curve(tmp_path / "whole") if "loss" in row]
    assert len(losses) == 12
    assert min(losses[-3:]) < losses[0] - 0.3


def test_a_damaged_checkpoint_falls_back_to_the_same_curve(make, tmp_path):
    config = make()
    train(config, tmp_path / "whole", say=quiet)
    train(config, tmp_path / "parts", say=quiet)
    *_, before, last = checkpoints.folders(tmp_path / "parts")
    content = bytearray((last / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (last / "model.safetensors").write_bytes(content)
    said = []
    train(config, tmp_path / "parts", resume=True, say=said.append)
    assert any("model.safetensors: damaged" in line and "before step-00000012 is used" in line for line in said)
    assert f"going on from {before.name}" in said
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_micro_batches_add_up_to_the_step(make, tmp_path):
    losses = []
    for tokens in (512, 128):
        train(make({"batch.device_tokens": tokens, "batch.tokens": 512}), tmp_path / str(tokens), say=quiet)
        losses.append([row["loss"] for row in curve(tmp_path / str(tokens)) if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)


def test_every_micro_batch_of_every_process_draws_dropout_of_its_own(make, tmp_path, monkeypatch):
    seeds = []
    config = make({"batch.device_tokens": 128, "batch.tokens": 512})
    run = loop._Run(config, tmp_path, loop.Rank(0, 1, torch.device("cpu")), quiet, None)
    source = run._batches()
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    for rank, run.step in ((0, 0), (1, 0), (0, 1)):
        run.place = loop.Rank(rank, 1, torch.device("cpu"))
        run._step(source)
    assert len(seeds) == len(set(seeds)) == 3 * run.shape.accumulate > 3


@pytest.mark.parametrize("answers", [1.0, 8.0])
def test_every_counted_token_of_a_step_weighs_as_asked(make, tmp_path, answers):
    """The first loss is that of all counted tokens, though micro-batches hold different numbers of them."""
    changes = {"batch.device_tokens": 64, "batch.tokens": 512, "batch.longer": None, "steps": 1}
    changes |= {"model": {"preset": "gdn", "size": "tiny"}, "optim.answers": answers} if answers != 1 else {}
    config = make({**changes, "model.changes": {"initializer_range": 0.5}})  # so that losses of tokens differ
    train(config, tmp_path / "run", say=quiet)
    run = loop._Run(config, tmp_path / "other", loop.Rank(0, 1, torch.device("cpu")), quiet, None)
    batches = [run.mixture.batch(run.shape, 0, micro) for micro in range(8)]
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    counts = {int((batch["labels"][:, 1:] != -100).sum()) for batch in batches}
    assert len(counts) > 1
    labels = whole["labels"][:, 1:]
    logits = run.parallel.network(input_ids=whole["input_ids"]).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    weights = whole["label_weights"][:, 1:] if answers != 1 else torch.ones_like(losses)
    assert set(weights.unique().tolist()) == {1.0, answers}
    weights = weights * (labels != -100)
    expected = ((losses * weights).sum() / weights.sum()).item()
    assert curve(tmp_path / "run")[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_models_without_weights_of_labels_are_refused_them(make, tmp_path):
    with pytest.raises(UserError, match=r"optim.answers is 8, and LlamaForCausalLM weighs all tokens alike"):
        train(make({"optim.answers": 8.0}), tmp_path / "run", say=quiet)


RECALLING = {
    "model": TINY,
    "sparsity.budget": 9,
    "sparsity.hold": 0.75,
    "sparsity.release": 0.2,
    "sparsity.recall": 50.0,
    "log.answers": 1,
    "log.far": 4,
    "steps": 12,
}


@pytest.fixture
def answering(monkeypatch):
    """Sets what the far answers of each step are, in percent; tells how each was measured, and how far open."""
    measured = []

    def answer(right):
        def measure(self, network, device, autocast, training=False):
            opened = {layer.opened[0].item() for layer in network.modules() if hasattr(layer, "opened")}
            measured.append((training, *opened))
            return {"recall": {"far": {"right": right[len(measured) - 1], "loss": 1.0, "begun": 0.0, "n": 9}}}

        monkeypatch.setattr("foveate.hybrids.training.probes.Probes.measure", measure)
        return measured

    return answer


def test_a_hold_ends_when_far_answers_are_right(make, tmp_path, answering, monkeypatch):
    """They are those of open rows until the release is over, then as in inference. A bias keeps the budget."""
    measured, said, lowered = answering([0, 60, 40, 60, 70, *[80] * 7]), [], []
    lower = network.lower_scores
    monkeypatch.setattr(network, "lower_scores", lambda *given: lowered.append(1) or lower(*given))
    outcome = train(make(RECALLING), tmp_path / "run", say=said.append)
    assert outcome.finished
    assert outcome.missed is None
    assert "step 5: far recall is 70 %; the hold ends, the release begins" in said
    rows = curve(tmp_path / "run")
    assert [row["opened"] for row in rows if "answers" in row] == 5 * [1.0] + [0.125 + 0.875 / 3] + 6 * [0.125]
    assert measured == 6 * [(True, 1)] + 6 * [(False, 1)]
    assert not any(row["penalty"] for row in rows if "loss" in row)
    assert len(lowered) == 12


def test_a_run_that_never_recalls_ends_with_its_hold_and_without_a_model(make, tmp_path, answering):
    answering([40] * 12)
    outcome = train(make({**RECALLING, "log.every": 4, "log.answers": 4}), tmp_path / "run", say=quiet)
    assert (outcome.step, outcome.finished) == (9, False)
    assert "the model has not learned to look back" in outcome.missed
    assert not (tmp_path / "run" / loop.MODEL).exists()


def test_a_complete_run_that_recalls_too_little_says_so_again(make, tmp_path, answering):
    answering([60] * 11 + [40])
    config = make({**RECALLING, "checkpoints.every": 12})
    missed = train(config, tmp_path / "run", say=quiet).missed
    assert missed == "at the end far recall is 40 %; sparsity.recall asks for 50 %"
    assert train(config, tmp_path / "run", resume=True, say=quiet).missed == missed


@pytest.mark.full
def test_a_release_by_recall_goes_on_as_it_was(make, tmp_path, monkeypatch):
    """Killed and resumed in the hold, while it waits, and after: to the same weights. What is measured follows the
    step, so that both runs read alike."""
    right = {1: 90, 2: 90, 3: 90, 4: 10, 5: 10}

    def measure(self, network, device, autocast, training=False):
        return {"recall": {"far": {"right": right.get(run.step, 90), "loss": 1.0, "begun": 0.0, "n": 9}}}

    step = loop._Run._answer

    def answer(self, log):
        nonlocal run
        run = self
        step(self, log)

    run = None
    monkeypatch.setattr("foveate.hybrids.training.probes.Probes.measure", measure)
    monkeypatch.setattr(loop._Run, "_answer", answer)
    config = make({**RECALLING, "checkpoints.every": 1, "log.held_out": 0})
    train(config, tmp_path / "run", say=quiet)
    for killed in (1, 4, 6):
        interrupted(config, tmp_path / str(killed), killed)
        train(config, tmp_path / str(killed), resume=True, say=quiet)
        assert same(weights(tmp_path / "run"), weights(tmp_path / str(killed)))


def test_recall_needs_something_that_measures_it(make, tmp_path):
    with pytest.raises(UserError, match=r"sparsity\.recall is 50, and nothing measures recall: set log.answers"):
        train(make({**RECALLING, "log.answers": 0}), tmp_path / "run", say=quiet)


def test_recall_needs_a_step_of_a_hold(make, tmp_path):
    with pytest.raises(UserError, match=r"sparsity\.hold is 0\.01: of 12 steps none is left in which the model could"):
        train(make({**RECALLING, "sparsity.hold": 0.01}), tmp_path / "run", say=quiet)


def test_recall_needs_answers_that_are_far(make, tmp_path):
    with pytest.raises(UserError, match=r"in rows of batch\.length 64 no answer of needles or recall is more than log"):
        train(make({**RECALLING, "log.far": 400}), tmp_path / "run", say=quiet)


def test_a_run_that_waits_for_batches_says_so(make, tmp_path, monkeypatch):
    said, real = [], loop._Run._batches

    def slow(self):
        for batch in real(self):
            time.sleep(0.2 * (self.step > 4))
            yield batch

    monkeypatch.setattr(loop._Run, "_batches", slow)
    train(make({"steps": 8, "log.held_out": 0}), tmp_path / "run", say=said.append)
    (told,) = [text for text in said if "waiting for batches" in text]
    assert told.endswith("raise run.workers")


@pytest.mark.parametrize("where", ["loss", "gradient", "weights"])
def test_nan_stops_and_keeps_the_last_good_checkpoint(make, tmp_path, monkeypatch, where):
    config = make({"log.every": 4, "optim.clip": 0.0 if where == "weights" else 1.0})
    real = loop._Run._step

    def poisoned(self, source):
        network = self.parallel.network
        if self.step == 6 and where == "gradient":
            network.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
        if self.step == 5 and where == "loss":
            with torch.no_grad():
                network.model.norm.weight.fill_(math.nan)
        real(self, source)
        if self.step == 8 and where == "weights":
            with torch.no_grad():
                network.model.norm.weight.fill_(math.nan)

    monkeypatch.setattr(loop._Run, "_step", poisoned)
    said = {
        "loss": "step 6: the loss is nan; stopped",
        "gradient": "step 7: the gradient's norm is (inf|nan); stopped",
        "weights": "step 8: weights are not finite; stopped",
    }
    with pytest.raises(
        DivergedError, match=said[where] + r", and the last good checkpoint is .*step-00000004\. Try a lower"
    ):
        train(config, tmp_path / "run", say=quiet)
    assert [folder.name for folder in checkpoints.folders(tmp_path / "run")] == ["step-00000004"]
    good, _ = weights(tmp_path / "run")
    assert all(value.isfinite().all() for value in good.values())


def test_a_signal_ends_the_run_with_a_checkpoint(make, tmp_path):
    def stop(step, steps, row):
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    said, before = [], signal.getsignal(signal.SIGTERM)
    outcome = train(make(), tmp_path / "run", say=said.append, progress=stop)
    assert (outcome.step, outcome.finished, outcome.signal) == (7, False, signal.SIGTERM)
    assert said[-1] == "stopped after step 7; --resume goes on from there"
    assert checkpoints.folders(tmp_path / "run")[-1].name == "step-00000007"
    assert not (tmp_path / "run" / "model").exists()
    assert signal.getsignal(signal.SIGTERM) == before
    train(make(), tmp_path / "run", resume=True, say=quiet)
    train(make(), tmp_path / "whole", say=quiet)
    losses = [[row for row in curve(tmp_path / name) if "loss" in row] for name in ("run", "whole")]
    assert losses[0] == losses[1]


def test_minutes_end_a_run(make, tmp_path):
    outcome = train(make(), tmp_path / "run", minutes=1e-9, say=quiet)
    assert (outcome.step, outcome.finished, outcome.signal) == (1, False, None)


def test_two_processes_do_not_train_into_one_folder(make, tmp_path):
    refused = []

    def again(step, steps, row):
        with pytest.raises(UserError, match="run: another process is writing to it"):
            train(make(), tmp_path / "run", resume=True, say=quiet)
        refused.append(step)

    train(make(), tmp_path / "run", say=quiet, progress=again)
    assert refused
    assert train(make(), tmp_path / "run", resume=True, say=quiet).finished


def test_a_run_is_never_overwritten_or_continued_otherwise(make, tmp_path):
    train(make({"steps": 4}), tmp_path / "run", say=quiet)
    with pytest.raises(UserError, match="holds a run; --resume goes on with it, or choose another --out"):
        train(make(), tmp_path / "run", say=quiet)
    with pytest.raises(UserError, match=r"other settings: steps is 4 there, 4 here|optim.lr is 0.01 there, 0.5 here"):
        train(make({"optim.lr": 0.5}), tmp_path / "run", resume=True, say=quiet)
    said = []
    done = train(make({"optim.lr": 0.01}), tmp_path / "run", resume=True, say=said.append)
    assert (done.finished, said[-1]) == (True, f"{tmp_path / 'run'} is complete; nothing to train")


def test_a_run_killed_before_the_model_was_written_writes_it(make, tmp_path):
    whole = train(make({"steps": 4}), tmp_path / "run", say=quiet)
    model = tmp_path / "run" / "model"
    first = load_file(model / "model.safetensors")
    shutil.rmtree(model)
    assert train(make({"steps": 4}), tmp_path / "run", resume=True, say=quiet).held_out == whole.held_out
    again = load_file(model / "model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    stamp = model.stat().st_mtime_ns
    train(make({"steps": 4}), tmp_path / "run", resume=True, say=quiet)
    assert model.stat().st_mtime_ns == stamp


def test_another_configuration_in_the_models_folder_is_another_run(make, model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "model")
    changes = {"model.folder": str(tmp_path / "model"), "steps": 4}
    train(make(changes), tmp_path / "run", say=quiet)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))
    with pytest.raises(UserError, match=r"other settings: model.config.rms_norm_eps is 1e-06 there, 0.5 here\."):
        train(make(changes), tmp_path / "run", resume=True, say=quiet)


def test_other_micro_batches_are_said_when_a_run_goes_on(make, tmp_path):
    train(make({"steps": 4}), tmp_path / "run", say=quiet)
    said = []
    train(make({"batch.device_tokens": 128}), tmp_path / "run", resume=True, say=said.append)
    expected = "batch.device_tokens was 256, is 128: rounding and the draws of dropout differ from the run so far"
    assert said.count(expected) == 1
    said.clear()
    train(make({"batch.device_tokens": 256}), tmp_path / "run", resume=True, say=said.append)
    assert not any("dropout" in line for line in said)


def test_one_process_copies_the_weights_and_after_the_writing_before(make, tmp_path, monkeypatch):
    run = loop._Run(make({"log.held_out": 0}), tmp_path, loop.Rank(0, 1, torch.device("cpu")), quiet, None)
    real, begun = run.parallel.weights, []

    def copied():
        begun.append(run.writing is None or run.writing.done())
        return real()

    monkeypatch.setattr(run.parallel, "weights", copied)
    monkeypatch.setattr(run, "_write", lambda snapshot: time.sleep(0.3))
    with ThreadPoolExecutor(1) as writer:
        run._save(None, writer)
        run._save(None, writer)
        assert begun == [True, True]
        run.place = loop.Rank(1, 1, torch.device("cpu"))
        run._save(None, writer)
        run._export()
    assert begun == [True, True]
    assert not (tmp_path / "model").exists()


@pytest.mark.full
def test_the_held_out_loss_is_measured_uncompiled(make, tmp_path, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: real(module, backend=backend))
    run = loop._Run(make({"run.compile": True}), tmp_path, loop.Rank(0, 1, torch.device("cpu")), quiet, None)
    assert math.isfinite(run.held_out.measure(run.parallel.network, run.place.device, run._autocast))
    assert not graphs
    run._step(run._batches())
    assert graphs


def test_resume_without_a_checkpoint_begins(make, tmp_path):
    said = []
    assert train(make({"steps": 2}), tmp_path / "run", resume=True, say=said.append).finished
    assert any("has no checkpoint; training begins" in line for line in said)


def test_the_model_is_a_folder_that_transformers_reads(make, tmp_path):
    train(make({"steps": 4}), tmp_path / "run", say=quiet)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.dtype == torch.float32
    trained, _ = weights(tmp_path / "run")
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in trained.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.decode(tokenizer.encode("Call me Ishmael.")) == "Call me Ishmael."
    last = checkpoints.folders(tmp_path / "run")[-1]
    again = AutoModelForCausalLM.from_pretrained(last)
    assert torch.equal(again.lm_head.weight, trained["model.embed_tokens.weight"])


def test_training_goes_on_from_a_models_weights(make, tmp_path):
    train(make({"steps": 8}), tmp_path / "first", say=quiet)
    changes = {"model.folder": str(tmp_path / "first" / "model"), "steps": 2, "optim.lr": 1e-6}
    train(make(changes), tmp_path / "second", say=quiet)
    first = [row["loss"] for row in curve(tmp_path / "first") if "loss" in row]
    assert curve(tmp_path / "second")[0]["loss"] < first[0] - 0.3


def test_the_feedback_is_logged_and_acts(make, evicting_folder, tmp_path):
    config = make({**EVICTING, "model.folder": str(evicting_folder), "steps": 12, "sparsity.up": 4.0})
    train(config, tmp_path / "run", say=quiet)
    rows = [row for row in curve(tmp_path / "run") if "loss" in row]
    assert {"lambda_mean", "lambda_max", "lambda_zero", "retained_mean", "retained_max", "penalty"} <= rows[0].keys()
    assert rows[1]["lambda_max"] == pytest.approx(0.4)  # every token is retained at first
    assert rows[-1]["lambda_max"] == 1.0
    assert rows[0]["penalty"] > 0


def test_a_hold_retains_everything_and_lambda_rests(make, tmp_path):
    """Also over a kill and a resume within the hold. The scores learn, and λ acts afterwards."""
    changes = {"model": TINY, "sparsity.budget": 9, "sparsity.interval": 1, "steps": 8}
    config = make({**changes, "sparsity.hold": 0.75})
    train(config, tmp_path / "run", say=quiet)
    interrupted(config, tmp_path / "parts", 5)
    train(config, tmp_path / "parts", resume=True, say=quiet)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "parts"))
    halfway = load_file(checkpoints.folders(tmp_path / "run")[0] / checkpoints.MODEL)
    store = TokenStore(config.data.folder)
    drawn = network.build(config.model, store.vocab_size, store.end, 128, config.seed).state_dict()
    of_scores = [name for name in drawn if ".scores." in name and "weight" in name]
    assert of_scores
    assert not any(torch.equal(halfway[name], drawn[name]) for name in of_scores)
    rows = [row for row in curve(tmp_path / "run") if "loss" in row]
    assert [row["penalty"] > 0 for row in rows] == 6 * [False] + 2 * [True]
    assert all({"retained", "heads_silent", "heads_saturated"} <= row.keys() for row in rows)
    assert len({row["lambda_max"] for row in rows[:6]}) == 1
    assert rows[-1]["lambda_max"] > rows[0]["lambda_max"]


@pytest.mark.full
@pytest.mark.parametrize("gradient", ["value", "worth"])
def test_a_release_goes_on_as_it_was(make, tmp_path, gradient):
    """Killed in its midst and resumed. Heads keep about their budget by a bias, and λ rests."""
    model = {**TINY, "changes": {"lte_gradient": gradient}}
    changes = {"model": model, "sparsity.budget": 9, "sparsity.interval": 1, "steps": 8}
    config = make({**changes, "sparsity.hold": 0.25, "sparsity.release": 0.5})
    train(config, tmp_path / "run", say=quiet)
    interrupted(config, tmp_path / "parts", 5)
    train(config, tmp_path / "parts", resume=True, say=quiet)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "parts"))
    rows = [row for row in curve(tmp_path / "run") if "loss" in row]
    assert not any(row["penalty"] for row in rows)
    assert all((row["lesson"] > 0) == (gradient == "worth") for row in rows)
    assert rows[-1]["retained_mean"] < 30 < rows[0]["retained_mean"]
    train(make({**changes, "sparsity.release": 0}), tmp_path / "at_once", say=quiet)
    assert not same(weights(tmp_path / "run"), weights(tmp_path / "at_once"))


def test_a_run_says_what_the_feedback_warns_of(make, evicting_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("foveate.hybrids.training.sparsity.SparsityFeedback.warning", lambda self: "a head is silent")
    said = []
    train(make({**EVICTING, "model.folder": str(evicting_folder), "steps": 2}), tmp_path / "run", say=said.append)
    assert "step 1: a head is silent" in said


def test_answers_are_measured_near_and_far(make, tmp_path):
    """The same rows at every measurement; what is right is counted as the loss says."""
    changes = {"log.answers": 6, "log.every": 6, "log.far": 20, "steps": 12}
    train(make(changes), tmp_path / "run", say=quiet)
    measured = [row for row in curve(tmp_path / "run") if "answers" in row]
    assert [row["step"] for row in measured] == [6, 12]
    numbers = [
        {(kind, where): values["n"] for kind, found in row["answers"].items() for where, values in found.items()}
        for row in measured
    ]
    assert numbers[0] == numbers[1]
    assert {where for _, where in numbers[0]} == {"near", "far"}
    assert all(values["loss"] > 0 for found in measured[1]["answers"].values() for values in found.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity.budget": 9}, "sparsity.budget is set, and LlamaForCausalLM has no layer that evicts"),
        (
            {"model": TINY, "sparsity": {"budget": 9, "hold": 0.99}},
            "sparsity.hold is 0.99 and .* of 12 steps none is left",
        ),
        (
            {"model": TINY, "sparsity": {"budget": 9, "hold": 0.5, "release": 0.49}},
            "sparsity.hold is 0.5 and sparsity.release 0.49: of 12 steps none is left after them",
        ),
        ({"model.changes": {"vocab_size": 100}}, "the model has 100 tokens, the text 800; use its tokenizer"),
        ({"model.changes": {"max_position_embeddings": 100}}, "rows of 128 tokens are longer than .* 100 positions"),
        ({"model.changes": {"hidden": 3}}, "model.changes.hidden: a configuration of type llama has no such field"),
        ({"model.folder": "/none"}, "model.folder /none: no config.json there"),
        ({"data.folder": "/none"}, "/none: no tokenised text there"),
        ({"mixture.text.share": 0.4}, "the shares must add up to 1, got 0.9"),
        ({"log.held_out": 10**9, "batch.length": 64, "data.folder": "/none"}, "no tokenised text there"),
    ],
)
def test_bad_input(make, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train(make(changes), tmp_path / "run", say=quiet)


def test_text_is_prepared_on_the_way(make, text_folder, tmp_path):
    changes = {
        "data": {
            "folder": str(tmp_path / "tokens"),
            "text": str(text_folder),
            "prepare": {"vocab_size": 800, "held_out": 0.1},
        },
        "steps": 1,
    }
    assert train(make(changes), tmp_path / "run", say=quiet).finished
    assert json.loads((tmp_path / "tokens" / "meta.json").read_text())["vocab_size"] == 800


def test_the_learning_rate_rises_and_falls():
    settings = OptimSettings(lr=2.0, final=0.1, warmup=0.1)
    rates = [optim.learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(2.0)
    assert rates[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[10 + 89 // 2] == pytest.approx(1.1, abs=0.02)


def test_vectors_do_not_decay():
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    decay, none = optim.adamw(network, OptimSettings(weight_decay=0.3)).param_groups
    assert [tuple(p.shape) for p in decay["params"]] == [(4, 3)]
    assert [tuple(p.shape) for p in none["params"]] == [(4,), (4,), (4,)]
    assert (decay["weight_decay"], none["weight_decay"]) == (0.3, 0.0)


def test_scores_learn_at_a_share_of_the_rate(make, tmp_path):
    config = make({"model": TINY, "sparsity.budget": 9, "optim.scores": 0.25, "optim.warmup": 0.0, "steps": 1})
    network_ = network.build(config.model, 800, 0, 128, 0)
    groups = optim.adamw(network_, config.optim).param_groups
    layers = network.evicting_layers(network_)
    scores = {id(parameter) for layer in layers for parameter in layer.scores.parameters()}
    assert scores
    assert {(group["share"], {id(p) for p in group["params"]} <= scores) for group in groups} == {
        (1.0, False),
        (0.25, True),
    }
    assert sum(len(group["params"]) for group in groups) == len(list(network_.parameters()))
    train(config, tmp_path / "run", say=quiet)
    store = TokenStore(config.data.folder)
    drawn = network.build(config.model, store.vocab_size, store.end, 128, config.seed).state_dict()
    learned = load_file(checkpoints.folders(tmp_path / "run")[0] / checkpoints.MODEL)
    moved = {name: (value - drawn[name]).abs().max().item() for name, value in learned.items()}
    of_scores, others = (max(moved[name] for name in moved if (".scores." in name) == yes) for yes in (True, False))
    assert of_scores == pytest.approx(0.25 * others, rel=0.2)  # AdamW's first step is the rate


@pytest.mark.parametrize("device_tokens", [256, 512])
def test_a_step_waits_for_nothing(make, tmp_path, monkeypatch, device_tokens):
    """Nor does an update of λ. The optimiser, whose fused kernel a GPU has, is left out."""
    config = make(
        {
            "model": {"preset": "lalte", "size": "tiny"},
            "sparsity": {"budget": 20, "interval": 1, "start": 0.1},
            "batch.device_tokens": device_tokens,
        }
    )
    run = loop._Run(config, tmp_path, loop.Rank(0, 1, torch.device("cpu")), quiet, None)
    monkeypatch.setattr(run.optimizer, "step", lambda: None)
    source = run._batches()
    run._step(source)
    ready = iter([next(source) for _ in range(run.shape.accumulate)])
    with Waits() as waits:
        run._step(ready)
        assert not waits.names
        run._read()
    assert "_local_scalar_dense" in waits.names
    assert run.step == 2


def test_which_rows_are_open_follows_from_step_and_row_alone(make, tmp_path, monkeypatch):
    """Not from how many rows a micro-batch has; one of eight stays open to the end."""
    found, opened = {}, network.open_rows
    for rows in (1, 4):
        seen = []

        def noted(tensor, share, step, first, rows=rows, seen=seen):
            opened(tensor, share, step, first)
            seen.append(lte._open_rows(tensor, rows)[:, 0, 0].tolist())

        monkeypatch.setattr(network, "open_rows", noted)
        changes = {"model": TINY, "sparsity.budget": 9, "sparsity.hold": 0.25, "sparsity.release": 0.25, "steps": 8}
        changes |= {"batch.length": 128, "batch.tokens": 512, "batch.device_tokens": 128 * rows}
        train(make(changes), tmp_path / str(rows), say=quiet)
        monkeypatch.setattr(network, "open_rows", opened)
        found[rows] = list(zip(*4 * [itertools.chain.from_iterable(seen)]))
    assert found[1] == found[4]
    assert len(found[1]) == 8
    assert all(map(all, found[1][:2]))
    assert not any(map(all, found[1][2:]))
    assert 1 <= sum(map(sum, found[1][4:])) <= 3


def test_a_log_without_tensorboard_says_so(make, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # installed, but not importable
    said = []
    train(make({}), tmp_path / "run", say=said.append)
    assert any("tensorboard cannot be imported" in line for line in said)
    assert curve(tmp_path / "run")
    assert not (tmp_path / "run" / journal.EVENTS).exists()


@pytest.mark.parametrize("sizes", [(1,), (4, 4), (4, 1), (3, 3, 2)])
def test_the_held_out_loss_is_the_mean_over_rows_however_they_are_batched(sizes):
    class Losses(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            return SimpleNamespace(loss=input_ids.float().mean())

    ids = torch.arange(sum(sizes))[:, None].expand(-1, 5) ** 2
    measured = object.__new__(HeldOut)
    measured.batches = [{"input_ids": part} for part in ids.split(sizes)]
    found = measured.measure(Losses(), torch.device("cpu"), contextlib.nullcontext)
    assert found == pytest.approx(float(ids.float().mean()))
