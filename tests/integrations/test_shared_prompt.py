"""A prompt that several methods read together, from which each goes on as if it had read alone, to the last bit."""

import functools

import pytest
import torch

import foveate
from foveate import methods, ops
from foveate.methods import SharedPrompt
from tests.combinations import every_pair
from tests.helpers import cached, left_padded, tiny_model, tokens

pytestmark = pytest.mark.usefixtures("little_room")
GROUP = [
    "dense",
    "h2o:top_k=9,window=8",
    "h2o:top_k=0.2,window=4",
    "h2o:top_k=60,window=8",
    "tova:top_k=20,pool=kv_head",
    "snapkv:top_k=0.2,window=5,kernel_size=3,pooling=max",
    "luka:page_size=4,tail=9,top_k=2",
    "luka:page_size=5,tail=7,top_k=0.3,bias=log,compressor=attention,prior=0.0",
    methods.make("mixed", **methods.get("mixed").about.small_budget).spec,
    'per_layer:layers={"0": "dense", "rest": "luka:page_size=4,tail=9,compressor=attention,prior=0.0"}',
]
"""Methods whose prompts are dense, in every layer."""
LENGTHS = [61, 23, 40]
STEPS = 12
FAR = 24
"""Steps past the room after the prompt."""


def inputs(batch: str) -> dict[str, torch.Tensor]:
    if batch == "padded":
        return left_padded(LENGTHS)
    return {"input_ids": tokens(61, batch=1 if batch == "one" else 2), "attention_mask": None}


def read(model, batch, chunk=None):
    """The prompt's last logits and its cache."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = foveate.Cache(model)
    cache.begin(ids.shape[1], assistant=False)
    for piece in torch.arange(ids.shape[1]).split(chunk or ids.shape[1]):
        seen = mask[:, : piece[-1] + 1] if mask is not None else None
        positions = seen.cumsum(1)[:, piece].sub(1).clamp_min(0) if mask is not None else None
        options = {"attention_mask": seen, "position_ids": positions, **cached(cache), "logits_to_keep": 1}
        logits = model(ids[:, piece], **options).logits
    return logits[:, -1], cache


def decode_from(model, batch, logits, cache, steps=STEPS):
    """The logits of greedy decoding, and the statistics."""
    mask, made = batch["attention_mask"], [logits]
    positions = mask.sum(1, keepdim=True) if mask is not None else None
    for _ in range(steps):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        options = {"attention_mask": mask, "position_ids": positions, **cached(cache)}
        made.append(model(made[-1].argmax(-1, keepdim=True), **options).logits[:, -1])
        positions = positions + 1 if mask is not None else None
    return torch.stack(made), foveate.stats(model).to_dict()


@torch.inference_mode()
def alone(model, batch, spec, chunk=None, steps=STEPS):
    with foveate.attached(model, spec):
        return decode_from(model, batch, *read(model, batch, chunk), steps)


@torch.inference_mode()
def together(model, batch, specs, chunk=None, steps=STEPS, reading=None):
    with foveate.attached(model, SharedPrompt(tuple(map(methods.parse, reading or specs)))):
        logits, cache = read(model, batch, chunk)
    for spec in specs:
        with foveate.attached(model, spec):
            yield decode_from(model, batch, logits, cache.branch(model), steps)


@every_pair(("batch", ["one", "alike", "padded"]), ("family", ["llama", "gemma3"]), ("chunk", [None, 20]))
def test_every_method_goes_on_as_if_it_had_read_alone(family, batch, chunk):
    model, batch = tiny_model(family), inputs(batch)
    for spec, (logits, stats) in zip(GROUP, together(model, batch, GROUP, chunk)):
        expected, expected_stats = alone(model, batch, spec, chunk)
        assert torch.equal(logits, expected), spec
        assert stats == expected_stats, spec


@functools.cache
def far_alone(spec):
    """The logits of a padded batch, past the room after the prompt."""
    return alone(tiny_model(), inputs("padded"), spec, steps=FAR)[0]


@pytest.mark.parametrize("order", [GROUP[::-1], GROUP[5:] + GROUP[:5]], ids=["backwards", "turned"])
def test_nothing_that_a_method_does_is_seen_by_the_next(order):
    model, batch = tiny_model(), inputs("padded")
    for spec, (logits, _) in zip(order, together(model, batch, order, steps=FAR, reading=GROUP)):
        assert torch.equal(logits, far_alone(spec)), spec


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision(dtype):
    model, batch = tiny_model().to(dtype), inputs("padded")
    for spec, (logits, _) in zip(GROUP, together(model, batch, GROUP, steps=STEPS // 2)):
        assert torch.equal(logits, alone(model, batch, spec, steps=STEPS // 2)[0]), spec


def test_what_is_learnt_alike_is_learnt_once(monkeypatch):
    """Three budgets of H2O and two of LuKA's attention-weighted summaries: one accumulated mass a layer."""
    counted, column_mass = [], ops.column_mass
    monkeypatch.setattr(ops, "column_mass", lambda *args, **more: counted.append(1) or column_mass(*args, **more))
    model, batch = tiny_model(), inputs("one")
    list(together(model, batch, GROUP))
    assert len(counted) == model.config.num_hidden_layers


