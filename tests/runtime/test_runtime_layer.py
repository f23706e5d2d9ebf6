"""One attention layer of the runtime, as an engine drives it: without Transformers."""

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from foveate import methods
from foveate.ops import Choice, Logits
from foveate.runtime import Layer, Phase, handover
from foveate.state import Counters

PROMPT, TOTAL = 21, 30


def drawn(batch=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, TOTAL, 8, generator=generator) for heads in (4, 2, 2)]


def feed(layer, tokens, first, last, mask=None):
    new = [x[:, :, first:last] for x in tokens]
    layer.announce(last - first)
    return layer.attend(*new, mask, Logits(8**-0.5))


def layer_of(spec, **how):
    return Layer(methods.parse(spec), Counters(), Phase(prompt_end=PROMPT), **how)


def dense(q, k, v):
    """Causal attention, materialised in fp64."""
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    future = torch.ones(TOTAL, TOTAL).triu(1).bool()
    logits = (q.double() @ k.transpose(-1, -2) * 8**-0.5).masked_fill(future, float("-inf"))
    return (logits.softmax(-1) @ v).float()


def test_pieces_of_a_prompt_and_steps_are_causal_attention():
    layer, tokens = layer_of("dense"), drawn()
    outs = [feed(layer, tokens, *ends) for ends in ((0, 13), (13, 25), (25, 26), (26, TOTAL))]
    torch.testing.assert_close(torch.cat(outs, 2), dense(*tokens))
    assert (layer.seen, layer.counters.prompt_tokens, layer.counters.decode_steps) == (TOTAL, 2 * PROMPT, 9)


@pytest.mark.parametrize("spec", ["dense", "h2o:top_k=9,window=4", "quest:page_size=4,top_k=8,dense_layers=0"])
def test_removed_tokens_leave_no_trace(spec):
    removed, plain, tokens = layer_of(spec), layer_of(spec), drawn()
    others = [x.flip(2) for x in tokens]
    for layer in (removed, plain):
        layer.start_recording_past()
        feed(layer, tokens, 0, PROMPT)
    feed(removed, others, PROMPT, PROMPT + 4)
    removed.remove_last(4)
    assert removed.seen == PROMPT
    assert torch.equal(feed(removed, tokens, PROMPT, TOTAL), feed(plain, tokens, PROMPT, TOTAL))


@pytest.mark.parametrize("assistant", [False, True])
def test_an_assistant_may_take_back_one_token_more(assistant):
    """Assisted decoding crops the draft model's cache to the tokens accepted, and then by one more."""
    layer, plain = layer_of("h2o:top_k=9,window=4"), layer_of("h2o:top_k=9,window=4")
    tokens = drawn()
    layer.phase.assistant = assistant
    layer.start_recording_past()
    for one in (layer, plain):
        feed(one, tokens, 0, PROMPT)
    for at in range(PROMPT, PROMPT + 4):
        feed(layer, tokens, at, at + 1)
    layer.remove_last(2)
    assert sorted(layer.cache.snapshots) == [PROMPT + 1] * assistant + [PROMPT + 2]
    if assistant:
        layer.remove_last(1)
    for at in range(PROMPT, layer.seen):
        feed(plain, tokens, at, at + 1)
    torch.testing.assert_close(feed(layer, tokens, layer.seen, TOTAL), feed(plain, tokens, plain.seen, TOTAL))


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("read", [[[3, 5]], [[4]]])
def test_places_behind_a_packed_choice_are_not_read(read, padding):
    """Whether rows are alike or not."""
    number = torch.tensor(read).expand(2, -1)

    @dataclass(frozen=True)
    class Packed(methods.Method):
        needs_prompt_end = True

        def choose(self, cache, q, scaling):
            return Choice(keys=torch.arange(6).expand(2, 2, -1), read=number, packed=True)

    class Masked(Packed):
        def choose(self, cache, q, scaling):
            return (torch.arange(cache.used) < number[..., None]).expand(2, 2, -1)

    tokens, mask, outs = drawn(), torch.ones(2, PROMPT + 1), []
    mask[1, :padding] = 0
    for method in (Packed(), Masked()):
        layer = Layer(method, Counters(), Phase(prompt_end=PROMPT))
        feed(layer, tokens, 0, PROMPT, mask[:, :PROMPT])
        outs.append((feed(layer, tokens, PROMPT, PROMPT + 1, mask), float(layer.counters.keys_read)))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_of_other_rows_is_refused(rows):
    layer, mask = layer_of("dense"), torch.ones(rows, PROMPT)
    mask[:, :3] = 0
    with pytest.raises(ValueError, match=f"attention_mask has {rows} rows, but the batch has 2"):
        feed(layer, drawn(), 0, PROMPT, mask)
    assert layer.seen == 0


