"""Learned eviction on frozen models: what each KV head keeps, token by token, and what is refused."""

import pytest
import torch
from matrix import DIM, KV_HEADS, LTE, PROMPT, Driver, Tokens

import foveate
from foveate import methods
from foveate.calibration import eviction_scores
from foveate.calibration.eviction_scores import LEVELS, EvictionScores
from foveate.integrations.transformers.facts import model_facts, rotary_facts
from foveate.integrations.transformers.support import attention_modules
from foveate.state import Geometry, SlotCache
from tests.helpers import generate, tiny_model, tokens


def budgets(method, length):
    """Tokens that each KV head of layer 1 keeps: by the threshold under which all heads together keep the share."""
    share = method.top_k if isinstance(method.top_k, float) else method.top_k / PROMPT
    always = method.window + method.sinks
    if method.allocation == "uniform":
        whole = int(method.top_k * length + 1e-9) if isinstance(method.top_k, float) else method.top_k
        return [max(whole, always)] * KV_HEADS
    found = eviction_scores.read(method.file).shares(share, range(3))[1] / share
    found = found if method.allocation == "global" else found.mean().expand(KV_HEADS)
    tokens = method.top_k * length if isinstance(method.top_k, float) else method.top_k
    return [always + max(int(one * (tokens - always) + 1e-9), 0) for one in found.tolist()]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 20, "window": 14, "sinks": 0},
        {"allocation": "layer"},
        {"allocation": "global"},
        {"allocation": "global", "top_k": 0.4, "sinks": 3},
        {"allocation": "global", "top_k": 20},
    ],
    ids=str,
)
def test_what_each_head_keeps(settings):
    """The tokens scored highest of those before the window, whose scores know six later tokens."""
    method = methods.make("lte", **LTE | settings).for_layer(1, 3)
    sequence = Tokens.random(1, PROMPT + 40, seed=3)
    scores = eviction_scores.read(method.file).score(1, sequence.k, sequence.v, torch.arange(PROMPT + 40)[None, None])
    driver = Driver(method)
    driver.feed(sequence[:PROMPT])
    kept, sizes = [list(range(PROMPT)) for _ in range(KV_HEADS)], set()
    for length in range(PROMPT, PROMPT + 41):
        allowed = budgets(method, length)
        for head in range(KV_HEADS):
            worth = {p: float("inf") if p < method.sinks else float(scores[0, head, p]) for p in kept[head]}
            while len(kept[head]) > allowed[head]:
                old = [p for p in kept[head] if p < length - method.window]
                kept[head].remove(min(old, key=lambda p: (worth[p], -p)))
        held = [sorted(p for p in own if p >= 0) for own in driver.store.positions[0].tolist()]
        assert held == kept
        sizes.add(tuple(map(len, kept)))
        if length < PROMPT + 40:
            driver.feed(sequence[length : length + 1])
            kept = [[*own, length] for own in kept]
    uneven = [a for a, b in sizes if a != b]
    assert bool(uneven) == (method.allocation == "global")


def test_budgets_of_heads_add_up_to_the_budget_of_all():
    made = methods.make("lte", **LTE | {"allocation": "global", "top_k": 0.2})
    of_heads = [own for layer in range(3) for own in made.for_layer(layer, 3).allowed_by_head(1000, KV_HEADS)]
    assert len(set(of_heads)) == 3  # the heads of layers 0 and 2 are alike
    assert sum(of_heads) / len(of_heads) == pytest.approx(200, abs=10)
    by_layer = [methods.make("lte", **LTE | {"allocation": "layer", "top_k": 0.2}).for_layer(n, 3) for n in range(3)]
    assert sum(own.allowed(1000) for own in by_layer) / 3 == pytest.approx(200, abs=10)


def test_scores_of_one_token_are_those_of_the_whole_text():
    """Whether tokens come as a prompt, in pieces, or one by one."""
    method = methods.make("lte", **LTE | {"top_k": 1.0}).for_layer(2, 3)
    sequence = Tokens.random(1, 60, seed=3)
    expected = eviction_scores.read(method.file).score(2, sequence.k, sequence.v, torch.arange(60)[None, None])
    for cuts in ([60], [3, 5, 6, 30, 60], [1], [20]):
        driver = Driver(method, cuts[-1])
        for first, last in zip([0, *cuts], cuts):
            driver.feed(sequence[first:last])
        if cuts[-1] < 60:
            driver.feed_steps(sequence[cuts[-1] :])
        found = driver.store.channel("score")[:, :, :54]
        assert torch.equal(found[:, :, :2].isinf(), torch.ones(1, KV_HEADS, 2, dtype=torch.bool))
        torch.testing.assert_close(found[:, :, 2:], expected[:, :, 2:54], atol=1e-5, rtol=1e-5)


