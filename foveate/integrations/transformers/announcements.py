"""What `generate` announces of its first forward pass: the cache that it has prepared, and what it has yet to ask for.

Each thread has announcements of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import transformers

_slot = threading.local()


class Announced(NamedTuple):
    """What `generate` has prepared for its first forward pass."""

    cache: weakref.ref[transformers.Cache]
    owes_steps: bool
    """`generate` has yet to ask for the function that runs a decode step."""
    prompt_only: bool
    """The pass feeds no more than the prompt."""


def announce(owner: str, cache: transformers.Cache, *, owes_steps: bool, prompt_only: bool) -> None:
    """Note that `generate` has prepared a cache for the model with this attachment uid, see :class:`Announced`."""
    _announced()[owner] = Announced(weakref.ref(cache), owes_steps, prompt_only)


def asked_for_steps(owner: str) -> None:
    """Note that `generate` has asked for the function that runs a decode step."""
    if owner in _announced():
        _announced()[owner] = _announced()[owner]._replace(owes_steps=False)


@contextmanager
def prefilling(owner: str) -> Iterator[None]:
    """Within the block `generate` reads the prompt on the announced cache; the announcement ends with it."""
    _slot.__dict__.setdefault("prefilling", set()).add(owner)
    try:
        yield
    finally:
        _slot.prefilling.discard(owner)
        _announced().pop(owner, None)


def announced(owner: str) -> Announced | None:
    """The announcement for the first forward pass of a prompt that `generate` reads; None in any other pass."""
    return _announced().pop(owner, None) if owner in _slot.__dict__.get("prefilling", ()) else None


def _announced() -> dict[str, Announced]:
    return _slot.__dict__.setdefault("announced", {})
