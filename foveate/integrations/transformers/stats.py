"""What the layers of an attached model did: read, refined, evicted, reused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from foveate.runtime import Use
from foveate.runtime.drafts import DraftUse


@dataclass(frozen=True)
class LayerStats:
    """One layer since it was attached or its counters were reset. Keys count per sequence and KV head."""

    layer: int
    method: str
    """Spec of the method, or "unchanged" for a layer that foveate leaves alone."""
    prompt_tokens: int = 0
    decode_steps: int = 0
    keys_read_per_step: float = 0.0
    keys_available_per_step: float = 0.0
    kv_bytes_per_step: float = 0.0
    tokens_evicted: int = 0
    """Tokens evicted of all sequences."""
    pages_refined: int = 0
    mass_read_share: float | None = None
    """Share of the attention that the keys read hold by the method's own estimate, the mean over decode steps; None of
    a method that makes none. Of ``pages``, and of layer 0 of ``kascade_pages`` under ``first_layer=pages``: of the
    attention to full pages, what those read hold by their summaries."""
    indices_reused: int = 0
    pages_hot_share: float | None = None
    """Of a layer in host memory, the share of the pages chosen in decode steps that were on the GPU."""
    fetched_bytes_per_step: float = 0.0
    """Bytes of keys and values that a decode step fetched from host memory, of one sequence and all KV heads."""
    dense_steps: int = 0
    """Decode steps that read everything, because so short a context is not read faster in another way."""
    selections_lost: int = 0
    """Selections of decode steps on a GPU, which do not wait to look, that were nothing because a score was NaN."""
    sequences: int = 0
    """Sequences whose prompts were read; further turns on a cache are of the same sequence."""
    note: str = ""


@dataclass(frozen=True)
class Stats:
    """All layers, and the size of the cache that was filled last (of layers left alone: while it is alive)."""

    layers: list[LayerStats]
    resident_bytes: int
    cache_peak_bytes: int
    """The most bytes that this cache has held at once: methods that evict hold more while they read a prompt. Layers
    left alone count with what they hold now."""
    host_bytes: int = 0
    """Bytes of keys and values that this cache has in host memory, with ``offload=True``."""
    graphs: Use = field(default_factory=Use)
    """Decode steps that were replayed as CUDA graphs, and why others were not."""
    dense_prompts: str = ""
    """What attends to prompts where they are read densely: FlashAttention-3, cuDNN, PyTorch, a kernel or blocks in
    torch; empty while no prompt has been read."""
    decodes_alone: str = ""
    """Spec of a method that acts on decoded tokens alone; empty for others."""
    chosen: str = ""
    """What ``attach`` has chosen, and why; empty where the method was named."""
    short_contexts: str = ""
    """Below how many tokens, of all sequences together, decode steps are dense on this device, in words; empty of
    methods that never decode densely."""
    drafts: DraftUse | None = None
    """What ``lossless`` has drafted and verified; None without it."""

    @property
    def decode_steps(self) -> int:
        """Steps in which layers have decoded a token of each sequence."""
        return self.summary()["decode_steps"]

    @property
    def keys_read_share(self) -> float:
        """Share of the keys so far that decode steps have read, 0 to 1: the mean over layers, steps and KV heads."""
        return self.summary()["keys_read_share"]

    def summary(self) -> dict[str, Any]:
        """Totals over the layers that foveate handles, with the field names of result rows.

        ``tokens_evicted`` is summed over layers and sequences, ``tokens_evicted_per_sequence`` the mean over both.
        """
        handled = [layer for layer in self.layers if layer.method != "unchanged"]
        masses = [layer.mass_read_share for layer in handled if layer.mass_read_share is not None]
        available = sum(layer.keys_available_per_step for layer in handled)
        read = sum(layer.keys_read_per_step for layer in handled)
        asked = [layer.pages_hot_share for layer in handled if layer.pages_hot_share is not None]
        offloaded = {
            "host_bytes": self.host_bytes,
            "pages_hot_share": sum(asked) / len(asked) if asked else None,
            "fetched_bytes_per_step": sum(layer.fetched_bytes_per_step for layer in handled),
        }
        return (offloaded if self.host_bytes else {}) | {
            "decode_steps": max((layer.decode_steps for layer in handled), default=0),
            "dense_steps": max((layer.dense_steps for layer in handled), default=0),
            "keys_read_share": read / available if available else 1.0,
            "keys_read_per_step": read / len(handled) if handled else 0.0,
            "kv_bytes_per_step": sum(layer.kv_bytes_per_step for layer in handled),
            "resident_bytes": self.resident_bytes,
            "cache_peak_bytes": self.cache_peak_bytes,
            "tokens_evicted": sum(layer.tokens_evicted for layer in handled),
            "tokens_evicted_per_sequence": _mean(layer.tokens_evicted / max(layer.sequences, 1) for layer in handled),
            "pages_refined": sum(layer.pages_refined for layer in handled),
            "mass_read_share": sum(masses) / len(masses) if masses else None,
            "indices_reused": sum(layer.indices_reused for layer in handled),
            "notes": self._notes(),
        }

    def _notes(self) -> list[str]:
        notes = sorted({layer.note for layer in self.layers if layer.note})
        dense = max((layer.dense_steps for layer in self.layers), default=0)
        if dense:
            notes.append(f"{dense} decode steps read everything: their contexts were short (dense_below)")
        if self.decodes_alone and not any(layer.decode_steps for layer in self.layers):
            notes.append(
                f"{self.decodes_alone} has changed no output: no token was decoded, and what else a model reads is "
                "dense under it (prompts, log-likelihoods of whole texts, use_cache=False)"
            )
        lost = sum(layer.selections_lost for layer in self.layers)
        return notes + ([f"scores were NaN, so that {lost} selections are of nothing"] if lost else [])

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values."""
        layers = [asdict(layer) for layer in self.layers]
        more = {"cuda_graphs": asdict(self.graphs), "dense_prompts": self.dense_prompts}
        more |= {"chosen": self.chosen, "short_contexts": self.short_contexts}
        more |= {} if self.drafts is None else {"drafts": asdict(self.drafts)}
        return {"layers": layers, **more, **self.summary()}

    def __str__(self) -> str:
        total = self.summary()
        lines = [
            f"{total['decode_steps']} decode steps, {100 * total['keys_read_share']:.1f} % of the keys read "
            f"({total['keys_read_per_step']:.0f} a head and layer), "
            f"{total['kv_bytes_per_step'] / 1e6:.2f} MB of KV a step, {total['resident_bytes'] / 1e6:.1f} MB resident "
            f"({total['cache_peak_bytes'] / 1e6:.1f} MB at the peak)"
        ]
        if evicted := total["tokens_evicted_per_sequence"]:
            lines.append(f"{evicted:,.0f} tokens of each sequence evicted, the mean over layers")
        if total["pages_refined"]:
            lines.append(f"{total['pages_refined']:,} pages refined, in all layers together")
        if total["mass_read_share"] is not None and total["decode_steps"]:
            lines.append(
                f"pages read hold {100 * total['mass_read_share']:.1f} % of the attention to pages (estimated)"
            )
        if self.host_bytes:
            hot = (
                ""
                if total["pages_hot_share"] is None
                else (
                    f": {100 * total['pages_hot_share']:.1f} % of the pages chosen were on the GPU, "
                    f"{total['fetched_bytes_per_step'] / 1e6:.2f} MB a token were fetched"
                )
            )
            lines.append(f"{self.host_bytes / 1e6:.1f} MB in host memory{hot}")
        lines += filter(None, [self.chosen, self.short_contexts])
        if self.dense_prompts:
            lines.append(f"dense prompts by {self.dense_prompts}")
        if self.drafts is not None:
            lines.append(
                f"{self.drafts.cycles} passes verified {self.drafts.drafted} drafted tokens and accepted "
                f"{self.drafts.accepted}; {self.drafts.ties} tokens were ties"
            )
        if self.graphs.replayed:
            lines.append(f"{self.graphs.replayed} steps replayed, of {self.graphs.captured} captured CUDA graphs")
        return "\n".join(lines + total["notes"])


def _mean(values: Iterable[float]) -> float:
    """0.0 of none."""
    known = list(values)
    return sum(known) / len(known) if known else 0.0
