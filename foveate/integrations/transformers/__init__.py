"""foveate on Hugging Face Transformers models, through its attention, mask and cache interfaces."""

from foveate.integrations.transformers.attach import attach, attached, detach, stats
from foveate.integrations.transformers.attachment import Attachment
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.saved import load_cache, save_cache
from foveate.integrations.transformers.stats import LayerStats, Stats

__all__ = [
    "Attachment",
    "Cache",
    "LayerStats",
    "Stats",
    "attach",
    "attached",
    "detach",
    "load_cache",
    "save_cache",
    "stats",
]
