"""Rotary positions of every kind, across the length at which they change and across chunks, against Transformers."""

import pytest
import torch
import transformers

import foveate
from foveate.integrations.transformers import conversation, hooks
from foveate.integrations.transformers.positions import length_kinds, rotated_otherwise

FIRST = 64
"""Tokens after which rotations that depend on the length change."""
LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 3 * n for n in range(8)]}
SCALED = {"factor": 4.0, "original_max_position_embeddings": FIRST}
ROPES = {
    "longrope": {"rope_type": "longrope", **LONG, "original_max_position_embeddings": FIRST},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", **SCALED},
    "llama3": {"rope_type": "llama3", **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "default": {"rope_type": "default"},
}
FAMILIES = {
    **{name: ("LlamaConfig", rope, {}) for name, rope in ROPES.items()},
    "phi longrope": ("Phi3Config", ROPES["longrope"], {"original_max_position_embeddings": FIRST}),
    "partial": ("Phi3Config", {"rope_type": "default", "partial_rotary_factor": 0.5}, {}),
    "partial longrope": (
        "Phi3Config",
        ROPES["longrope"] | {"partial_rotary_factor": 0.5} | {name: factor[:4] for name, factor in LONG.items()},
        {"original_max_position_embeddings": FIRST},
    ),
    "none": ("SmolLM3Config", {"rope_type": "default"}, {"no_rope_layers": [0, 0]}),
}
DEPENDS = [name for name in FAMILIES if "longrope" in name or name == "dynamic"]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_that_depends = pytest.mark.parametrize("family", DEPENDS)


def made(family):
    """A model whose rotations change greatly, and that has read nothing before."""
    cls, rope, more = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    most = FIRST if family == "dynamic" else 512
    rope = {"rope_theta": 1e4, **rope}
    config = getattr(transformers, cls)(**sizes, **ends, max_position_embeddings=most, rope_parameters=rope, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(lengths):
    generator = torch.Generator().manual_seed(max(lengths))
    ids = torch.randint(3, 97, (len(lengths), max(lengths)), generator=generator)
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - one for one in lengths]).long()
    return ids * mask, mask


def answers(model, ids, mask, new=6, **options):
    found = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return found.sequences, torch.stack(found.logits, 1)


@each_family
@pytest.mark.parametrize("lengths", [[60], [63], [64], [65], [100], [100, 61], [61, 40]], ids=str)
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.filterwarnings("ignore:.*decoding goes beyond:UserWarning", "ignore:.*beyond the model's:UserWarning")
def test_answers_are_those_of_the_model_alone(monkeypatch, family, lengths, chunk):
    """In one piece, and where `generate` would read in chunks; the prompt, the answer or neither crosses the length."""
    ids, mask = prompt(lengths)
    expected = answers(made(family), ids, mask)
    if chunk:
        monkeypatch.setattr(hooks, "LONG_PROMPT", 1)
        monkeypatch.setattr(hooks, "CHUNK", chunk * len(lengths))
    model = made(family)
    with foveate.attached(model, "dense", cuda_graph=False):
        found = answers(model, ids, mask)
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found[1], expected[1], atol=1e-3)


