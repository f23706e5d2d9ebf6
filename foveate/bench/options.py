"""The options of every bench, without torch; what else a plan checks is beside what it measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from foveate.bench.plan import DTYPES, Plan, device, dtype, option, seed

_MODEL_FOLDER = "Folder of a Hugging Face model."
_KNOWN_MODEL = "Folder, or llama-3.1-8b or qwen3-8b with random weights."
_METHOD = "A method."
_HEADS, _KV_HEADS, _HEAD_DIM = "Query heads.", "KV heads.", "Dimensions of a head."
_LAYERS = "Layers, of which each kind is timed once."
_INDEX_HEADS, _INDEX_DIM, _RATIO = "Index heads.", "Dimensions of an index head.", "Tokens a compressed key."
_TOKENS, _REPEATS = "Length of the context.", "Timed runs."
_FP8 = (*DTYPES, "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class CpuDecode(Plan):
    """Decode steps of a real model on a CPU."""

    bench: ClassVar[str] = "cpu-decode"

    model: Path = option(..., _MODEL_FOLDER)
    data: Path = option(..., "Folder with books.")
    context: int = option(8000, "Prompt tokens.", least=1)
    steps: int = option(48, "Timed decode steps of each implementation.", least=1)
    threads: int = option(2, "Threads of torch.", least=1)
    methods: Sequence[str] = option(
        (
            *("dense", "streaming:window=1024", "h2o", "quest", "omnikv", "kascade:decode_only=true"),
            *("luka:page_size=16,top_k=3,score=spread", "luka:page_size=16,top_k=0.12", "luka", "luka:score=spread"),
        ),
        "A method; dense is always among them.",
        flag="method",
    )


@dataclasses.dataclass(frozen=True)
class Prefill(Plan):
    """Attention of a layer's prompt; the defaults are a layer of Llama-3.1-8B, as in the papers."""

    bench: ClassVar[str] = "prefill"
    level: ClassVar[str] = "kernel"

    methods: Sequence[str] = option(
        (
            *("dense", "kascade", "kascade:exact_anchors=false"),
            *("streaming", "snapkv", "tova", "h2o", "luka"),
        ),
        _METHOD,
        flag="method",
    )
    contexts: Sequence[int] = option((8192, 32768, 131072), "Prompt tokens.", flag="context", least=1)
    heads: int = option(32, _HEADS, least=1)
    kv_heads: int = option(8, _KV_HEADS, least=1)
    head_dim: int = option(128, _HEAD_DIM, least=1)
    layers: int = option(32, _LAYERS, least=1)
    repeats: int = option(5, _REPEATS, least=1)
    dtype: str = dtype("float16")
    seed: int = seed()
    device: str = device()


@dataclasses.dataclass(frozen=True)
class PrefillModel(Plan):
    """Time to the first token of a model."""

    bench: ClassVar[str] = Prefill.bench
    level: ClassVar[str] = "model"

    model: str = option("llama-3.1-8b", _KNOWN_MODEL)
    methods: Sequence[str] = option(
        (
            *("dense", "streaming", "kascade", "kascade:rest=mean", "kascade:exact_anchors=false"),
            *("tova", "snapkv", "h2o", "luka", "luka:compressor=attention", "mixed"),
        ),
        _METHOD,
        flag="method",
    )
    contexts: Sequence[int] = option((8192, 16384, 32768), "Prompt tokens.", flag="context", least=1)
    chunks: Sequence[int] = option((0,), "Tokens of a prompt that are read at once, 0 for all.", flag="chunk", least=0)
    repeats: int = option(5, _REPEATS, least=1)
    dtype: str = dtype("bfloat16")
    seed: int = seed()
    device: str = device()


@dataclasses.dataclass(frozen=True)
class Decode(Plan):
    """Attention of a layer's decode step; the defaults are a layer of Llama-3.1-8B, as in the papers."""

    bench: ClassVar[str] = "decode"

    methods: Sequence[str] = option(
        (
            *("dense", "kascade:decode_only=true", "luka:page_size=16,top_k=3,score=spread", "luka"),
            *("pages", "quest", "omnikv", "lessismore"),
        ),
        _METHOD,
        flag="method",
    )
    contexts: Sequence[int] = option((8192, 32768, 131072), "Tokens so far.", flag="context", least=1)
    batches: Sequence[int] = option((1, 32), "Sequences.", flag="batch", least=1)
    heads: int = option(32, _HEADS, least=1)
    kv_heads: int = option(8, _KV_HEADS, least=1)
    head_dim: int = option(128, _HEAD_DIM, least=1)
    layers: int = option(32, _LAYERS, least=1)
    level: str = "kernel"
    dtype: str = dtype("float16")
    seed: int = seed()
    device: str = device()


