"""Four published methods, written as an author would write them, by the guide's pages on extending and on hooks.

None of them is a method of foveate. They are here because each needs another part of what authors get: budgets by
layer, heads that keep different numbers of tokens, pages chosen by a key of each, positions that are not the tokens'.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import foveate
from foveate import lab, ops
from foveate.lab.checks import tiny
from foveate.methods import (
    REGISTRY,
    About,
    Channel,
    Choice,
    Evicts,
    KeepsByScore,
    Method,
    Observation,
    Replay,
    clamp,
    note_queries,
    recent,
    register,
    setting,
    window_votes,
)
from foveate.ops import KV
from tests.matrix import PROMPT, SCALING, Driver, Tokens, close


class PyramidKV(KeepsByScore):
    """SnapKV's votes, with budgets that fall from layer to layer; their mean is ``top_k``."""

    name = "test_pyramid"
    about = About(
        "PyramidKV, Cai et al. 2024, arXiv:2406.02069",
        full_budget={"top_k": 4096},
        small_budget={"window": 8, "top_k": 16},
    )
    sinks, min_k = 0, 0

    slope: float = setting(0.5, "share by which the first layer's budget is above the mean, and the last one's below")

    def for_layer(self, layer, num_layers, among=None):
        factor = 1 + self.slope * (1 - 2 * layer / max(num_layers - 1, 1))
        own = min(self.top_k * factor, 1.0) if isinstance(self.top_k, float) else max(1, round(self.top_k * factor))
        return dataclasses.replace(self, top_k=own, slope=0.0)

    def channels(self, geometry):
        return {"queries": Channel((geometry.num_heads, self.window, geometry.head_dim), per=0, dtype=None)}

    def observe(self, cache, q, attended, scaling):
        note_queries(cache, q, self.window)

    def scores(self, cache, scaling):
        votes = window_votes(cache, self.window, scaling)
        if votes is None:
            return None
        votes = F.max_pool1d(votes, 5, 1, 2).unflatten(1, (cache.geometry.num_kv_heads, -1)).sum(2)
        return F.pad(votes, (0, self.window))


class KeyDiff(KeepsByScore):
    """The tokens whose keys are least like the mean key; the KV heads of a layer share one budget."""

    name = "test_keydiff"
    about = About("KeyDiff, Park et al. 2025, arXiv:2504.15364", small_budget={"top_k": 12, "window": 4, "sinks": 2})
    evicts = Evicts.AT_PROMPT_END | Evicts.UNEVENLY
    min_k = 0

    def scores(self, cache, scaling):
        held = (cache.positions >= 0)[..., None]
        keys = F.normalize(cache.keys.float(), dim=-1)
        return -F.cosine_similarity(keys, (keys * held).sum(2, keepdim=True), dim=-1)

    def keep(self, cache, scores, allowed):
        held = cache.positions >= 0
        always = recent(cache, self.window) | (cache.positions < self.sinks)
        flat = scores.masked_fill(always, torch.inf).masked_fill(~held, -torch.inf).flatten(1)
        best = flat.topk(min(allowed * held.shape[1], flat.shape[1])).indices
        kept = torch.zeros_like(flat, dtype=torch.bool).scatter(1, best, True).view_as(held) & held
        return torch.where(kept, torch.arange(cache.used, device=kept.device), -1)


