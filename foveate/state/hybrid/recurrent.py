"""The memory of a recurrent layer: its state and the last inputs of its short convolution."""

from __future__ import annotations

from foveate.state.hybrid.memory import StagedMemory


class RecurrentMemory(StagedMemory):
    """A gated delta rule's state, fp32 ``[B, H, D, Dv]``, as ``state``, and the last inputs of the convolution before
    it, ``[B, kernel - 1, C]``, as ``tail``. Its size does not depend on the sequence."""
