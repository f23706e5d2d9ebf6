"""LuKA's summaries against the paper's formulas, written out."""

import torch
from matrix import DIM, HEADS, KV_HEADS, SCALING, Driver, Tokens, close

from foveate import methods


def test_attention_weighted_summaries_are_those_of_the_paper():
    """w_i: mass over all queries, averaged over the heads of the KV group; pi = softmax(w / tau) over a page."""
    page, tail, tau, length = 4, 6, 3.0, 30
    tokens = Tokens.random(1, length)
    driver = Driver(methods.make("luka", page_size=page, tail=tail, compressor="attention", temperature=tau), length)
    driver.feed(tokens)
    pages = (length - tail) // page
    group = HEADS // KV_HEADS
    logits = tokens.q @ tokens.k.repeat_interleave(group, 1).transpose(-1, -2) * SCALING
    future = torch.ones(length, length).triu(1).bool()
    mass = logits.masked_fill(future, float("-inf")).softmax(-1).sum(2).view(1, KV_HEADS, group, length).mean(2)
    weights = (mass[:, :, : pages * page].view(1, KV_HEADS, pages, page) / tau).softmax(-1)[..., None]
    for name, x in (("summary_k", tokens.k), ("summary_v", tokens.v)):
        expected = (weights * x[:, :, : pages * page].view(1, KV_HEADS, pages, page, DIM)).sum(3)
        close(driver.store.channel(name)[:, :, :pages], expected)


def test_preserved_mass_is_equation_3_written_out():
    page, tail, length = 4, 6, 31
    tokens = Tokens.random(1, length)
    method = methods.make("luka", page_size=page, tail=tail, top_k=2, mass="preserve")
    driver = Driver(method, length - 1)
    driver.feed(tokens[: length - 1])
    out = driver.feed(tokens[length - 1 :])
    pages = (length - 1 - tail) // page
    group = HEADS // KV_HEADS
    for kv_head in range(KV_HEADS):
        k, v = tokens.k[0, kv_head], tokens.v[0, kv_head]
        summaries_k, summaries_v = (x[: pages * page].view(pages, page, DIM).mean(1) for x in (k, v))
        queries = tokens.q[0, kv_head * group : (kv_head + 1) * group, -1]
        cover = torch.cat([summaries_k, k[pages * page :]])
        alpha = (queries @ cover.T * SCALING).softmax(-1)
        refined = alpha[:, :pages].mean(0).topk(2).indices.tolist()
        expected = alpha[:, pages:] @ v[pages * page :]
        for index in range(pages):
            tokens_of = slice(index * page, (index + 1) * page)
            beta = (queries @ k[tokens_of].T * SCALING).softmax(-1)
            value = beta @ v[tokens_of] if index in refined else summaries_v[index]
            expected = expected + alpha[:, index, None] * value
        close(out[0, kv_head * group : (kv_head + 1) * group, 0], expected)
