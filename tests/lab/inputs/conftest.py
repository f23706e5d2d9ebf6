import pytest

from tests import tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """The folder of a tiny random model. Tests leave it as it is."""
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tokenizer():
    return tiny.make_tokenizer()


@pytest.fixture(scope="session")
def sample():
    """The data that the project ships."""
    return tiny.SAMPLE
