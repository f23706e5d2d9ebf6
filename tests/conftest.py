"""Set-up of every test run: one thread, and property tests that draw the same examples every time."""

import gc
import os
import uuid
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A process that hands tests to others (``-n``) runs none itself: it does without torch and Transformers."""
    if config.getoption("numprocesses", None):
        return
    import torch

    import benchmarks.methods.h2o_as_published  # noqa: F401  (the tests of every method are tests of it, too)

    gc.disable()  # until all tests are there
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.interpreter import speed_up

        speed_up()
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile("foveate", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("foveate")


def pytest_collection_finish() -> None:
    """Thousands of tests live to the end: the garbage collector need not look through them again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files that run under Triton's interpreter come first, so that nothing waits for them at the end."""
    from tests.selection import mark_full

    mark_full(items)
    items.sort(key=lambda item: "under_the_interpreter" not in item.name)


@pytest.fixture(autouse=True)
def no_kept_calibrations(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a cache folder of its own, which is not there yet."""
    folder = tmp_path_factory.getbasetemp() / "caches" / uuid.uuid4().hex
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture
def imported_methods() -> Iterator[None]:
    """Methods of files that a test runs are forgotten at its end."""
    from foveate.methods import REGISTRY

    known = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(known)


@pytest.fixture
def methods_of_package(imported_methods: None) -> list[str]:
    """The names of the package's own methods; no others are known while the test runs."""
    from foveate.methods import REGISTRY, names

    for name, method in list(REGISTRY.items()):
        if not method.__module__.startswith("foveate."):
            del REGISTRY[name]
    return names()


@pytest.fixture
def poisoned():
    """Fresh memory holds NaN, so that what a kernel fails to write is seen."""
    from tests.kernels import poisoned_memory

    with poisoned_memory():
        yield


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache grows within a few tokens."""
    monkeypatch.setattr("foveate.state.store.ALIGN", 16)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a tiny random model. Tests leave it as it is."""
    from tests import tiny

    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tokenizer():
    from tests import tiny

    return tiny.make_tokenizer()


@pytest.fixture(scope="session")
def sample():
    """The data that the project ships."""
    from tests import tiny

    return tiny.SAMPLE
