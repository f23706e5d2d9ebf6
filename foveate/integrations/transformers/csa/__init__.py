"""Models trained with compressed sparse attention: their own selection, in bounded memory.

Transformers scores every key for every query, ``[B, S, H, T]``, and turns the selection into a mask ``[B, S, T]``.
This package replaces the forward of a model's indexers (DeepSeek-V3.2 and kin) or compressors (DeepSeek-V4) by one with
the same projections that selects in bounded memory. The attention function reads the selected keys, and the layers
get key positions in place of a mask.
"""

from foveate.integrations.transformers.csa.attachment import MODELS, SparseAttachment, has_own, kind

__all__ = ["MODELS", "SparseAttachment", "has_own", "kind"]
