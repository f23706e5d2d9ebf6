"""Trainable token mixers on the verbs of :mod:`foveate.ops`: what the hybrids of paper laLTE/laNSA are made of."""

from foveate.layers.gated_deltanet import GatedDeltaNet
from foveate.layers.lte import LearnedEviction, RetentionScores
from foveate.layers.nsa import NativeSparseAttention
from foveate.layers.rotary import Rotary, rotate
from foveate.layers.window import SlidingWindowAttention

__all__ = [
    "GatedDeltaNet",
    "LearnedEviction",
    "NativeSparseAttention",
    "RetentionScores",
    "Rotary",
    "SlidingWindowAttention",
    "rotate",
]
