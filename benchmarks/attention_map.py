"""Where one head looks in a text of interwoven topics: the observation that LuKA's clustered attention starts from.

The text is cut into segments, each of a topic. The head shown is the one that joins distant segments
of one topic most (LuKA, figure 1).

    python -m benchmarks.attention_map MODEL docs/figures/luka-attention.png
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from benchmarks.probe import Seen, watched
from foveate.cli.quiet import quiet
from foveate.integrations.transformers import loading
from foveate.io import circumstances
from foveate.lab.report.plots.figure import drawing, title
from foveate.prompting import leading_ids

TOPICS = ("tides", "bread", "tides", "question")
TEXT = (Path(__file__).parent / "attention_map.txt").read_text(encoding="utf-8")

_SINKS = 4  # first tokens, which many heads look at whatever the text says
_DARKEST = 0.995  # quantile of the attention, those first tokens apart, at which the colours end
_SAME, _OTHER = "#D55E00", "#444444"
_WIDTH, _HEIGHT = 8.6, 7.4


@dataclass(frozen=True)
class Segments:
    """A tokenised text: ``ids``, the segment ``of`` each token ``[L]``, and the topic of each segment."""

    ids: tuple[int, ...]
    of: Tensor
    topics: tuple[str, ...]

    def edges(self) -> list[int]:
        """First token of each segment, and the length."""
        return [0, *self.of.bincount(minlength=len(self.topics)).cumsum(0).tolist()]

    def pairs(self, same: bool) -> list[tuple[int, int]]:
        """Segments and earlier ones, of the same or of different topics, up to the last that takes up a topic again."""
        pairs = [(i, j) for i in range(len(self.topics)) for j in range(i)]
        again = [(i, j) for i, j in pairs if self.topics[i] == self.topics[j]]
        last = max(again)[0] if again else -1
        return again if same else [(i, j) for i, j in pairs if self.topics[i] != self.topics[j] and i <= last]


@dataclass(frozen=True)
class Map:
    """Attention of one head, chosen from so many ``rivals``.

    ``weights [L, L]`` fp32; ``share [S, S]``: mean attention of a token of one segment on another segment.
    """

    layer: int
    head: int
    rivals: int
    weights: Tensor
    share: Tensor


def segments(tokenizer: Any, text: str = TEXT, topics: Sequence[str] = TOPICS) -> Segments:
    """A text of paragraphs, apart by empty lines, as segments with a topic each."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    first, ends = leading_ids(tokenizer), list(itertools.accumulate(len(paragraph) + 2 for paragraph in paragraphs))
    coded = tokenizer("\n\n".join(paragraphs), add_special_tokens=False, return_offsets_mapping=True)
    starts = torch.tensor([0] * len(first) + [start for start, _ in coded["offset_mapping"]])
    ids = (*first, *coded["input_ids"])
    return Segments(ids, torch.searchsorted(torch.tensor(ends), starts, right=True), tuple(topics))


@torch.inference_mode()
def look(model: Any, text: Segments) -> Map:
    """The attention of the head with the largest :func:`reach`; of all others, only shares a segment are kept.

    Args:
        model: a Transformers model in eval mode.
        text: what it reads.

    Raises:
        ValueError: when its attention cannot be watched.
    """
    ids = torch.tensor([text.ids], device=model.device)
    member = torch.nn.functional.one_hot(text.of, len(text.topics)).float().to(ids.device)
    member[:_SINKS] = 0
    found: dict[int, Tensor] = {}

    def note(seen: Seen) -> None:
        found[seen.layer] = torch.stack([_shares(seen.weights(h), member) for h in range(seen.heads)])

    with watched(model, note):
        model(ids, use_cache=False, logits_to_keep=1)
    shares = torch.stack([found[index] for index in sorted(found)]).cpu()  # [layers, heads, S, S]
    reaches = reach(shares, member.sum(0).cpu(), text)
    layer, head = divmod(int(reaches.argmax()), reaches.shape[1])
    maps = []
    with watched(model, lambda seen: maps.append(seen.weights(head)) if seen.layer == layer else None):
        model(ids, use_cache=False, logits_to_keep=1)
    return Map(layer, head, reaches.numel(), maps[0].cpu(), shares[layer, head])