class InfLLM(Method):
    """Decode steps read the first block, the newest ones, and those whose most attended key suits the query best."""

    name = "test_infllm"
    about = About(
        "InfLLM, Xiao et al. 2024, arXiv:2402.04617",
        full_budget={"blocks": 1 << 20},
        small_budget={"block_size": 4, "blocks": 2, "local": 2},
        estimates=True,
    )
    needs_prompt_end = True
    observation = Observation("mass of an author", needs_lse=True)
    replay = Replay()

    block_size: int = setting(64, "tokens of a block")
    blocks: int = setting(16, "blocks read beside the first and the newest ones")
    local: int = setting(4, "newest blocks, always read")

    def __post_init__(self):
        for name in ("block_size", "blocks", "local"):
            self._check_count(name, 1)

    def channels(self, geometry):
        return {"received": Channel(least=0.0)}

    def observe(self, cache, q, attended, scaling):
        how = {"logits": cache.logits(scaling), "offset": cache.used - q.shape[2]}
        ops.column_mass(q, KV(cache.keys), attended.lse, out=cache.channel("received"), **how)

    def choose(self, cache, q, scaling):
        size, counts = self.block_size, cache.plan["counts"][:, None]
        received = F.pad(cache.channel("received"), (0, -cache.used % size)).unflatten(2, (-1, size))
        places = torch.arange(received.shape[2], device=q.device)
        slots = (places * size + received.argmax(-1)).clamp_max(cache.used - 1)
        rows = ops.fold_group(q, cache.geometry.num_kv_heads)
        scores = ops.key_logits(rows, ops.gather_slots(cache.keys, slots), cache.logits(scaling)).sum(2)
        number = cache.plan.per_row(self.number, of="counts")[:, None]
        always = (places == 0) | (places >= number - self.local)
        scores = scores.masked_fill(always[:, None], torch.inf).masked_fill((places >= number)[:, None], -torch.inf)
        pages = ops.topk_rows(scores, cache.plan.per_row(self.read, of="counts"), self.read(cache.used))
        tokens = (counts - places * size).clamp(0, size)[:, None].expand(scores.shape)
        return Choice(pages=pages, page_size=size, read=(tokens.gather(2, pages.clamp_min(0)) * (pages >= 0)).sum(-1))

    def number(self, tokens):
        """Blocks of so many tokens."""
        return -(-tokens // self.block_size)

    def read(self, tokens):
        """Blocks that a step reads of so many tokens."""
        return clamp(1 + self.local + self.blocks, 1, self.number(tokens))

    def scored(self, tokens, geometry, dtype):
        return tokens / self.block_size * geometry.key_share


class SelfExtend(Method):
    """Tokens further away than a window have positions that a group of them shares, in prompts as in decode steps."""

    name = "test_self_extend"
    about = About(
        "Self-Extend, Jin et al. 2024, arXiv:2401.01325",
        full_budget={"window": 1 << 20},
        small_budget={"window": 16, "group": 4},
    )
    needs_rotary = True
    stateful = False
    replay = Replay()

    window: int = setting(1024, "distances below this are as they are, in tokens")
    group: int = setting(8, "tokens that share a position further away")

    def __post_init__(self):
        for name in ("window", "group"):
            self._check_count(name, 1)

    def attended(self, cache, q, at, scaling):
        """Attention of ``q [B, Hq, n, D]`` at the positions ``at``, int ``[B, 1, n]``, to earlier tokens."""
        there, group = cache.positions, self.group
        distance = at[..., None] - there[:, :, None]  # [B, Hkv, n, used]
        seen, near = (there >= 0)[:, :, None] & (distance >= 0), distance < self.window
        far_q = cache.rotary.apply(cache.rotary.remove(q, at), at // group + self.window - self.window // group)
        far_k = cache.rotary.apply(cache.rotary.remove(cache.keys, there), there // group)
        logits = cache.logits(scaling)
        how = {"logits": logits.without_sinks(), "need_lse": True}
        parts = [
            ops.attend(q, KV(cache.keys, cache.values), mask=seen & near, **how),
            ops.attend(far_q.to(q.dtype), KV(far_k.to(q.dtype), cache.values), mask=seen & ~near, **how),
        ]
        return ops.with_sinks(ops.merge(parts), logits.sinks)

    def prompt(self, cache, q, scaling):
        at, step = cache.positions[:, :1, -q.shape[2] :], 256  # bounds the masks
        parts = [self.attended(cache, *one, scaling) for one in zip(q.split(step, 2), at.split(step, 2))]
        return ops.Attended(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))

    def choose(self, cache, q, scaling):
        at = (cache.plan["lengths"] - 1)[:, None, None]
        return Choice(attended=self.attended(cache, q, at, scaling), read=cache.plan["live"][:, None])


METHODS = [PyramidKV, KeyDiff, InfLLM, SelfExtend]


@pytest.fixture(scope="module", autouse=True)
def known():
    before = dict(REGISTRY)
    for one in METHODS:
        register(one)
    yield
    for name in set(REGISTRY) - set(before):
        del REGISTRY[name]


@pytest.mark.parametrize("name", [one.name for one in METHODS])
def test_every_line_of_the_check_passes(name):
    found = lab.check(name)
    assert found.passed, str(found)
    told = [line.name for line in found.lines if line.outcome == "told"]
    assert told == ["vLLM"], str(found)


def test_pyramid_budgets_fall_from_layer_to_layer():
    model = tiny()
    with foveate.attached(model, "test_pyramid:top_k=16,window=8", dense_below=0) as attachment:
        found = [policy.method.top_k for policy in attachment.policies.values()]
    assert found == [24, 16, 8]


def test_heads_share_the_budget_of_keydiff():
    driver, tokens = Driver(KeyDiff(top_k=12, window=4, sinks=2)), Tokens.random(4, PROMPT)
    driver.feed(tokens)
    held = (driver.store.positions[0] >= 0).sum(-1)
    assert held.sum() == 2 * 16
    assert held[0] != held[1]
    keys = F.normalize(tokens.k[0], dim=-1)
    scores = -torch.stack([F.cosine_similarity(head, head.sum(0), dim=-1) for head in keys])
    scores[:, :2] = scores[:, -4:] = torch.inf
    best = scores.flatten().topk(32).indices
    for head in range(2):
        mine = best[best // PROMPT == head] % PROMPT
        assert sorted(mine.tolist()) == [place for place in driver.store.positions[0, head].tolist() if place >= 0]


def test_self_extend_attends_by_grouped_distances():
    driver, tokens = Driver(SelfExtend(window=16, group=4)), Tokens.random(1, PROMPT + 1)
    found = torch.cat([driver.feed(tokens[:PROMPT]), driver.feed(tokens[PROMPT:])], 2)
    rotary = driver.layer.rotary
    q, k = (rotary.remove(x[0], torch.arange(PROMPT + 1)) for x in (tokens.q, tokens.k))
    for at in (5, 40, PROMPT):
        places = torch.arange(at + 1)
        distances = torch.where(at - places < 16, at - places, at // 4 - places // 4 + 16 - 16 // 4)
        outs = []
        for head in range(len(q)):
            turned = torch.stack([rotary.apply(q[head, at], distance) for distance in distances])
            weights = ((turned * k[head * 2 // len(q), : at + 1]).sum(-1) * SCALING).softmax(-1)
            outs.append(weights @ tokens.v[0, head * 2 // len(q), : at + 1])
        close(found[0, :, at], torch.stack(outs))


def test_infllm_reads_the_first_the_newest_and_the_best_blocks():
    method = InfLLM(block_size=4, blocks=2, local=2)
    driver, tokens = Driver(method), Tokens.random(1, PROMPT + 1)
    driver.feed(tokens[:PROMPT])
    received = driver.store.channel("received")[0].clone()
    found = driver.feed(tokens[PROMPT:])
    blocks = -(-(PROMPT + 1) // 4)
    for head in range(2):
        chosen = {0, blocks - 2, blocks - 1}
        queries = tokens.q[0, :, -1].unflatten(0, (2, -1))[head]
        worth = {}
        for block in sorted(set(range(blocks)) - chosen):
            best = block * 4 + received[head, block * 4 : block * 4 + 4].argmax()
            worth[block] = float((queries @ tokens.k[0, head, best]).sum())
        chosen |= set(sorted(worth, key=worth.get)[-2:])
        slots = [slot for slot in range(PROMPT + 1) if slot // 4 in chosen]
        weights = (queries @ tokens.k[0, head, slots].T * SCALING).softmax(-1)
        close(found[0, :, 0].unflatten(0, (2, -1))[head], weights @ tokens.v[0, head, slots])
