import copy
import json
from pathlib import Path

import pytest

from foveate.hybrids.training import configuration
from foveate.hybrids.training.prepare import Preparation, prepare
from foveate.hybrids.training.tokens import TokenStore
from tests.hybrids.training import evicting

SAMPLE = Path(__file__).resolve().parents[3] / "examples" / "data"


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """A folder of a hundred short documents, from the sample novels."""
    folder = tmp_path_factory.mktemp("text")
    text = (SAMPLE / "books" / "moby_dick.txt").read_text(encoding="utf-8")[10_000:110_000]
    rows = [{"title": f"Part {i}", "text": text[1000 * i : 1000 * (i + 1)]} for i in range(100)]
    (folder / "parts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory, text_folder):
    """Its tokenised text: a vocabulary of 800, three shards, questions of SQuAD's sample. Tests leave it as it is."""
    out = tmp_path_factory.mktemp("tokens") / "store"
    squad = sorted((SAMPLE / "squad").glob("*.json*"))
    plan = Preparation(text_folder, vocab_size=800, held_out=0.1, shard_tokens=20_000, questions=tuple(squad))
    assert prepare(plan, out, lambda text: None)
    return out


@pytest.fixture
def store(store_folder):
    return TokenStore(store_folder)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """The configuration of a tiny model without weights."""
    return evicting.write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def evicting_folder(tmp_path_factory):
    """The configuration of a tiny model with learned retention scores and dropout."""
    return evicting.write_evicting(tmp_path_factory.mktemp("models") / "evicting")


@pytest.fixture(scope="session")
def settings(store_folder, model_folder):
    """The settings of a quick run, as nested mappings. Tests leave them as they are."""
    return {
        "steps": 12,
        "seed": 3,
        "model": {"folder": str(model_folder)},
        "data": {"folder": str(store_folder)},
        "batch": {"tokens": 512, "device_tokens": 256, "length": 64, "longer": 128},
        "optim": {"lr": 0.01},
        "mixture": {
            "text": {"share": 0.5},
            "copies": {"share": 0.3, "gap": [8, 40], "span": [8, 16]},
            "recall": {"share": 0.2, "pairs": [2, 8]},
        },
        "checkpoints": {"every": 4},
        "log": {"every": 1, "held_out": 512},
        "run": {"device": "cpu"},
    }


@pytest.fixture
def values(settings):
    """A copy of those settings for one test."""
    return copy.deepcopy(settings)


@pytest.fixture
def make(values):
    """A configuration from those settings; `make({"optim.lr": 1})` sets some otherwise."""

    def build(changes=None):
        for name, value in (changes or {}).items():
            configuration._change(values, f"{name}={json.dumps(value)}")
        return configuration.parse(values)

    return build
