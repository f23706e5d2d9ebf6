"""Lossless decoding in vLLM: the model drafts for itself by a method, and vLLM verifies the drafts.

vLLM treats foveate as a draft model, and verifies its drafts like any other draft model's, by vLLM's own attention to
all keys. The draft model is the served model itself over the same blocks. A draft's keys and values go to slots that
vLLM keeps free for drafts, and the verifying pass overwrites them with its own. All keys and values that stay in the
blocks are therefore dense attention's, and the keys that a draft reads affect speed alone. See
:mod:`foveate.runtime.drafts` for what a draft reads.

Model runner V2 alone; :func:`install` makes it take the place of a draft model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from foveate.integrations.vllm.requests import wrap_once
from foveate.integrations.vllm.settings import wants_lossless

_RUNNER = "vllm.v1.worker.gpu.model_runner"


def install() -> None:
    """Have this process let runner V2 draft by the ``Drafter`` where the settings ask for it; once in a process."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import spec_decode

    wrap_once(spec_decode, "init_speculator", _with_drafter)
    if _RUNNER in sys.modules:  # which holds the function by its name
        sys.modules[_RUNNER].init_speculator = spec_decode.init_speculator
    wrap_once(VllmConfig, "_get_v2_model_runner_unsupported_features", _without_draft_models)


def _with_drafter(inner: Callable[..., Any]) -> Callable[..., Any]:
    def init_speculator(vllm_config: Any, device: torch.device, *more: Any) -> Any:
        if not wants_lossless(vllm_config):
            return inner(vllm_config, device, *more)
        from foveate.integrations.vllm.drafter import Drafter

        return Drafter(vllm_config, device)

    return init_speculator


def _without_draft_models(inner: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """What runner V2 does not support, without draft models where foveate stands for one."""

    def unsupported(vllm_config: Any) -> list[str]:
        found = inner(vllm_config)
        return [what for what in found if "draft_model" not in what] if wants_lossless(vllm_config) else found

    return unsupported
