"""The fixtures of pictures."""

from report.conftest import coarse, pages_of  # noqa: F401