@each_family
def test_chunks_are_read_where_they_are_the_same(monkeypatch, family):
    passes = []
    monkeypatch.setattr(hooks, "LONG_PROMPT", 1)
    monkeypatch.setattr(hooks, "CHUNK", 16)
    for length in (FIRST - 4, FIRST + 40):
        model, (ids, mask) = made(family), prompt([length])
        with foveate.attached(model, "dense", cuda_graph=False):
            passes.clear()
            model.model.register_forward_pre_hook(lambda *_: passes.append(1))
            answers(model, ids, mask, new=1)
        in_one = family in DEPENDS and length > FIRST
        assert len(passes) == (1 if in_one else -(-length // 16)), length


@each_that_depends
def test_a_prompt_in_parts_across_the_length_is_refused(family):
    """Chunks asked for, chunks by hand, another turn, tokens after a crop: before anything is read."""
    model, (ids, mask) = made(family), prompt([80])
    with foveate.attached(model, "dense", cuda_graph=False):
        with pytest.raises(ValueError, match=r"prefill_chunk_size=40: .*depend on the length.*leave it out"):
            answers(model, ids, mask, prefill_chunk_size=40)
        cache = foveate.Cache(model, 80)
        model(ids[:, :40], cache=cache)
        model(ids[:, 40:60], cache=cache)
        with pytest.raises(ValueError, match=r"depend on the length of the whole beyond 64 tokens.*with a new cache"):
            model(ids[:, 60:80], cache=cache)
        assert cache.get_seq_length() == 60, "as it was"
        cache = foveate.Cache(model)
        model(ids, cache=cache)
        cache.crop(-30)
        with pytest.raises(ValueError, match="depend on the length"):
            model(ids[:, 50:60], cache=cache)


@each_that_depends
def test_a_cache_of_mixed_rotations_is_not_saved(tmp_path, family):
    model, (ids, _) = made(family), prompt([80])
    with foveate.attached(model, "dense", cuda_graph=False):
        cache = foveate.Cache(model)
        model(ids, cache=cache)
        foveate.save_cache(model, cache, tmp_path / "whole")
        loaded = foveate.load_cache(model, tmp_path / "whole")
        loaded.crop(-30)
        with pytest.raises(ValueError, match="such a cache cannot be saved"):
            foveate.save_cache(model, loaded, tmp_path / "mixed")
        cache = foveate.Cache(model)
        model(ids[:, :FIRST], cache=cache)
        with pytest.warns(UserWarning, match="decoding goes beyond the length"):
            model(ids[:, FIRST : FIRST + 1], cache=cache)


class Letters:
    """A tokenizer of one token a character, without a template."""

    chat_template, bos_token_id, eos_token_id, pad_token_id, is_fast = None, None, 2, 0, True

    def encode(self, text, add_special_tokens=False):
        return [3 + ord(one) % 90 for one in text]

    def decode(self, ids, **_):
        return "".join(chr(97 + int(one) % 26) for one in ids)

    def __call__(self, text, **_):
        return {"input_ids": self.encode(text)}


@each_family
@pytest.mark.parametrize("document", [30, 55, 90])
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.filterwarnings("ignore:.*decoding goes beyond:UserWarning", "ignore:.*beyond the model's:UserWarning")
def test_questions_on_a_document_are_answered_as_the_whole_prompts(monkeypatch, family, document, attached):
    monkeypatch.setattr(conversation, "_CHUNK", 16)
    monkeypatch.setattr(conversation, "_positions", lambda model: 0)
    tokenizer, text = Letters(), ("a long story of foxes " * 9)[:document].strip()
    questions = ["why?", "who is it that asks?"]
    expected = []
    for one in questions:
        ids = torch.tensor([tokenizer.encode(f"{text}\n\n{one}")])
        found, _ = answers(made(family), ids, torch.ones_like(ids))
        expected.append(tokenizer.decode(found[0, ids.shape[1] :]))
    model = made(family)
    if attached:
        foveate.attach(model, "dense", cuda_graph=False)
    assert foveate.ask(model, tokenizer, text, questions, max_new_tokens=6) == expected


def test_the_declaration():
    kinds = {name: length_kinds(made(name).config) for name in FAMILIES}
    assert {name: set(found.values()) for name, found in kinds.items() if found} == {name: {FIRST} for name in DEPENDS}
    longrope, dynamic = made("longrope").config, made("dynamic").config
    for config in (longrope, dynamic):
        assert not rotated_otherwise(config, 1, FIRST)
        assert rotated_otherwise(config, FIRST, FIRST + 1)
        assert rotated_otherwise(config, FIRST + 1, 1)
    assert not rotated_otherwise(longrope, FIRST + 1, FIRST + 9)
    assert rotated_otherwise(dynamic, FIRST + 1, FIRST + 9)
    assert not rotated_otherwise(dynamic, FIRST + 9, FIRST + 9)
