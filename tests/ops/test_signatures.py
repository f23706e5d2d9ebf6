"""Kernels take what their references take: one signature, whose types stand with the reference."""

import importlib
import inspect
import sys

import pytest

import foveate.hybrids.ops
import foveate.ops  # noqa: F401 with all verbs
from foveate.ops import dispatch


def plain(function):
    """Names, kinds and defaults of its parameters."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


def verb(name):
    modules = [module for key, module in sorted(sys.modules.items()) if key.startswith("foveate.") and ".ops" in key]
    made = [one for module in modules for one in vars(module).values() if hasattr(one, "__wrapped__")]
    return next(one for one in made if one.__name__ == name)


@pytest.mark.parametrize("name", sorted(dispatch._verbs))
def test_a_kernel_has_the_signature_of_its_reference(name):
    pytest.importorskip("triton")
    assert plain(getattr(importlib.import_module(dispatch._verbs[name]), name)) == plain(verb(name))
