"""Compressed sparse attention (DeepSeek-V3.2, DeepSeek-V4): the lightning indexer in bounded memory (StreamIndex)."""

from foveate.csa.indexer import lightning_indexer

__all__ = ["lightning_indexer"]
