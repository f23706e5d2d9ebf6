"""Caches written to disk and read again: equal to caches that stayed in memory."""

import copy
import os

import pytest
import torch
from safetensors.torch import save_file

import foveate
from foveate.state.packing import pack
from tests.helpers import VOCAB, cached, full_disk, of_release, tiny_model
from tests.integrations.test_damaged_cache import put_together, taken_apart

METHODS = sorted({*foveate.methods.names()} - {"lte", "h2o_as_published"})
"""The first needs a file of learned scores, and the second takes no other turn."""


def small(name):
    return foveate.methods.make(name, **foveate.methods.get(name).about.small_budget)


def tokens(*shape, seed=1):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def filled(model, ids, **more):
    """A cache of a prompt and a few decoded tokens, and all of these."""
    out = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, do_sample=False, **more)
    return getattr(out, next(iter(cached(None)))), out.sequences


def goes_on(model, cache, ids, **more):
    new = tokens(len(ids), 5, seed=2)
    mask = more.get("attention_mask")
    if mask is not None:
        more["attention_mask"] = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] + 5 - mask.shape[1])], 1)
    ids = torch.cat([ids, new], 1)
    return model.generate(ids, max_new_tokens=6, do_sample=False, **cached(cache), **more)


@pytest.mark.parametrize("name", of_release(METHODS))
def test_a_cache_read_from_disk_goes_on_alike(name, tmp_path):
    model = tiny_model()
    foveate.attach(model, small(name))
    cache, ids = filled(model, tokens(2, 60))
    foveate.save_cache(model, cache, tmp_path / "cache.safetensors")
    again = foveate.load_cache(model, tmp_path / "cache.safetensors")
    for layer, known in zip(again.layers, cache.layers):
        (tensors, facts), (expected, wanted) = pack(layer.cache), pack(known.cache)
        assert facts == wanted
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert foveate.stats(model).cache_peak_bytes == foveate.stats(model).resident_bytes > 0
    assert torch.equal(goes_on(model, again, ids), goes_on(model, copy.deepcopy(cache), ids))
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


@pytest.mark.parametrize("name", ["dense", "kascade", "h2o", "luka"])
def test_padded_prompts(name, tmp_path):
    model = tiny_model()
    method = small(name)
    foveate.attach(model, method)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :23] = 0
    ids = tokens(2, 60).masked_fill(mask == 0, 0)
    cache, ids = filled(model, ids, attention_mask=mask)
    foveate.save_cache(model, cache, tmp_path / "cache.safetensors")
    again = foveate.load_cache(model, tmp_path / "cache.safetensors")
    expected = goes_on(model, copy.deepcopy(cache), ids, attention_mask=mask)
    assert torch.equal(goes_on(model, again, ids, attention_mask=mask), expected)


def test_another_process_attaches_anew(tmp_path):
    model = tiny_model()
    foveate.attach(model, small("quest"))
    cache, ids = filled(model, tokens(1, 60))
    foveate.save_cache(model, cache, tmp_path / "cache.safetensors")
    expected = goes_on(model, cache, ids)
    other = tiny_model()
    foveate.attach(other, small("quest"))
    assert torch.equal(goes_on(other, foveate.load_cache(other, tmp_path / "cache.safetensors"), ids), expected)


