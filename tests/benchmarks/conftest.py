"""The fixtures of pictures."""

from tests.lab.report.conftest import coarse, pages_of  # noqa: F401
