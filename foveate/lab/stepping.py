"""The time of a decode step of a model in memory, by several methods in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteriaList

import foveate
from foveate.errors import UserError, check_seed, require
from foveate.integrations.transformers.positions import max_positions
from foveate.integrations.transformers.support import decoder_of, unwrapped
from foveate.lab.bench.models import Clock, generate
from foveate.lab.evaluation import runner
from foveate.methods import Method

_WARM_UP = 20
"""Steps that are not timed: they compile kernels and record graphs."""
_CHUNK = 8192  # tokens of the prompts that are read at once


class StepTime(NamedTuple):
    """What a decode step of all sequences takes by a method."""

    method: str
    """The method's spec."""
    ms: float
    """Milliseconds from a token to the next, the median over steps and rounds."""
    times_as_fast: float
    """Dense attention's milliseconds over these."""
    keys_read_share: float
    """Share of the keys so far that the steps have read, 0 to 1."""
    resident_bytes: int
    """Bytes of keys, values and state after the last step, of all sequences."""
    replayed: bool
    """Whether steps were replays of a CUDA graph."""


def time_step(
    model: Any,
    methods: Sequence[str | Method],
    *,
    tokens: int,
    batch: int = 1,
    steps: int = 64,
    rounds: int = 2,
    dense_below: int | str = 0,
    seed: int = 0,
) -> list[StepTime]:
    """Time decode steps of a model by several methods and by dense attention, which is always among them.

    Prompts are random tokens; the time of a step does not depend on their values. Methods take turns in each round, so
    that something that slows the machine for a while slows all methods. Nothing remains attached.

    Args:
        model: a model as :func:`foveate.attach` takes it, without a method.
        methods: specs or methods.
        tokens: tokens of each sequence before the first step.
        batch: number of sequences.
        steps: number of timed steps in a round, after a few steps that are not timed.
        rounds: number of rounds; each has all methods.
        dense_below: see :func:`foveate.attach`; "auto" times what a user of `attach` gets.
        seed: seed of the prompts.

    Returns:
        Dense attention's time first, then the times of the methods in their order.
    Raises:
        UserError: for a method that does not exist or does not fit the model, and for more tokens than the model has
            positions for; nothing is timed before.
    """
    if getattr(model, "foveate", None) is not None:
        raise UserError("the model has a method already: call foveate.detach(model) first")
    for name, value in (("tokens", tokens), ("batch", batch), ("steps", steps), ("rounds", rounds)):
        require(value >= 1, name, "at least 1", value)
    check_seed(seed)
    model = unwrapped(model)
    config = decoder_of(model).config.get_text_config(decoder=True)
    new, most = _WARM_UP + steps + 1, max_positions(config.to_dict())
    if most and tokens + new > most:
        raise UserError(f"context and steps need {tokens + new:,} positions, and the model has {most:,}")
    chosen, _ = runner.parse_methods([one if isinstance(one, str) else one.spec for one in methods])
    for method in chosen:
        try:
            foveate.attach(model, method, dense_below=dense_below)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UserError(f"method '{method.spec}' cannot be applied to the model: {error}") from error
        finally:
            foveate.detach(model)
    generator = torch.Generator(model.device).manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (batch, tokens), generator=generator, device=model.device)
    times: dict[Method, list[float]] = {method: [] for method in chosen}
    last: dict[Method, tuple[float, int, bool]] = {}
    for _ in range(rounds):
        for method in chosen:
            with foveate.attached(model, method, dense_below=dense_below) as attachment:
                clock = Clock()
                chunk = 0 if attachment.whole_prompt else max(1, _CHUNK // batch)
                made = generate(model, ids, new, chunk, stopping_criteria=StoppingCriteriaList([clock]))
                stats = foveate.stats(model)
                del made  # the statistics are of the live cache
            times[method] += clock.steps(_WARM_UP, steps)
            last[method] = stats.keys_read_share, stats.resident_bytes, stats.graphs.replayed > 0
    medians = {method: statistics.median(found) for method, found in times.items()}
    dense = medians[chosen[0]]
    return [StepTime(method.spec, ms, dense / ms, *last[method]) for method, ms in medians.items()]
