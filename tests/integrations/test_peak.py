"""The most bytes that a cache holds while its prompt is read, which eviction in parts bounds."""

import pytest
import torch

import foveate
from foveate import methods
from tests.helpers import cached, generate, left_padded, tiny_model, tokens

CHUNK = 32
LAYERS = 3
SLOT = 2 * (16 + 16) * 4
"""Bytes of a token's keys and values in a layer: two KV heads of 16, fp32."""
WHOLE = [name for name in methods.names() if methods.get(name).evicts and methods.get(name).needs_prompt_end]
"""Methods that evict when a prompt ends, unless they are told to do it earlier."""


pytestmark = pytest.mark.usefixtures("little_room")


def peak_of(spec: str, length: int, chunk: int | None = CHUNK) -> tuple[int, int, torch.Tensor]:
    """The peak of the cache, what stays of it, and the tokens that are generated."""
    model = tiny_model()
    with foveate.attached(model, spec):
        out = generate(model, tokens(length), new=4, prefill_chunk_size=chunk)
        found = foveate.stats(model)
    assert found.cache_peak_bytes >= found.resident_bytes > 0
    return found.cache_peak_bytes, found.resident_bytes, out


@pytest.mark.parametrize(
    "spec",
    [
        "streaming:sinks=2,window=20",
        f"lte:score=key_norm,top_k=20,window=13,evict_every={CHUNK}",
        f"h2o:top_k=12,window=8,evict_every={CHUNK}",
        f"tova:top_k=20,min_k=1,evict_every={CHUNK}",
        f"uniform:top_k=12,window=8,evict_every={CHUNK}",
        f"snapkv:top_k=12,window=8,evict_every={CHUNK}",
    ],
)
def test_a_budget_in_tokens_bounds_the_peak_of_any_number_of_chunks(spec):
    """Twenty tokens stay, or 22, and one layer at a time holds a chunk beside them."""
    peak, kept, out = peak_of(spec, 4 * CHUNK)
    for chunks in (8, 14):
        more, stays, _ = peak_of(spec, chunks * CHUNK)
        assert more == peak
        assert stays == kept
    assert peak <= kept + (CHUNK + 8) * (SLOT + 4 * 2 * 2)
    assert peak_of("dense", 14 * CHUNK)[0] > 5 * kept
    if not spec.startswith("streaming"):  # which holds what a pass brings
        assert peak_of(spec, 4 * CHUNK, None)[0] == peak
    assert torch.equal(peak_of(spec, 4 * CHUNK, None)[2], out)
    assert torch.equal(peak_of(spec, 4 * CHUNK, 7)[2], out)


@pytest.mark.parametrize("name", ["uniform:top_k=0.25,window=8", "lte:score=key_norm,top_k=0.25,window=13,sinks=2"])
def test_a_share_bounds_the_peak_by_what_stays_and_a_chunk(name):
    length = 14 * CHUNK
    peak, kept, out = peak_of(f"{name},evict_every={CHUNK}", length)
    dense = peak_of("dense", length)[0]
    assert peak <= kept + (CHUNK + 8) * (SLOT + 4 * 2 * 2) < 0.4 * dense
    assert torch.equal(peak_of(f"{name},evict_every={CHUNK}", length, None)[2], out)
    assert torch.equal(peak_of(f"{name},evict_every={CHUNK}", length, 50)[2], out)


@pytest.mark.parametrize("name", WHOLE)
def test_whoever_waits_for_the_end_holds_the_prompt_until_then(name):
    """In chunks nearly all of it in all layers, in one piece all of it in one layer at a time."""
    spec = methods.make(name, **methods.get(name).about.small_budget).spec
    length = 14 * CHUNK
    dense, waits = peak_of("dense", length)[0], peak_of(spec, length)
    assert 0.9 * dense < waits[0] < 1.5 * dense  # keys and values, and what the method learns
    assert waits[1] < 0.4 * dense
    assert peak_of(spec, length, None)[0] < 0.6 * waits[0]


def test_the_peak_of_chunks_by_hand():
    """Before the last chunk three layers hold four; then the first holds five, and gives four back before the next."""
    model, length = tiny_model(), 5 * CHUNK
    entry = SLOT + 2 * 4 * 2  # a position and a score in each KV head
    room = {n: n + 16 for n in (CHUNK, 4 * CHUNK, 5 * CHUNK)}  # slots allocated for so many tokens
    with foveate.attached(model, f"tova:top_k={CHUNK},min_k=1"):
        cache, ids, held = foveate.Cache(model, prompt_length=length), tokens(length), []
        with torch.inference_mode():
            for part in ids.split(CHUNK, 1):
                model(part, **cached(cache))
                held.append(cache.resident_bytes)
        assert held[-2:] == [LAYERS * room[4 * CHUNK] * entry, LAYERS * room[CHUNK] * entry]
        assert foveate.stats(model).cache_peak_bytes == (room[5 * CHUNK] + 2 * room[4 * CHUNK]) * entry


def test_a_peak_is_of_one_cache_and_counted_from_its_beginning():
    model = tiny_model()
    with foveate.attached(model, "tova:top_k=8,min_k=1"):
        assert foveate.stats(model).cache_peak_bytes == 0
        generate(model, tokens(400))
        long = foveate.stats(model, reset=True).cache_peak_bytes
        assert foveate.stats(model).cache_peak_bytes == long
        generate(model, tokens(40))
        short = foveate.stats(model).cache_peak_bytes
        assert 0 < short < long / 3
        cache = foveate.Cache(model)
        generate(model, tokens(400), **cached(cache))
        cache.reset()
        generate(model, tokens(40), **cached(cache))
        assert foveate.stats(model).cache_peak_bytes == short


def test_a_printed_peak():
    model = tiny_model()
    with foveate.attached(model, "tova:top_k=8,min_k=1"):
        generate(model, tokens(400))
        found = foveate.stats(model)
    assert f"{found.resident_bytes / 1e6:.1f} MB resident ({found.cache_peak_bytes / 1e6:.1f} MB at the peak)" in str(
        found
    )


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_is_not_kept_is_read_alike(family):
    model, batch = tiny_model(family), left_padded([60, 25, 41])
    with foveate.attached(model, "h2o:top_k=8,window=8,evict_every=20"):
        real = batch["attention_mask"].bool()
        found = [model(**batch, use_cache=kept).logits[real] for kept in (False, True)]
    torch.testing.assert_close(*found)
    assert float((found[0] - model(**batch).logits[real]).abs().max()) > 0.1


def test_gradients_do_not_flow_through_a_prompt_that_evicts():
    model, ids = tiny_model(), tokens(60)
    with foveate.attached(model, "h2o:top_k=8,window=8,evict_every=20"):
        out = model(ids).logits
        with torch.no_grad():
            torch.testing.assert_close(out, model(ids).logits)
        with pytest.raises(RuntimeError, match="gradients do not flow"):
            out.sum().backward()
        with pytest.raises(ValueError, match=r"h2o:.*evict_every=20 evicts while 60 tokens .* at the end of a prompt"):
            model(ids, use_cache=False)
        model(ids[:, :20], use_cache=False).logits.sum().backward()
