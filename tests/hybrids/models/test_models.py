"""Hybrids as Transformers models: presets, saving and loading, and every mode of `generate`."""

import copy
import functools
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from benchmarks.hybrid_task_tables import cache_bytes
from foveate.hybrids.models import PRESETS, HybridCache, HybridConfig, HybridForCausalLM, make_config
from tests.helpers import CACHE, checkpoint_activations
from tests.selection import in_full

KINDS = ("transformer", "gdn_swa", "lalte", "lansa", "lte_mlp")
"""Presets in which every kind of mixer comes up."""
every_preset = pytest.mark.parametrize("preset", in_full(PRESETS, KINDS))
NEW = 12


@functools.cache
def model_of(preset: str, **changes) -> HybridForCausalLM:
    """A tiny model whose greedy tokens vary; not to be changed."""
    torch.manual_seed(0)
    model = HybridForCausalLM(make_config(preset, "tiny", vocab_size=64, **changes)).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data *= 3
    for layer in model.model.layers:
        if hasattr(layer.mixer, "scores"):
            layer.mixer.scores.head.bias.data.fill_(-0.1)
    return model


def prompt(length: int = 90, batch: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **settings) -> torch.Tensor:
    return model.generate(ids, **{"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False} | settings)


@functools.cache
def greedy(preset: str) -> torch.Tensor:
    """Greedy tokens after :func:`prompt`, without a cache: every token reads everything anew."""
    return generate(model_of(preset), prompt(), use_cache=False)


def count(preset: str, size: str) -> tuple[float, float]:
    """Parameters and those of retention scores, in millions."""
    with torch.device("meta"):
        model = HybridForCausalLM(make_config(preset, size))
    scores = sum(p.numel() for name, p in model.named_parameters() if ".scores." in name)
    return sum(p.numel() for p in model.parameters()) / 1e6, scores / 1e6


@pytest.mark.parametrize(("size", "millions", "share"), [("0.4B", 354, 0.0176), ("1.4B", 1340, 0.0023)])
def test_parameters_are_the_published_models(size, millions, share):
    """Without the scores, whose share the authors' code gives as 1.76 % and 0.23 %."""
    total, scores = count("lalte", size)
    assert round(total - scores) == millions
    assert scores / (total - scores) == pytest.approx(share, abs=5e-5)
    assert round(count("gdn_swa", size)[0]) == round(count("gdn_attn", size)[0]) == millions


@pytest.mark.parametrize(("size", "millions"), [("27M", 27), ("60M", 59)])
def test_small_sizes_are_what_they_are_called(size, millions):
    assert all(abs(count(preset, size)[0] - millions) < 6 for preset in PRESETS)


@every_preset
def test_greedy_tokens_vary(preset):
    """Tokens that repeat would show nothing."""
    assert len(greedy(preset)[0, -NEW:].unique()) > NEW // 3


@every_preset
def test_generate(preset):
    assert torch.equal(generate(model_of(preset), prompt()), greedy(preset))


@every_preset
def test_a_prompt_in_chunks(preset):
    assert torch.equal(generate(model_of(preset), prompt(), prefill_chunk_size=32), greedy(preset))


@every_preset
def test_beams(preset):
    model = model_of(preset)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(generate(model, prompt(), **beams), generate(model, prompt(), use_cache=False, **beams))


@every_preset
def test_sampling_and_several_sequences(preset):
    model, found = model_of(preset), []
    for cache in (True, False):
        torch.manual_seed(1)
        found.append(generate(model, prompt(), do_sample=True, num_return_sequences=2, use_cache=cache))
    assert torch.equal(*found)


@every_preset
def test_assisted_decoding(preset):
    model, one = model_of(preset), prompt()[:1]
    expected = greedy(preset)[:1]
    assert torch.equal(generate(model, one, prompt_lookup_num_tokens=3), expected)
    assistant = copy.deepcopy(model)
    for weight in assistant.parameters():
        weight.data += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(generate(model, one, assistant_model=assistant), expected)


@every_preset
def test_left_padding(preset):
    """Rows of a padded batch give what they give alone."""
    model, ids = model_of(preset), prompt()
    mask = torch.ones_like(ids)
    mask[1, :31] = 0
    ids = ids.masked_fill(mask == 0, 1)
    found = generate(model, ids, attention_mask=mask, pad_token_id=1)
    assert torch.equal(found[:1], greedy(preset)[:1])
    alone = generate(model, ids[1:, 31:])
    assert torch.equal(found[1:, 31:], alone)
    chunked = generate(model, ids, attention_mask=mask, pad_token_id=1, prefill_chunk_size=40)
    assert torch.equal(chunked, found)


@every_preset
def test_several_turns(preset):
    """A second prompt on the first one's cache, with padding in between."""
    model = model_of(preset)
    ids, mask = prompt(), torch.ones(2, 90, dtype=torch.int64)
    mask[1, :10] = 0
    cache = HybridCache(model.config)
    first = generate(model, ids, attention_mask=mask, pad_token_id=1, **{CACHE: cache})
    more = prompt(20, seed=3)
    both = torch.cat([first, more], 1)
    longer = torch.cat([mask, torch.ones(2, NEW + 20, dtype=torch.int64)], 1)
    longer[0, 90 + NEW : 90 + NEW + 5] = 0
    second = generate(model, both, attention_mask=longer, pad_token_id=1, **{CACHE: cache})
    for row in range(2):
        alone = both[row, longer[row].bool()][None]
        assert torch.equal(second[row, -NEW:], generate(model, alone, use_cache=False)[0, -NEW:])


@every_preset
def test_embeddings_instead_of_ids(preset):
    model = model_of(preset)
    embeds = model.get_input_embeddings()(prompt())
    assert torch.equal(generate(model, None, inputs_embeds=embeds), greedy(preset)[:, -NEW:])


@every_preset
def test_saved_and_loaded(preset, tmp_path):
    model = model_of(preset)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.mixers == model.config.mixers
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    assert torch.equal(loaded(prompt()).logits, model(prompt()).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert generate(half, prompt()).shape == (2, 90 + NEW)


@every_preset
def test_it_trains(preset):
    """Every parameter gets a gradient, checkpointed activations give the same ones, and the loss falls."""
    model = copy.deepcopy(model_of(preset)).train()
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    ids = prompt()
    out = model(ids, labels=ids, output_retention=True)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert all(bool(g.isfinite().all()) for g in gradients.values())
    assert len(out.retention or ()) == model.config.mixers.count("lte")
    model.zero_grad()
    checkpoint_activations(model)
    model(ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], atol=1e-6, rtol=1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < out.loss.item() - 0.5


@pytest.mark.full
def test_a_compiled_model_trains_alike():
    model = copy.deepcopy(model_of("lalte", num_hidden_layers=2)).train()  # one layer of each kind
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    compiled, ids, found = copy.deepcopy(model), prompt(), []
    compiled.compile(backend="aot_eager")
    for one in (model, compiled):
        out = one(ids, labels=ids, output_retention=True)
        out.loss.backward()
        found.append([out.loss, *out.retention, *(p.grad for p in one.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-4)
    compiled.eval()
    model.eval()
    assert torch.equal(compiled(ids, labels=ids).logits, model(ids).logits)


@pytest.mark.filterwarnings("ignore:the sequence is longer")
def test_constant_memory():
    """Gated DeltaNet and learned eviction hold as much after 4,000 tokens as after 100; attention does not."""
    sizes = {}
    for preset in ("lalte", "gdn_attn"):
        model = model_of(preset)
        cache, sizes[preset] = HybridCache(model.config), []
        with torch.no_grad():
            for length in (100, 900, 3000):
                model(prompt(length, batch=1), use_cache=True, **{CACHE: cache})
                sizes[preset].append(cache.nbytes)
    assert len(set(sizes["lalte"])) == 1
    assert sizes["gdn_attn"][2] > 10 * sizes["gdn_attn"][0]


@torch.no_grad()
def test_more_tokens_than_in_training_are_read_and_said_once():
    model = HybridForCausalLM(make_config("lalte", "tiny", vocab_size=64)).eval()
    model(prompt(512))
    with pytest.warns(UserWarning, match="longer than the 512 tokens"):
        assert model(prompt(513)).logits.shape[1] == 513
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(prompt(600))


def test_a_pattern_of_its_own():
    config = make_config("gdn", "tiny", mixers=["gdn", "gdn", "lte", "nsa"])
    model = HybridForCausalLM(config).eval()
    ids = prompt()
    assert torch.equal(generate(model, ids), generate(model, ids, use_cache=False))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_config("mamba", "tiny"), "preset must be one of transformer, gdn"),
        (lambda: make_config("gdn", "7B"), "size must be one of tiny, 27M"),
        (lambda: make_config("gdn", "tiny", windows=3), "'windows' is no field"),
        (lambda: HybridConfig(mixers=["gdn", "lte", "nsa"], num_hidden_layers=4), "3 entries"),
        (lambda: HybridConfig(mixers=["gdn", "ssm"]), "mixers must be of gdn, attn"),
        (lambda: HybridConfig(mixers=[]), "mixers must be of gdn, attn"),
        (lambda: HybridConfig(mixers="gdn"), "not the string 'gdn'"),
        (lambda: make_config("gdn_attn", "tiny", num_key_value_heads=3), "num_attention_heads must be a multiple"),
    ],
)
def test_configurations_that_cannot_be(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_another_cache_is_refused():
    model = model_of("lalte")
    with pytest.raises(ValueError, match=r"cache must be a foveate\.hybrids\.models\.HybridCache"):
        model(prompt(), **{CACHE: DynamicCache(config=model.config)})
    with pytest.raises(ValueError, match=r"cache must be a foveate\.hybrids\.models\.HybridCache"):
        model(prompt(), **{CACHE: HybridCache(model_of("gdn_attn").config)})


def test_masks_that_do_not_fit():
    model = model_of("lalte")
    with pytest.raises(ValueError, match="attention_mask covers 91 columns"):
        model(prompt(), attention_mask=torch.ones(2, 91))
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(prompt(), attention_mask=torch.ones(2, 1, 90, 90))


def test_caches_that_cannot_be():
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        generate(model_of("lalte"), prompt(), cache_implementation="static")


def test_hidden_states_and_retention_can_be_asked_for():
    model = model_of("lalte")
    with torch.no_grad():
        out = model(prompt(), output_hidden_states=True, output_retention=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    assert [scores.shape for scores in out.retention] == [(2, 2, 90)] * 2
    with pytest.raises(ValueError, match="output_attentions=True is not possible"):
        model(prompt(), output_attentions=True)


def test_positions_must_follow_one_another():
    model, positions = model_of("lalte"), torch.arange(90)[None]
    with torch.no_grad():
        shifted = model(prompt(), position_ids=positions + 100).logits
        torch.testing.assert_close(shifted, model(prompt()).logits, atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="position_ids must follow one another"):
        model(prompt(), position_ids=positions * 2)


@every_preset
@pytest.mark.parametrize("length", [20, 200])
def test_bytes_of_a_cache_are_known_from_the_configuration(preset, length):
    model = model_of(preset)
    cache = HybridCache(model.config)
    with torch.no_grad():
        for part in prompt(length, batch=1).split(length - 1, 1):  # nsa compresses blocks for the token after a prompt
            model(part, **{CACHE: cache}, use_cache=True)
    assert cache_bytes(model.config, length, torch.float32) == cache.nbytes


def test_a_memory_does_not_follow_the_default_dtype():
    model, before = copy.deepcopy(model_of("lalte")).double(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(generate(model, prompt()), greedy("lalte"))
    finally:
        torch.set_default_dtype(before)
