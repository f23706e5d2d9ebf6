"""Whole models that read images: text prompts give Transformers' own tokens where a method leaves nothing out."""

import copy
import functools
from pathlib import Path

import pytest
import torch
import transformers

import foveate
from foveate import methods
from foveate.lab.recorded import record
from tests.helpers import cached, fingerprint, generate, left_padded, returned_cache, tokens
from tests.multimodal import IMAGE, IMAGES, WRAPPERS, with_image, wrapper

METHODS = ["luka", "kascade"]
"""A wrapper's text model is a family of tests/integrations/test_families.py, which has more."""


@functools.cache
def own(name):
    """Transformers' own tokens of a padded batch of text."""
    return generate(wrapper(name), **left_padded([40, 23]), new=10)


@pytest.mark.parametrize("name", WRAPPERS)
def test_tokens_are_those_of_transformers(name):
    model = wrapper(name)
    for method in METHODS:
        with foveate.attached(model, method, **methods.get(method).about.full_budget):
            assert torch.equal(generate(model, **left_padded([40, 23]), new=10), own(name)), method
            assert foveate.stats(model).summary()["keys_read_share"] >= 0.99
    assert len(own(name).unique()) > 5  # a model that repeats a token would show nothing


@pytest.mark.parametrize("name", WRAPPERS)
def test_nothing_remains_after_detach(name):
    model = wrapper(name)
    before = fingerprint(model)
    with foveate.attached(model, "dense"):
        pass
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "Gemma 3"])
def test_images(name):
    """They are read as tokens, which a small budget leaves out as any other."""
    model, given = wrapper(name), with_image(name)
    expected = generate(model, **given)
    changed = given | {"pixel_values": given["pixel_values"].flip(-1)}
    with torch.no_grad():
        assert not torch.allclose(model(**given).logits[:, -1], model(**changed).logits[:, -1], atol=1e-5)
    for method in METHODS:
        with foveate.attached(model, method, **methods.get(method).about.full_budget):
            assert torch.equal(generate(model, **given), expected), method
    with foveate.attached(model, "h2o", top_k=8, window=4):
        generate(model, **given)
        assert foveate.stats(model).summary()["keys_read_share"] < 0.4


@pytest.mark.parametrize("name", IMAGES)
def test_replayed_steps(name):
    model, given = wrapper(name), with_image(name) if name != "Gemma 3" else {"input_ids": tokens(40)}
    with foveate.attached(model, "h2o", top_k=8, window=4) as attachment:
        ordinary = generate(model, **given, new=16)
        attachment.graphs.recorder = record
        assert torch.equal(generate(model, **given, new=16), ordinary)
        used = foveate.stats(model).graphs
        reasons = ("a cache whose memory moves", "mm_token_type_ids changes its shape")  # the second until 5.17
        assert used.replayed >= 8 or any(reason in used.reason for reason in reasons), used.reason


@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3-VL", "GLM 4V"])
def test_rows_whose_positions_differ_are_reordered(name):
    """A row with an image beside one of text: the offsets of their positions go with the rows."""
    model, given = wrapper(name), with_image(name)
    text = tokens(40, seed=3).clamp(max=IMAGE - 1)
    kinds = torch.cat([given["mm_token_type_ids"], torch.zeros_like(text)])
    batch = given | {"input_ids": torch.cat([given["input_ids"], text]), "mm_token_type_ids": kinds}
    with foveate.attached(model, "dense"):
        cache, order, step = returned_cache(model(**batch)), torch.tensor([1, 0, 0]), tokens(1, 2, seed=5)
        assert cache.offsets[0].unique().numel() == 2
        twin = copy.deepcopy(cache)
        cache.reorder_cache(order)
        for _ in range(2):
            expected = model(step, **cached(twin)).logits[order]
            torch.testing.assert_close(model(step[order], **cached(cache)).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_small_budget_is_applied(name):
    with foveate.attached(wrapper(name), "h2o", top_k=8, window=4):
        generate(wrapper(name), tokens(60), new=10)
        assert foveate.stats(wrapper(name)).summary()["keys_read_share"] < 0.3


@torch.no_grad()
@pytest.mark.parametrize("name", WRAPPERS)
def test_logits_of_forward_passes(name):
    model, batch = wrapper(name), left_padded([40, 31])
    real, expected = batch["attention_mask"].bool(), model(**batch, use_cache=False).logits
    with foveate.attached(model, "dense"):
        for use_cache in (True, False):
            found = model(**batch, use_cache=use_cache).logits
            torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Gemma 3", "LLaVA"])  # Gemma 3 tells the sequences apart with a cache as well
def test_sequences_packed_into_one_row(name):
    model, given = wrapper(name), {"input_ids": tokens(24), "position_ids": torch.arange(24)[None] % 14}
    expected = model(**given, use_cache=False).logits
    with foveate.attached(model, "dense"):
        torch.testing.assert_close(model(**given, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="position_ids do not go on by one within a row"):
            model(**given)
        whole = {"input_ids": tokens(24), "position_ids": torch.arange(24)[None]}
        assert model(**whole).logits.shape == expected.shape


def row(name):
    """The model's line in docs/guide/models.md."""
    with foveate.attached(wrapper(name), "dense") as attachment:
        kinds = ", ".join(sorted(set(attachment.unchanged.values())))
    images = "refused" if name == "Gemma 3" else "yes" if name in IMAGES else "not tested"
    return f"| {name} | `{type(wrapper(name)).__name__}` | {kinds} | {images} |"


def test_the_documented_table():
    page = (Path(__file__).parents[2] / "docs" / "guide" / "models.md").read_text()
    assert [line for line in page.splitlines() if "ForConditionalGeneration` |" in line] == [*map(row, WRAPPERS)]


def test_a_causal_language_model_with_a_vision_part():
    """Of such a configuration ``AutoModelForCausalLM`` makes the whole model."""
    config = copy.deepcopy(wrapper("Gemma 3").config)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert type(model) is transformers.Gemma3ForConditionalGeneration
    with foveate.attached(model, "kascade", anchors=1, top_k=64):
        assert generate(model, tokens(40), 4).shape == (1, 4)


class TestTokensThatSeeEachOther:
    """Gemma 3: those of one image."""

    @pytest.mark.parametrize("lengths", [[40, 23], [7, 4]])  # the second within the sliding window
    def test_text_alone(self, lengths):
        model, batch = wrapper("Gemma 3"), left_padded(lengths)
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])  # as its processor gives them beside any text
        for rows in (slice(None), slice(1, None)):  # one row alone is broadcast where a mask of pairs is not
            given = {name: x[rows] for name, x in batch.items()}
            expected = generate(model, **given, new=10)
            with foveate.attached(model, "kascade", **methods.get("kascade").about.full_budget):
                assert torch.equal(generate(model, **given, new=10), expected)

    @pytest.mark.parametrize("method", ["dense", "kascade_paper:anchors=1"])
    def test_images_are_refused(self, method):
        model, given = wrapper("Gemma 3"), with_image("Gemma 3")
        assert generate(model, **given, new=4).shape == (1, 4)
        with foveate.attached(model, method), pytest.raises(ValueError, match="images whose tokens see later ones"):
            generate(model, **given, new=4)
