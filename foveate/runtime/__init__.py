"""Engine-neutral execution of methods: prompt, decode and undo of an attention layer; capture and replay of steps."""

from foveate.runtime.layer import Layer as Layer
from foveate.runtime.layer import read_once as read_once
from foveate.runtime.phase import Phase as Phase
from foveate.runtime.policy import SHORT_SEQUENCE as SHORT_SEQUENCE
from foveate.runtime.policy import Policy as Policy
from foveate.runtime.policy import check_dense_below as check_dense_below
from foveate.runtime.policy import dense_until as dense_until
from foveate.runtime.policy import pays_from as pays_from
from foveate.runtime.policy import sparse_from_length as sparse_from_length
from foveate.runtime.recorder import CaptureError as CaptureError
from foveate.runtime.recorder import CudaRecorder as CudaRecorder
from foveate.runtime.recorder import Recording as Recording
from foveate.runtime.recorder import Use as Use
from foveate.runtime.replay import ReplayedSteps as ReplayedSteps
from foveate.runtime.steps import EngineSteps as EngineSteps
