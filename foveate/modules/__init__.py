"""Trainable parts that methods and models share."""

from foveate.modules.summariser import PageSummariser

__all__ = ["PageSummariser"]