def test_what_is_refused(tmp_path):
    model, path = tiny_model(), tmp_path / "cache.safetensors"
    with pytest.raises(ValueError, match="not attached"):
        foveate.load_cache(model, path)
    foveate.attach(model, small("quest"))
    with pytest.raises(ValueError, match="no such file"):
        foveate.load_cache(model, path)
    with pytest.raises(ValueError, match="empty"):
        foveate.save_cache(model, foveate.Cache(model), path)
    cache, _ = filled(model, tokens(1, 60))
    foveate.save_cache(model, cache, path)

    foveate.attach(model, small("h2o"))
    with pytest.raises(ValueError, match=r"of method quest.* in layer 0, and the model has h2o"):
        foveate.load_cache(model, path)
    with pytest.raises(ValueError, match="another model, or before"):
        foveate.save_cache(model, cache, path)
    other = tiny_model(seed=1)
    foveate.attach(other, small("quest"))
    with pytest.raises(ValueError, match="its weights differ"):
        foveate.load_cache(other, path)
    half = tiny_model().bfloat16()
    foveate.attach(half, small("quest"))
    with pytest.raises(ValueError, match="its weights differ in value or type"):
        foveate.load_cache(half, path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        foveate.load_cache(other, path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not a cache of foveate"):
        foveate.load_cache(other, path)


def test_files(tmp_path, monkeypatch):
    """Of the kind that the package's one writer of files takes, whose own tests are elsewhere."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tiny_model()
    foveate.attach(model, "dense")
    cache, _ = filled(model, tokens(1, 60))
    before = os.umask(0o027)
    try:
        foveate.save_cache(model, cache, "~/new/deep/cache")
    finally:
        os.umask(before)
    path = tmp_path / "new" / "deep" / "cache"
    assert path.stat().st_mode & 0o777 == 0o640
    assert foveate.load_cache(model, "~/new/deep/cache").get_seq_length() == 63
    kept = path.read_bytes()
    with full_disk(1000), pytest.raises(ValueError, match=f"^{path}: cannot be written to .*File too large"):
        foveate.save_cache(model, cache, path)
    assert path.read_bytes() == kept
    assert [one.name for one in path.parent.iterdir()] == ["cache"]
    os.mkfifo(tmp_path / "pipe")
    for odd, why in [(tmp_path, "is a folder"), (tmp_path / "pipe", "is a device"), (path / "x", "is no folder")]:
        with pytest.raises(ValueError, match=why):
            foveate.save_cache(model, cache, odd)
    for odd, why in [(tmp_path, "is a folder"), (tmp_path / "pipe", "is a device"), ("/dev/zero", "is a device")]:
        with pytest.raises(ValueError, match=why):
            foveate.load_cache(model, odd)
    with pytest.raises(ValueError, match="path must be the path of a file, not None"):
        foveate.save_cache(model, cache, None)
    with pytest.raises(ValueError, match=r"must be a foveate\.Cache, not a int"):
        foveate.save_cache(model, 3, path)


def test_a_cache_in_the_making_cannot_be_saved(tmp_path):
    model = tiny_model()
    foveate.attach(model, "h2o")
    cache, _ = filled(model, tokens(1, 60))
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="can be undone"):
        foveate.save_cache(model, cache, tmp_path / "cache")


@pytest.mark.parametrize("prompt_length", [None, 60])
def test_a_prompt_end_that_was_guessed_stays_so(prompt_length, tmp_path):
    model, ids = tiny_model(), tokens(2, 60)
    attachment = foveate.attach(model, small("h2o"))
    cache = foveate.Cache(model, prompt_length)
    with torch.no_grad():
        model(ids, **cached(cache))
        foveate.save_cache(model, cache, tmp_path / "cache")
        again = foveate.load_cache(model, tmp_path / "cache")
        for name in ("prompt_end", "prompt_end_known", "prompt_end_guessed"):
            assert getattr(again.phase, name) == getattr(cache.phase, name), name
        assert attachment.cache is again
        mask = torch.ones(2, 61)
        mask[0, -1] = 0
        with pytest.raises(ValueError, match="marks padding after the prompt"):
            model(ids[:, :1], attention_mask=mask, **cached(again))


def test_a_refused_file_is_not_what_stats_reports(tmp_path):
    model, path = tiny_model(), tmp_path / "cache"
    attachment = foveate.attach(model, small("h2o"))
    cache, _ = filled(model, tokens(1, 60))
    before = str(foveate.stats(model))
    foveate.save_cache(model, cache, path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not that of its checksum"):
        foveate.load_cache(model, path)
    assert attachment.cache is cache
    assert str(foveate.stats(model)) == before


def test_a_file_that_is_refused_late_changes_no_counter(tmp_path):
    model, path = tiny_model(), tmp_path / "cache"
    foveate.attach(model, small("h2o"))
    cache, _ = filled(model, tokens(1, 60))
    foveate.save_cache(model, cache, path)
    filled(model, tokens(3, 200))
    before = foveate.stats(model).summary()
    tensors, described = taken_apart(path)
    put_together(path, tensors, described, {"offsets.0": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"tensor offsets\.0 is not known"):
        foveate.load_cache(model, path)
    assert foveate.stats(model).summary() == before
    foveate.save_cache(model, cache, path)
    again = foveate.load_cache(model, path)
    assert foveate.stats(model).summary()["resident_bytes"] == again.resident_bytes < before["resident_bytes"]


def test_a_cache_gives_the_same_bytes(tmp_path):
    model = tiny_model()
    foveate.attach(model, "dense")
    cache, _ = filled(model, tokens(1, 60))
    for number in range(8):
        foveate.save_cache(model, cache, tmp_path / f"{number}")
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_parts_that_keep_one_tensor(tmp_path):
    model, path = tiny_model(), tmp_path / "cache"
    attachment = foveate.attach(model, "dense")
    cache, _ = filled(model, tokens(1, 60))
    attachment.keepers = [torch.nn.Module(), torch.nn.Module()]
    cache.offsets = [torch.tensor([[3]])] * 2
    foveate.save_cache(model, cache, path)
    assert foveate.load_cache(model, path).offsets == cache.offsets


def test_names_of_any_bytes(tmp_path):
    model, ids = tiny_model(), tokens(1, 20)
    path = tmp_path / os.fsdecode(b"\xff.safetensors")
    with foveate.attached(model, "h2o:top_k=9,window=3", cuda_graph=False):
        cache = foveate.Cache(model)
        model(ids, cache=cache)
        foveate.save_cache(model, cache, path)
        loaded = foveate.load_cache(model, path)
    assert loaded.get_seq_length() == 20
