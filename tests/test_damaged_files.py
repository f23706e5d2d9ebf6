"""Every kind of file that foveate writes, damaged or edited: it is read right, or one error names it."""

import copy
import functools
import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from foveate import methods
from foveate.calibration import Calibration
from foveate.calibration import load as load_calibration
from foveate.calibration.eviction_scores import LEVELS, EvictionScores
from foveate.errors import UserError
from foveate.hybrids.training import checkpoints, journal
from foveate.lab.report import rows as report_rows
from foveate.lab.results import resultfile
from tests.hybrids.training.test_training_checkpoints import write as write_checkpoints
from tests.lab.results.test_resultfile import RUN, record, row

ODD = [None, "x", -1, 0, 10**400, 1.5, float("nan"), True, [], {}, [[1]], {"a": 1}]


def calibration(folder):
    model = {"model_type": "llama", "layers": 4, "heads": 6, "kv_heads": 2, "head_dim": 16, "weights": [[0.5], None]}
    found = {"coverage": [[0.9, None]], "run": {"model": "tiny é"}, "layers": []}
    path = folder / "tiny.json"
    Calibration(model, (0, 2), {"1": [1, 1], "3": [0, 1]}, found).write(path)
    return path, load_calibration


def setting(folder):
    path = folder / "foveate.json"
    found = {"kind": "foveate_setting", "schema": 2, "method": "pages:top_k=0.1", "architecture": {"layers": 4}}
    path.write_text(json.dumps(found | {"objective": "bytes", "max_loss": 1.0, "measured": {"score": 5.0}}))
    return path, lambda one: methods.make(str(one))


def lte(folder):
    torch.manual_seed(0)
    frequencies = (10000.0 ** -(torch.arange(0, 16, 2) / 16)).expand(3, -1)
    scores = EvictionScores({"layers": 3}, range(3), 2, 16, 16, frequencies, torch.ones(3), window=16, length=60)
    scores.quantiles.copy_(torch.linspace(-1, 1, LEVELS).expand_as(scores.quantiles))
    path = folder / "lte.safetensors"
    scores.save(path)
    return path, EvictionScores.load


def result_rows(folder):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row(method=name, settings={})) + "\n" for name in ("dense", "mine")))
    return path, lambda one: resultfile.read_rows(one, RUN)


def reported_rows(folder):
    path, _ = result_rows(folder)
    return path, report_rows.read_any


def partial_results(folder):
    out = folder / "rows.jsonl"
    with resultfile.PartialFile(out, RUN) as partial:
        for first in (1, 2):
            partial.append(record(first))
    return resultfile.partial_path(out), lambda one: resultfile.read_partial(out, RUN)


def training_log(folder):
    with journal.Journal(folder, {"kind": "run"}, 0) as log:
        for step in range(1, 5):
            log.add({"step": step, "loss": 1.5 / step, "lr": 0.1})
    return folder / journal.LOG, lambda one: journal.Journal(one.parent, {"kind": "run"}, 3)


def checkpoint(folder):
    (of_step,) = write_checkpoints(folder, 4)
    return of_step / checkpoints.STATE, lambda one: checkpoints.read_state(one.parent)


KINDS = [calibration, setting, lte, result_rows, reported_rows, partial_results, training_log, checkpoint]
CHECKED = {"checkpoint", "lte"}
"""Those with a digest: any change is refused."""
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def read(reads, path, what):
    """Whether a file is read; an error has to be the one that users are told, and name the file."""
    try:
        reads(path)
    except (UserError, ValueError) as error:
        said = str(error)
    else:
        return True
    assert path.name in said or path.parent.name in said, (what, said)
    assert "\n" not in said, (what, said)
    return False


@every_kind
def test_flipped_bits_and_other_ends(kind, tmp_path):
    path, reads = kind(tmp_path)
    content, draw = path.read_bytes(), random.Random(kind.__name__)
    assert read(reads, path, "as it was written")
    path.write_bytes(content)  # a log that is gone on with is written again
    bits = [(draw.randrange(len(content)), draw.randrange(8)) for _ in range(120)]
    changed = [(f"bit {bit} of {at}", flipped(content, at, bit)) for at, bit in bits]
    cuts = [0, 1, *(draw.randrange(len(content)) for _ in range(20)), len(content) - 1]
    changed += [(f"the first {cut}", content[:cut]) for cut in cuts]
    changed += [("more", content + b"more"), ("zeros", bytes(len(content))), ("half", half_of_zeros(content))]
    for what, other in changed:
        path.write_bytes(other)
        accepted = read(reads, path, what)
        if kind.__name__ in CHECKED:
            assert not accepted or (kind is checkpoint and json.loads(content) == json.loads(other)), what


def flipped(content, at, bit):
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def half_of_zeros(content):
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


def places(value, path=()):
    """The place of every field, and of the first entries of lists, at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def edits(value):
    """A copy of a JSON value for each change of each field."""
    for place in places(value):
        for odd in (..., *ODD):
            other = copy.deepcopy(value)
            inside = functools.reduce(lambda found, key: found[key], place[:-1], other)
            if odd is ...:
                inside.pop(place[-1])
            else:
                inside[place[-1]] = odd
            yield f"{place} is {'gone' if odd is ... else repr(odd)[:40]}", other
    if isinstance(value, dict):
        yield "another field", {**value, "evil": 1}
    yield from ((f"all is {odd!r}"[:40], odd) for odd in ODD)


@pytest.mark.full
@every_kind
def test_edited_fields(kind, tmp_path):
    path, reads = kind(tmp_path)
    refused, number = 0, 0
    if kind is lte:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            described = file.metadata()
        (name,) = {*described} - {"digest"}
        for what, other in edits(json.loads(described[name])):
            save_file(tensors, path, {name: json.dumps(other)})  # as of versions that wrote no digest
            refused, number = refused + (not read(reads, path, what)), number + 1
        for tensor in tensors:
            for other in (tensors[tensor][..., :1], tensors[tensor][None], tensors[tensor] + 1.0):
                save_file(tensors | {tensor: other.contiguous()}, path, described)
                assert not read(reads, path, tensor) or torch.equal(other, tensors[tensor])
    else:
        content = path.read_text()
        lines = content.splitlines() if path.suffix in (".jsonl", ".partial") else [content]
        for at in {0, len(lines) - 1}:
            for what, other in edits(json.loads(lines[at])):
                changed = [*lines[:at], json.dumps(other), *lines[at + 1 :]]
                path.write_text("".join(f"{line}\n" for line in changed))
                refused, number = refused + (not read(reads, path, what)), number + 1
    assert number > 50
    assert refused > 0 or kind is training_log
