"""Padding in forward passes by hand: each row as if it were alone, or refused."""

import copy

import pytest
import torch

import foveate
from foveate import methods
from foveate.integrations.transformers import padding
from tests.families import FAMILIES, RECURRENT, family
from tests.helpers import LargestTensor, cached, cut_rows, generate, left_padded, tiny_model, tokens

SLIDING = [name for name, (_, settings) in FAMILIES.items() if "layer_types" in settings and name not in RECURRENT]
SLIDING += ["Llama 4"]  # by chunks
PLAIN = ["Llama", "Qwen3", "Phi 3", "Cohere"]
LENGTHS, ASKED = [30, 17, 24], [4, 9, 2]


def spec(name):
    return methods.make(name, **methods.get(name).about.small_budget).spec


def mask_of(batch, *more):
    """The mask of everything so far: a batch, and the columns after it."""
    return torch.cat([batch["attention_mask"], *more], 1)


def ones(rows, columns):
    return torch.ones(rows, columns, dtype=torch.long)


@torch.no_grad()
def alone(model, batch, *later):
    """Logits of the last token of each later part, row by row."""
    found = []
    for row, ids in enumerate(cut_rows(batch)):
        cache, outs = foveate.Cache(model, ids.shape[1]), []
        for part in (ids, *(one[row] for one in later)):
            outs.append(model(part, **cached(cache)).logits[0, -1])
        found.append(torch.stack(outs))
    return torch.stack(found)


