"""Trainable token mixers on the verbs of :mod:`foveate.ops`: what the hybrids of paper laLTE/laNSA are made of."""

from foveate.hybrids.layers.gated_deltanet import GatedDeltaNet
from foveate.hybrids.layers.lte import LearnedEviction
from foveate.hybrids.layers.nsa import NativeSparseAttention
from foveate.hybrids.layers.rotary import Rotary, rotate
from foveate.hybrids.layers.window import Retention, SlidingWindowAttention

__all__ = [
    "GatedDeltaNet",
    "LearnedEviction",
    "NativeSparseAttention",
    "Retention",
    "Rotary",
    "SlidingWindowAttention",
    "rotate",
]
