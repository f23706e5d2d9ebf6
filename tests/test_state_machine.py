"""A few of the sequences that `python -m tests.state_machine` draws, always the same; and those that once disagreed."""

import copy

import pytest
import torch

import foveate
from tests import state_machine
from tests.helpers import cached, left_padded, of_release, tiny_model, tokens
from tests.selection import ONE_OF_A_KIND


@pytest.mark.parametrize("name", of_release(state_machine.NAMES))
def test_caches_equal_their_history_or_are_refused(name):
    state_machine.run(name, examples=6 if name in ONE_OF_A_KIND else 3)


@torch.no_grad()
def test_a_prompt_that_was_cropped_is_saved(tmp_path):
    model, ids = tiny_model(), tokens(20)
    foveate.attach(model, "dense")
    cache = foveate.Cache(model, 20)
    model(ids, **cached(cache))
    cache.crop(-4)
    foveate.save_cache(model, cache, tmp_path / "cache")
    again, fresh = foveate.load_cache(model, tmp_path / "cache"), foveate.Cache(model, 16)
    model(ids[:, :16], **cached(fresh))
    step = tokens(1, seed=3)
    torch.testing.assert_close(model(step, **cached(again)).logits, model(step, **cached(fresh)).logits)


@pytest.mark.parametrize("lengths", [[20, 20], [20, 12]])
@pytest.mark.parametrize("spec", ["dense", "pages:page_size=4,top_k=12"])
@torch.no_grad()
def test_a_crop_within_a_prompt_with_padding_is_refused(spec, lengths):
    """Of rows that are alike, too: a column removed there may be padding or a token."""
    model = tiny_model()
    foveate.attach(model, spec)
    batch = {name: torch.nn.functional.pad(x, (2, 0)) for name, x in left_padded(lengths).items()}
    cache = foveate.Cache(model, 22)
    model(**batch, **cached(cache))
    for _ in range(3):
        model(tokens(1, 2), **cached(cache))
    with pytest.raises(ValueError, match="a padded prompt cannot be cropped"):
        cache.crop(-4)
    cache.crop(-3)
    assert cache.get_seq_length() == 22


@pytest.mark.parametrize("name", ["h2o", "snapkv", "luka", "quest"])
@torch.no_grad()
def test_a_crop_to_within_a_prompt_that_has_ended(name):
    """Recording began there: what is done when a prompt ends is not done then."""
    model, ids = copy.deepcopy(state_machine.built()), torch.randint(3, state_machine.VOCAB, (1, 60))
    foveate.attach(model, state_machine.spec_of(name))
    cache = foveate.Cache(model, 40)
    model(ids[:, :30], **cached(cache))
    cache.activate_past_recording()
    model(ids[:, 30:40], **cached(cache))
    model(ids[:, 40:41], **cached(cache))
    if name == "quest":  # its state at the end of a prompt is that of the tokens
        cache.crop(-11)
    else:
        with pytest.raises(ValueError, match=f"of 41 tokens, the {name} method can return to .* that is to 40, 41 of"):
            cache.crop(-11)
        cache.crop(-1)
    fresh, held = foveate.Cache(model), cache.get_seq_length()
    model(ids[:, :held], **cached(fresh))
    for at in range(held, held + 3):
        step = ids[:, at : at + 1]
        torch.testing.assert_close(model(step, **cached(cache)).logits, model(step, **cached(fresh)).logits)


@torch.no_grad()
def test_a_crop_to_an_earlier_turn_ends_the_prompt_there(tmp_path):
    """So that the cache, and a file of it, says how many tokens were decoded since."""
    model, ids = copy.deepcopy(state_machine.built()), torch.randint(3, state_machine.VOCAB, (1, 60))
    foveate.attach(model, state_machine.spec_of("h2o"))
    cache = foveate.Cache(model, 20)
    cache.activate_past_recording()
    model(ids[:, :20], **cached(cache))
    for at in range(20, 24):
        model(ids[:, at : at + 1], **cached(cache))
    cache.begin(40, assistant=False)
    model(ids[:, 24:40], **cached(cache))
    cache.crop(-18)
    assert (cache.get_seq_length(), cache.phase.prompt_end) == (22, 20)
    for layer in cache.layers:
        layer.stop_recording_past()
    foveate.save_cache(model, cache, tmp_path / "cache")
    again, step = foveate.load_cache(model, tmp_path / "cache"), ids[:, 50:51]
    torch.testing.assert_close(model(step, **cached(again)).logits, model(step, **cached(cache)).logits)


@torch.no_grad()
def test_a_call_of_generate_that_reads_nothing_leaves_no_prompt_to_come(monkeypatch):
    model, ids = copy.deepcopy(state_machine.built()), torch.randint(3, state_machine.VOCAB, (1, 60))
    foveate.attach(model, state_machine.spec_of("lessismore"))
    caches = [foveate.Cache(model, 40) for _ in range(2)]
    for cache in caches:
        model(ids[:, :40], **cached(cache))
    with monkeypatch.context() as stopped:
        stopped.setattr(model.model.embed_tokens, "forward", lambda ids: (_ for _ in ()).throw(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            model.generate(ids[:, :50], max_new_tokens=2, **cached(caches[0]))
    with pytest.raises(ValueError, match="the cache has read other tokens"):
        model.generate(ids.flip(1), max_new_tokens=2, **cached(caches[0]))
    assert caches[0].phase.prompt_end == 40
    for at in range(40, 50):
        one, other = (model(ids[:, at : at + 1], **cached(cache)).logits for cache in caches)
        torch.testing.assert_close(one, other)
