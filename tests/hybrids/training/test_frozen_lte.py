"""LTE's module trained on a frozen model: it finds planted tokens, resumes to the same file, and refuses bad input."""

import itertools
import json
import signal
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import foveate
from foveate.calibration.eviction_scores import EvictionScores
from foveate.cli import app
from foveate.errors import UserError
from foveate.hybrids.training import frozen_lte
from foveate.hybrids.training.frozen_lte import Plan, ranking_loss, recall, train
from foveate.hybrids.training.lte_sequences import Drawn, Sequences
from foveate.integrations.transformers import loading
from tests import tiny

LOUD = range(5, 600, 12)
"""Ids of the tokens to which all later queries of the planted model attend."""


def plant(folder):
    """The tiny model, its keys and queries such that every query looks for loud tokens, wherever they stand."""
    tiny.build(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.mul_(0.3)
        embedding[:, 0], embedding[:, 1] = 1.0, 0.0
        embedding[list(LOUD), 1] = 2.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.002)
            layer.mlp.down_proj.weight.mul_(0.002)
            for weight, heads, source, size in (
                (layer.self_attn.q_proj.weight, 4, 0, 3.0),
                (layer.self_attn.k_proj.weight, 2, 1, 2.0),
            ):
                weight.mul_(0.2)
                for head in range(heads):  # of 8 dimensions; 3 turns with 7, and slowly
                    weight[head * 8 + 3, source] = size
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return plant(tmp_path_factory.mktemp("models") / "planted")


@pytest.fixture
def plan(planted, tmp_path, monkeypatch):
    monkeypatch.setattr(frozen_lte, "_HELD_OUT", 2)
    monkeypatch.setattr(frozen_lte, "_EVERY", 5)
    return Plan(planted, tiny.SAMPLE, tmp_path / "lte.safetensors", steps=60, length=400, window=16, lr=5e-3)