def test_keys_and_values_are_kept_once():
    model, batch = tiny_model(), inputs("one")
    with foveate.attached(model, SharedPrompt(tuple(map(methods.parse, GROUP)))), torch.inference_mode():
        logits, cache = read(model, batch)
    store = cache.layers[1].cache
    held = {name: getattr(store, name).clone() for name in ("keys", "values")}
    for spec in GROUP:
        method = methods.parse(spec).for_layer(1, 3)
        with foveate.attached(model, spec), torch.inference_mode():
            branch = cache.branch(model)
            assert branch.phase.prompt_end_known  # a decoded token is no padding: no step waits to read the mask
            shares = branch.layers[1].cache.keys.data_ptr() == store.keys.data_ptr()
            decode_from(model, batch, logits, branch)
        assert shares == (not method.evicts or getattr(method, "top_k", 0) == 60), spec
    assert all(torch.equal(getattr(store, name), before) for name, before in held.items())


def test_what_cannot_go_on_is_refused():
    model, batch = tiny_model(), inputs("one")
    with pytest.raises(ValueError, match=r"streaming:window=9 is sparse in prefill"):
        foveate.attach(model, SharedPrompt((methods.parse("dense"), methods.parse("streaming:window=9"))))
    with pytest.raises(ValueError, match=r"per_layer:.*streaming.* is sparse in prefill"):
        foveate.attach(model, SharedPrompt((methods.parse('per_layer:layers={"1": "streaming", "rest": "h2o"}'),)))
    with foveate.attached(model, "dense"), torch.inference_mode():
        _, own = read(model, batch)
        with pytest.raises(ValueError, match=r"methods\.SharedPrompt"):
            own.branch(model)
    with foveate.attached(model, SharedPrompt((methods.parse("dense"),))), torch.inference_mode():
        _, cache = read(model, batch)
        unfinished = foveate.Cache(model, prompt_length=90)
        model(batch["input_ids"], **cached(unfinished))
    with foveate.attached(model, "h2o"):
        with pytest.raises(ValueError, match="h2o is not among the methods that the prompt was read for: dense"):
            cache.branch(model)
        with pytest.raises(ValueError, match="not complete"):
            unfinished.branch(model)
    message = "kascade_paper:anchors=1 is not among the methods"  # it learns nothing, but is sparse in prefill
    with foveate.attached(model, "kascade_paper:anchors=1"), pytest.raises(ValueError, match=message):
        cache.branch(model)
    with foveate.attached(model, SharedPrompt((methods.parse("dense"),))):
        _, cache = read(model, batch)
        with pytest.raises(ValueError, match="take a branch"):
            model(tokens(1), **cached(cache))
