"""The entry point ``vllm.general_plugins``, which vLLM calls once in each of its processes.

It names an attention backend, which `--attention-backend CUSTOM` chooses. Without that option vLLM runs as it would
without foveate, but refuses requests with an unknown setting of foveate's. A mistake in the options of the
process's command ends it before an engine starts.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys

BACKEND = "foveate.integrations.vllm.backend.Chosen"
ON_CPU = "foveate.integrations.vllm.backend.ChosenOnCPU"

_log = logging.getLogger("vllm.foveate")


def register() -> None:
    """Name foveate's backend CUSTOM, unless another plugin has done so, check requests, and prepare metrics."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from foveate.integrations.vllm import lossless, published, releases, requests

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        _log.warning("foveate: another plugin has registered %s as the CUSTOM attention backend", custom.get_path())
        return
    if multiprocessing.parent_process() is None:
        from foveate.integrations.vllm.launch import check_command

        try:
            check_command(sys.argv[1:])
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
    if os.environ.get("FOVEATE_METHOD"):
        from foveate.integrations.vllm.settings import settings_of

        try:
            settings_of(None)
            _log.info("foveate: FOVEATE_METHOD takes effect with --attention-backend CUSTOM alone")
        except ValueError as error:
            _log.error("FOVEATE_METHOD: %s", error)  # and an exception where the backend is used
    register_backend(custom, BACKEND)
    if current_platform.is_cpu():  # its platform takes CPU_ATTN, whatever backend was chosen
        register_backend(AttentionBackendEnum.CPU_ATTN, ON_CPU)
    with contextlib.suppress(ValueError):  # another release, which the backend refuses
        releases.check()
        requests.install_check()
        lossless.install()
    published.serve()
