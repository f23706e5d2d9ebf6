"""Settings of earlier versions that became a method of their own, and how it is written now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KASCADE: dict[str, dict[str, Any]] = {
    "kascade": {},
    "kascade_paper": {
        "pool": "kv_head",
        "pooling": "post_softmax",
        "decode_only": False,
        "dense_anchor_prefill": False,
    },
}
"""Methods that had the setting ``score_keys``, and where their defaults differ from those of ``kascade_pages``."""
_OF_PAGES = ("first_layer", "page_size", "weighted")


def written_now(name: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The method, and its settings, that an earlier version spelled as this name with these settings.

    ``kascade`` with ``score_keys=pages`` is ``kascade_pages``, and with ``score_keys=exact`` ``kascade``. None: what is
    given is not of an earlier version, or no method stands for it.
    """
    scored = settings.get("score_keys")
    if name not in _KASCADE or scored not in ("exact", "pages"):
        return None
    if scored == "exact":
        return name, {key: value for key, value in settings.items() if key not in ("score_keys", *_OF_PAGES)}
    found = {
        key: value for key, value in settings.items() if (key, value) not in (("score_keys", "pages"), ("every", 1))
    }
    found = _KASCADE[name] | found
    if found.get("decode_only", True):
        found.pop("dense_anchor_prefill", None)  # without effect
    return "kascade_pages", found
