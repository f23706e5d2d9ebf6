"""What a result has to say about its circumstances: model, device, versions, commit, memory; and the row's schema."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foveate.evaluation.errors import UserError
from foveate.integrations.transformers.positions import max_positions

ROW_SCHEMA = 1
ROW_FIELDS = {
    "method": "the method's name",
    "spec": "the method with its settings, as `foveate.attach` takes it",
    "settings": "all settings of the method",
    "model": "the model folder's name",
    "architecture": "the model's kind, layers, heads, widths, positions",
    "task": "the task's name",
    "task_settings": "all settings of the task",
    "split": "the task's split",
    "length": "prompt tokens: as asked for, or the mean where the task's prompts have their own",
    "n": "items",
    "score": "the task's main metric, 0..100",
    "low": "lower end of the score's 95 % bootstrap interval",
    "high": "its upper end",
    "metrics": "every metric of the task: value, low, high",
    "ceiling": "the best score that a reader of the prompts could reach, 0..100",
    "dense_score": "the score of full attention on the same items; of a model that ran as it is, alone, its own",
    "diff_to_dense": "score - dense_score",
    "diff_low": "lower end of that difference's 95 % paired-bootstrap interval",
    "diff_high": "its upper end",
    "keys_read_share": "keys read in decode over the keys that full attention would read, 0..1; none of method 'own'",
    "kv_bytes_per_step": "bytes of keys and values read in a decode step, a sequence, all layers; none of method 'own'",
    "resident_bytes": "bytes of keys, values and state after an answer, all layers, the largest batch",
    "decode_steps": "decode steps taken",
    "tokens_evicted": "tokens that the method dropped",
    "pages_refined": "pages that the method looked into",
    "indices_reused": "selections taken over from another layer or step",
    "notes": "what the method has to say, such as layers that it left as they are",
    "prefill_ms": "wall time of a batch's prompt, median; none where the prompt was read for several methods at once",
    "decode_ms_per_token": "wall time of a decode step (a token of every sequence in the batch), median",
    "timing": "'generate', or 'teacher-forced' where the decode steps were fed in blocks and are not a speed; with "
    "', shared prompt' where the prompt was read for several methods at once",
    "peak_bytes": "the largest memory in use while answering",
    "peak_kind": "what peak_bytes counts; a shared prompt's memory is that of all methods it was read for",
    "batch_size": "sequences answered at once",
    "dtype": "the model's number format",
    "device": "the device's name",
    "versions": "versions of Python and the libraries",
    "limit": "items, or examples, asked for",
    "seed": "seed of the items and of the bootstrap",
    "commit": "`git describe` of the checkout, or 'unknown'",
    "command": "the command that makes this row and dense's, paths shortened to their last names",
    "run": "the run's fingerprint; rows of one file share it",
    "item_values": "the graded values of every item, in the order of the items",
    "examples": "the first items: id, gold answers, what the method said",
}
"""The fields of a result row, in their order."""


def model_facts(folder: Path) -> dict[str, Any]:
    """Architecture facts from a model folder's config.json, and from the defaults of what it leaves out.

    Raises `UserError` if there is no such model, or Transformers does not know it.
    """
    config, text = read_config(folder), _decoder_config(folder)
    heads = text.get("num_attention_heads")
    hidden = text.get("hidden_size")
    facts = {
        "model_type": config.get("model_type"),
        "layers": text.get("num_hidden_layers"),
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or (hidden // heads if hidden and heads else None),
        "max_positions": max_positions(text) or None,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _decoder_config(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True).to_dict()
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{folder / 'config.json'}: not the configuration of a known model ({reason})") from None


def check_positions(needed: int, facts: Mapping[str, Any], what: str) -> None:
    """Raises `UserError` if `needed` tokens are more than the model has positions for; `what` begins the message."""
    limit = facts.get("max_positions")
    if limit and needed > limit:
        raise UserError(f"{what} {needed:,} positions, the model has {limit:,}; ask for less")


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json. Raises `UserError` if the folder, the file or the weights are missing."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such model folder (foveate fetch smollm2-135m --out {folder} makes one)")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: not a model folder (no config.json)") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / 'config.json'}: malformed JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'}: expected an object")
    if not weight_files(folder):
        raise UserError(f"{folder}: no weights (*.safetensors) in the model folder")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted."""
    return sorted(Path(folder).glob("*.safetensors"))


