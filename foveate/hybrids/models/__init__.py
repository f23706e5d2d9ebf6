"""Hybrids of linear, sparse and full attention as ordinary Transformers models (laLTE/laNSA, section 3.2).

Importing this module registers them with ``AutoConfig`` and ``AutoModelForCausalLM``.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from foveate.hybrids.models.cache import HybridCache, MemoryLayer
from foveate.hybrids.models.configuration import MIXERS, HybridConfig
from foveate.hybrids.models.modeling import HybridForCausalLM, HybridModel
from foveate.hybrids.models.presets import PRESETS, SIZES, make_config

AutoConfig.register(HybridConfig.model_type, HybridConfig, exist_ok=True)
AutoModel.register(HybridConfig, HybridModel, exist_ok=True)
AutoModelForCausalLM.register(HybridConfig, HybridForCausalLM, exist_ok=True)

__all__ = [
    "MIXERS",
    "PRESETS",
    "SIZES",
    "HybridCache",
    "HybridConfig",
    "HybridForCausalLM",
    "HybridModel",
    "MemoryLayer",
    "make_config",
]
