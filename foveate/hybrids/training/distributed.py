"""One process or several, under torchrun, by DDP.

Weights and the optimiser's moments leave and come back by name: a checkpoint of two GPUs goes on with one, and the
other way round.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foveate.errors import UserError


@dataclass(frozen=True)
class Rank:
    """This process among `world` of them, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place; no process waits on the host."""
        if self.world > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        if self.world > 1:
            torch.distributed.barrier()


@contextlib.contextmanager
def joined(device: str) -> Iterator[Rank]:
    """The place of this process; several processes are joined for the block, unless the caller has joined them.

    Raises `UserError` without the GPU that is asked for, or if `accelerate launch` asks for sharded weights.
    """
    for name, kind in _SHARDED.items():
        if os.environ.get(name, "").lower() in ("true", "1"):
            raise UserError(
                f"{name} is {os.environ[name]}, but foveate train runs by DDP, where each process holds all weights, "
                f"and not by {kind}. Launch it with torchrun, or shard weights by FSDP2 with "
                "examples/train_with_trainer.py --fsdp"
            )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is cuda, and there is no GPU")
    rank, world, local = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(
                f"process {local} of this host has no GPU of its own; there are {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local)
    place = Rank(rank, world, torch.device(device, local) if device == "cuda" else torch.device("cpu"))
    if world == 1 or torch.distributed.is_initialized():
        yield place
        return
    own = {"device_id": place.device} if device == "cuda" else {}
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_PATIENCE, **own)
    try:
        yield place
    finally:
        torch.distributed.destroy_process_group()


_PATIENCE = datetime.timedelta(hours=2)
"""How long processes wait for one another: the first one tokenises the text while the others wait."""
_SHARDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism of other axes",
}
"""Variables by which `accelerate launch` asks for weights that are shared out over the processes."""
_VARIABLES = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))


class Parallel:
    """A model as the processes share it."""

    def __init__(self, network: nn.Module, place: Rank):
        self.place, self.network = place, network
        self.model = network
        if place.world > 1:
            from torch.nn.parallel import DistributedDataParallel

            ids = [place.device.index] if place.device.type == "cuda" else None
            self.model = DistributedDataParallel(
                network, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False
            )

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        """Gradients of a micro-batch are exchanged only with the step's last one."""
        return self.model.no_sync() if self.place.world > 1 and not last else contextlib.nullcontext()

    def clip(self, largest: float) -> Tensor:
        """Clips the gradient's norm and returns it as it was, on the device."""
        return nn.utils.clip_grad_norm_(self.network.parameters(), largest)

    def finite(self) -> bool:
        """Whether all weights are finite; waits for the device."""
        flags = [torch.isfinite(parameter).all() for parameter in self.network.parameters()]
        broken = (~torch.stack(flags)).any().float()
        return not self.place.sum(broken).item()

    def weights(self) -> dict[str, Tensor]:
        """All weights and lasting buffers by name, on the host; tied ones once."""
        return {name: _on_host(value) for name, value in self._kept().items()}

    def _kept(self) -> dict[str, Tensor]:
        """The same, as the network holds them."""
        tied = {name for name, _ in self.network.named_parameters(remove_duplicate=False)}
        kept = dict(self.network.named_parameters())
        return kept | {name: value for name, value in self.network.state_dict().items() if name not in tied}

    def moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The optimiser's tensors as `<weight>/<name>`, on the host."""
        return {
            f"{name}/{key}": _on_host(value)
            for name, parameter in self.network.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises `UserError` if the names or shapes are not the network's."""
        mine = self._kept()
        if mine.keys() != tensors.keys():
            some = ", ".join(sorted(mine.keys() ^ tensors.keys())[:4])
            raise UserError(f"the checkpoint is of another model: its weights' names differ ({some}, …)")
        with torch.no_grad():
            for name, value in mine.items():
                if value.shape != tensors[name].shape:
                    raise UserError(
                        f"the checkpoint is of another model: {name} is {list(tensors[name].shape)} there, "
                        f"{list(value.shape)} here"
                    )
                value.copy_(tensors[name])

    def load_moments(self, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
        names = {parameter: name for name, parameter in self.network.named_parameters()}
        whole = optimizer.state_dict()
        ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(ordered):
            prefix = f"{names[parameter]}/"
            state[number] = {
                key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
            }
        optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
