"""Run by torchrun on each rank: λ is the same everywhere, and training by two ranks is training by one.

Arguments: a folder with a configuration (JSON) for each run; a run's folder is named like its configuration.
"""

import sys
from pathlib import Path

import evicting  # noqa: F401  (registers its model)
import torch
import torch.distributed as dist

from foveate.training.configuration import load
from foveate.training.loop import train
from foveate.training.sparsity import SparsityFeedback, SparsitySettings


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


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    synchronised_weights()
    for config in sorted(Path(sys.argv[1]).glob("*.json")):
        outcome = train(load(config), config.with_suffix(""), resume=True)
        print(f"{config.stem} done: {outcome.step}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
