"""One process or several, under torchrun: DDP, or FSDP2 for models whose optimiser does not fit beside them.

Weights and the optimiser's moments leave as whole tensors by name and come back so, whichever way they were split: a
checkpoint of two GPUs goes on with one, and the other way round.
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
class Place:
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
def joined(device: str) -> Iterator[Place]:
    """The place of this process; several processes are joined for the block, unless the caller has joined them.

    Raises `UserError` without the GPU that is asked for.
    """
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
    place = Place(rank, world, torch.device(device, local) if device == "cuda" else torch.device("cpu"))
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
_VARIABLES = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))


class Parallel:
    """A model as the processes share it."""

    def __init__(self, network: nn.Module, place: Place, how: str, half: bool):
        self.place, self.network = place, network
        self.sharded = how == "fsdp" and place.world > 1
        if self.sharded:
            if place.device.type != "cuda":
                raise UserError("run.parallel is fsdp, which needs GPUs; use ddp")
            shard(network, place, half)
        self.model = network
        if place.world > 1 and not self.sharded:
            from torch.nn.parallel import DistributedDataParallel

            ids = [place.device.index] if place.device.type == "cuda" else None
            self.model = DistributedDataParallel(
                network, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False
            )

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Gradients of a micro-batch are exchanged only with the step's last one."""
        if self.sharded:
            self.network.set_requires_gradient_sync(last)
            yield
        elif self.place.world > 1 and not last:
            with self.model.no_sync():
                yield
        else:
            yield

    def clip(self, largest: float) -> Tensor:
        """Clips the gradient's norm and returns it as it was, on the device."""
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), largest)
        return _whole(norm)

    def finite(self) -> bool:
        """Whether all weights are finite; waits for the device."""
        flags = [torch.isfinite(_local(parameter)).all() for parameter in self.network.parameters()]
        broken = (~torch.stack(flags)).any().float()
        return not self.place.sum(broken).item()

    def weights(self) -> dict[str, Tensor]:
        """All weights and lasting buffers by name, whole, on the host; tied ones once. Every process takes part."""
        tied = {name for name, _ in self.network.named_parameters(remove_duplicate=False)}
        kept = dict(self.network.named_parameters())
        kept |= {name: value for name, value in self.network.state_dict().items() if name not in tied}
        return {name: _on_host(value.detach()) for name, value in kept.items()}

    def moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The optimiser's tensors as `<weight>/<name>`, whole, on the host. Every process takes part."""
        return {
            f"{name}/{key}": _on_host(value)
            for name, parameter in self.network.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises `UserError` if the names or shapes are not the network's."""
        mine = dict(self.network.named_parameters())
        tied = {name for name, _ in self.network.named_parameters(remove_duplicate=False)}
        mine |= {name: value for name, value in self.network.state_dict().items() if name not in tied}
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
                value.copy_(like(tensors[name], value))

    def load_moments(self, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
        names = {parameter: name for name, parameter in self.network.named_parameters()}
        whole = optimizer.state_dict()
        ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(ordered):
            prefix = f"{names[parameter]}/"
            mine = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            state[number] = {
                key: value if value.ndim == 0 and key == "step" else like(value, parameter)
                for key, value in mine.items()
            }
        optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


def shard(network: nn.Module, place: Place, half: bool) -> None:
    """FSDP2: each layer by itself, then what is left.

    In half precision, weights are cast to bf16 when they are gathered. Those that the network keeps in fp32
    (`_keep_in_fp32_modules_strict`) are gathered with the other weights of their own module, uncast; the modules within
    it are a group of their own.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(place.device.type, (place.world,))
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else exact
    kept = set(getattr(network, "_keep_in_fp32_modules_strict", None) or ()) if half else set()
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()), default=[]):
        for module in list(layer.modules()):
            if kept.intersection(name for name, _ in module.named_parameters(recurse=False)):
                if within := [child for child in module.children() if any(True for _ in child.parameters())]:
                    fully_shard(within, mesh=mesh, mp_policy=policy)
                fully_shard(module, mesh=mesh, mp_policy=exact)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _on_host(tensor: Tensor) -> Tensor:
    return _whole(tensor).detach().to("cpu", copy=True).contiguous()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, split as another one is."""
    if not hasattr(other, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)
