"""The fixtures of pictures."""

from tests.lab.conftest import coarse, pages_of  # noqa: F401
