"""Checkpoints on the disk: whole or not there, checked, pruned."""

import json

import pytest
import torch

from foveate.errors import DataError, UserError
from foveate.hybrids.training import checkpoints
from foveate.hybrids.training.checkpoints import Snapshot


def snapshot(step, held_out=None):
    weights = {"a.weight": torch.full((2, 3), float(step))}
    return Snapshot(step, weights, {"a.weight/exp_avg": torch.ones(2, 3)}, {"steps": 9}, held_out, {"loss": 1.5})


def describe(folder):
    (folder / "config.json").write_text("{}")


def write(out, *steps, **settings):
    return [checkpoints.write(out, snapshot(step, **settings), describe) for step in steps]


def test_a_checkpoint_comes_back(tmp_path):
    (folder,) = write(tmp_path, 7, held_out=2.5)
    assert folder.name == "step-00000007"
    found, state = checkpoints.newest(tmp_path, pytest.fail)
    assert (found, state["step"], state["held_out"], state["extra"]) == (folder, 7, 2.5, {"loss": 1.5})
    weights, moments = checkpoints.read_tensors(found)
    assert torch.equal(weights["a.weight"], torch.full((2, 3), 7.0))
    assert set(moments) == {"a.weight/exp_avg"}
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json", "state.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, name, how):
    before, last = write(tmp_path, 4, 8)
    path = last / name
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    said = []
    found, state = checkpoints.newest(tmp_path, said.append)
    assert (found, state["step"]) == (before, 4)
    (line,) = said
    assert str(path) in line
    assert line.endswith("the checkpoint before step-00000008 is used")


def test_all_damaged_none_and_interrupted(tmp_path):
    assert checkpoints.newest(tmp_path / "none", pytest.fail) is None
    (folder,) = write(tmp_path, 4)
    (tmp_path / ".unfinished-step-00000008").mkdir()
    said = []
    assert checkpoints.newest(tmp_path, said.append)[0] == folder
    assert said == ["step-00000008 was interrupted while it was written; it is removed"]
    assert not (tmp_path / ".unfinished-step-00000008").exists()
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="all 1 checkpoints are damaged"):
        checkpoints.newest(tmp_path, said.append)


def test_a_write_that_fails_keeps_the_others(tmp_path):
    (before,) = write(tmp_path, 4)

    def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"step-00000008: cannot be written to \(No space left.*earlier checkpoints"):
        checkpoints.write(tmp_path, snapshot(8), full)
    assert checkpoints.folders(tmp_path) == [before]
    assert checkpoints.newest(tmp_path, lambda text: None)[0] == before


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, 2.6), (5, 2.7)):
        write(tmp_path, step, held_out=loss)
        checkpoints.prune(tmp_path, 2)
    assert [folder.name[-1] for folder in checkpoints.folders(tmp_path)] == ["2", "4", "5"]


def test_other_settings_are_named(tmp_path):
    (folder,) = write(tmp_path, 4)
    state = checkpoints.read_state(folder)
    checkpoints.check_fingerprint(folder, state["fingerprint"], {"steps": 9})
    with pytest.raises(UserError, match=r"of a run with other settings: steps is 9 there, 8 here; seed is None there"):
        checkpoints.check_fingerprint(folder, state["fingerprint"], {"steps": 8, "seed": 1})
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(json.dumps({**json.loads(text), "schema": 5}))
    with pytest.raises(DataError, match="schema 5, this version reads 1"):
        checkpoints.read_state(folder)
