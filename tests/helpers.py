"""What the tests share: tiny random models, their inputs, and the problems of attention of ``tests.problems``."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor

from foveate import methods
from foveate.integrations.transformers.releases import CACHE, OLDEST
from foveate.integrations.transformers.releases import returned_cache as returned_cache
from foveate.methods import Method
from tests.problems import LAYOUTS as LAYOUTS
from tests.problems import LargestTensor as LargestTensor
from tests.problems import Naive as Naive
from tests.problems import Shape as Shape
from tests.problems import assert_close as assert_close
from tests.problems import causal_mask as causal_mask
from tests.problems import in_buffer as in_buffer
from tests.problems import naive as naive
from tests.problems import problem as problem
from tests.selection import ONE_OF_A_KIND

# Files


@contextlib.contextmanager
def full_disk(room: int):
    """No file can grow beyond so many bytes: the system refuses a write as it does where the disk is full."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Methods


ONE_OF_EACH = ONE_OF_A_KIND | {
    *("adakv", "expected_attention", "kascade", "lessismore", "pages", "rocketkv", "sparq", "streaming")
}
"""Also what `auto` chooses, heads that keep different numbers of tokens, rotation, pages of what is kept, a state of
the whole sequence, and prompts under a window: for what is done for all methods alike, each of which goes through the
matrix."""


def of_release(specs: Iterable[str]) -> list[str]:
    """Methods, by name or spec, to be tried on the installed Transformers: on the oldest one of each kind.

    Methods know nothing of Transformers (`tests/test_architecture.py`): what they do there, they do on the newest.
    """
    if transformers.__version__ != OLDEST:
        return [*specs]
    return [spec for spec in specs if spec.partition(":")[0] in ONE_OF_A_KIND]


def kascade_by_head(method: str = "kascade", **settings: Any) -> Method:
    """Kascade whose KV heads choose for themselves by mean attention, in prompts too, unless settings say otherwise."""
    return methods.make(method, **{"pool": "kv_head", "pooling": "post_softmax", "decode_only": False} | settings)


# Shapes of attention


def shapes(max_queries: int = 19, max_offset: int = 23) -> st.SearchStrategy[Shape]:
    """Odd sizes: groups that are no powers of two, head dims off the multiples of eight, values of another width."""
    return st.builds(
        Shape,
        batch=st.sampled_from([1, 2, 3]),
        kv_heads=st.sampled_from([1, 2, 3]),
        group=st.sampled_from([1, 3, 4, 7, 8]),
        queries=st.integers(1, max_queries),
        offset=st.integers(0, max_offset),
        dim=st.sampled_from([5, 16, 64, 80]),
        value_dim=st.sampled_from([5, 16, 64, 80]),
    )


# Models

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": lambda **more: transformers.LlamaConfig(**COMMON | {"head_dim": 16} | more),
    "qwen2": lambda **more: transformers.Qwen2Config(**COMMON | more),
    "qwen3": lambda **more: transformers.Qwen3Config(**COMMON | {"head_dim": 16} | more),
    "mistral": lambda **more: transformers.MistralConfig(**COMMON | {"head_dim": 16, "sliding_window": None} | more),
    "gemma3": lambda **more: transformers.Gemma3TextConfig(
        **COMMON
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        }
        | more
    ),
}
FAMILIES = list(CONFIGS)
SLIDING = {"gemma3": [0, 2]}


def prepare(model, seed: int = 0):
    """Give a model random biases and norms too, no end of sequence, no liking for special ids, and evaluation mode."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.lm_head.weight[:3] = 0  # a generated padding id would later be taken for padding
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@functools.cache
def _built(family: str, seed: int):
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    config._attn_implementation = "sdpa"
    return prepare(transformers.AutoModelForCausalLM.from_config(config), seed)


def tiny_model(family: str = "llama", seed: int = 0):
    """A random model of its own for the test that asks: always the same weights."""
    return copy.deepcopy(_built(family, seed))


def cached(cache) -> dict[str, Any]:
    """The keyword argument that gives a model, or `generate`, a cache."""
    return {CACHE: cache}


def checkpoint_activations(model, on: bool = True) -> None:
    """By the installed release's name: 5.24 renamed gradient checkpointing to activation checkpointing."""
    verb = "enable" if on else "disable"
    names = (f"activation_checkpointing_{verb}", f"gradient_checkpointing_{verb}")
    getattr(model, next(name for name in names if hasattr(model, name)))()


def fingerprint(model) -> dict[tuple[str, ...], int]:
    """Every attribute of every module, and what its containers hold, by identity."""
    found = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            found[name, key] = id(value)
            if isinstance(value, dict):
                found |= {(name, key, str(inner)): id(held) for inner, held in value.items()}
    return found


@functools.cache
def _assistant(family: str):
    # the oldest supported release cannot draft with a sliding window that is full, even unattached: make it a long one
    config = CONFIGS[family](**{"sliding_window": 400} if family in SLIDING else {})
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(_built(family, 0).state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    model.generation_config.update(
        eos_token_id=None,
        pad_token_id=0,
        num_assistant_tokens=4,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return model.eval()


def assistant(family: str = "llama"):
    """A model that often, but not always, agrees with :func:`tiny_model`: its drafts are partly accepted."""
    return copy.deepcopy(_assistant(family))


def tokens(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Random ids ``[batch, length]`` without the special ones."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def repetitive(length: int, seed: int = 0) -> Tensor:
    """Ids ``[1, length]`` that repeat themselves, so that prompt lookup finds drafts."""
    return tokens(7, seed=seed).repeat(1, length // 7 + 1)[:, :length]


def left_padded(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """A batch of rows of unequal lengths, padded on the left: ``input_ids`` and ``attention_mask``."""
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.int64), torch.zeros(len(lengths), width, dtype=torch.int64)
    for b, length in enumerate(lengths):
        ids[b, width - length :] = tokens(length, seed=seed + b)[0]
        mask[b, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, input_ids: Tensor, new: int = 12, **options) -> Tensor:
    """The new tokens only, ``[B, new]``; every id counts as real unless a mask is given."""
    options.setdefault("attention_mask", torch.ones_like(input_ids))
    options.setdefault("do_sample", False)
    out = model.generate(input_ids, max_new_tokens=new, min_new_tokens=new, **options)
    return out[:, input_ids.shape[1] :]


def cut_rows(batch: dict[str, Tensor]) -> list[Tensor]:
    """Each row of a left-padded batch alone and without its padding, ``[1, length]``."""
    return [ids[mask.bool()][None] for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
