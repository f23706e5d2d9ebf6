"""The memory of a gated-delta-rule layer: its recurrent state and the last inputs of its short convolution."""

from __future__ import annotations

from foveate.hybrids.state.memory import StagedMemory


class RecurrentMemory(StagedMemory):
    """Tensors of a gated delta rule, whose size does not depend on the sequence's length.

    ``state`` fp32 ``[B, H, D, Dv]``: the recurrent state; ``tail`` ``[B, kernel - 1, C]``: the last inputs of the
    convolution before it.
    """
