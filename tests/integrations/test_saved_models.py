"""Caches on disk, of models of every kind: right for the model that filled them, refused for any other."""

import copy

import peft
import pytest
import torch

import foveate
from foveate.integrations.transformers.digests import digests, weights_digest
from foveate.integrations.transformers.support import forgets
from tests.combinations import in_turn
from tests.families import FAMILIES, RECURRENT, family
from tests.helpers import cached, generate, left_padded, tiny_model, tokens
from tests.multimodal import IMAGES, with_image, wrapper

SLIDING = [name for name, (_, settings) in FAMILIES.items() if "layer_types" in settings and name not in RECURRENT]
ROTATED = [name for name, (_, given) in IMAGES.items() if "image_grid_thw" in given]
SPEC = "pages:top_k=12,page_size=4"
GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def read(model, input_ids, **given):
    cache = foveate.Cache(model)
    with torch.no_grad():
        model(input_ids, **given, **cached(cache))
    return cache


@in_turn(("name", [*SLIDING, *RECURRENT]), ("batch", [1, 2]))
def test_layers_without_a_method_are_kept(name, batch, tmp_path):
    assert len(SLIDING) >= 6
    model, ids = copy.deepcopy(family(name)), tokens(60, batch)
    foveate.attach(model, SPEC)
    cache = read(model, ids[:, : 59 if forgets(model) else 50])
    foveate.save_cache(model, cache, tmp_path / "cache")
    other = copy.deepcopy(family(name))
    foveate.attach(other, SPEC)
    again = foveate.load_cache(other, tmp_path / "cache")
    expected = model.generate(ids, **GREEDY, **cached(cache))
    assert torch.equal(other.generate(ids, **GREEDY, **cached(again)), expected)
    assert again.batch_size == batch


def part(model, name, scale=0.05):
    """Change all parameters of a name."""
    changed = [one for parameter, one in model.named_parameters() if name in parameter]
    assert changed
    with torch.no_grad():
        for one in changed:
            one.add_(scale * torch.randn(one.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", ["embed", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "norm", "lm_head"])
def test_a_cache_of_other_weights_is_refused(name, tmp_path):
    model, other = tiny_model(), tiny_model()
    part(other, name)
    foveate.attach(model, SPEC)
    foveate.attach(other, SPEC)
    foveate.save_cache(model, read(model, tokens(40)), tmp_path / "cache")
    with pytest.raises(ValueError, match="its weights differ"):
        foveate.load_cache(other, tmp_path / "cache")
    foveate.load_cache(model, tmp_path / "cache")
    part(model, name)  # in place
    with pytest.raises(ValueError, match="its weights differ"):
        foveate.load_cache(model, tmp_path / "cache")


@pytest.mark.parametrize("inference", [False, True])
def test_weights_written_to_where_autograd_does_not_see_it(inference, tmp_path):
    with torch.inference_mode(inference):
        model, path = tiny_model(), tmp_path / "cache"
        foveate.attach(model, SPEC)
        foveate.save_cache(model, read(model, tokens(40)), path)
        foveate.load_cache(model, path)
        weight = model.model.layers[1].self_attn.v_proj.weight
        version = None if inference else weight._version
        weight.data.add_(0.01)
        assert inference or weight._version == version
        with pytest.raises(ValueError, match="its weights differ"):
            foveate.load_cache(model, path)


def test_a_merged_adapter(tmp_path):
    """Merging changes the weights of the plain model in place."""
    model, path = adapted(["v_proj"]), tmp_path / "cache"
    foveate.attach(model, SPEC)
    with model.disable_adapter():
        foveate.save_cache(model, read(model, tokens(40)), path)
        foveate.load_cache(model, path)
    model.merge_adapter()
    with pytest.raises(ValueError, match="its weights differ"):
        foveate.load_cache(model, path)
    foveate.save_cache(model, read(model, tokens(40)), path)
    foveate.load_cache(model, path)
    model.unmerge_adapter()
    with model.disable_adapter(), pytest.raises(ValueError, match="its weights differ"):
        foveate.load_cache(model, path)


def test_a_cache_of_other_rotary_positions_is_refused(tmp_path):
    """They are no weights: the configuration has them."""
    model, path = tiny_model(), tmp_path / "cache"
    other = type(model)(copy.deepcopy(model.config)).eval()
    other.load_state_dict(model.state_dict())
    foveate.attach(model, SPEC)
    foveate.save_cache(model, read(model, tokens(40)), path)
    foveate.attach(other, SPEC)
    assert foveate.load_cache(other, path).get_seq_length() == 40
    foveate.detach(other)
    other.config.rope_parameters = other.config.rope_parameters | {"rope_theta": 5e5}
    foveate.attach(other, SPEC)
    with pytest.raises(ValueError, match=r"is for other rotary positions than the model's; read the prompt again"):
        foveate.load_cache(other, path)


@pytest.mark.parametrize("spec", ["h2o:top_k=12,window=4", "snapkv:top_k=8,window=4,kernel_size=3", SPEC])
@pytest.mark.parametrize(("length", "first"), [(40, [40, 1, 1]), (60, [20, 20]), (40, [30])])
def test_the_end_of_the_prompt_is_kept(spec, length, first, tmp_path):
    """Of one that is not yet read, and of one that is: later tokens are decoded, however many come at once."""
    model, ids = tiny_model(), tokens(64)
    foveate.attach(model, spec)
    cache = foveate.Cache(model, prompt_length=length)
    with torch.no_grad():
        for part in ids[:, : sum(first)].split(first, 1):
            model(part, **cached(cache))
        foveate.save_cache(model, cache, tmp_path / "cache")
        again = foveate.load_cache(model, tmp_path / "cache")
        for one in ids[:, sum(first) :].split([8] + [1] * (56 - sum(first)), 1):
            expected = model(one, **cached(cache)).logits
            assert torch.equal(model(one, **cached(again)).logits, expected)


def adapted(targets, seed=1, **names):
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=targets, lora_alpha=64), **names)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.copy_(torch.randn(one.shape, generator=generator) * 0.2)
    return model.eval()


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["v_proj"], ["down_proj"], "all-linear"])
def test_adapters(targets, tmp_path):
    model, path = adapted(targets), tmp_path / "cache"
    foveate.attach(model, SPEC)
    ids = tokens(60)
    foveate.save_cache(model, read(model, ids[:, :50]), path)
    expected = model.generate(input_ids=ids, **GREEDY)
    assert torch.equal(model.generate(input_ids=ids, **GREEDY, **cached(foveate.load_cache(model, path))), expected)
    with model.disable_adapter(), pytest.raises(ValueError, match="other adapters: its weights differ"):
        foveate.load_cache(model, path)
    other = adapted(targets, seed=2)
    foveate.attach(other, SPEC)
    with pytest.raises(ValueError, match="its weights differ"):
        foveate.load_cache(other, path)
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=targets))  # not active
    foveate.load_cache(model, path)
    model.set_adapter("other")
    with pytest.raises(ValueError, match="its weights differ"):
        foveate.load_cache(model, path)
    model.set_adapter("default")
    foveate.load_cache(model, path)
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(0.5)
    with pytest.raises(ValueError, match="its weights differ"):
        foveate.load_cache(model, path)


