"""retain: what stays in the cache when it is full."""

from foveate.ops.retain.reference import keep_best, weakest

__all__ = ["keep_best", "weakest"]