def reach(shares: Tensor, sizes: Tensor, text: Segments) -> Tensor:
    """How much more heads look at earlier segments of the same topic than any segment at one of another topic.

    The comparison with what *others* see in the same segment leaves out heads that look at some token of it from
    everywhere.

    Args:
        shares: ``[layers, heads, S, S]``: mean attention of a token of one segment on another segment.
        sizes: ``[S]``: tokens of the segments.

    Returns:
        ``[layers, heads]``: attention a key.
    """
    a_key = shares / sizes
    same, other = (torch.stack([a_key[..., i, j] for i, j in text.pairs(kind)], -1) for kind in (True, False))
    return same.mean(-1) - other.amax(-1)


def draw(found: Map, text: Segments, model: str, out: Path) -> None:
    """The map as PNG: segments and topics at the sides, in each block its share of the attention.

    Raises:
        UserError: for a file name that is no PNG's, or when matplotlib is missing.
    """
    edges, tokens = text.edges(), len(text.ids)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    darkest = found.weights[:, _SINKS:][~future[:, _SINKS:]].quantile(_DARKEST).item()
    with drawing(out, _HEIGHT, _WIDTH) as figure:
        from matplotlib.colors import PowerNorm

        axis = figure.subplots()
        shown = found.weights.masked_fill(future, float("nan")).numpy()
        norm = PowerNorm(0.5, vmin=0.0, vmax=darkest)
        image = axis.imshow(shown, cmap="Blues", norm=norm, interpolation="nearest")
        bar = figure.colorbar(image, extend="max", fraction=0.035, pad=0.02)
        bar.set_label("attention of a token on a token, after the softmax")
        for i, j in itertools.product(range(len(text.topics)), repeat=2):
            if j <= i:
                _block(axis, edges, i, j, f"{100 * found.share[i, j]:.1f} %", (i, j) in text.pairs(same=True))
        middles = [(first + last - 1) / 2 for first, last in itertools.pairwise(edges)]
        axis.set_xticks(middles, text.topics)
        axis.set_yticks(middles, text.topics, rotation=90, va="center")
        axis.tick_params(length=0)
        axis.grid(False)
        axis.set_xlabel("key")
        axis.set_ylabel("query")
        chosen = f"of {found.rivals} heads the one that joins distant segments of a topic most"
        what = f"Attention of layer {found.layer}, head {found.head}: {chosen}"
        blocks = f"in each block the mean share of a query's attention, the first {_SINKS} tokens not counted"
        title(figure, what, f"{model} · {tokens} tokens\n{blocks}")


def _block(axis: Any, edges: Sequence[int], i: int, j: int, words: str, same: bool) -> None:
    """Border and label of the attention of segment i on segment j; of those on the diagonal only the label."""
    from matplotlib.patches import Rectangle

    color = _SAME if same else _OTHER
    if j < i:
        width, height = edges[j + 1] - edges[j], edges[i + 1] - edges[i]
        look = {"fill": False, "edgecolor": color, "linewidth": 2.2 if same else 0.8, "zorder": 3 if same else 2}
        axis.add_patch(Rectangle((edges[j] - 0.5, edges[i] - 0.5), width, height, **look))
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0}
    place = (edges[j] + 0.5, edges[i + 1] - 1.5)
    axis.annotate(words, place, (3, 3), textcoords="offset points", fontsize=7.5, bbox=box, color=color)


def _shares(weights: Tensor, member: Tensor) -> Tensor:
    """Mean over the tokens of each segment of their attention on each segment, ``[S, S]``, from ``[L, L]``."""
    counts = member.sum(0).clamp_min(1.0)
    return (member / counts).T @ (weights @ member)


def main(model: Path, out: Path) -> None:
    """Draw the map of a model in float32."""
    quiet()
    device = loading.choose_device("auto")
    cut = segments(loading.load_tokenizer(model))
    found = look(loading.load_model(model, "float32", device), cut)
    draw(found, cut, f"{model.name} · float32 · {circumstances.device_name(device)}", out)
    print(f"{out}: layer {found.layer}, head {found.head}")


if __name__ == "__main__":
    typer.run(main)
