"""Whole layers of hybrids, on the CPU at a small size."""

import pytest
import torch

from benchmarks import hybrid_layers, hybrid_tables
from foveate.lab.results import timing
from foveate.lab.results.measurements import FIELDS

SMALL = {"size": "tiny", "contexts": (40, 96), "decoded": (40,), "batch": 2, "steps": 20, "repeats": 2}
SMALL |= {"dtype": "float32", "device": "cpu"}


def test_a_row_for_each_kind_phase_and_context():
    rows = hybrid_layers.run(hybrid_layers.Plan(**SMALL), lambda text: None)
    assert all(field in row for row in rows for field in FIELDS)
    found = {(row["case"]["what"], row["case"]["phase"], row["case"]["context"]): row for row in rows}
    prompts = {(kind, "layer prompt", context) for kind in hybrid_layers._PRESETS for context in (40, 96)}
    steps = {(kind, "layer decode", 40) for kind in hybrid_layers._PRESETS if kind != "attn"}
    assert found.keys() == prompts | steps
    assert {row["baseline"] for row in rows} == {"swa"}
    assert all(0 <= found["lte", "layer prompt", context]["retained"] <= 16 for context in (40, 96))
    table = hybrid_tables.layers(rows)
    assert "| prompt | 96 |" in table
    assert "(1.00×)" in table
    assert "retained" in table
    later = [row | {"commit": "another", "ms": 1.0} for row in rows if row["case"]["what"] == "swa"]
    assert hybrid_tables.layers([*rows, *later]).startswith(f"{table}\n\n"), "a run has a table of its own"


@pytest.mark.parametrize("kind", hybrid_layers._PRESETS)
def test_a_layer_reads_what_its_model_hands_it(kind):
    layer = hybrid_layers._Layer(hybrid_layers.Plan(**SMALL), kind)
    seen = []
    with torch.inference_mode():
        hidden = layer._hidden(30)
        ids = []
        layer.layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        layer.model.embed_tokens.register_forward_pre_hook(lambda module, args: ids.append(args[0]))
        assert torch.equal(layer._hidden(30), hidden)
        layer.model(ids[0], use_cache=False)
    torch.testing.assert_close(seen[0], hidden)
    assert len(ids[0].unique()) > 10
    assert not torch.equal(ids[0][0], ids[0][1])


def test_steps_follow_the_prompt(monkeypatch):
    """What is decoded is what a whole pass makes of the same tokens."""
    layer = hybrid_layers._Layer(hybrid_layers.Plan(**SMALL), "lte")
    outs, runs = [], []
    monkeypatch.setattr(timing, "milliseconds", lambda work, device: runs.append(work()) or 40.0)
    with torch.inference_mode():
        layer.layer.register_forward_hook(lambda module, args, out: outs.append(out[0]))
        assert layer.decode(40)["ms"] == 40.0 / 20
        decoded, outs[:] = torch.cat(outs[-20:], 1), []
        hidden = layer._hidden(60)
        layer._read(hidden, layer._inputs(hidden))
    assert len(runs) == 1
    torch.testing.assert_close(decoded, outs[-1][:, 40:], rtol=1e-4, atol=1e-5)


def test_scores_that_are_given_are_not_computed(monkeypatch):
    layer = hybrid_layers._Layer(hybrid_layers.Plan(**SMALL), "lte")
    calls, scores = [], layer.layer.mixer.scores
    real = scores.of_cached
    monkeypatch.setattr(scores, "of_cached", lambda *args: calls.append(args) or real(*args))
    with torch.inference_mode():
        hidden = layer._hidden(96)
        inputs = layer._inputs(hidden)
        expected = layer._read(hidden, inputs).layers[1].memory.tensors
        with layer._scored(lambda: layer._read(hidden, inputs)):
            before = len(calls)
            assert before
            found = layer._read(hidden, inputs).layers[1].memory.tensors
            assert len(calls) == before
    assert torch.equal(found["positions"], expected["positions"])
    assert "_margins" not in vars(layer.layer.mixer)