@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("name", [*PLAIN, *SLIDING, *RECURRENT])
@torch.no_grad()
def test_a_batch_read_by_hand_without_positions(name, with_mask):
    """And steps after it, which may be given no mask: the cache knows where the padding is."""
    model, batch = copy.deepcopy(family(name)), left_padded(LENGTHS)
    foveate.attach(model, "dense")
    steps = [tokens(1, 3, seed=n) for n in range(4)]
    expected = alone(model, batch, *([one[None] for one in step] for step in steps))
    cache = foveate.Cache(model, max(LENGTHS))
    outs = [model(**batch, **cached(cache)).logits[:, -1]]
    for number, step in enumerate(steps, 1):
        given = {"attention_mask": mask_of(batch, ones(3, number))}
        if not with_mask and name not in SLIDING:  # whose layers know of padding by the mask alone
            given = {}
        outs.append(model(step, **given, **cached(cache)).logits[:, -1])
    torch.testing.assert_close(torch.stack(outs, 1), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", ["dense", "h2o", "quest", "streaming", "kascade_paper"])
@torch.no_grad()
def test_what_was_read_by_hand_goes_on_in_generate(method):
    """Whose positions do not count padding either."""
    model, batch = tiny_model(), left_padded(LENGTHS)
    foveate.attach(model, spec(method))
    cache = foveate.Cache(model)
    model(**batch, **cached(cache))
    ids = torch.cat([batch["input_ids"], tokens(5, 3, seed=9)], 1)
    together = generate(model, ids, attention_mask=mask_of(batch, ones(3, 5)), **cached(cache))
    for row, ids in enumerate(cut_rows(batch)):
        cache = foveate.Cache(model)
        model(ids, **cached(cache))
        ids = torch.cat([ids, tokens(5, 3, seed=9)[row : row + 1]], 1)
        assert torch.equal(generate(model, ids, **cached(cache)), together[row : row + 1])


@pytest.mark.parametrize("name", PLAIN)
@torch.no_grad()
def test_questions_of_unequal_length_on_one_document(name):
    model, asked = copy.deepcopy(family(name)), left_padded(ASKED, seed=20)
    foveate.attach(model, "dense")
    cache, ids = foveate.Cache(model, 30), tokens(30)
    model(ids, **cached(cache))
    single = [copy.deepcopy(cache) for _ in ASKED]
    cache.batch_repeat_interleave(3)
    cache.phase.prompt_end = 30 + max(ASKED)
    mask = torch.cat([ones(3, 30), asked["attention_mask"]], 1)
    out = model(asked["input_ids"], attention_mask=mask, **cached(cache)).logits[:, -1]
    expected = torch.cat([model(one, **cached(kept)).logits[:, -1] for one, kept in zip(cut_rows(asked), single)])
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", [*SLIDING, *(name for name in RECURRENT if name != "Jamba")])
@torch.no_grad()
def test_questions_on_one_document_where_layers_take_padding_for_tokens(name):
    """Those of one length are answered as alone, others refused, by hand and in `generate`."""
    model, asked = copy.deepcopy(family(name)), left_padded(ASKED, seed=20)
    foveate.attach(model, "dense")
    cache, ids = foveate.Cache(model, 40), tokens(30)
    model(ids, **cached(cache))
    single = copy.deepcopy(cache)
    cache.batch_repeat_interleave(3)
    mask, kind = torch.cat([ones(3, 30), asked["attention_mask"]], 1), "recurrent" if name in RECURRENT else "sliding"
    refused = pytest.raises(ValueError, match=rf"row 0 of attention_mask has padding .* which {kind}.* one by one")
    with refused:
        model(asked["input_ids"], attention_mask=mask, **cached(cache))
    whole = torch.cat([ids.expand(3, -1), asked["input_ids"]], 1)
    with refused:
        model.generate(whole, attention_mask=mask, max_new_tokens=2, **cached(copy.deepcopy(cache)))
    with refused:
        model.generate(whole, attention_mask=mask, max_new_tokens=2)
    same = tokens(5, 3, seed=3)
    out = model(same, **cached(cache)).logits
    each = torch.cat([model(one[None], **cached(copy.deepcopy(single))).logits for one in same])
    torch.testing.assert_close(out, each, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_padding_on_the_right_by_hand():
    """Logits of real tokens are right; of recurrent layers nothing can follow."""
    batch = {name: x.flip(1) for name, x in left_padded(LENGTHS).items()}
    for name in ("Llama", "Bamba"):
        model = copy.deepcopy(family(name))
        foveate.attach(model, "dense")
        cache = foveate.Cache(model, max(LENGTHS))
        out = model(**batch, **cached(cache)).logits
        for row, ids in enumerate(cut_rows(batch)):
            torch.testing.assert_close(out[row : row + 1, : ids.shape[1]], model(ids).logits, atol=1e-3, rtol=1e-3)
        given = {"attention_mask": mask_of(batch, ones(3, 1)), **cached(cache)}
        if name == "Bamba":
            with pytest.raises(ValueError, match="row 1 of attention_mask has padding between its tokens"):
                model(tokens(1, 3), **given)
            continue
        expected = alone(model, batch, [one[None] for one in tokens(1, 3)])[:, -1]
        torch.testing.assert_close(model(tokens(1, 3), **given).logits[:, -1], expected, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_positions_that_count_padding_are_refused():
    model, batch = tiny_model(), left_padded(LENGTHS)
    foveate.attach(model, "dense")
    columns = torch.arange(30).expand(3, -1)
    with pytest.raises(ValueError, match=r"position_ids count the padding of row 1: leave them out, or pass .*cumsum"):
        model(**batch, position_ids=columns, use_cache=True)
    counted = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    given = model(**batch, position_ids=counted, use_cache=True).logits
    assert torch.equal(given, model(**batch, use_cache=True).logits)
    with pytest.raises(ValueError, match="row 0"):
        model(tokens(7, 1), attention_mask=ones(1, 7) - torch.eye(7).long()[:1], position_ids=torch.arange(7)[None])
    model(tokens(7, 2), attention_mask=ones(2, 7), position_ids=torch.arange(7).expand(2, -1))


@pytest.mark.parametrize("method", ["dense", "h2o"])
@torch.no_grad()
def test_a_mask_that_contradicts_what_was_read_is_refused(method):
    """As where a row has ended early, and its padding is masked in the next turn, having been read as tokens."""
    model, batch = tiny_model(), left_padded(LENGTHS)
    foveate.attach(model, spec(method))
    out = model.generate(**batch, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    cache = getattr(out, next(iter(cached(None))))
    ids, mask = torch.cat([out.sequences, tokens(4, 3)], 1), mask_of(batch, ones(3, 10))
    generate(model, ids, attention_mask=mask, **cached(copy.deepcopy(cache)))
    for row, column, there in ((1, 33, 0), (2, 0, 1)):
        other = mask.clone()
        other[row, column] = there
        with pytest.raises(ValueError, match=rf"real tokens in the first 35 columns of row {row}, and the cache has"):
            model.generate(ids, attention_mask=other, max_new_tokens=2, **cached(copy.deepcopy(cache)))


@torch.no_grad()
def test_a_step_of_generate_makes_no_tensor_of_its_mask():
    model, batch = tiny_model(), left_padded([30, 17])
    foveate.attach(model, "dense")
    cache = foveate.Cache(model)
    generate(model, **batch, new=3, **cached(cache))
    mask = torch.ones(2, cache.get_seq_length() + 1, dtype=torch.long)
    given = {"attention_mask": mask, "position_ids": torch.full((2, 1), 40)}
    with LargestTensor() as made:
        padding.check(given, cache)
        padding.place(model.model, given, cache, 1, mask.device)
    assert not made.bytes, made.what
