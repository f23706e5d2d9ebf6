"""How far a model's predictions move when one layer reads the keys that another layer would choose."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import foveate
from foveate.errors import UserError
from foveate.lab.evaluation import decoding, generation
from foveate.lab.evaluation.tasks.base import Item
from foveate.methods import SharedPrompt
from foveate.methods._anchored import anchor_role, dense_role, reader_role
from foveate.methods._top_k_by_mass import TopKByMass
from foveate.methods.base import Role, setting
from foveate.methods.kascade import Kascade


class Answered(NamedTuple):
    """Prompts that were read, and dense attention's answers."""

    prompt: generation.Prompt
    trace: decoding.Trace
    again: Callable[[], generation.Prompt]  # reads the prompts anew, with the method that is attached


@dataclass(frozen=True)
class OneReader(TopKByMass):
    """Dense attention but in one layer, which reads the keys that another layer, or itself, chooses for each token."""

    chooser: int = setting(0, "the layer that chooses")
    reader: int = setting(0, "the layer that reads, this or a later one")
    heads: tuple[int, ...] | None = setting(None, "for each of the reader's KV heads the chooser's")

    @classmethod
    def of(cls, method: Kascade, chooser: int, reader: int, heads: Sequence[int]) -> OneReader:
        """What `method` would do in the reader, were the chooser its anchor."""
        how = {field.name: getattr(method, field.name) for field in dataclasses.fields(TopKByMass)}
        mapped = tuple(heads) if chooser != reader else None
        return cls(**how | {"decode_only": True, "rest": "none"}, chooser=chooser, reader=reader, heads=mapped)

    def role_of(self, layer: int, among: Sequence[int]) -> Role:
        if layer == self.reader:
            return anchor_role(layer) if layer == self.chooser else reader_role(layer, self.chooser, self.heads)
        return anchor_role(layer, dense=True) if layer == self.chooser else dense_role(layer)


def pairs(layers: Sequence[int]) -> list[tuple[int, int]]:
    """The places of chooser and reader among some layers; layer 0 is dense where it is its own anchor."""
    return [(a, b) for b in range(len(layers)) for a in range(b + 1) if layers[b] != 0]


@torch.inference_mode()
def measure(
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    method: Kascade,
    layers: Sequence[int],
    maps: Tensor,
    step: Callable[[], None] = lambda: None,
) -> Tensor:
    """The divergence from dense attention's predictions, for each pair of a chooser and a reader among L layers.

    The model answers the items with dense attention; then its predictions along these answers are compared, one pair
    at a time, all layers but the reader dense. Prompts are dense throughout.

    Args:
        method: how keys are chosen: its `top_k`, `min_k`, `pool`, `pooling`.
        layers: the L layers' numbers, ascending.
        maps: int64 ``[L, L, Hkv]``: for each head of the second layer the first one's whose choice it reads.
        step: called when the items are answered, and after each pair.

    Returns fp32 ``[L, L]``: KL divergence, nats a token, mean over an answer's tokens and over the items; 0 where the
    reader comes first. Raises `UserError` where it is not finite.
    """
    answered = answer(model, tokenizer, items)
    found = torch.zeros(len(layers), len(layers))
    step()
    for a, b in pairs(layers):
        one = OneReader.of(method, layers[a], layers[b], maps[a, b].tolist())
        when = f"when it reads the choice of layer {layers[a]}"
        found[a, b] = _moved(model, answered, one, True, f"layer {layers[b]}: {{}} {when}")
        step()
    return found


@torch.inference_mode()
def together(
    model: Any, answered: Answered, methods: Sequence[Kascade], step: Callable[[], None] = lambda: None
) -> Tensor:
    """The divergence from dense attention's predictions with each of N methods, all layers reading what they would.

    As :func:`measure`, fp32 ``[N]``. Prompts are dense for a method with `decode_only`; any other one reads them, too,
    and the first token of an answer counts then. `step` is called after each method. Raises `UserError` where the
    divergence is not finite.
    """
    found = torch.zeros(len(methods))
    for number, method in enumerate(methods):
        found[number] = _moved(model, answered, method, method.decode_only, "{} with " + method.spec)
        step()
    return found


def _moved(model: Any, answered: Answered, method: Any, dense_prompt: bool, words: str) -> Tensor:
    """The mean divergence with a method; the error where it is not finite has these words."""
    with foveate.attached(model, method, dense_below=0):
        read = answered.prompt if dense_prompt else answered.again()
        found = read.divergence(model, answered.trace, shared=dense_prompt).mean()
    if not bool(torch.isfinite(found)):
        raise UserError(words.replace("{}", "the predictions of the model are not finite (NaN or infinite)"))
    return found


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, items: Sequence[Item]) -> Answered:
    """The items' prompts, read densely, and the model's answers to them."""
    with foveate.attached(model, SharedPrompt((foveate.methods.parse("dense"),))):
        prompt = generation.read_prompt(model, tokenizer, items)
    with foveate.attached(model, "dense"):
        trace = prompt.trace(model, shared=True)
    return Answered(prompt, trace, functools.partial(generation.read_prompt, model, tokenizer, items))
