"""Counters against numbers worked out by hand, and the sizes that stats reports."""

import json

import pytest
import torch

import foveate
from foveate import methods
from tests.helpers import SLIDING, cached, generate, left_padded, returned_cache, tiny_model, tokens

PROMPT, NEW = 61, 12
STEPS = NEW - 1
"""The first new token comes from the prompt, and the last one is never fed."""
KEY_BYTES = 2 * (16 + 16) * 4
"""Two KV heads, a key and a value of 16 numbers each, fp32."""


def layers_after(method: str, inputs=None, family: str = "llama", **options):
    """Stats of the handled layers after one run, all of which must agree."""
    model = tiny_model(family)
    inputs = {"input_ids": tokens(PROMPT)} if inputs is None else inputs
    with foveate.attached(model, method):
        generate(model, new=NEW, **inputs, **options)
        layers = [layer for layer in foveate.stats(model).layers if layer.method != "unchanged"]
    assert len({layer.keys_read_per_step for layer in layers}) == 1
    return layers


def test_the_share_of_keys_is_that_of_rows():
    model = tiny_model()
    with foveate.attached(model, "snapkv:top_k=10,window=8"):
        generate(model, tokens(PROMPT), NEW)
        stats = foveate.stats(model)
    assert (stats.keys_read_share, stats.decode_steps) == (stats.to_dict()["keys_read_share"], STEPS)
    assert 0 < stats.keys_read_share < 0.5


def test_dense():
    """Every step reads all tokens so far, its own included: 62 to 72, 67 on average."""
    for layer in layers_after("dense"):
        assert layer.method == "dense"
        assert layer.prompt_tokens == 61
        assert layer.decode_steps == 11
        assert layer.keys_read_per_step == layer.keys_available_per_step == 67
        assert layer.kv_bytes_per_step == 67 * KEY_BYTES
        assert layer.tokens_evicted == layer.pages_refined == layer.indices_reused == 0
        assert layer.note == ""


def test_streaming():
    """2 sinks and 13 recent tokens; of the prompt 2 + 12 stay, and every step gives up one."""
    for layer in layers_after("streaming:sinks=2,window=13"):
        assert layer.keys_read_per_step == 15
        assert layer.keys_available_per_step == 67
        assert layer.kv_bytes_per_step == 15 * KEY_BYTES
        assert layer.tokens_evicted == (61 - 14) + 11


def test_h2o():
    """9 heavy hitters and 8 recent tokens stay; a step reads its own token too, and then gives up one."""
    for layer in layers_after("h2o:top_k=9,window=8"):
        assert layer.keys_read_per_step == 9 + 8 + 1
        assert layer.keys_available_per_step == 67
        assert layer.tokens_evicted == (61 - 17) + 11


def test_h2o_with_a_share():
    """A fifth of the tokens so far: 12 of 61 to 64, 13 of 65 to 69, 14 of 70 to 72; what the last step left is read."""
    reads = [12 + 8 + 1] * 4 + [13 + 8 + 1] * 5 + [14 + 8 + 1] * 2
    for layer in layers_after("h2o:top_k=0.2,window=8"):
        assert layer.keys_read_per_step == pytest.approx(sum(reads) / STEPS)
        assert layer.tokens_evicted == 61 + 11 - (14 + 8)


def test_tova():
    for layer in layers_after("tova:top_k=9"):
        assert layer.keys_read_per_step == 10
        assert layer.tokens_evicted == (61 - 9) + 11


def test_snapkv_keeps_what_it_generates():
    """12 + 8 of the prompt and the new tokens so far: 21 to 31."""
    for layer in layers_after("snapkv:top_k=12,window=8"):
        assert layer.keys_read_per_step == 26
        assert layer.tokens_evicted == 61 - 20


