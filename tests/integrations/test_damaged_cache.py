"""Files of caches that are damaged or edited: one error that names the file and what is wrong in it."""

import copy
import json
import random
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import foveate
from foveate.integrations.transformers import saved
from foveate.integrations.transformers.digests import digests
from tests.families import family
from tests.helpers import cached, tiny_model, tokens


def written(folder, spec, model=None):
    """A model, its attachment made, and a file with a cache of 50 prompt tokens and one more."""
    model, path = tiny_model() if model is None else model, folder / "cache"
    foveate.attach(model, spec)
    cache = foveate.Cache(model)
    with torch.no_grad():
        model(tokens(50, 2), **cached(cache))
        model(tokens(1, 2), **cached(cache))
    foveate.save_cache(model, cache, path)
    return model, path


@pytest.fixture
def evicting(tmp_path):
    return written(tmp_path, "h2o:top_k=12,window=4")


def taken_apart(path):
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described = json.loads(file.metadata()["foveate_cache"])
        described.pop("digest")
        return tensors, described


def put_together(path, tensors, described, sums=True):
    """Write a file whose checksums and digest are right, so that its content has to be found wrong."""
    if sums:
        described["checksums"] = digests(tensors)
    save_file(tensors, path, {"foveate_cache": json.dumps(described | {"digest": saved._digest(described)})})


def error_of(model, path):
    """What is said of a file; empty where it is loaded."""
    try:
        foveate.load_cache(model, path)
    except ValueError as error:
        return str(error)
    return ""


def refused(model, path, *says, what=""):
    error = error_of(model, path)
    for part in (str(path), *says):
        assert part in error, what


def test_any_bit(evicting):
    model, path = evicting
    content, draw = path.read_bytes(), random.Random(0)
    for _ in range(150):
        place, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        refused(model, path)
    header = struct.unpack("<Q", content[:8])[0] + 8
    for _ in range(150):
        place, bit = draw.randrange(header), 1 << draw.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        refused(model, path)


