"""What a release of vLLM needs. Its names are used in this folder alone."""

from __future__ import annotations

from packaging.version import Version

LINES = ("0.26", "0.32", "0.33")
"""Release lines whose interface is tested; others are refused."""


def line(version: str) -> str:
    """The release line of a version, such as 0.32 of 0.32.1+cpu."""
    return "{}.{}".format(*Version(version).release)


def check() -> None:
    """Raise ValueError unless the installed vLLM is of a supported line."""
    import vllm

    if line(vllm.__version__) not in LINES:
        raise ValueError(
            f"foveate supports vLLM {', '.join(LINES)}, and this is {vllm.__version__}; the interface of attention "
            "backends changed from 0.26 to 0.32, and releases between are not tested"
        )
