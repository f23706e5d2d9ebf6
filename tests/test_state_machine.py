"""A few of the sequences that `python -m tests.state_machine` draws, always the same; and those that once disagreed."""

import pytest
import torch

import foveate
from tests import state_machine
from tests.helpers import cached, left_padded, tiny_model, tokens


@pytest.mark.parametrize("name", state_machine.NAMES)
def test_caches_equal_their_history_or_are_refused(name):
    state_machine.run(name, examples=6)


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