def made_for(model, path, **changed):
    """Untrained scores in a file, made for a model."""
    config = model.config.get_text_config(decoder=True)
    modules, _ = attention_modules(model, model.get_decoder(), config)
    facts = model_facts(config, modules) | {"rope": rotary_facts(config)} | changed
    shapes = (sorted(modules), facts["kv_heads"], facts["head_dim"], facts["head_dim"])
    frequencies = torch.ones(len(modules), facts["head_dim"] // 2)
    scores = EvictionScores(facts, *shapes, frequencies, torch.ones(len(modules)), 16, 64)
    scores.quantiles.copy_(torch.linspace(0, 1, LEVELS) * torch.arange(1, 2 * len(modules) + 1).view(-1, 2, 1))
    scores.save(path)
    return str(path)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("allocation", ["uniform", "layer", "global"])
def test_generate_with_a_file(tmp_path, family, allocation):
    """Also on the full-attention layers alone, and for turns after turns."""
    model = tiny_model(family)
    spec = methods.make(
        "lte", file=made_for(model, tmp_path / "a.safetensors"), top_k=0.4, window=13, sinks=2, allocation=allocation
    ).spec
    with foveate.attached(model, spec):
        alone = [generate(model, tokens(length, seed=length), 20) for length in (61, 30)]
        found = foveate.stats(model, reset=True).summary()
        assert 0.2 < found["keys_read_share"] < 0.75
        ids = torch.zeros(2, 61, dtype=torch.int64)
        ids[0], ids[1, 31:] = tokens(61, seed=61)[0], tokens(30, seed=30)[0]
        assert torch.equal(generate(model, ids, 20, attention_mask=(ids > 0).long()), torch.cat(alone))
        assert generate(model, tokens(61), 20, num_beams=2).shape == (1, 20)
        assert torch.equal(generate(model, tokens(61, seed=61), 20, prompt_lookup_num_tokens=3), alone[0])


def test_a_file_of_another_model_is_refused_by_name(tmp_path):
    file = made_for(tiny_model(seed=1), tmp_path / "a.safetensors")
    model = tiny_model()
    with pytest.raises(ValueError, match=r"LTE file '.*a\.safetensors' is for another model of the same shape"):
        foveate.attach(model, "lte", file=file)
    with pytest.raises(ValueError, match="with model_type 'llama', and this one has 'qwen3'"):
        foveate.attach(tiny_model("qwen3"), "lte", file=file)
    with pytest.raises(ValueError, match=r"scores of layers \[0, 1, 2\], and not of layer 3; it is for another model"):
        methods.make("lte", file=file).for_layer(3, 4)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    file = made_for(model, tmp_path / "b.safetensors", rope=rope)
    with pytest.raises(ValueError, match="rotary positions"):
        foveate.attach(model, "lte", file=file)
    foveate.attach(model, "lte", file=made_for(model, tmp_path / "c.safetensors"))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "file must be a file of `foveate train lte` with score=learned"),
        ({"file": "nowhere.safetensors", "window": 12}, "window must be an integer of at least 13"),
        ({"file": "a", "score": "key_norm"}, "file must be left out with score=key_norm"),
        ({"score": "key_norm", "allocation": "global"}, "allocation must be uniform with score=key_norm"),
        ({"score": "value_norm"}, "score must be one of learned, key_norm"),
        ({"file": "a", "allocation": "best"}, "allocation must be one of uniform, layer, global"),
    ],
)
def test_settings_that_do_not_fit(settings, match):
    with pytest.raises(ValueError, match=match):
        methods.make("lte", **settings)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"lte: nowhere\.safetensors: no such LTE file; `foveate train lte"):
        methods.make("lte", file="nowhere.safetensors").for_layer(0, 2)


def test_shapes_of_other_layers_are_refused():
    method = methods.make("lte", **LTE).for_layer(0, 3)
    with pytest.raises(ValueError, match=f"2 KV heads with keys and values of {DIM} and {DIM} dimensions, not 2 of 8"):
        Driver(method).feed(Tokens(*(x[..., :8] for x in vars(Tokens.random(1, PROMPT)).values())))


def test_rows_of_different_lengths_have_the_scores_that_they_have_alone():
    """Before anything is evicted: slots are in the order of tokens, and the last ones of a shorter row are empty."""
    method, rows = methods.make("lte", score="key_norm", top_k=0.5, window=3, sinks=2), []
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(1, 2, length, 8, generator=generator) for length in (12, 7)]
    for chosen in ([0, 1], [0], [1]):
        geometry = Geometry(4, 2, 8, 8)
        cache = SlotCache(
            geometry, len(chosen), torch.float32, torch.device("cpu"), method.channels(geometry), method.evicts
        )
        cache.reserve(12)
        for b, which in enumerate(chosen):
            with cache.row(b) as one:
                one.append(tokens[which][:, :, :-1], tokens[which][:, :, :-1])
                method._write_scores(one, one.used)
        newest = torch.cat([tokens[which][:, :, -1:] for which in chosen])
        cache.write_step(newest, newest)
        method._write_scores(cache, 1)
        rows += [cache.channel("score")[b, :, : tokens[which].shape[2]] for b, which in enumerate(chosen)]
    together, alone = rows[:2], rows[2:]
    assert all(map(torch.equal, together, alone))
    assert all((x[:, 2:] < 0).all() for x in alone)
