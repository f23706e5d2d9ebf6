"""foveate: long-context inference that looks closely only where it matters.

>>> import foveate
>>> foveate.attach(model, "luka", page_size=16, top_k=3)
>>> model.generate(**inputs)
>>> print(foveate.stats(model))
>>> foveate.detach(model)
"""

__version__ = "0.1.0.dev0"

from foveate import methods
from foveate.integrations.transformers import Attachment, Cache, Stats, attach, attached, detach, stats
from foveate.methods import Method, per_layer

__all__ = ["Attachment", "Cache", "Method", "Stats", "attach", "attached", "detach", "methods", "per_layer", "stats"]
