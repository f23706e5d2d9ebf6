"""Which class stands for the backend: vLLM resolves a name of this module when it builds a model's first layer."""

from __future__ import annotations

from foveate.integrations.vllm import releases
from foveate.integrations.vllm.settings import check_early


def __getattr__(name: str) -> type:
    """The backend ``Chosen`` by `--attention-backend CUSTOM`, or ``ChosenOnCPU``: there vLLM's own without the option.

    Raises:
        ValueError: for a release of vLLM that is not supported, and for what cannot be served.
    """
    if name not in ("Chosen", "ChosenOnCPU"):
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    vllm_config = get_current_vllm_config()
    if name == "ChosenOnCPU":
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        chosen = vllm_config.attention_config.backend
        if getattr(chosen, "name", None) != "CUSTOM":
            return CPUAttentionBackend
    releases.check()
    check_early(vllm_config)
    if current_platform.is_cpu():
        from foveate.integrations.vllm.cpu import FoveateOnCPU

        return FoveateOnCPU
    from foveate.integrations.vllm.gpu import FoveateOnGPU

    return FoveateOnGPU
