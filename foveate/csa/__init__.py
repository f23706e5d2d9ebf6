"""Compressed sparse attention (DeepSeek-V3.2, DeepSeek-V4): the lightning indexer in bounded memory (StreamIndex)."""

from foveate.csa.attention import Window, sparse_attention
from foveate.csa.indexer import lightning_indexer

__all__ = ["Window", "lightning_indexer", "sparse_attention"]
