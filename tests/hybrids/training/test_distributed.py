"""Two processes as under torchrun, on the CPU."""

import copy
import json
import shutil

import pytest
import torch

from foveate.errors import UserError
from foveate.hybrids.training import checkpoints, configuration, distributed, journal
from foveate.hybrids.training.loop import train
from tests.hybrids.training import run_distributed
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def runs(settings, evicting_folder, tmp_path_factory):
    """By two ranks: ``two`` without dropout, whose draws are a rank's own; ``whole``; its second half, ``parts``."""
    folder = tmp_path_factory.mktemp("distributed")
    changes = {"batch.device_tokens": 128, "log.every": 2}
    for name, more in (
        (
            "two",
            {
                "model": {"folder": str(evicting_folder), "changes": {"dropout": 0.0}},
                "sparsity": {"budget": 20, "interval": 2, "start": 0.1},
            },
        ),
        (
            "whole",
            {
                "model": {"folder": str(evicting_folder)},
                "sparsity": {"budget": 20, "interval": 3, "start": 0.1},
            },
        ),
    ):
        values = copy.deepcopy(settings)
        for key, value in (changes | more).items():
            configuration._change(values, f"{key}={json.dumps(value)}")
        (folder / f"{name}.json").write_text(json.dumps(values))
    said = "".join(run_ranks(2, run_distributed.main, folder, folder=tmp_path_factory.mktemp("ranks")))
    assert said.count("two done: 12") == said.count("whole done: 12") == said.count("parts done: 12") == 2
    return folder


def test_two_ranks_train_as_one_does(runs, tmp_path):
    """The curves agree to rounding, though ranks count different numbers of tokens; one rank goes on from two."""
    config = configuration.load(runs / "two.json")
    shutil.copytree(runs / "two", tmp_path / "two")
    train(config, tmp_path / "one", say=lambda text: None)
    _check_same(tmp_path)
    (checkpoints.folders(tmp_path / "two")[-1] / "state.json").unlink()
    said = []
    assert train(config, tmp_path / "two", resume=True, say=said.append).finished
    assert "going on from step-00000008" in said
    _check_same(tmp_path)


def test_two_ranks_go_on_exactly_between_two_updates(runs):
    """The checkpoint of step 8 is between the updates of λ after steps 6 and 9; ranks count different numbers."""
    whole, parts = (
        [
            {name: value for name, value in row.items() if name not in ("tokens_per_s", "waited")}
            for row in journal.read(run)
        ]
        for run in (runs / "whole", runs / "parts")
    )
    assert parts == whole
    (ours, of_ours), (theirs, of_theirs) = (
        checkpoints.read_tensors(checkpoints.folders(run)[-1]) for run in (runs / "whole", runs / "parts")
    )
    for one, other in ((ours, theirs), (of_ours, of_theirs)):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_processes_wait_for_the_text_to_be_tokenised(monkeypatch):
    """The default of NCCL's groups, ten minutes, is less than a large text takes."""
    asked = {}
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: asked.update(options))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    with distributed.joined("cpu") as place:
        assert place.world == 2
    assert asked["timeout"].total_seconds() == 7200


@pytest.mark.parametrize(("name", "kind"), sorted(distributed._SHARDED.items()))
def test_weights_that_are_to_be_sharded_are_refused(name, kind, monkeypatch):
    """As `accelerate launch` asks for them: DDP in their place would hold all weights in silence."""
    monkeypatch.setenv(name, "true")
    with (
        pytest.raises(UserError, match=f"{name} is true, .* not by {kind}.*train_with_trainer.py --fsdp"),
        distributed.joined("cpu"),
    ):
        pass
    monkeypatch.setenv(name, "false")
    with distributed.joined("cpu") as place:
        assert place.world == 1


def _check_same(folder):
    rows = [[row for row in journal.read(folder / name) if "loss" in row] for name in ("two", "one")]
    assert [row["step"] for row in rows[0]] == [2, 4, 6, 8, 10, 12]
    for two, one in zip(*rows):
        for name in ("loss", "grad_norm", "lambda_mean", "retained_mean", "penalty"):
            assert two[name] == pytest.approx(one[name], rel=1e-3), (name, two["step"])
    last = [checkpoints.folders(folder / name)[-1] for name in ("two", "one")]
    (two, of_two), (one, of_one) = map(checkpoints.read_tensors, last)
    assert of_two.keys() == of_one.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=2e-3)
