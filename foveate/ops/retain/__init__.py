"""retain: what stays in the cache when it is full."""

from foveate.ops.dispatch import dispatch
from foveate.ops.retain import reference
from foveate.ops.retain.reference import keep_best as keep_best
from foveate.ops.retain.reference import place_token as place_token
from foveate.ops.retain.reference import weakest as weakest

give_up = dispatch(reference.give_up, "foveate.ops.retain.slots_kernel", reference.check_give_up)
put_token = dispatch(reference.put_token, "foveate.ops.retain.slots_kernel")
