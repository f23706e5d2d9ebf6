"""Exact top-k in every layer: an upper bound for methods that choose keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foveate.methods._anchored import anchor_role, dense_role
from foveate.methods._top_k_by_mass import TopKByMass
from foveate.methods.base import About, Role, register, setting


@register
class OracleTopK(TopKByMass):
    """Every layer but the first ones reads the keys that its own queries attend to most: what top-k could reach.

    It computes all attention in order to leave most of it out, and saves nothing.
    """

    name: ClassVar[str] = "oracle_topk"
    about: ClassVar[About] = About(
        "Kascade, Deshmukh et al. 2025, section 3.1 and figure 2",
        full_budget={"top_k": 1.0},
        small_budget={"top_k": 9, "tile": 1, "dense_layers": 0},
    )

    dense_layers: int = setting(1, "first layers that read all keys")

    def __post_init__(self):
        super().__post_init__()
        self._check_count("dense_layers")

    def role_of(self, layer: int, among: Sequence[int]) -> Role:
        return anchor_role(layer) if layer >= self.dense_layers else dense_role(layer)
