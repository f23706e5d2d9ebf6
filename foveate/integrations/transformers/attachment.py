"""What :func:`~foveate.attach` keeps of a model: its method, layer by layer, and the facts that hooks need."""

from __future__ import annotations

import math
import uuid
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import Tensor, nn

from foveate.integrations.transformers import attention, offloading
from foveate.integrations.transformers.configurations import Configurations
from foveate.integrations.transformers.facts import geometry_of, kv_heads, model_shape
from foveate.integrations.transformers.graphs import Graphs
from foveate.methods import Method, sparse_prompt
from foveate.methods.base import NEVER_FASTER
from foveate.runtime import SHORT_SEQUENCE, Policy, dense_until
from foveate.state import Geometry
from foveate.state.store import MakeStore, class_of


@dataclass(repr=False)
class Attachment:
    """What :func:`attach` put on a model."""

    method: Method
    config: transformers.PreTrainedConfig
    """The decoder's configuration; while attached, a copy that only this model uses."""
    policies: dict[int, Policy]
    unchanged: dict[int, str]
    """Layers that stay as they are, with the reason."""
    uid: str
    """Names this attachment: caches belong to one."""
    forward: dict[Hashable, Any]
    """What the layers of a forward pass without a cache share."""
    configurations: Configurations = field(default_factory=Configurations)
    before: Any = None
    """What was attached before, for a block of :func:`attached`."""
    left: bool = False
    """Whether the block of :func:`attached` has ended."""
    keepers: list[nn.Module] = field(default_factory=list)
    """Parts of the model that keep ``rope_deltas``, which belong to the sequence that was read last."""
    _cache: Any = None
    """Finds the anchors of a method that has to be calibrated on its first prompt."""
    graphs: Graphs = field(default_factory=lambda: Graphs("auto"))
    store: MakeStore | None = None
    """Makes the stores of the layers; None: keys and values are on the device or, with :attr:`offload`, on the host."""
    offload: bool = False
    """Whether keys and values are kept in host memory."""
    gpu_budget: int | float | None = None
    """What a cache may then take of the GPU, see :class:`foveate.runtime.offload.Offload`."""
    geometries: dict[int, Geometry] = field(default_factory=dict)
    """Then the shapes of the layers in :attr:`policies`."""
    lossless: Any = None
    """How drafts are made and verified, see :class:`foveate.integrations.transformers.lossless.Lossless`; None: not."""
    chosen: str = ""
    """What `auto` has chosen, and why; empty where the method was named."""
    positions: int | None = None
    """How many positions the model has; None until it was asked; 0 when it does not say, and once `generate` has warned
    of more."""

    def __repr__(self) -> str:
        return f"Attachment({self.chosen or self.method.spec})"

    @property
    def fetches(self) -> bool:
        """Whether decode steps fetch the keys that they read."""
        return bool(offloading.fetching(self.offload, self.store))

    @property
    def sparse_prompt(self) -> bool:
        """Whether prompt queries look at less than everything in some layer."""
        return any(sparse_prompt(policy.method) for policy in self.policies.values())

    @property
    def evicts_in_prompt(self) -> bool:
        """Whether some layer evicts while a prompt is read, which takes a cache."""
        return any(policy.method.prompt_evicts_every for policy in self.policies.values())

    @property
    def decodes_alone(self) -> bool:
        """Whether the method acts on decoded tokens alone, so that prompts and passes without a cache are dense."""
        return not self.sparse_prompt and any(policy.method.name != "dense" for policy in self.policies.values())

    @property
    def whole_prompt(self) -> bool:
        """Whether some layer must be given the prompt in one piece."""
        return None in self._prompt_tiles()

    @property
    def prompt_tile(self) -> int:
        """Tokens of a prompt after whose multiples it can be cut in all layers (:meth:`Method.prompt_tile`)."""
        return math.lcm(*filter(None, self._prompt_tiles()))

    def _prompt_tiles(self) -> set[int | None]:
        group = self.config.num_attention_heads // kv_heads(self.config)
        return {policy.method.prompt_tile(group) for policy in self.policies.values()}

    def short_contexts(self, model: nn.Module) -> str:
        """From how many tokens on decode steps are sparse, in words; empty of methods that never decode densely."""
        device, geometry = model.device, geometry_of(model_shape(self.config))
        able = [policy for policy in self.policies.values() if policy.method.sparse_from_tokens is not None]
        until = max((dense_until(one.method, one.dense_below, geometry, device) for one in able), default=0)
        where = "this GPU" if device.type == "cuda" else f"a {device.type.upper()}"
        if not able:
            return ""
        if not until:
            return f"sparse at any length on {where}"
        if until >= NEVER_FASTER:
            return f"dense at any length on {where}, where it is not faster; dense_below=0 makes it sparse"
        asked = all(one.dense_below != "auto" for one in able)
        return f"dense below {until:,} tokens" + (
            " (dense_below)" if asked else f", or {SHORT_SEQUENCE:,} each, on {where}"
        )

    @property
    def cache(self) -> transformers.Cache | None:
        """The cache that was filled last, while it is alive."""
        return None if self._cache is None else self._cache()

    def replay_obstacle(self, model: nn.Module) -> str:
        """Why decode steps of the model are never replayed; empty when they are."""
        methods = (policy.method for policy in self.policies.values())
        reason = self.graphs.obstacle(model, self.config, methods, self.unchanged)
        if not reason and self.store is not None and not class_of(self.store).can_be_captured:
            return f"the class {class_of(self.store).__name__} does not declare can_be_captured"
        return reason

    def offsets(self) -> list[Tensor | None]:
        """What each of :attr:`keepers` keeps of the sequence that it has read."""
        return [one.rope_deltas for one in self.keepers]

    def restore_offsets(self, cache: transformers.Cache) -> None:
        """Have :attr:`keepers` keep what they did after the cache's last pass; nothing for an empty cache."""
        for one, offset in zip(self.keepers, cache.offsets or [None] * len(self.keepers)):
            one.rope_deltas = offset

    def remember(self, cache: transformers.Cache) -> None:
        """Note the cache whose size :func:`stats` reports."""
        self._cache = weakref.ref(cache)

    def __getstate__(self) -> dict[str, Any]:  # for copies and pickles, which are attachments of their own
        own = ("uid", "forward", "_cache")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, uid=new_uid(), forward={}, _cache=None)
        for policy in self.policies.values():
            policy.owner, policy.forward = self.uid, self.forward
        attention.register()  # a pickle may be read in another process


class OfModel:
    """A hook, or what stands in for a method, of a model with an attachment."""

    def __init__(self, model: nn.Module, attachment: Attachment):
        self.model, self.attachment = model, attachment


def new_uid() -> str:
    """A name that no other attachment has."""
    return uuid.uuid4().hex
