"""retain: what stays in the cache when it is full."""

from foveate.ops.dispatch import dispatch
from foveate.ops.retain import reference, running
from foveate.ops.retain.reference import keep_best, weakest
from foveate.ops.retain.running import Leaving

give_up = dispatch(reference.give_up, "foveate.ops.retain.slots_kernel", reference.check_give_up)
put_token = dispatch(reference.put_token, "foveate.ops.retain.slots_kernel")
replace_weakest = dispatch(running.replace_weakest, "foveate.ops.retain.running_kernel")
running_best = dispatch(running.running_best, "foveate.ops.retain.running_kernel")

__all__ = ["Leaving", "give_up", "keep_best", "put_token", "replace_weakest", "running_best", "weakest"]
