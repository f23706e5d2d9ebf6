"""What the evicting methods keep, token by token, against their rules written out with loops in fp64."""

import pytest
import torch
from torch import Tensor

from foveate import methods
from foveate.ops import Logits
from foveate.runtime import Layer, Phase, handover
from foveate.runtime.decode import decode
from foveate.state import Counters, Geometry, SlotCache
from tests.helpers import assert_close

PROMPT, STEPS, HEADS, KV_HEADS, DIM = 41, 30, 6, 2, 16
GROUP = HEADS // KV_HEADS
SCALING = 0.6


class Sequence:
    """Queries, keys and values of all tokens, and how the tokens attend to a set of earlier ones."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (
            torch.randn(heads, PROMPT + STEPS, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )

    def weights(self, head: int, query: int, seen: list[int]) -> Tensor:
        """Softmax of one query head over the positions in ``seen``."""
        return (self.k[head // GROUP, seen].double() @ self.q[head, query].double() * SCALING).softmax(0)

    def mass(self, kv: int, query: int, seen: list[int]) -> dict[int, float]:
        """Attention of a token to each position, summed over the heads of a group."""
        total = sum(self.weights(head, query, seen) for head in range(kv * GROUP, (kv + 1) * GROUP))
        return dict(zip(seen, total.tolist()))

    def output(self, query: int, seen: list[list[int]]) -> Tensor:
        rows = [
            self.weights(head, query, seen[head // GROUP]) @ self.v[head // GROUP, seen[head // GROUP]].double()
            for head in range(HEADS)
        ]
        return torch.stack(rows)


def best(scores: dict[int, float], k: int) -> list[int]:
    return sorted(scores, key=lambda position: (-scores[position], position))[:k]


# Each rule yields what every KV head keeps: when the prompt ends, and then after every token.


def streaming(sequence: Sequence, sinks: int, window: int):
    for length in range(PROMPT, PROMPT + STEPS + 1):
        # the next query's window holds its own token too
        kept = [p for p in range(length) if p < sinks or p >= length + 1 - window]
        yield [kept] * KV_HEADS


def h2o(sequence: Sequence, top_k: int, window: int):
    mass = [dict.fromkeys(range(PROMPT + STEPS), 0.0) for _ in range(KV_HEADS)]
    kept = [list(range(PROMPT)) for _ in range(KV_HEADS)]
    for kv in range(KV_HEADS):
        for query in range(PROMPT):
            for position, one in sequence.mass(kv, query, list(range(query + 1))).items():
                mass[kv][position] += one
        old = {p: mass[kv][p] for p in range(PROMPT - window)}
        kept[kv] = sorted(best(old, top_k)) + list(range(PROMPT - window, PROMPT))
    yield kept
    for token in range(PROMPT, PROMPT + STEPS):
        for kv in range(KV_HEADS):
            kept[kv] = [*kept[kv], token]
            for position, one in sequence.mass(kv, token, kept[kv]).items():
                mass[kv][position] += one
            old = {p: mass[kv][p] for p in kept[kv] if p < token + 1 - window}
            kept[kv] = sorted(best(old, top_k)) + list(range(token + 1 - window, token + 1))
        yield kept


def tova(sequence: Sequence, top_k: int, pool: str):
    kept = [list(range(PROMPT)) for _ in range(KV_HEADS)]
    for token in range(PROMPT - 1, PROMPT + STEPS):
        if token >= PROMPT:
            kept = [[*own, token] for own in kept]
        scores = [sequence.mass(kv, token, kept[kv]) for kv in range(KV_HEADS)]
        if pool == "layer":
            scores = [{p: sum(one[p] for one in scores) for p in kept[0]}] * KV_HEADS
        kept = [sorted(best(own, top_k)) for own in scores]
        yield kept


def snapkv(sequence: Sequence, top_k: int, window: int, kernel_size: int, pooling: str):
    kept, before = [], PROMPT - window
    for kv in range(KV_HEADS):
        votes = dict.fromkeys(range(before), 0.0)
        for head in range(kv * GROUP, (kv + 1) * GROUP):
            one = sum(
                torch.nn.functional.pad(sequence.weights(head, query, list(range(query + 1))), (0, PROMPT - 1 - query))
                for query in range(before, PROMPT)
            ).tolist()
            for p in range(before):
                near = [one[p + d] for d in range(-(kernel_size // 2), kernel_size // 2 + 1) if 0 <= p + d < before]
                votes[p] += max(near) if pooling == "max" else sum(near) / kernel_size
        kept.append(sorted(best(votes, top_k)) + list(range(before, PROMPT)))
    yield kept
    for token in range(PROMPT, PROMPT + STEPS):
        kept = [[*own, token] for own in kept]
        yield kept


def uniform(sequence: Sequence, top_k: int, window: int):
    old = PROMPT - window
    kept = [i * old // top_k for i in range(top_k)] + list(range(old, PROMPT))
    yield [kept] * KV_HEADS
    for token in range(PROMPT, PROMPT + STEPS):
        kept = [*kept, token]
        # the first token has no neighbour before it, so nothing is as far apart as its neighbours
        gap = {p: kept[i + 1] - kept[i - 1] if i else float("inf") for i, p in enumerate(kept[:-window])}
        leaving = min(gap, key=lambda p: (gap[p], -p))
        kept = [p for p in kept if p != leaving]
        yield [kept] * KV_HEADS


def key_norm(sequence: Sequence, top_k: int, window: int, sinks: int):
    kept = [list(range(PROMPT)) for _ in range(KV_HEADS)]
    for length in range(PROMPT, PROMPT + STEPS + 1):
        for kv in range(KV_HEADS):
            always = [p for p in kept[kv] if p < sinks or p >= length - window]
            short = {p: -float(sequence.k[kv, p].norm()) for p in kept[kv] if p not in always}
            kept[kv] = sorted([*always, *best(short, top_k - len(always))])
        yield kept
        kept = [[*own, length] for own in kept]


RULES = {
    "streaming:sinks=3,window=9": (streaming, 3, 9),
    "streaming:sinks=0,window=5": (streaming, 0, 5),
    "h2o:top_k=7,window=6": (h2o, 7, 6),
    "h2o:top_k=1,window=1": (h2o, 1, 1),
    "tova:top_k=9": (tova, 9, "layer"),
    "tova:top_k=9,pool=kv_head": (tova, 9, "kv_head"),
    "snapkv:top_k=8,window=5,kernel_size=3": (snapkv, 8, 5, 3, "avg"),
    "snapkv:top_k=9,window=3,kernel_size=15": (snapkv, 9, 3, 15, "avg"),
    "snapkv:top_k=8,window=5,kernel_size=5,pooling=max": (snapkv, 8, 5, 5, "max"),
    "uniform:top_k=6,window=5": (uniform, 6, 5),
    "lte:score=key_norm,top_k=17,window=7,sinks=2": (key_norm, 17, 7, 2),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("spec", RULES)
def test_what_is_kept_and_what_is_attended(spec, seed):
    method, sequence = methods.parse(spec), Sequence(seed)
    rule, *settings = RULES[spec]
    expected = rule(sequence, *settings)
    geometry = Geometry(HEADS, KV_HEADS, DIM, DIM)
    channels = method.channels(geometry)
    cache = SlotCache(geometry, 1, torch.float32, torch.device("cpu"), channels, method.evicts)

    def held() -> list[list[int]]:
        return [sorted(p for p in own if p >= 0) for own in cache.positions[0].tolist()]

    prompt = slice(0, PROMPT)
    cache.append(sequence.k[None, :, prompt], sequence.v[None, :, prompt])
    q = sequence.q[None, :, prompt]
    method.observe(cache, q, method.prompt(cache, q, SCALING), SCALING)
    cache.rows["observed"] = list(cache.lengths)
    keep = method.prompt_end(cache, SCALING)
    if keep is not None:
        cache.retain(keep)
    cache.rows["prompt"] = list(cache.lengths)
    kept = next(expected)
    assert held() == kept
    for token in range(PROMPT, PROMPT + STEPS):
        now = slice(token, token + 1)
        cache.write_step(sequence.k[None, :, now], sequence.v[None, :, now])
        out = decode(method, cache, sequence.q[None, :, now], SCALING)[0].out
        assert_close(out[0, :, 0], sequence.output(token, [[*own, token] for own in kept]))
        kept = [list(own) for own in next(expected)]
        assert held() == kept


@pytest.mark.parametrize(
    "method", ["tova:top_k=8,min_k=1", "tova:top_k=8,min_k=1,pool=kv_head", "snapkv:top_k=7,window=1,kernel_size=1"]
)
def test_a_prompt_is_weighed_beside_learned_sinks(method):
    """As a decoded token weighs it: sinks take more from some heads than from others."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 40, 16, generator=generator) for heads in (4, 2, 2))
    sinks = torch.tensor([4.0, -8.0, 4.0, -8.0])
    layer = Layer(methods.parse(method), Counters(), Phase(prompt_end=40))
    handover.begin("driver", layer.phase)
    handover.post(layer, k)
    layer.attend(q, k, v, None, Logits(0.25, sinks))
    logits = (q[:, :, -1:] @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.25)[:, :, 0]
    mass = torch.cat([logits, sinks[None, :, None]], -1).softmax(-1)[..., :40].unflatten(1, (2, 2)).sum(2)
    if method == "tova:top_k=8,min_k=1":  # the layer's heads together
        mass = mass.sum(1, keepdim=True).expand(-1, 2, -1)
    if method.startswith("snapkv"):
        mass[..., -1] = torch.inf  # its window
    expected = mass.topk(8).indices.sort(-1).values
    assert torch.equal(layer.cache.positions[:, :, : layer.cache.used].sort(-1).values.long(), expected)