def test_a_cache_of_the_plain_model_is_one_of_the_model_without_its_adapter(tmp_path):
    plain, model = tiny_model(), adapted(["v_proj"])
    foveate.attach(plain, SPEC)
    foveate.attach(model, SPEC)
    foveate.save_cache(plain, read(plain, tokens(40)), tmp_path / "cache")
    with pytest.raises(ValueError, match="its weights differ"):
        foveate.load_cache(model, tmp_path / "cache")
    with model.disable_adapter():
        assert foveate.load_cache(model, tmp_path / "cache").get_seq_length() == 40


def test_a_compiled_model(tmp_path):
    model = tiny_model()
    compiled = torch.compile(model, backend="eager")
    foveate.attach(compiled, SPEC)
    cache, ids = read(model, tokens(60)[:, :50]), tokens(60)
    foveate.save_cache(compiled, cache, tmp_path / "cache")
    again = foveate.load_cache(compiled, tmp_path / "cache")
    assert torch.equal(model.generate(ids, **GREEDY, **cached(again)), model.generate(ids, **GREEDY, **cached(cache)))


@pytest.mark.parametrize("name", ROTATED)
@pytest.mark.parametrize("by_hand", [False, True])
def test_what_belongs_to_an_image_travels_with_the_cache(name, by_hand, tmp_path):
    given, question = with_image(name), tokens(6, seed=4).clamp(max=89)
    image = given.pop("input_ids")
    ids = torch.cat([image, question], 1)
    model = copy.deepcopy(wrapper(name))
    foveate.attach(model, "dense")
    expected = model.generate(ids, **given | {"mm_token_type_ids": (ids == 90).long()}, **GREEDY)
    if by_hand:
        cache = read(model, image, **given)
    else:
        cache = foveate.Cache(model)
        model.generate(image, **given, max_new_tokens=1, **cached(cache))
    assert cache.offsets[0].item() != 0
    foveate.save_cache(model, cache, tmp_path / "cache")
    model.generate(tokens(20, seed=7).clamp(max=89), **GREEDY)  # which leaves its own offsets on the model
    assert torch.equal(model.generate(ids, **GREEDY, **cached(copy.deepcopy(cache))), expected)
    with torch.no_grad():
        logits = model(question, **cached(copy.deepcopy(cache))).logits
    new = copy.deepcopy(wrapper(name))
    foveate.attach(new, "dense")
    again = foveate.load_cache(new, tmp_path / "cache")
    assert torch.equal(new.generate(ids, **GREEDY, **cached(copy.deepcopy(again))), expected)
    with torch.no_grad():
        assert torch.equal(new(question, **cached(copy.deepcopy(again))).logits, logits)
        text = tokens(20, seed=7).clamp(max=89)
        read_text = read(model, text)  # after an image, whose offsets the model keeps
        found = model(question, **cached(read_text)).logits
        clean = copy.deepcopy(wrapper(name))
        foveate.attach(clean, "dense")
        torch.testing.assert_close(found, clean(question, **cached(read(clean, text))).logits)


