"""Run on each rank: λ is the same everywhere, sharded gates stay in fp32, and two ranks train as one does."""

import copy
import shutil

import torch
import torch.distributed as dist

from foveate.hybrids.layers import GatedDeltaNet
from foveate.hybrids.models import HybridForCausalLM, make_config
from foveate.hybrids.training import checkpoints
from foveate.hybrids.training.configuration import load
from foveate.hybrids.training.distributed import Place, shard
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


def exact_gates():
    """Of a sharded Gated DeltaNet in bf16; gradients are those of the whole network."""
    torch.manual_seed(0)
    whole = HybridForCausalLM(make_config("gdn", "tiny", num_hidden_layers=2)).train()
    sharded, ids = copy.deepcopy(whole), torch.randint(512, (2, 64))
    shard(sharded, Place(dist.get_rank(), 2, torch.device("cpu")), half=True)
    seen = []
    for module in sharded.modules():
        if isinstance(module, GatedDeltaNet):
            module.register_forward_pre_hook(lambda gdn, _: seen.append((gdn.log_rate.dtype, gdn.step_bias.dtype)))
            module.o_proj.register_forward_pre_hook(lambda proj, _: seen.append(proj.weight.dtype))
    sharded(ids, labels=ids).loss.backward()
    assert seen == 2 * [(torch.float32, torch.float32), torch.bfloat16], seen
    with torch.autocast("cpu", torch.bfloat16):
        whole(ids, labels=ids).loss.backward()
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        error = (one.grad.full_tensor() - other.grad).norm() / other.grad.norm()
        assert one.grad.dtype == torch.float32, name
        assert error < 0.05, (name, error)


def main(folder):
    """Args: a folder with a configuration (JSON) for each run; a run's folder is named like its configuration.

    The run ``whole`` is then gone on with from its last but one checkpoint, as ``parts``.
    """
    dist.init_process_group("gloo")
    synchronised_weights()
    exact_gates()
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
