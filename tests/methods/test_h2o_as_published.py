"""Lined attention as published: its fault, written out, and what it refuses."""

import pytest
import torch
from matrix import HEADS, KV_HEADS, PROMPT, SCALING, Driver, Tokens, close, dense, padded

import foveate
from foveate import methods
from tests.helpers import generate, left_padded, tiny_model

WINDOW = 8
METHOD = methods.make("h2o_as_published", top_k=0.15, window=WINDOW)


def written_out(tokens, prompt, pool):
    """Outputs of one sequence, a query at a time in fp64, and the mass by which the next one decides."""
    group, blind = HEADS // KV_HEADS, max(0, prompt - WINDOW)
    q, k, v = (x[0].double() for x in (tokens.q, tokens.k, tokens.v))
    mass, outs = torch.zeros(KV_HEADS, len(tokens), dtype=torch.float64), []
    for t in range(len(tokens)):
        out = torch.zeros(HEADS, v.shape[2], dtype=torch.float64)
        received = torch.zeros(KV_HEADS, len(tokens), dtype=torch.float64)
        for kv in range(KV_HEADS):
            if t < blind:
                seen, blank = list(range(blind, prompt)), True
            elif t < prompt:
                seen, blank = list(range(blind, t + 1)), False
            else:
                window = list(range(max(0, t + 1 - WINDOW), t + 1))
                score = (mass.sum(0) if pool == "layer" else mass[kv]).tolist()
                others = [s for s in range(t + 1) if s not in window and score[s] > 0]
                heavy = sorted(others, key=lambda s: (-score[s], s))[: int(0.15 * (t + 1) + 1e-9)]
                seen, blank = sorted(heavy) + window, False
            for head in range(kv * group, (kv + 1) * group):
                weights = torch.softmax(k[kv, seen] @ q[head, t] * (0.0 if blank else SCALING), 0)
                out[head] = weights @ v[kv, seen]
                received[kv, seen] += weights
        mass += received
        outs.append(out)
    return torch.stack(outs, 1)[None].float(), mass[None].float()


@pytest.mark.parametrize("pool", ["kv_head", "layer"])
@pytest.mark.parametrize("prompt", [PROMPT, WINDOW + 1, WINDOW, 3])
def test_it_is_the_published_fault(prompt, pool):
    """And with ``pool=layer`` the published code's grid: one for all heads."""
    tokens = Tokens.random(1, prompt + 12)
    driver = Driver(methods.make(METHOD, pool=pool), prompt)
    out = torch.cat([driver.feed(tokens[:prompt]), driver.feed_steps(tokens[prompt:])], 2)
    expected, mass = written_out(tokens, prompt, pool)
    close(out, expected)
    close(driver.store.channel("mass"), mass)


def test_early_queries_see_the_future_and_h2o_does_not():
    tokens, others = Tokens.random(1, PROMPT), Tokens.random(1, PROMPT, seed=1)
    changed = tokens[: PROMPT - 1].cat(others[PROMPT - 1 :])
    for method, leaks in ((METHOD, True), (methods.make("h2o"), False)):
        outs = [Driver(method).feed(sequence)[:, :, : PROMPT - WINDOW] for sequence in (tokens, changed)]
        assert (outs[0] - outs[1]).abs().max().gt(1e-3) == leaks
    close(Driver(methods.make("h2o")).feed(tokens), dense(tokens))


def test_the_heads_of_a_layer_read_the_same_only_with_one_grid():
    tokens = Tokens.random(1, PROMPT + 20)
    for pool, alike in (("kv_head", False), ("layer", True)):
        driver = Driver(methods.make(METHOD, pool=pool))
        driver.feed(tokens[:PROMPT])
        driver.feed_steps(tokens[PROMPT:])
        heads = driver.layer.method._selected(driver.store)[0]
        assert torch.equal(heads[0], heads[1]) == alike
    with pytest.raises(ValueError, match="pool must be one of kv_head, layer, not 'head'"):
        methods.make(METHOD, pool="head")


def test_the_prompt_must_come_whole():
    tokens = Tokens.random(1, PROMPT)
    driver = Driver(METHOD)
    driver.feed(tokens[:20])
    with pytest.raises(ValueError, match="h2o_as_published: the prompt must come in one piece, and only once"):
        driver.feed(tokens[20:])


def test_generate_on_a_padded_batch_equals_each_row_alone():
    model, batch = tiny_model(), left_padded([40, 23, 5])
    with foveate.attached(model, METHOD):
        together = generate(model, **batch)
        for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"])):
            alone = generate(model, input_ids=ids[None, mask.bool()], attention_mask=mask[None, mask.bool()])
            assert torch.equal(together[row], alone[0])


def test_mass_of_padded_rows_is_that_of_rows_alone():
    rows = [Tokens.random(1, length, seed=length) for length in (PROMPT, 30)]
    batch, mask = padded(rows, PROMPT)
    driver = Driver(METHOD)
    driver.feed(batch, mask)
    for b, row in enumerate(rows):
        alone = Driver(METHOD, len(row))
        alone.feed(row)
        close(driver.store.channel("mass")[b, :, : len(row)], alone.store.channel("mass")[0])
