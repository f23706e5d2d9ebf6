"""A step that an engine captures once gives what fresh steps give, for any rows; what the host decided is frozen."""

import dataclasses

import pytest
import torch

from foveate.lab.recorded import record
from tests.served import BATCHES, LAYERS, LOGITS, LONGEST, ROWS, SPECS, Served


@pytest.mark.parametrize("spec", SPECS)
def test_replays_equal_fresh_steps(spec):
    served = Served()
    captured, fresh = served.steps(spec), served.steps(spec)
    recording = served.capture(captured, record)
    for name, (lengths, prompts) in BATCHES.items():
        served.fill(lengths)
        before = float(captured.keys_read()), float(fresh.keys_read())
        served.begin(captured, lengths, prompts)
        served.write(captured)  # a kernel's launch, or a reference that no graph can capture
        recording.replay()
        served.begin(fresh, lengths, prompts)
        served.write(fresh)
        found = served.run(fresh)
        torch.testing.assert_close(recording.out, found, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(found, served.expected(spec, lengths, prompts))
        read = float(captured.keys_read()) - before[0], float(fresh.keys_read()) - before[1]
        assert read[0] == pytest.approx(read[1])
        assert captured.totals == fresh.totals


def test_rows_that_are_read_whole_are_counted_so_and_prompts_not_at_all():
    served = Served()
    steps = served.steps("oracle_topk:top_k=5,decode_only=true")
    recording = served.capture(steps, record)
    lengths, prompts = [130, 310, 200, 20, 0], [1]
    served.fill(lengths)
    served.begin(steps, lengths, prompts)
    recording.replay()
    scored = (130 + 200) / 2  # by their keys, without the values
    assert float(steps.keys_read()) == (130 + 200 + 20) + (LAYERS - 1) * (5 + 5 + 20 + scored)
    totals = steps.totals
    assert (totals.steps, totals.rows, totals.keys_available) == (1, 3, LAYERS * 350)
    assert totals.selections == 3 * (LAYERS - 1)


def test_a_batch_of_prompts_is_no_step():
    served = Served()
    steps = served.steps("omnikv:top_k=6,filters=[0,3],wait=1")
    served.fill([130, 310, 0, 0, 0])
    served.begin(steps, [130, 310, 0, 0, 0], [0, 1])
    served.run(steps)
    totals = steps.totals
    assert (totals.steps, totals.dense_rows, totals.rows, totals.selections, totals.keys_available) == (0, 0, 0, 0, 0)
    assert float(steps.keys_read()) == 0


def test_a_step_may_run_again_before_it_is_captured():
    """What its first run has computed once for all layers belongs to that run, and a graph must not read it."""
    served = Served()
    steps = served.steps("kascade_paper:top_k=7,anchors=[0,3],decode_only=true")
    steps.begin_capture(served.lengths, served.table, LONGEST)
    served.run(steps)
    recording = record(lambda: served.run(steps))
    lengths, prompts = BATCHES["shorter, and short rows among long ones"]
    served.fill(lengths)
    served.begin(steps, lengths, prompts)
    recording.replay()
    torch.testing.assert_close(recording.out, served.expected(SPECS[1], lengths, prompts))


def test_a_capture_counts_nothing():
    served = Served()
    steps = served.steps(SPECS[1])
    served.fill([90] * ROWS)
    served.begin(steps, [90] * ROWS, [])
    served.run(steps)
    before = float(steps.keys_read()), dataclasses.replace(steps.totals)
    served.capture(steps, record)
    assert before[0] > 0
    assert (float(steps.keys_read()), steps.totals) == before


def test_a_first_run_without_the_layers_that_the_engine_attends_to_counts_nothing():
    served = Served()
    steps = served.steps("oracle_topk:top_k=5,decode_only=true")
    steps.begin_capture(served.lengths, served.table, LONGEST)
    assert steps.reads_all(0)
    for n in range(1, LAYERS):
        steps.attend(n, served.q[n], *served.kv(n), LOGITS)
    assert float(steps.keys_read()) == 0
