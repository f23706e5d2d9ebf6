"""Compressed sparse attention (CSA; DeepSeek-V3.2, DeepSeek-V4) in bounded memory (StreamIndex).

``forward`` is the whole layer. Its parts are ``compress_tokens``, ``lightning_indexer`` and ``sparse_attention``.
"""

from foveate.csa.attention import Window, sparse_attention
from foveate.csa.compressor import Carry, compress_tokens
from foveate.csa.indexer import lightning_indexer, to_fp8
from foveate.csa.layer import Tokens, forward
from foveate.csa.sharded import pieces, sharded_lightning_indexer

__all__ = [
    "Carry",
    "Tokens",
    "Window",
    "compress_tokens",
    "forward",
    "lightning_indexer",
    "pieces",
    "sharded_lightning_indexer",
    "sparse_attention",
    "to_fp8",
]