def ranked(planted, scores):
    """The share of the loud tokens of a text among as many tokens scored highest, by layer and KV head."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(planted).eval(), tiny.make_tokenizer()
    text = (tiny.SAMPLE / "books" / "moby_dick.txt").read_text(encoding="utf-8")[50_000:52_000]
    ids = torch.tensor([tokenizer.encode(text)[:500]])
    loud = torch.isin(ids[0], torch.tensor(list(LOUD)))[4:-6]
    frozen = frozen_lte.FrozenModel(model, 16)
    found = []
    for layer, seen in frozen.read(ids).items():
        worth = scores.score(layer, seen.k, seen.v, torch.arange(ids.shape[1])[None, None])[0, :, 4:-6]
        best = worth.topk(int(loud.sum()), 1).indices
        found.append(loud[best].float().mean(1))
    return torch.stack(found), float(loud.float().mean())


@pytest.mark.full
def test_it_finds_tokens_that_later_queries_want(plan, planted):
    outcome = train(plan, lambda text: None)
    assert outcome.finished
    assert outcome.recall > 0.5  # of a tenth of the tokens, of which fewer are loud
    scores = EvictionScores.load(plan.out)
    found, share = ranked(planted, scores)
    assert 0.02 < share < 0.2
    assert (found > 0.9).all()
    torch.manual_seed(0)
    for scorer in scores.scorers:
        scorer.reset()
    assert ranked(planted, scores)[0].mean() < 0.5
    rows = [json.loads(line) for line in plan.log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(5, 65, 5)]
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss"]
    assert not plan.partial.exists()
    assert ((scores.quantiles[..., 1:] - scores.quantiles[..., :-1]) >= 0).all()


def test_its_file_serves_the_model_and_no_other(plan, planted, tmp_path):
    train(Plan(**vars(plan) | {"steps": 2}), lambda text: None)
    model = AutoModelForCausalLM.from_pretrained(planted).eval()
    ids = torch.arange(3, 203)[None]
    for allocation in ("uniform", "layer", "global"):
        with foveate.attached(model, "lte", file=str(plan.out), top_k=0.2, window=16, allocation=allocation):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            assert 0.1 < foveate.stats(model).summary()["keys_read_share"] < 0.35
    other = AutoModelForCausalLM.from_pretrained(tiny.build(tmp_path / "other", seed=1))
    with pytest.raises(ValueError, match="another model of the same shape"):
        foveate.attach(other, "lte", file=str(plan.out))


class StoppedAfter:
    """A stop that is asked for after so many steps."""

    def __init__(self, steps):
        self._looks, self._steps = itertools.count(), steps  # it is looked at before each

    signal = signal.SIGTERM

    def __call__(self, minutes):
        return self

    @property
    def asked(self):
        return next(self._looks) >= self._steps

    def on_signals(self):
        import contextlib

        return contextlib.nullcontext()


def test_an_interrupted_run_goes_on_to_the_same_file(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(frozen_lte, "_EVERY", 2)
    plan = Plan(**vars(plan) | {"steps": 8})
    whole = Plan(**vars(plan) | {"out": tmp_path / "whole.safetensors"})
    assert train(whole, lambda text: None).finished
    with monkeypatch.context() as patched:
        patched.setattr(frozen_lte, "Stop", StoppedAfter(3))
        outcome = train(plan, lambda text: None)
    assert (outcome.finished, outcome.signal) == (False, signal.SIGTERM)
    assert 0 < outcome.step < 8
    assert not plan.out.exists()
    said = []
    assert train(plan, said.append).finished
    assert any(f"going on from step {outcome.step} of 8" in text for text in said)
    assert plan.out.read_bytes() == whole.out.read_bytes()
    rows, others = ([json.loads(line) for line in one.log.read_text().splitlines()] for one in (plan, whole))
    assert [row["step"] for row in rows if row["step"] % 2 == 0] == [row["step"] for row in others] == [2, 4, 6, 8]


def test_two_processes_do_not_train_into_one_file(plan):
    def again(*_):
        with pytest.raises(UserError, match=r"safetensors\.lock: another process is writing to it"):
            train(plan, lambda text: None)

    plan = Plan(**vars(plan) | {"steps": 1})
    assert train(plan, lambda text: None, again).finished
    assert not plan.out.with_name(f"{plan.out.name}.lock").exists()


def test_what_another_run_has_left_is_refused(plan, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(frozen_lte, "Stop", StoppedAfter(1))
        train(plan, lambda text: None)
    with pytest.raises(UserError, match=r"lte\.safetensors\.partial is of another run: lr differ; remove it"):
        train(Plan(**vars(plan) | {"lr": 1e-3}), lambda text: None)
    plan.partial.write_bytes(b"no safetensors")
    with pytest.raises(UserError, match="not an unfinished training"):
        train(plan, lambda text: None)


def test_minutes_end_a_run_with_the_file(plan):
    outcome = train(Plan(**vars(plan) | {"minutes": 1e-4}), lambda text: None)
    assert outcome.finished
    assert outcome.step == 1
    assert plan.out.exists()


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"lr": 0.0}, "lr must be above 0, got 0"),
        ({"minutes": -1.0}, "minutes must be above 0, got -1"),
        ({"window": 100}, "window must be below a quarter of the length, 100, got 100"),
    ],
)
def test_plans_that_cannot_be(plan, changed, match):
    with pytest.raises(UserError, match=match):
        Plan(**vars(plan) | changed)


def test_text_that_is_too_short(plan, tmp_path):
    (tmp_path / "short.txt").write_text("Call me Ishmael. Some years ago.")
    with pytest.raises(UserError, match="shorter than one sequence of 400 tokens"):
        train(Plan(**vars(plan) | {"text": tmp_path}), lambda text: None)


def test_sequences_longer_than_the_model_reads(plan):
    with pytest.raises(UserError, match=r"sequences of training need 4,?000 positions|4,?000"):
        train(Plan(**vars(plan) | {"length": 4000}), lambda text: None)


# Sequences


@pytest.fixture(scope="module")
def sequences():
    return Sequences(tiny.SAMPLE, tiny.make_tokenizer(), 700, 0)


def test_sequences_are_functions_of_their_names(sequences):
    again = Sequences(tiny.SAMPLE, tiny.make_tokenizer(), 700, 0)
    assert sequences.draw("a") == again.draw("a") != sequences.draw("b")
    assert Sequences(tiny.SAMPLE, tiny.make_tokenizer(), 700, 1).draw("a") != again.draw("a")


def test_a_document_is_followed_by_questions_on_it(sequences):
    tokenizer, chats = tiny.make_tokenizer(), 0
    for number in range(20):
        drawn = sequences.draw(str(number))
        assert 0 <= drawn.begin < drawn.end < len(drawn.ids) <= 700
        assert drawn.end >= 300
        assert len(drawn.ids) - drawn.end >= 100
        chat = tokenizer.decode(drawn.ids[: drawn.begin])
        assert chat in ("", "<|user|>")
        chats += chat != ""
        document, rest = tokenizer.decode(drawn.ids[drawn.begin : drawn.end]), tokenizer.decode(drawn.ids[drawn.end :])
        assert "<|" not in document
        answers = [word for word in rest.replace("<", " ").split() if len(word) > 5]
        assert sum(word.strip('".?') in document for word in answers) > 0.4 * len(answers)
    assert 4 <= chats <= 16


def test_a_tokenizer_without_a_template():
    drawn = Sequences(tiny.SAMPLE, tiny.make_tokenizer(None), 700, 0)
    assert all("<|" not in tiny.make_tokenizer().decode(drawn.draw(str(number)).ids) for number in range(5))


# Losses


def test_the_learning_rate_rises_and_falls():
    rates = [frozen_lte._schedule(step / 1000) for step in range(1001)]
    assert 0.05 < rates[0] < 0.15
    assert rates[:18] == sorted(rates[:18])
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert all(a > b for a, b in itertools.pairwise(rates[20:]))
    assert rates[-1] == pytest.approx(0.1)


def test_what_is_learned_from_has_followers_and_queries_beyond_the_window(plan):
    run = object.__new__(frozen_lte._Run)
    run._plan, run._scores = plan, SimpleNamespace(reach=6)
    for (begin, end), part in {(0, 400): (4, 400 - 16 - 6), (30, 200): (30, 200)}.items():
        assert run._part(Drawn((), begin, end), 400) == slice(*part)


def test_losses_and_recall():
    target = torch.arange(100.0)[None].repeat(2, 1)
    assert recall(target, target) == 1
    assert recall(-target, target) == 0
    assert recall(torch.stack([target[0], -target[0]]), target) == 0.5
    generator = torch.Generator().manual_seed(0)
    good, bad = (ranking_loss(sign * target, target, generator) for sign in (1, -1))
    assert good < 0.1 < bad


# The command


def test_the_command(planted, tmp_path, monkeypatch):
    monkeypatch.setattr(frozen_lte, "_HELD_OUT", 1)
    monkeypatch.setattr(frozen_lte, "_EVERY", 1)
    out = tmp_path / "made" / "lte.safetensors"
    arguments = ["train", "lte", "--model", planted, "--text", tiny.SAMPLE, "--out", out, "--steps", 2]
    arguments += ["--length", 300, "--window", 16]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    assert "step 2 · held-out loss" in done.output
    assert "use it as --method 'lte:file=" in done.output.replace("\n", "")
    assert EvictionScores.load(out).window == 16
    with monkeypatch.context() as patched:
        patched.setattr(frozen_lte, "Stop", StoppedAfter(1))
        stopped = CliRunner().invoke(app, [*map(str, arguments), "--seed", "1"])
    assert stopped.exit_code == 143, stopped.output
    done = CliRunner().invoke(app, [*map(str, arguments[:-2]), "--window", "0"])
    assert done.exit_code == 2
    assert "window must be at least 1, got 0" in done.output
    done = CliRunner().invoke(app, [*map(str, arguments), "--seed", "-1"])
    assert done.exit_code == 2
    assert "seed must be at least 0 and below 2^64, got -1" in done.output


def test_comparing_with_the_file(plan, planted, tmp_path):
    from foveate.lab.evaluation import runner, tasks

    train(Plan(**vars(plan) | {"steps": 1}), lambda text: None)
    methods, _ = runner.parse_methods([f"lte:file={json.dumps(str(plan.out))},top_k=40,window=16"])
    task = tasks.parse("niah:max_new_tokens=2", length=300, question="after")
    rows = runner.run(runner.prepare(runner.Comparison(planted, task, tiny.SAMPLE, methods, 2, tmp_path / "r.jsonl")))
    assert rows[1]["method"] == "lte"
    assert rows[1]["task_settings"]["question"] == "after"
    assert 0 < rows[1]["keys_read_share"] < 0.2
    assert loading.choose_device("cpu") == "cpu"
