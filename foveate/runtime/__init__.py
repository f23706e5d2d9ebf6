"""Engine-neutral execution of methods: prompt, decode and undo of an attention layer; capture and replay of steps."""

from foveate.runtime.layer import Layer, dense_until, read_once
from foveate.runtime.phase import Phase
from foveate.runtime.policy import Policy, check_dense_below
from foveate.runtime.recorder import CaptureError, CudaRecorder, Recording, Use
from foveate.runtime.replay import ReplayedSteps
from foveate.runtime.steps import EngineSteps

__all__ = [
    "CaptureError",
    "CudaRecorder",
    "EngineSteps",
    "Layer",
    "Phase",
    "Policy",
    "Recording",
    "ReplayedSteps",
    "Use",
    "check_dense_below",
    "dense_until",
    "read_once",
]