def test_any_end(evicting):
    model, path = evicting
    content = path.read_bytes()
    for cut in (0, 4, 8, 100, 1000, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        refused(model, path)
    path.write_bytes(content + b"more")
    refused(model, path)
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    refused(model, path, "is not that of its checksum")


ODD = [None, "x", -1, 0, 7, 10**9, 1.5, float("nan"), True, [], {}, [-1, -1], [9999, 9999], [1], ["2", "2"], [2.0, 2.0]]


def edits(described, tensors):
    """Each field with each odd value, each field left out, and one more of each kind, by what must be named."""
    for name in described:
        if name != "layers":
            yield name, lambda one, n=name: one.pop(n)
            for value in ODD:
                yield name, lambda one, n=name, v=value: one.update({n: v})
    for name in described["layers"][1]:
        yield "layer 1", lambda one, n=name: one["layers"][1].pop(n)
        for value in ODD:
            yield "layer 1", lambda one, n=name, v=value: one["layers"][1].update({n: v})
    for name in described["layers"][1].get("rows", ()):
        yield f"rows.{name}", lambda one, n=name: one["layers"][1]["rows"].pop(n)
        for value in ODD:
            yield "rows", lambda one, n=name, v=value: one["layers"][1]["rows"].update({n: v})
    yield "evil", lambda one: one.update(evil=1)
    yield "evil", lambda one: one["layers"][1].update(evil=1)
    for value in (None, 3, [], {}):
        yield "layers", lambda one, v=value: one.update(layers=v)
        yield "layers[0]" if value != {} else "layer 0", lambda one, v=value: one["layers"].__setitem__(0, v)
    yield "layers", lambda one: one["layers"].pop()
    yield "layers", lambda one: one["layers"].append(one["layers"][0])


@pytest.mark.parametrize("spec", ["h2o:top_k=12,window=4", "dense", "quest:page_size=4", "luka:page_size=4", "Bamba"])
def test_any_edited_field(spec, tmp_path):
    """With checksums and a digest that are right, so that each field is checked by itself."""
    model = copy.deepcopy(family(spec)) if spec == "Bamba" else None
    model, path = written(tmp_path, "dense" if spec == "Bamba" else spec, model)
    tensors, before = taken_apart(path)
    number = 0
    for named, edit in edits(before, tensors):
        described = copy.deepcopy(before)
        edit(described)
        if repr(described) == repr(before):
            continue
        put_together(path, tensors, described, sums="checksums" not in str(named))
        if error := error_of(model, path):
            assert str(path) in error
            assert any(part in error for part in (named, "is for", "is of method")), (named, error)
            number += 1
        else:  # what is known of the cache allows it: the digest is what refuses the edited file
            assert allowed(before, described), (named, edit.__defaults__)
        save_file(tensors, path, {"foveate_cache": json.dumps(described | {"digest": saved._digest(before)})})
        refused(model, path)
    assert number > 100


def allowed(before, described):
    """Whether two descriptions differ in what a cache of the same tensors may say."""
    if before["prompt_end"] != described["prompt_end"]:
        return isinstance(described["prompt_end"], int)
    one, other = before["layers"][1], described["layers"][1]
    free = {"scaling", "ordered", "uneven", "rows", "freed"}
    free |= {name for name in one if name.startswith(("is_", "has_", "conv_kernel"))}
    return {name for name in one if one[name] != other.get(name)} <= free


@pytest.mark.parametrize("spec", ["h2o:top_k=12,window=4", "dense", "quest:page_size=4", "Bamba"])
def test_any_edited_tensor(spec, tmp_path):
    model = copy.deepcopy(family(spec)) if spec == "Bamba" else None
    model, path = written(tmp_path, "dense" if spec == "Bamba" else spec, model)
    tensors, described = taken_apart(path)
    for name, tensor in tensors.items():
        odd = [
            tensor[..., :1],
            tensor[:1],
            tensor[None],
            tensor.flatten(),
            tensor.double(),
            tensor.float().bool(),
            tensor.repeat_interleave(2, 0),
        ]
        for other in odd if tensor.dim() else []:
            if other.shape == tensor.shape and other.dtype == tensor.dtype:
                continue
            put_together(path, tensors | {name: other.contiguous()}, copy.deepcopy(described))
            own = name.partition(".")[2]
            if own.startswith(("conv", "recurrent")) or (own in ("keys", "values") and other.shape[-1] == 1):
                # sizes that nothing in the file tells: its checksums and digest do
                continue
            refused(model, path, what=f"{name} {other.dtype} {other.shape}")
        put_together(path, {one: x for one, x in tensors.items() if one != name}, copy.deepcopy(described))
        if name != "ids":
            refused(model, path, what=f"a cache without {name}")
    put_together(path, tensors | {"0.evil": torch.zeros(3)}, copy.deepcopy(described))
    refused(model, path, "evil")
    put_together(path, tensors | {"9.keys": torch.zeros(3)}, copy.deepcopy(described))
    refused(model, path, "9.keys")
    if "1.positions" in tensors:
        for change in (tensors["1.positions"] + 1, tensors["1.positions"].flip(0) * 0 - 1):
            put_together(path, tensors | {"1.positions": change.int()}, copy.deepcopy(described))
            refused(model, path, "positions")


def test_other_files(evicting, tmp_path):
    model, path = evicting
    tensors, described = taken_apart(path)
    save_file(tensors, path)
    refused(model, path, "not a cache of foveate")
    save_file(tensors, path, {"foveate_cache": "[" * 100_000})
    refused(model, path, "its description is no JSON")
    save_file(tensors, path, {"foveate_cache": "[]"})
    refused(model, path, "its description is no object")
    put_together(path, tensors, described | {"schema": 2})
    refused(model, path, "schema 2, and this version reads 3; read the prompt again")
    put_together(path, tensors, described | {"seen": 40})
    refused(model, path)
