"""Settings of earlier versions that have become methods of their own, and the spec that replaces them."""

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
"""Methods that once had the setting ``score_keys``, each with the defaults by which it differs from
``kascade_pages``."""
_OF_PAGES = ("first_layer", "page_size", "weighted")


def written_now(name: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The present method and settings for a method and settings of an earlier version.

    ``kascade`` with ``score_keys=pages`` is now ``kascade_pages``; with ``score_keys=exact`` it is ``kascade``. Returns
    None when the name and settings are not of an earlier version.
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