def model_digest(folder: Path, samples: int = 64, sample_bytes: int = 1 << 16) -> str:
    """A fingerprint of a model folder (16 hex digits): its config, and its weights' names, sizes and sampled content.

    Each file gives its header and `samples` evenly spaced pieces of `sample_bytes` bytes, so that large models take
    no longer than small ones.
    """
    config = {key: value for key, value in read_config(folder).items() if not key.startswith(("_", "transformers_"))}
    total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in weight_files(folder):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(samples):
                file.seek(max(0, size - sample_bytes) * sample // (samples - 1))
                total.update(file.read(sample_bytes))
    return total.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that can change a result; CUDA's if torch was built with it."""
    import foveate

    found = {"python": platform.python_version(), "foveate": foveate.__version__, "torch": torch.__version__}
    for package in ("transformers", "tokenizers", "triton", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def device_name(device: str) -> str:
    """The device's own name: the GPU's, or the CPU's with the number of torch threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    threads = torch.get_num_threads()
    return f"cpu: {name}, {threads} thread{'s' if threads > 1 else ''}"


def commit() -> str:
    """`git describe --always --dirty` of the checkout that foveate runs from, or "unknown" outside of one.

    Where the code was copied without its history, the variable FOVEATE_COMMIT names the commit.
    """
    if named := os.environ.get("FOVEATE_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def milliseconds(work: Callable[[], Any], device: str) -> float:
    """How long some work takes, on a GPU from event to event; waits for its end."""
    if not device.startswith("cuda"):
        begin = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        start.record()
        work()
        end.record()
    end.synchronize()
    return start.elapsed_time(end)


def marks(device: str) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """What marks a moment, on a GPU without waiting, and what gives the milliseconds between two, which waits."""
    if not device.startswith("cuda"):
        return time.perf_counter, lambda start, end: 1000 * (end - start)

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)

    return mark, between


class PeakMemory:
    """The largest memory in use since `start`: allocated by torch on a GPU, the process's resident set on a CPU."""

    def __init__(self, device: str):
        self._cuda = torch.device(device) if device.startswith("cuda") else None
        self.kind = "torch.cuda.max_memory_allocated" if self._cuda else "process RSS high-water, weights included"

    def start(self) -> None:
        """Forgets what came before; where the system cannot forget, the peak is that of the whole process."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            self.kind = "process RSS high-water since the process began, weights included"

    def peak(self) -> int:
        """Bytes."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._cuda)
        try:
            for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        import resource

        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def add_up(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row's cost fields from the records of its batches.

    Shares and bytes a step are weighted by the decode steps, times are medians, memory is the largest.
    """
    read = dense = steps = counted = kv_bytes = 0.0
    for batch in batches:
        stats = batch["stats"]
        steps += stats["decode_steps"]
        if stats["keys_read_per_step"] is None:  # reads were not counted
            continue
        counted += stats["decode_steps"]
        keys = stats["keys_read_per_step"] * stats["decode_steps"]
        read += keys
        dense += keys / stats["keys_read_share"] if stats["keys_read_share"] else 0.0
        kv_bytes += stats["kv_bytes_per_step"] * stats["decode_steps"]
    return {
        "keys_read_share": read / dense if dense else None,
        "kv_bytes_per_step": kv_bytes / counted if counted else None,
        "resident_bytes": max(batch["stats"]["resident_bytes"] for batch in batches),
        "decode_steps": int(steps),
        **{
            counter: sum(batch["stats"].get(counter, 0) for batch in batches)
            for counter in ("tokens_evicted", "pages_refined", "indices_reused")
        },
        "notes": list(dict.fromkeys(note for batch in batches for note in batch["stats"]["notes"])),
        "prefill_ms": _median(batch["prefill_ms"] for batch in batches),
        "decode_ms_per_token": _median(batch["decode_ms_per_token"] for batch in batches),
        "timing": _joined(batch["timing"] for batch in batches),
        "peak_bytes": max(batch["peak_bytes"] for batch in batches),
        "peak_kind": _joined(batch["peak_kind"] for batch in batches),
        "commit": ", ".join(sorted({batch["commit"] for batch in batches})),
    }


def ordered(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its fields in the schema's order. Raises ValueError if a field is missing or unknown."""
    if row.keys() != ROW_FIELDS.keys():
        raise ValueError(f"row fields differ from the schema: {sorted(row.keys() ^ ROW_FIELDS.keys())}")
    return {field: row[field] for field in ROW_FIELDS}


def _joined(values: Iterable[str]) -> str:
    """The different values, for rows whose batches were measured in different ways."""
    return " / ".join(dict.fromkeys(values))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