@pytest.mark.parametrize(("cost", "more"), [(1, ",score=summary"), (1.5, ",score=spread")])
def test_luka(cost, more):
    """2 sinks, and pages of 4 until 9 or more tokens are left, made when the prompt ends and at every fourth token.

    A summary is a key and a value, and half as much for its spread where there is one.
    """
    reads, pages = [], (61 - 11) // 4
    for length in range(62, 73):
        reads.append(cost * pages + 2 * 4 + (length - 4 * pages))
        if (length - 61) % 4 == 0:
            pages = (length - 11) // 4
    assert reads[:5] == ([34, 35, 36, 37, 35] if cost == 1 else [40, 41, 42, 43, 41.5])
    for layer in layers_after(f"luka:page_size=4,sinks=2,tail=9,top_k=2{more}"):
        assert layer.keys_read_per_step == pytest.approx(sum(reads) / STEPS)
        assert layer.pages_refined == 2 * 11
        assert layer.tokens_evicted == 0


def test_a_prompt_in_chunks_counts_like_one_in_one_piece():
    method = "h2o:top_k=9,window=8"
    assert layers_after(method, prefill_chunk_size=20) == layers_after(method)


@pytest.mark.parametrize(
    ("method", "read", "evicted"),
    [("dense", (67 + 46) / 2, 0), ("streaming:sinks=2,window=13", 15, 47 + 26 + 22), ("h2o:top_k=9,window=8", 18, 89)],
)
def test_a_padded_batch_counts_each_sequence_without_its_padding(method, read, evicted):
    for layer in layers_after(method, left_padded([61, 40])):
        assert layer.decode_steps == 11
        assert layer.keys_read_per_step == read
        assert layer.keys_available_per_step == (67 + 46) / 2
        assert layer.kv_bytes_per_step == read * KEY_BYTES
        assert layer.tokens_evicted == evicted


def test_padding_is_no_prompt_token():
    for layer in layers_after("dense", left_padded([61, 40])):
        assert layer.prompt_tokens == 61 + 40


def test_a_context_below_the_budget_is_read_whole():
    for layer in layers_after("h2o:top_k=90,window=8"):
        assert layer.keys_read_per_step == layer.keys_available_per_step == 67
        assert layer.tokens_evicted == 0


def test_tokens_fed_together_count_like_single_steps():
    model = tiny_model()
    with torch.no_grad(), foveate.attached(model, "dense"):
        cache = returned_cache(model(tokens(PROMPT)))
        model(tokens(11), **cached(cache))
        layer = foveate.stats(model).layers[0]
    assert layer.decode_steps == 11
    assert layer.keys_read_per_step == layer.keys_available_per_step == 67


def test_half_precision_halves_the_bytes():
    model = tiny_model().bfloat16()
    with foveate.attached(model, "dense"):
        generate(model, tokens(PROMPT), NEW)
        assert foveate.stats(model).layers[0].kv_bytes_per_step == 67 * KEY_BYTES / 2


def test_reset_counts_from_zero():
    model = tiny_model()
    with foveate.attached(model, "streaming:sinks=2,window=13"):
        generate(model, tokens(PROMPT), NEW)
        first = foveate.stats(model, reset=True)
        empty = foveate.stats(model)
        generate(model, tokens(PROMPT), NEW)
        again = foveate.stats(model)
    assert first.layers == again.layers
    assert first.layers[0].decode_steps == 11
    assert all(layer.decode_steps == layer.tokens_evicted == layer.prompt_tokens == 0 for layer in empty.layers)
    assert empty.summary()["keys_read_share"] == 1.0


def test_counts_add_up_until_they_are_reset():
    model = tiny_model()
    with foveate.attached(model, "streaming:sinks=2,window=13"):
        for _ in range(3):
            generate(model, tokens(PROMPT), NEW)
        layer = foveate.stats(model).layers[0]
    assert layer.decode_steps == 33
    assert layer.prompt_tokens == 183
    assert layer.tokens_evicted == 3 * 58
    assert layer.sequences == 3
    assert layer.keys_read_per_step == 15