def test_padding_is_that_of_each_mask():
    phase, mask = Phase(), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    other = mask.flip(0)
    assert [row.tolist() for row in phase.rows(mask, 0, 4)] == [[1, 2, 3], [0, 1, 2, 3]]
    assert [row.tolist() for row in phase.rows(other, 0, 4)] == [[0, 1, 2, 3], [1, 2, 3]]
    assert [row.tolist() for row in phase.rows(mask, 0, 2)] == [[1], [0, 1]]  # the others follow in the same pass
    assert phase.rows(mask, 2, 2) is None
    assert phase.rows(other, 1, 3) is None
    assert phase.rows(None, 0, 4) is None


def test_a_pass_that_was_interrupted_is_dropped_with_those_nested_in_it():
    first, second = Phase(), Phase()
    handover.begin("engine", first)
    handover.begin("draft", Phase())  # neither ends
    handover.begin("engine", second)
    assert handover.current().phase() is second
    assert handover.current("draft") is None
    assert handover.end("engine").phase() is second
    assert handover.end("engine") is None
    assert handover.end("draft") is None


def test_keys_that_are_never_attended_to_are_an_error():
    layer, (_, k, _) = layer_of("dense"), drawn()
    handover.begin("engine", layer.phase)
    handover.post(layer, k)
    with pytest.raises(RuntimeError, match="attention never took them"):
        handover.post(layer, k)
    assert handover.take(k, "engine") is layer
    handover.end("engine")


def test_a_layer_is_posted_in_a_pass_on_its_own_cache_alone():
    layer, (_, k, _) = layer_of("dense"), drawn()
    with pytest.raises(ValueError, match="outside of a forward pass"):
        handover.post(layer, k)
    handover.begin("engine", Phase())
    with pytest.raises(ValueError, match="outside of a forward pass"):
        handover.post(layer, k)
    handover.end("engine")


@pytest.mark.full
def test_steps_are_replayed_where_transformers_is_not_installed():
    """The recorder runs a step again instead of capturing it."""
    program = """
        import sys
        sys.modules["transformers"] = None
        import torch
        from foveate import methods
        from foveate.ops import Logits
        from foveate.runtime import Layer, Phase, Recording, ReplayedSteps, Use
        from foveate.state import Counters

        def attend(q, k, v):
            layer.announce(k.shape[2])
            return layer.attend(q, k, v, None, Logits(8**-0.5))

        generator = torch.Generator().manual_seed(0)
        tokens = [torch.randn(2, heads, 30, 8, generator=generator) for heads in (4, 2, 2)]
        found = []
        for replayed in (False, True):
            layer = Layer(methods.parse("tova:top_k=9"), Counters(), Phase(prompt_end=21))
            attend(*(x[:, :, :21] for x in tokens))
            outs = torch.zeros(2, 4, 1, 8)

            def run(**given):
                return outs.copy_(attend(**given))

            def record(run):
                def again():
                    run()
                    layer.seen -= 1  # a replay runs nothing on the host
                return Recording(outs, again)

            use, step = Use(), run
            if replayed:
                steps = ReplayedSteps(record, use)
                step = lambda **given: steps([layer], run, given, {})
            found.append([step(**{name: x[:, :, n : n + 1] for name, x in zip("qkv", tokens)}).clone()
                          for n in range(21, 30)])
        torch.testing.assert_close(*found)
        print(use.captured, use.replayed)
    """
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "8"]
