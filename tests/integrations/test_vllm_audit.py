"""Which steps are audited, and what is compared of them; without vLLM."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from foveate.integrations.vllm import audit
from foveate.integrations.vllm.audit import Share, compared
from foveate.runtime.steps import Audited


@pytest.mark.parametrize(("share", "picked"), [(0, 0), (0.001, 2), (0.25, 500), (0.3, 600), (1, 2000)])
def test_a_share_of_the_steps_is_picked_evenly(share, picked):
    own = Share(share)
    found = [own.due() for _ in range(2000)]
    assert sum(found) == picked
    assert max(sum(found[n : n + 20]) for n in range(1980)) <= 20 * share + 1


def test_rows_are_compared_by_the_greedy_token_and_the_divergence():
    dense = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 1.0, -torch.inf]])
    given = torch.tensor([[0.0, 2.0, 1.0], [0.0, 3.0, 0.0], [0.0, 1.0, -torch.inf]])
    found = compared(dense, given)
    assert found["agreement"].tolist() == [1, 0, 1]
    p, q = dense[1].double().softmax(0), given[1].double().softmax(0)
    expected = float((p * (p / q).log()).sum())
    torch.testing.assert_close(found["kl"], torch.tensor([0.0, expected, 0.0]))


class Runner:
    """What model runner V2 does in a step, around a state that prepares it, and a model whose logits are its input."""

    def __init__(self, audited):
        self.model_state, self.model, self.calls = State(audited, self), Model(self), []

    def execute_model(self, number, dummy_run=False):
        batch = SimpleNamespace(input_ids=torch.full((2, 3), float(number)), positions=None)
        self.model_state.prepare_attn(batch, "FULL", (), "slots", [], "config", for_capture=False)
        self.model_state.prepare_inputs(batch, None)
        self.calls.append("served")
        self.execute_model_state = SimpleNamespace(hidden_states=torch.eye(2, 3))
        return number


class State:
    def __init__(self, audited, runner):
        self.audited, self.runner = audited, runner

    def prepare_attn(self, batch, mode, tables, slots, groups, config, for_capture=False):
        return {"layer": SimpleNamespace(foveate=self.audited)}

    def prepare_inputs(self, batch, requests):
        return {"positions": "its own"}


class Model:
    def __init__(self, runner):
        self.runner = runner

    def __call__(self, **inputs):
        self.runner.calls.append(inputs["positions"])
        return inputs["input_ids"]

    def compute_logits(self, hidden):
        return hidden * 2


@pytest.mark.parametrize("audited", [True, False])
def test_model_runner_v2_runs_the_audited_step_before_the_one_that_it_serves(audited, monkeypatch):
    monkeypatch.setattr(audit, "_context_of", lambda runner, batch, **step: contextlib.nullcontext(step))
    monkeypatch.setattr(Runner, "execute_model", audit._audited_execution(Runner.execute_model))
    observed, mass = [], torch.tensor([0.5, 0.25])
    step = SimpleNamespace(
        real=1, steps=SimpleNamespace(audit=lambda: contextlib.nullcontext(Audited([mass], [(mass > 0.3).float()])))
    )
    step.audited = SimpleNamespace(observe=observed.append) if audited else None
    runner = Runner(step)
    assert runner.execute_model(7) == 7
    assert runner.calls == ["its own", "served"][1 - audited :]
    assert vars(runner.model_state).keys() == {"audited", "runner"}, "what the step has replaced is as it was"
    if audited:
        (found,) = observed
        expected = compared(torch.full((1, 3), 14.0), torch.tensor([[2.0, 0, 0]]))
        assert {name: x.tolist() for name, x in found.items()} == {
            **{name: x.tolist() for name, x in expected.items()},
            "mass_read": [0.5],
            "ranks_alike": [1.0],
        }
    runner.calls.clear()
    runner.execute_model(7, dummy_run=True)
    assert (runner.calls, len(observed)) == (["served"], int(audited))
