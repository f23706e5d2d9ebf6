"""`benchmarks/methods/luka_ablated.py`: `luka_paper` where that has the settings, else the formulas written out."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from luka_written_out import Sequence, softmax
from matrix import KV_HEADS, SCALING, Driver, Tokens, close, padded
from typer.testing import CliRunner

from foveate import methods
from foveate.cli import app, imports

ROOT = Path(__file__).resolve().parents[3]
FILE, MODEL = ROOT / "benchmarks" / "methods" / "luka_ablated.py", ROOT / "models" / "smollm2-135m"
SMALL = {"page_size": 4, "sinks": 2, "tail": 9}


@pytest.fixture(autouse=True)
def ablations(imported_methods):
    imports.run(FILE)
    return sys.modules[str(FILE)]


def fed(method, rows, prompts, decoded):
    """A driver that has read a batch of sequences, and the outputs of their decoded tokens."""
    batch, mask = padded([row[: prompt + decoded] for row, prompt in zip(rows, prompts)], max(prompts) + decoded)
    driver = Driver(method, max(prompts))
    driver.feed(batch[: max(prompts)], mask[:, : max(prompts)])
    return driver, driver.feed_steps(batch[max(prompts) :])


@pytest.mark.parametrize("mass", ["exact", "preserve"])
@pytest.mark.parametrize("bias", ["none", "log", "entropy"])
@pytest.mark.parametrize("compressor", ["mean", "attention"])
@pytest.mark.parametrize("top_k", [0, 2, 0.4, 1.0])
def test_settings_of_luka_paper_give_what_it_gives(mass, bias, compressor, top_k):
    """Also in rows of other lengths, in a batch."""
    settings = SMALL | {"mass": mass, "bias": bias, "compressor": compressor, "top_k": top_k}
    prompts = [41, 23, 1]
    rows = [Tokens.random(1, prompt + 21, seed) for seed, prompt in enumerate(prompts)]
    ours, theirs = (fed(methods.make(name, **settings), rows, prompts, 21) for name in ("luka_ablated", "luka_paper"))
    close(ours[1], theirs[1])
    for counter in ("keys_read", "pages_refined"):
        own, its = (float(driver.layer.counters[counter]) for driver, _ in (ours, theirs))
        assert own == pytest.approx(its)


def test_a_second_turn_goes_on_with_the_pages_of_the_first():
    tokens, found = Tokens.random(1, 70), []
    for name in ("luka_ablated", "luka_paper"):
        driver = Driver(methods.make(name, **SMALL), 30)
        driver.feed(tokens[:30])
        driver.feed_steps(tokens[30:37])
        driver.layer.phase.prompt_end = 58
        driver.feed(tokens[37:58])
        found.append(driver.feed_steps(tokens[58:]))
    close(*found)


class Ablated(Sequence):
    """The removed settings, in the words of the paper."""

    def __init__(self, own, *given):
        self.own = own
        luka = methods.make("luka_paper", page_size=own.page_size, sinks=own.sinks, tail=own.tail, mass=own.mass)
        named = ("sizes", "sinks", "tail", "window", "score", "bias", "mass", "pool", "prior", "pages", "expand")
        facts = {name: getattr(luka, name) for name in named}
        super().__init__(SimpleNamespace(**facts, compressor=own.compressor, top_k=own.top_k), *given)

    def shares(self, head, children):
        if self.own.compressor == "random":
            return drawn(self.own, children[0].tokens[0], head)
        received = np.array([self.mass[head, child.tokens].sum() for child in children]) / self.group
        return softmax(received / self.own.temperature)

    def join(self, *given):
        node = super().join(*given)
        node.value = np.zeros_like(node.value) if self.own.zero_values else node.value
        return node

    def choose(self, level, token, trees, covers, ranks):
        if not self.own.threshold:
            return super().choose(level, token, trees, covers, ranks)
        masses = [dict(zip(cover, softmax(np.stack(list(cover.values()), 1)).T)) for cover in covers]
        largest = {}
        for cover in masses:
            for node, mass in cover.items():
                if node.level >= 0:
                    largest[node.number] = max(largest.get(node.number, 0.0), mass.max())
        return [
            [node for node in cover if node.level >= 0 and largest[node.number] > self.own.threshold]
            for cover in covers
        ]


def drawn(method, first, head):
    """The weights of the page that begins with a token."""
    page = torch.tensor([(first - method.sinks) // method.page_size])
    return (
        sys.modules[str(FILE)].random_tokens(page, KV_HEADS, method.page_size, method.seed)[0, head, 0].double().numpy()
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": "random"},
        {"compressor": "random", "seed": 3, "zero_values": True, "mass": "exact", "top_k": 0.4},
        {"zero_values": True},
        {"zero_values": True, "mass": "exact", "top_k": 0},
        {"temperature": 1.0},
        {"temperature": 0.2, "mass": "exact"},
        {"threshold": 0.1},
        {"threshold": 0.3, "mass": "exact", "compressor": "random"},
    ],
    ids=str,
)
def test_removed_settings_are_the_paper_s_formulas(settings):
    method, prompt, decoded = methods.make("luka_ablated", **SMALL | settings), 41, 20
    tokens = Tokens.random(1, prompt + decoded)
    driver, out = fed(method, [tokens], [prompt], decoded)
    written = Ablated(method, *(x[0].double().numpy() for x in (tokens.q, tokens.k, tokens.v)), prompt, SCALING)
    expected = torch.stack([torch.from_numpy(written.decode(prompt + step)) for step in range(decoded)], 1)
    close(out[0].double(), expected)
    assert float(driver.layer.counters["pages_refined"]) == pytest.approx(written.pages_refined)
    assert settings.get("top_k") == 0 or written.pages_refined > 0


def test_random_tokens_are_drawn_evenly_and_again(ablations):
    weights = ablations.random_tokens(torch.arange(4000), KV_HEADS, 16, 0)
    assert weights.shape == (1, KV_HEADS, 4000, 16)
    assert (weights.sum(-1) == 1).all()
    assert (weights.mean(2) - 1 / 16).abs().max() < 0.02
    assert torch.equal(weights[:, :, 40:50], ablations.random_tokens(torch.arange(40, 50), KV_HEADS, 16, 0))
    assert not torch.equal(weights, ablations.random_tokens(torch.arange(4000), KV_HEADS, 16, 1))
    assert not torch.equal(weights[:, 0], weights[:, 1])


def test_values_of_zero_change_the_values_alone():
    tokens = Tokens.random(1, 50)
    plain, zeroed = (
        fed(methods.make("luka_ablated", **SMALL, zero_values=zero), [tokens], [40], 10)[0].store
        for zero in (False, True)
    )
    assert plain.channel("made").sum() == zeroed.channel("made").sum() == 2 * ((40 + 8 - 11) // 4)
    assert zeroed.channel("summary_v").abs().max() == 0 < plain.channel("summary_v").abs().max()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0, not 0.0"),
        ({"threshold": 1.0}, "threshold must be at least 0 and below 1, not 1.0"),
        ({"compressor": "median"}, "compressor must be one of mean, attention, random"),
        ({"zero_values": 1}, "zero_values must be true or false, not 1"),
    ],
)
def test_settings_that_cannot_be(setting, message):
    with pytest.raises(ValueError, match=message):
        methods.make("luka_ablated", **setting)


def test_models_with_capped_logits_are_refused():
    with pytest.raises(ValueError, match="luka_ablated: models with learned sinks or capped logits"):
        Driver(methods.make("luka_ablated"), 30, softcap=5.0).feed(Tokens.random(1, 30))


@pytest.mark.full
def test_the_command_makes_rows_of_every_ablation(tmp_path):
    """On a small model: masses are exact, so that refining every page is dense attention."""
    paper = "tail=16,mass=exact,top_k="
    specs = ["dense", f"luka_paper:{paper}0", f"luka_ablated:{paper}0", f"luka_ablated:{paper}1.0,compressor=random"]
    specs += [f"luka_ablated:{paper}0,{one}" for one in ("compressor=random", "zero_values=true", "threshold=0.02")]
    words = ["compare", "--model", MODEL, "--data", ROOT / "examples" / "data", "--import", FILE, "--limit", 1]
    words += ["--task", "perplexity:continuation=64", "--length", 1, "--batch-size", 1, "--dtype", "float32"]
    words += ["--out", tmp_path / "rows.jsonl", *(word for spec in specs for word in ("--method", spec))]
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    dense, theirs, ours, full, random, zeroed, threshold = (row["metrics"]["perplexity"]["value"] for row in rows)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert full == pytest.approx(dense, rel=1e-4)
    assert dense < threshold < ours < min(random, zeroed)
