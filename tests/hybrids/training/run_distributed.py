"""Run on each rank: λ is the same everywhere, and two ranks train as one does."""

import shutil

import torch
import torch.distributed as dist

from foveate.hybrids.training import checkpoints
from foveate.hybrids.training.configuration import load
from foveate.hybrids.training.loop import train
from foveate.hybrids.training.sparsity import SparsityFeedback, SparsitySettings
from tests.hybrids.training import evicting  # noqa: F401  (registers its model)


def synchronised_weights():
    """Ranks count 4 and 16 tokens of each head: one is below a budget of 8 and the other above, their mean is above."""
    rank = dist.get_rank()
    scores = torch.zeros(1, 2, 3, 26)
    scores[..., : 4 + 12 * rank] = 0.9
    feedback = SparsityFeedback(SparsitySettings(budget=8, interval=2, start=0.1))
    for step in range(4):
        feedback.observe(tuple(scores))
        feedback.step()
        expected = 0.1 * 1.5 ** ((step + 1) // 2)
        torch.testing.assert_close(feedback.weights, torch.full((1, 3), expected))
    torch.testing.assert_close(feedback.average, torch.full((1, 3), 10.0))


def main(folder):
    """Args: a folder with a configuration (JSON) for each run; a run's folder is named like its configuration.

    The run ``whole`` is then gone on with from its last but one checkpoint, as ``parts``.
    """
    dist.init_process_group("gloo")
    synchronised_weights()
    for config in sorted(folder.glob("*.json")):
        outcome = train(load(config), config.with_suffix(""))
        print(f"{config.stem} done: {outcome.step}\n", end="", flush=True)
    if dist.get_rank() == 0:
        shutil.copytree(folder / "whole", folder / "parts")
        (checkpoints.folders(folder / "parts")[-1] / "state.json").unlink()  # as if it had not been finished
    dist.barrier()
    outcome = train(load(folder / "whole.json"), folder / "parts", resume=True)
    print(f"parts done: {outcome.step}\n", end="", flush=True)
    dist.destroy_process_group()