def test_positions_are_left_alone_after_detach():
    model = copy.deepcopy(wrapper("Qwen2-VL"))
    before = dict(model.__dict__)
    with foveate.attached(model, "dense"):
        assert model.__dict__.keys() > before.keys()
    assert model.__dict__.keys() == before.keys()


def test_another_document_of_the_same_length_is_an_error(tmp_path):
    model = tiny_model()
    foveate.attach(model, SPEC)
    ids, other = tokens(60, 2), tokens(60, 2)
    other[1, 7] = (other[1, 7] + 1) % 90
    cache = read(model, ids[:, :50])
    foveate.save_cache(model, cache, tmp_path / "cache")
    for one in (cache, foveate.load_cache(model, tmp_path / "cache")):
        with pytest.raises(ValueError, match=r"has read other tokens .*: token 7 of row 1 was \d+, and is \d+"):
            model.generate(other, **GREEDY, **cached(one))
        one.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(ValueError, match="token 7 of row 0"):
            model.generate(other.flip(0), **GREEDY, **cached(one))
        model.generate(ids.flip(0), **GREEDY, **cached(one))


def test_padding_may_be_any_token():
    model, batch = tiny_model(), left_padded([50, 40])
    foveate.attach(model, SPEC)
    cache = read(model, **batch)
    ids = torch.cat([batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7), tokens(10, 2)], 1)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 10), value=1)
    out = model.generate(ids, attention_mask=mask, **GREEDY, **cached(cache))
    assert torch.equal(out[1:, 10:], model.generate(ids[1:, 10:], **GREEDY))


def test_tokens_of_every_turn_are_known():
    """Those that `generate` decoded, in recorded steps too, and not those that were cropped."""
    model = tiny_model()
    foveate.attach(model, "dense")
    cache, ids = foveate.Cache(model), tokens(40)
    out = model.generate(ids, **GREEDY, **cached(cache))
    assert torch.equal(cache.ids.read(cache.get_seq_length()), out[:, :-1])
    cache.crop(-5)
    new = torch.cat([out[:, :42], tokens(3, seed=9)], 1)  # fewer than were cropped
    again = model.generate(new, **GREEDY, **cached(cache))
    assert torch.equal(cache.ids.read(cache.get_seq_length()), again[:, :-1])
    assert torch.equal(generate(model, new, new=8), again[:, 45:])


def test_tokens_of_before_a_reset_are_forgotten():
    model = tiny_model()
    foveate.attach(model, "dense")
    cache = foveate.Cache(model)
    model.generate(tokens(40), **GREEDY, **cached(cache))
    cache.reset()
    out = model.generate(tokens(20, seed=9), **GREEDY, **cached(cache))
    assert torch.equal(cache.ids.read(cache.get_seq_length()), out[:, :-1])


def test_embeddings_have_no_ids(tmp_path):
    model = tiny_model()
    foveate.attach(model, SPEC)
    ids, cache = tokens(50), foveate.Cache(model)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids), **cached(cache))
    foveate.save_cache(model, cache, tmp_path / "cache")
    model.generate(tokens(60, seed=5), **GREEDY, **cached(foveate.load_cache(model, tmp_path / "cache")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1 << 17, (3 << 16) + 5])
def test_a_digest_sees_every_element(dtype, size):
    tensor = torch.arange(size).remainder(2).to(dtype)
    before = digests({"x": tensor})["x"]
    assert digests({"x": tensor.clone()})["x"] == before
    assert digests({"x": tensor.view(1, size)})["x"] != before
    for place in {0, size // 2, size - 1} if size else ():
        one = tensor.clone()
        one.view(torch.uint8)[place * tensor.itemsize] ^= 1
        assert digests({"x": one})["x"] != before
    wide = torch.stack([tensor, tensor], 1)[:, 1]  # neither contiguous nor aligned
    assert digests({"x": wide})["x"] == before


def test_a_digest_sees_signs_and_places():
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    other, swapped = x.clone(), x.clone()
    other[[1, 3]] *= -1  # the highest bits of two words
    swapped[[4, 9]] = x[[9, 4]]
    assert len({digests({"x": one})["x"] for one in (x, other, swapped)}) == 3


def test_weights_that_are_not_at_hand():
    model = tiny_model()
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="is on the meta device"):
        weights_digest(model)
