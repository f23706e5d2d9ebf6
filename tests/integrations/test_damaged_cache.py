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
from foveate import methods
from foveate.integrations.transformers import saved
from foveate.integrations.transformers.digests import digests
from tests.families import FAMILIES, family
from tests.helpers import cached, left_padded, tiny_model, tokens
from tests.state_machine import error_of


def written(folder, name):
    """A model with a method, or a family's without, and a file with a cache of a padded prompt and some tokens more."""
    model, path = copy.deepcopy(family(name)) if name in FAMILIES else tiny_model(), folder / "cache"
    foveate.attach(model, "dense" if name in FAMILIES else name)
    cache = foveate.Cache(model)
    with torch.no_grad():
        model(**left_padded([50, 43]), **cached(cache))
        for n in range(7):
            model(tokens(1, 2, seed=n), **cached(cache))
    foveate.save_cache(model, cache, path)
    return model, path


@torch.no_grad()
def goes_on(model, path):
    """What is said of a file, empty where it is loaded; and the logits of the next two steps on it."""
    loaded = []
    if said := error_of(lambda: loaded.append(foveate.load_cache(model, path))):
        return said, None
    return "", torch.cat([model(tokens(1, 2, seed=n), **cached(loaded[0])).logits for n in (20, 21)])


@pytest.fixture
def evicting(tmp_path):
    return written(tmp_path, "h2o:top_k=12,window=4")


def taken_apart(path):
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described = json.loads(file.metadata()["foveate_cache"])
        described.pop("digest")
        return tensors, described


def put_together(path, tensors, described, changed=None):
    """Write a file whose digest is right, and whose checksums are where it says which tensors are other ones, so that
    its content has to be found wrong."""
    if changed is not None:
        tensors = tensors | changed
        sums = {name: one for name, one in described["checksums"].items() if name in tensors}
        described = described | {"checksums": sums | digests(changed)}
    save_file(tensors, path, {"foveate_cache": json.dumps(described | {"digest": saved._digest(described)})})


def refused(model, path, *says, what=""):
    error = error_of(lambda: foveate.load_cache(model, path))
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


def small(*names):
    """Specs of methods that keep different tensors, and models whose layers do."""
    return [*(methods.make(name, **methods.get(name).about.small_budget).spec for name in names), "Bamba", "Gemma 2"]


OF_OTHER_FIELDS = small("h2o", "adakv", "luka")
"""Other methods have the fields of these: only luka has numbers of its own, h2o free slots, adakv uneven heads."""
OF_OTHER_TENSORS = small("dense", "h2o", "adakv", "quest", "luka", "pages", "rocketkv", "sparq")
SPECS = small(
    *("dense", "h2o", "adakv", "quest", "luka", "locks", "pages", "snapkv", "tova", "streaming", "rocketkv", "sparq")
)


@pytest.mark.full
@pytest.mark.parametrize("name", OF_OTHER_FIELDS)
def test_any_edited_field(name, tmp_path):
    """With checksums and a digest that are right, so that each field is checked by itself: the next steps are as those
    of the file as it was, or it is refused."""
    model, path = written(tmp_path, name)
    (tensors, before), (_, expected) = taken_apart(path), goes_on(model, path)
    number = 0
    for named, edit in edits(before, tensors):
        described = copy.deepcopy(before)
        edit(described)
        if repr(described) == repr(before):
            continue
        put_together(path, tensors, described)
        said, found = goes_on(model, path)
        if said:
            assert str(path) in said
            assert any(part in said for part in (named, "is for", "is of method", "rows.")), (named, said)
            number += 1
        else:
            torch.testing.assert_close(
                found, expected, msg=lambda text, one=named, d=edit: f"{one} {d.__defaults__} {text}"
            )
        if len(edit.__defaults__ or ()) < 2 or edit.__defaults__[1] == "x":  # the digest has each field and its value
            save_file(tensors, path, {"foveate_cache": json.dumps(described | {"digest": saved._digest(before)})})
            refused(model, path)
    assert number > 90


@pytest.mark.full
@pytest.mark.parametrize("name", OF_OTHER_TENSORS)
def test_any_edited_tensor(name, tmp_path):
    model, path = written(tmp_path, name)
    tensors, described = taken_apart(path)
    alike = () if name in FAMILIES else ("0.", "2.")  # layers of layer 1's kind
    for name, tensor in tensors.items():
        if name.startswith(alike):
            continue
        odd = tensor.dim() and [
            tensor[..., :1],
            tensor[:1],
            tensor[None],
            tensor.flatten(),
            tensor.double(),
            tensor.float().bool(),
            tensor.repeat_interleave(2, 0),
        ]
        for other in odd or []:
            if other.shape == tensor.shape and other.dtype == tensor.dtype:
                continue
            put_together(path, tensors, described, {name: other.contiguous()})
            own = name.partition(".")[2]
            if own.startswith(("conv", "recurrent")):  # sizes that the checksums and the digest alone know
                continue
            refused(model, path, what=f"{name} {other.dtype} {other.shape}")
        put_together(path, {one: x for one, x in tensors.items() if one != name}, described, {})
        if name != "ids":
            refused(model, path, what=f"a cache without {name}")
    put_together(path, tensors, described, {"0.evil": torch.zeros(3)})
    refused(model, path, "evil")
    put_together(path, tensors, described, {"9.keys": torch.zeros(3)})
    refused(model, path, "9.keys")


OF_ANOTHER_DOCUMENT = ("keys", "values", "mass", "recent", "queries", "value_sum", "ids")
"""Tensors of which other numbers may be those of another document."""
SUMMARIES = ("summary_", "low", "high", "records", "channel_weights", "conv_states", "recurrent_states")
"""Tensors that follow from those: the digest alone tells whether they do."""


@pytest.mark.parametrize("name", SPECS)
def test_any_edited_number(name, tmp_path):
    """Slots, positions and the like say where a token is: one that is elsewhere is refused, or makes no difference."""
    model, path = written(tmp_path, name)
    (tensors, described), (_, expected) = taken_apart(path), goes_on(model, path)
    for which, tensor in tensors.items():
        if which.startswith(("0.", "2.", "3.")) or not tensor.dim():
            continue
        own, flat = which.partition(".")[2] or which, tensor.flatten()
        order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
        odd = [
            torch.cat([flat[:-1], flat.new_tensor([one])]) for one in (0, -1, 1, 100) if one >= 0 or flat.min() < 256
        ]
        odd += [flat[order], flat.roll(1), flat * 0, flat + 1]
        if tensor.is_floating_point():
            odd += [torch.cat([flat[:-1], flat.new_tensor([float("nan")])])]
        for other in odd:
            if torch.equal(other, flat):
                continue
            put_together(path, tensors, described, {which: other.view_as(tensor).contiguous()})
            if other.is_floating_point() and bool(other.isnan().any()):
                refused(model, path, what=f"{which} with NaN")
            elif own.startswith((*OF_ANOTHER_DOCUMENT, *SUMMARIES)):
                continue
            said, found = goes_on(model, path)
            assert not said or str(path) in said
            if not said:
                torch.testing.assert_close(found, expected, msg=which)


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