def test_evicted_tokens_are_shown_of_a_sequence():
    """Whatever the layers, sequences, calls and chunks."""
    model = tiny_model()
    with foveate.attached(model, "streaming:sinks=2,window=13"):
        for _ in range(2):
            generate(model, tokens(PROMPT).expand(3, -1), NEW)
        generate(model, tokens(PROMPT), NEW, prefill_chunk_size=20)
        found = foveate.stats(model)
        assert "58 tokens of each sequence evicted, the mean over layers" in str(found)
        assert found.summary()["tokens_evicted_per_sequence"] == 58
        assert found.summary()["tokens_evicted"] == 3 * 7 * 58
        assert {layer.sequences for layer in found.layers} == {7}
        foveate.stats(model, reset=True)
        assert {layer.sequences for layer in foveate.stats(model).layers} == {0}
        assert "evicted" not in str(foveate.stats(model))


def test_layers_that_stay_as_they_are_are_named():
    model = tiny_model("gemma3")
    with foveate.attached(model, "streaming:sinks=2,window=13"):
        generate(model, tokens(PROMPT), NEW)
        found = foveate.stats(model)
    assert [layer.layer for layer in found.layers] == [0, 1, 2, 3]
    for layer in found.layers:
        if layer.layer in SLIDING["gemma3"]:
            assert layer.method == "unchanged"
            assert layer.note == "sliding-window layers stay as they are"
            assert layer.decode_steps == 0
        else:
            assert layer.method == "streaming:sinks=2,window=13"
            assert layer.keys_read_per_step == 15
    assert found.summary()["notes"] == ["sliding-window layers stay as they are"]
    assert "sliding-window layers stay as they are" in str(found)
    assert found.summary()["keys_read_share"] == pytest.approx(15 / 67)


def test_layers_of_a_composed_method_report_their_own():
    model = tiny_model()
    with foveate.attached(model, "per_layer", layers={"0": "dense", "rest": "streaming:sinks=2,window=13"}):
        generate(model, tokens(PROMPT), NEW)
        found = foveate.stats(model)
    assert [layer.method for layer in found.layers] == ["dense"] + ["streaming:sinks=2,window=13"] * 2
    assert [layer.keys_read_per_step for layer in found.layers] == [67, 15, 15]
    total = found.summary()
    assert total["keys_read_share"] == pytest.approx((67 + 15 + 15) / (3 * 67))
    assert total["keys_read_per_step"] == pytest.approx((67 + 15 + 15) / 3)
    assert total["kv_bytes_per_step"] == (67 + 15 + 15) * KEY_BYTES
    assert total["tokens_evicted"] == 2 * 58
    assert total["tokens_evicted_per_sequence"] == pytest.approx(2 * 58 / 3)
    assert total["decode_steps"] == 11


@pytest.mark.parametrize("method", methods.names())
def test_stats_are_plain_values(method):
    model = tiny_model()
    with foveate.attached(model, method, **methods.get(method).about.small_budget):
        generate(model, tokens(PROMPT), NEW)
        found = foveate.stats(model)
    read = json.loads(json.dumps(found.to_dict()))
    assert [layer["layer"] for layer in read["layers"]] == [0, 1, 2]
    assert read["decode_steps"] == 11
    assert "11 decode steps" in str(found)
    if method != "dense":
        assert 0 < read["keys_read_share"] < 0.8


# Memory


