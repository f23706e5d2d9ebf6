"""compress: what stands for a page or group of keys."""

from foveate.ops.compress.reference import page_importance, summarise_pages

__all__ = ["page_importance", "summarise_pages"]
