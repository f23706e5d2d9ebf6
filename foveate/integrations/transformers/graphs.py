"""CUDA graphs for the decode steps of `generate`: whether steps are replayed, and why they are not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
import transformers
from torch import nn
from transformers.generation import GenerationMode

from foveate.errors import FoveateWarning
from foveate.integrations.transformers.positions import length_kinds
from foveate.methods import Method, replay_obstacle
from foveate.ops.dispatch import runs_kernel
from foveate.runtime import CaptureError, CudaRecorder, Use
from foveate.runtime.recorder import Recorder


class Graphs:
    """Whether and how an attached model replays its decode steps.

    Args:
        mode: True, False or "auto".

    Raises:
        ValueError: for another mode.
    """

    def __init__(self, mode: bool | str):
        if not (isinstance(mode, bool) or mode == "auto"):
            raise ValueError(f"cuda_graph must be True, False or 'auto', not {mode!r}")
        self.mode, self.use = mode, Use()
        self.recorder: Recorder | None = None
        """Replaces CUDA graphs as the way to record steps; None: CUDA graphs."""
        self._of_devices: dict[torch.device, CudaRecorder] = {}
        self._broken = ""

    def obstacle(
        self,
        model: nn.Module,
        config: transformers.PreTrainedConfig,
        methods: Iterable[Method],
        unchanged: Mapping[int, str],
    ) -> str:
        """Why steps of this model and method are never replayed; empty when they are.

        Args:
            config: the decoder's.
            methods: of the layers that have one.
            unchanged: the other layers, with the reason.
        """
        if self.mode is False:
            return "switched off"
        if self._broken:
            return self._broken
        moving = sorted(layer for layer, kind in unchanged.items() if "sliding-window" in kind)
        if moving:
            layers = ", ".join(map(str, moving))
            return f"layers {layers} stay as they are, with a cache whose memory moves"
        for method in methods:
            if obstacle := replay_obstacle(method):
                return obstacle
        if kinds := length_kinds(config):
            return f"{min(kinds)} rotary embeddings depend on the length of the context"
        if getattr(config, "mixers", None) is not None:
            return f"its {config.mixers[0]} layers keep a memory of their own, which a captured step cannot write to"
        if model.training:
            return "the model is in training mode"
        if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
            return "the model is spread over several devices"
        if (getattr(model, "_tp_size", None) or 1) > 1:
            return "the model is tensor-parallel"
        if self.recorder is None and model.device.type != "cuda":
            return f"the model is on the {model.device.type.upper()}, and CUDA graphs need a GPU"
        if self.mode == "auto" and self.recorder is None and not runs_kernel("attend"):
            return (
                "without the kernels of decoding, which stop where a row ends, replays can be slower (insist with True)"
            )
        return ""

    def require(self, reason: str) -> None:
        """Note why steps are not replayed.

        Raises:
            ValueError: when the attachment insists on it, with ``cuda_graph=True``.
        """
        self.use.reason = reason
        if reason and self.mode is True:
            raise ValueError(f"cuda_graph=True is not possible: {reason}; with cuda_graph='auto' it would be left out")

    def check_generation(self, mode: GenerationMode, use_cache: bool | None) -> None:
        """Check at the start of a call of `generate` whether its steps can be replayed.

        Raises:
            ValueError: as :meth:`require`, when they cannot.
        """
        if self.mode is False:
            return
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            self.require(f"{mode.value} takes other steps than one token for each sequence after the other")
        elif use_cache is False:
            self.require("use_cache=False computes all tokens at every step")

    def recorder_for(self, device: torch.device) -> Recorder:
        """The recorder of steps on a device; its graphs share memory."""
        return self.recorder or self._of_devices.setdefault(device, CudaRecorder(device))

    def broke(self, error: CaptureError) -> None:
        """Stop recording steps after one could not be captured, and warn."""
        self._broken = f"a step could not be captured ({error})"
        self.require(self._broken)
        warnings.warn(f"foveate: {self._broken}; steps are run one by one", FoveateWarning, stacklevel=3)

    def __reduce__(self):  # copies and pickles record their own steps
        return Graphs, (self.mode,)