def _tokens_or_auto(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


@dataclasses.dataclass(frozen=True)
class DecodeModel(Plan):
    """Tokens a second of a model's `generate`."""

    bench: ClassVar[str] = Decode.bench
    level: ClassVar[str] = "model"

    model: str = option("llama-3.1-8b", _KNOWN_MODEL)
    methods: Sequence[str] = option(("dense", "kascade:decode_only=true", "luka"), _METHOD, flag="method")
    contexts: Sequence[int] = option((32768,), "Tokens so far.", flag="context", least=1)
    batches: Sequence[int] = option((1,), "Sequences.", flag="batch", least=1)
    steps: int = option(64, "Timed tokens of a round.", least=1)
    rounds: int = option(1, "How often every method generates, one after the other.", least=1)
    liger: bool = option(False, "Norms, rotations and MLPs by Liger's kernels, for all methods alike.")
    dense_below: str | int = option(
        0,
        "Tokens of all sequences below which steps are dense, or auto: where methods are slower.",
        parser=_tokens_or_auto,
    )
    dtype: str = dtype("bfloat16")
    seed: int = seed()
    device: str = device()


@dataclasses.dataclass(frozen=True)
class Indexer(Plan):
    """The lightning indexer."""

    bench: ClassVar[str] = "indexer"

    tokens: Sequence[int] = option((2048, 4096, 8192, 32768, 131072, 262144, 1048576), _TOKENS)
    implementations: Sequence[str] | None = option(
        None,
        "foveate, chunked, materialised or deepgemm+flashinfer (fp8); by default all of ours, and the others that take "
        "the dtype and are installed.",
        flag="impl",
    )
    heads: int = option(64, _INDEX_HEADS, least=1)
    dim: int = option(128, _INDEX_DIM, least=1)
    top_k: int = option(512, "Keys a query.", least=1)
    ratio: int = option(4, _RATIO, least=1)
    dtype: str = dtype("bfloat16", _FP8)
    repeats: int = option(5, _REPEATS, least=1)
    seed: int = seed()
    device: str = option("cuda", "cuda or cpu.")


@dataclasses.dataclass(frozen=True)
class IndexerStudy(Plan):
    """Settings of the fused path at ``tokens``; ablations at ``small``; tiles of the chunked path at both."""

    bench: ClassVar[str] = "indexer-study"

    tokens: int = option(262144, "Length of the context for the fused path.")
    small: int = option(16384, "The same for the chunked path and the ablations.")
    heads: int = option(64, _INDEX_HEADS)
    dim: int = option(128, _INDEX_DIM)
    top_k: int = option(512, "Keys a query, where they are not what varies.")
    ratio: int = option(4, _RATIO)
    dtype: str = dtype("bfloat16", _FP8)
    repeats: int = option(3, _REPEATS)
    seed: int = seed()
    device: str = option("cuda", "cuda or cpu.")


@dataclasses.dataclass(frozen=True)
class CsaLayer(Plan):
    """A layer of compressed sparse attention; the defaults are the sizes of DeepSeek-V4's sparse layers."""

    bench: ClassVar[str] = "csa"

    tokens: Sequence[int] = option((8192, 32768, 65536, 131072, 262144), _TOKENS)  # those of StreamIndex's table 5
    implementations: Sequence[str] = option(
        ("foveate", "reference"), "foveate or reference.", flag="impl", choices=("foveate", "reference")
    )
    heads: int = option(64, "Query heads, which share one key head.", least=1)
    dim: int = option(512, _HEAD_DIM, least=1)
    index_heads: int = option(64, _INDEX_HEADS)
    index_dim: int = option(128, _INDEX_DIM)
    top_k: int = option(512, "Compressed keys a query.")
    window: int = option(128, "Raw tokens a query sees, itself included.", least=1)
    ratio: int = option(4, _RATIO)
    chunk: int = option(16384, "Queries at a time.", least=1)
    dtype: str = dtype("bfloat16")
    repeats: int = option(5, _REPEATS)
    seed: int = seed()
    device: str = option("cuda", "cuda or cpu.")


@dataclasses.dataclass(frozen=True)
class CsaModel(Plan):
    """A DeepSeek-V4 with random weights. Widths without an option are proportional to those with one."""

    bench: ClassVar[str] = "csa-model"

    tokens: Sequence[int] = option((262144,), "Prompt tokens.")
    small: int = option(8192, "Prompt tokens for both implementations; 0 for none.", least=0)
    chunk: int = option(4096, "Prompt tokens of one forward.", least=1)
    layers: int = option(43, "Layers.", least=1)
    hidden: int = option(1024, "Width of the model.", least=8)
    heads: int = option(16, "Attention heads.", least=1)
    head_dim: int = option(512, "Dimensions of an attention head.")
    experts: int = option(16, "Experts of a layer.", least=2)
    index_heads: int = option(64, _INDEX_HEADS)
    index_dim: int = option(128, _INDEX_DIM)
    top_k: int = option(512, "Entries a query.")
    window: int = option(128, "Tokens of the window.")
    ratios: tuple[int, int] = (4, 128)
    steps: int = option(16, "Timed decode steps.", least=1)
    dtype: str = dtype("bfloat16")
    seed: int = option(0, "Seed of the weights and of the prompt.")
    device: str = option("cuda", "cuda or cpu.")


@dataclasses.dataclass(frozen=True)
class Hybrids(Plan):
    """Attention of the hybrids' layers; the defaults are the shapes of laLTE-1.4B and laNSA-1.4B."""

    bench: ClassVar[str] = "hybrids"

    contexts: Sequence[int] = option((32768,), "Tokens of the prompt, and so far in decode.", flag="context", least=1)
    batches: Sequence[int] = option((32, 64), "Sequences that decode.", flag="batch", least=1, only=("decode",))
    phases: Sequence[str] = ("decode", "prefill")
    heads: int = option(32, _HEADS, least=1)
    kv_heads: int = option(8, "KV heads of learned eviction and the window.", least=1)
    nsa_kv_heads: int = option(2, "KV heads of native sparse attention.", least=1, only=("decode",))
    head_dim: int = option(64, _HEAD_DIM, least=1)
    window: int = option(768, "Tokens before its own that a query of learned eviction sees.")
    buffer: int = option(512, "Retained tokens per KV head.", least=1)
    half: int = option(256, "Retained tokens where the buffer is not full.", only=("decode",))
    sliding: int = option(1024, "Tokens of the sliding window that learned eviction is compared with.", least=1)
    share: float = option(0.25, "Tokens of a prompt that are offered to the buffer.", only=("prefill",))
    block: int = 64
    blocks: int = 16
    nsa_window: int = 512
    dtype: str = dtype("bfloat16")
    seed: int = seed()
    device: str = device()


@dataclasses.dataclass(frozen=True)
class HybridMemory(Plan):
    """Caches over a growing sequence; rows are held against `gdn_attn` if it is among the presets."""

    bench: ClassVar[str] = Hybrids.bench

    presets: Sequence[str] = option(("gdn_attn", "lalte"), "A preset.", flag="preset")
    size: str = option("27M", "Size of the presets.")
    contexts: Sequence[int] = option((4096, 16384, 65536, 262144, 1048576), "Tokens of the prompt.", flag="context")
    chunk: int = option(4096, "Prompt tokens of one forward.", least=1)
    steps: int = option(16, "Generated tokens, or timed training steps.", least=1)
    dtype: str = dtype("bfloat16")
    seed: int = seed()
    device: str = device()


@dataclasses.dataclass(frozen=True)
class HybridTraining(Plan):
    """Training steps; rows are held against `transformer` of the same size if it is among the models."""

    bench: ClassVar[str] = Hybrids.bench

    models: Sequence[str] = option(
        (
            *("transformer-27M", "gdn_attn-27M", "gdn_swa-27M", "lalte-27M", "lansa-27M", "gdn-27M"),
            *("lalte-0.4B", "lalte-1.4B"),
        ),
        "A model to train, such as lalte-27M.",
        flag="train",
    )
    tokens: int | None = option(None, "Tokens of a step of one device; by default what fits, by the size.")
    length: int = option(2048, "Tokens of a row.", least=16)
    steps: int = option(10, "Generated tokens, or timed training steps.", least=1)
    compile: bool = option(True, "Compile the layers.")
    profile: bool = option(False, "List the 25 kernels that a step spends most time in.")
    seed: int = seed()
    device: str = device()


@dataclasses.dataclass(frozen=True)
class PageScores(Plan):
    """Scores of LuKA's pages: ``limit`` items (or examples) of each task, ``tokens`` answer tokens of each item."""

    bench: ClassVar[str] = "page-scores"

    model: Path = option(..., _MODEL_FOLDER)
    data: Path = option(..., "Folder with the tasks' data.")
    tasks: Sequence[str] = option(..., "Such as niah:split=multi,length=4096.", flag="task")
    page_sizes: Sequence[int] = option((8, 16, 32), "Tokens of a page.", flag="page-size", least=2)
    budgets: Sequence[float] = option((0.06, 0.1, 0.15, 0.2, 0.25), "Share of the keys read.", flag="budget")
    limit: int = option(6, "Items (wikisalad: examples of several questions) of each task.", least=1)
    tokens: int = option(3, "Answer tokens looked at in each item.", least=1)
    seed: int = option(0, "Seed of the items and of the bootstrap.")
    dtype: str = option("auto", "float32, bfloat16, float16 or auto.")
    device: str = option("auto", "cpu, cuda or auto.")
