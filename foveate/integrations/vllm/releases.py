"""What a release of vLLM needs. Its names are used in this folder alone."""

from __future__ import annotations

from typing import Any

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
        raise ValueError(f"foveate supports vLLM {', '.join(LINES)}, and this is {vllm.__version__}")


def check_runner(vllm_config: Any) -> None:
    """Raise ValueError for a model runner that does not tell decoded tokens from a prompt's chunks of one token."""
    import vllm

    if line(vllm.__version__) == "0.26" and vllm_config.use_v2_model_runner:
        raise ValueError(
            "foveate: model runner V2 of vLLM 0.26 does not tell decoded tokens from prompts; "
            "set VLLM_USE_V2_MODEL_RUNNER=0"
        )