def resident_after(method: str, prompt: int = 480, **options) -> int:
    model = tiny_model()
    with foveate.attached(model, method, **options):
        out = model.generate(tokens(prompt), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        found = foveate.stats(model).resident_bytes
        assert found == returned_cache(out).resident_bytes
    return found


@pytest.mark.parametrize("method", [name for name in methods.names() if methods.get(name).evicts])
def test_evicting_frees_memory(method):
    dense = resident_after("dense")
    assert dense >= 3 * (480 + STEPS) * KEY_BYTES
    assert resident_after(method, **methods.get(method).about.small_budget) < dense / 2


def test_the_memory_of_a_window_does_not_grow_with_the_prompt():
    options = {"sinks": 2, "window": 13}
    assert resident_after("streaming", 480, **options) == resident_after("streaming", 100, **options)


def test_resident_bytes_cover_unchanged_layers_too():
    model = tiny_model("gemma3")
    with foveate.attached(model, "streaming:sinks=2,window=13"):
        out = model.generate(tokens(PROMPT), max_new_tokens=NEW, return_dict_in_generate=True)
        cache, found = returned_cache(out), foveate.stats(model).resident_bytes
        sliding = [cache.layers[index] for index in SLIDING["gemma3"]]
        own = sum(cache.layers[index].cache.resident_bytes for index in (1, 3))
    held = sum(tensor.nbytes for layer in sliding for tensor in (layer.keys, layer.values))
    assert found >= own + held > own


def test_resident_bytes_are_those_of_the_cache_filled_last_also_when_it_is_gone():
    model = tiny_model()
    with foveate.attached(model, "dense"):
        assert foveate.stats(model).resident_bytes == 0
        cache = foveate.Cache(model)
        generate(model, tokens(20), **cached(cache))
        held = cache.resident_bytes
        del cache
        assert foveate.stats(model, reset=True).resident_bytes == held > 0
        generate(model, tokens(20))
        foveate.Cache(model)  # not filled
        assert foveate.stats(model).resident_bytes == held


def test_what_reads_prompts_densely():
    model = tiny_model("llama")
    with foveate.attached(model, "h2o"):
        assert foveate.stats(model).dense_prompts == ""
        generate(model, new=2, input_ids=tokens(PROMPT))
        found = foveate.stats(model, reset=True)
        assert found.dense_prompts == found.to_dict()["dense_prompts"] == "PyTorch"
        assert "dense prompts by PyTorch" in str(found)
        assert foveate.stats(model).dense_prompts == ""


class TestMethodsThatNeverActed:
    """Most are dense until a token is decoded; stats then says that they changed nothing."""

    NOTE = "has changed no output: no token was decoded"

    @torch.no_grad()
    @pytest.mark.parametrize("use_cache", [True, False])
    def test_a_text_that_is_scored_whole(self, use_cache):
        model, ids = tiny_model(), tokens(PROMPT)
        expected = model(ids, use_cache=False).logits
        with foveate.attached(model, "h2o:top_k=8,window=4"):
            torch.testing.assert_close(model(ids, use_cache=use_cache).logits, expected, rtol=1e-4, atol=1e-4)
            assert f"h2o:top_k=8,window=4 {self.NOTE}" in str(foveate.stats(model))
            assert any(self.NOTE in note for note in foveate.stats(model).to_dict()["notes"])

    def test_answers_without_a_cache(self):
        model = tiny_model()
        own = generate(model, tokens(PROMPT))
        with foveate.attached(model, "h2o:top_k=8,window=4"):
            assert torch.equal(generate(model, tokens(PROMPT), use_cache=False), own)
            assert self.NOTE in str(foveate.stats(model))

    @pytest.mark.parametrize("method", ["h2o", "dense", "kascade_paper:anchors=1,top_k=8,tile=8"])
    def test_others_do_act(self, method):
        """In a step, as they should, or in a prompt."""
        model = tiny_model()
        with foveate.attached(model, method):
            generate(model, tokens(PROMPT), new=2 if method == "h2o" else 1)
            assert self.NOTE not in str(foveate.stats(model))


@pytest.mark.parametrize("model", [None, "smollm"])
def test_what_is_no_model(model):
    for ask in (foveate.stats, foveate.detach):
        with pytest.raises(
            ValueError, match=f"model must be a Transformers PreTrainedModel, not {type(model).__name__}"
        ):
            ask(model)
