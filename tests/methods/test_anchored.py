"""Keys chosen in one layer and read in others: Kascade, its oracle, OmniKV and LessIsMore, written out."""

import functools
import itertools
import math
import weakref

import pytest
import torch

from foveate import methods, ops
from foveate.methods import kascade_pages
from foveate.ops.compress.low_rank import factors
from foveate.runtime import Layer, Phase, handover
from foveate.runtime import decode as runtime_decode
from foveate.runtime.decode import decode
from foveate.state import Counters, Evicts
from foveate.state.borrowed import branch_of, cache_of
from tests.combinations import every_pair
from tests.helpers import assert_close, kascade_by_head

HEADS, KV_HEADS, DIM, SCALING = 6, 2, 16, 0.3
GROUP = HEADS // KV_HEADS


class Stack:
    """The attention layers of a model, fed one after the other in each forward pass."""

    def __init__(self, method, layers, prompt_end, softcap=None):
        self.phase, self.softcap = Phase(prompt_end=prompt_end), softcap
        self.layers = [Layer(method.for_layer(n, layers), Counters(), self.phase) for n in range(layers)]

    def feed(self, tokens, mask=None):
        """``tokens``: q, k and v of each layer. The outputs of all layers, ``[layers, B, Hq, n, D]``."""
        self.phase.forward.clear()
        outs = []
        for layer, (q, k, v) in zip(self.layers, tokens):
            handover.begin("driver", layer.phase)
            handover.post(layer, k)
            outs.append(layer.attend(q, k, v, mask, ops.Logits(SCALING, softcap=self.softcap)))
        return torch.stack(outs)


def draw(layers, batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(batch, heads, length, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for _ in range(layers)
    ]


def part(tokens, *where):
    return [tuple(x[:, :, slice(*where)] for x in layer) for layer in tokens]


def logits(q, k, i):
    """Scaled logits of the query at position i, float64 ``[Hq, i + 1]``, of one sequence."""
    keys = k.double().repeat_interleave(GROUP, 0)[:, : i + 1]
    return torch.einsum("hd,hnd->hn", q[:, i].double(), keys) * SCALING


def weights(q, k, i):
    """Attention of the query at position i, float64 ``[Hq, i + 1]``, of one sequence."""
    return logits(q, k, i).softmax(-1)


def read(q, k, v, i, chosen, unchosen=((),) * KV_HEADS):
    """Output of query i over the chosen positions of each KV head, ``[Hq, D]``, and over the mean of others as often as
    there are of them."""
    out = torch.empty(HEADS, DIM, dtype=torch.float64)
    for h in range(HEADS):
        index = sorted(chosen[h // GROUP])
        keys, values = (x[h // GROUP, index].double() for x in (k, v))
        of_keys = keys @ q[h, i].double() * SCALING
        if number := len(others := list(unchosen[h // GROUP])):
            mean_key, mean_value = (x[h // GROUP, others].double().mean(0, keepdim=True) for x in (k, v))
            of_mean = mean_key @ q[h, i].double() * SCALING + math.log(number)
            of_keys, values = torch.cat([of_keys, of_mean]), torch.cat([values, mean_value])
        out[h] = of_keys.softmax(0) @ values
    return out


def best(scores, k):
    """Positions of the k largest."""
    return set(scores.topk(k).indices.tolist())


def by_mass(q, k, queries, before, k_of, pool="kv_head", pooling="post_softmax"):
    """The keys before a position that a tile of queries attends to most, by KV head."""
    power = 0.5 if pooling == "sqrt" else 1.0
    mass = torch.stack([weights(q, k, i)[:, :before] ** power for i in queries]).mean(0)
    scores = mass.unflatten(0, (KV_HEADS, GROUP)).mean(1)
    if pool == "layer":
        scores = scores.mean(0, keepdim=True).expand(KV_HEADS, -1)
    return [best(row, min(k_of(before), before)) for row in scores]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"anchors": [0, 2], "heads": {"1": [1, 0], "3": [1, 1]}},
        {"anchors": [0, 1, 3], "pool": "layer", "tile": 9},
        {"anchors": [0, 1], "tile": 100},
        {"anchors": [0, 2], "pooling": "sqrt", "pool": "layer"},
        {"anchors": [1], "decode_only": True, "heads": {"3": [1, 0]}},
        {"anchors": [1, 2], "heads": {"3": [1, 1]}},
        {"anchors": [1], "dense_anchor_prefill": True, "tile": 5},
        {"anchors": [0, 2], "dense_anchor_prefill": True, "pooling": "sqrt"},
        {"anchors": [0, 2], "heads": {"1": [1, 0], "3": [1, 1]}, "rest": "mean"},
        {"anchors": [0, 1, 3], "pool": "layer", "tile": 9, "rest": "mean"},
        {"anchors": [0, 1], "dense_anchor_prefill": True, "pooling": "sqrt", "rest": "mean"},
    ],
    ids=str,
)
@pytest.mark.parametrize("top_k", [0.3, 7])
def test_kascade_written_out(settings, top_k):
    layers, prompt, total = 4, 41, 46
    settings = {"anchors": [0, 2], "tile": 12, "top_k": top_k, "min_k": 5, "dense_anchor_prefill": False} | settings
    method = kascade_by_head(**settings)
    tokens = draw(layers, 1, total)
    stack = Stack(method, layers, prompt)
    out = torch.cat(
        [stack.feed(part(tokens, prompt)), *(stack.feed(part(tokens, i, i + 1)) for i in range(prompt, total))], 3
    )

    def budget(length):
        return min(max(math.floor(top_k * length), 5) if isinstance(top_k, float) else top_k, length)

    tile, counted = max(1, settings["tile"] // GROUP), torch.zeros(layers)
    how = {name: settings[name] for name in ("pool", "pooling") if name in settings}
    for i in range(total):
        decoded = i >= prompt
        begin = i + 1 if decoded else i // tile * tile
        queries = [i] if decoded else range(begin, min(begin + tile, prompt))
        selection = None
        for layer, (q, k, v) in enumerate((x[0] for x in layer) for layer in tokens):
            everything = [set(range(i + 1))] * KV_HEADS
            if layer in settings["anchors"]:
                selection = by_mass(q, k, queries, begin, budget, **how)
                exact = not decoded and settings.get("dense_anchor_prefill")
                chosen = everything if layer == 0 or exact else selection
            elif selection is None:
                chosen = everything
            else:
                heads = settings.get("heads", {}).get(str(layer), range(KV_HEADS))
                chosen = [selection[h] for h in heads]
            dense = settings.get("decode_only") or selection is None or chosen is everything
            means = not decoded and not dense and settings.get("rest") == "mean"
            unchosen = [sorted(set(range(begin)) - one) if means else [] for one in chosen]
            if not decoded:
                chosen = everything if dense else [one | set(range(begin, i + 1)) for one in chosen]
            assert_close(out[layer, 0, :, i], read(q, k, v, i, chosen, unchosen))
            counted[layer] += decoded * sum(map(len, chosen)) / KV_HEADS
    for number, layer in enumerate(stack.layers):
        if number not in settings["anchors"]:  # which look at more keys than they read
            assert float(layer.counters.keys_read) == pytest.approx(float(counted[number]))
    assert [layer.counters["indices_reused"] for layer in stack.layers] == [
        (total - prompt) * (layer not in settings["anchors"] and layer > settings["anchors"][0])
        for layer in range(layers)
    ]


@pytest.mark.parametrize(
    "method",
    [
        kascade_by_head(anchors=[0, 2], tile=9, top_k=0.2, min_k=3, heads={"1": [1, 0]}),
        kascade_by_head(anchors=[1], decode_only=True, top_k=0.2, min_k=3),
        kascade_by_head("kascade_pages", anchors=[1, 2], tile=9, top_k=0.2, min_k=3),
        kascade_by_head("kascade_pages", anchors=[0], top_k=0.1, min_k=3, first_layer="pages"),
        methods.make("omnikv", filters=[0], wait=0, top_k=0.2, min_k=3),
        methods.make("omnikv", filters=[0], wait=0, top_k=0.2, min_k=3, score="logit"),
        methods.make("lessismore", selections=[1], top_k=0.3, min_k=3),
        methods.make("lessismore", selections=[1], top_k=0.5, min_k=3),  # with sinks in the longest row alone
    ],
    ids=lambda method: method.spec,
)
def test_padded_rows_get_their_own_layers_choices(method):
    layers, lengths, steps = 4, (33, 20, 20, 7), 5
    rows = [draw(layers, 1, length + steps, seed=row) for row, length in enumerate(lengths)]
    batch, mask = draw(layers, len(rows), max(lengths), seed=9), torch.zeros(len(rows), max(lengths), dtype=torch.bool)
    for b, (row, length) in enumerate(zip(rows, lengths)):
        mask[b, -length:] = True
        for layer, own in zip(batch, part(row, length)):
            for x, y in zip(layer, own):
                x[b, :, -length:] = y[0]
    stack = Stack(method, layers, max(lengths))
    prompts = stack.feed(batch, mask)
    alone = [Stack(method, layers, length) for length in lengths]
    for b, (row, length) in enumerate(zip(rows, lengths)):
        assert_close(prompts[:, b, :, -length:], alone[b].feed(part(row, length))[:, 0])
    for step in range(steps):
        at = [part(row, length + step, length + step + 1) for row, length in zip(rows, lengths)]
        together = [tuple(torch.cat(xs) for xs in zip(*layer)) for layer in zip(*at)]
        out = stack.feed(together)
        for b, own in enumerate(at):
            assert_close(out[:, b], alone[b].feed(own)[:, 0])
    for number, layer in enumerate(stack.layers):  # what is counted of a batch is the sum over its rows
        for name in ("decode_rows", "keys_read", "keys_available", *layer.method.counters):
            rows_alone = (one.layers[number].counters[name] for one in alone)
            assert float(layer.counters[name]) == pytest.approx(sum(map(float, rows_alone)))


@pytest.mark.parametrize("score", ["softmax", "logit"])
def test_omnikv_written_out(score):
    layers, prompt, total, k_of = 6, 30, 35, 8
    method = methods.make("omnikv", filters=[1, 4], wait=1, top_k=k_of, score=score)
    tokens = draw(layers, 1, total)
    stack = Stack(method, layers, prompt)
    stack.feed(part(tokens, prompt))
    for i in range(prompt, total):
        out = stack.feed(part(tokens, i, i + 1))
        for layer, (q, k, v) in enumerate((x[0] for x in layer) for layer in tokens):
            if layer in (1, 4):
                scores = weights(q, k, i) if score == "softmax" else logits(q, k, i)
                chosen = best(scores.amax(0), k_of)
            sparse = layer == 3
            assert_close(out[layer, 0, :, 0], read(q, k, v, i, [chosen if sparse else set(range(i + 1))] * KV_HEADS))


@pytest.mark.parametrize(
    ("k_of", "sinks", "first", "last"),
    [
        (16, 2, 2, 2),
        (20, 4, 4, 1),
        (16, 4, 0, 4),  # four keys are the sinks' and the recent tokens': no place for a recent one beside the sinks
        (12, 4, 0, 3),
        (3, 4, 0, 1),
    ],
)
def test_lessismore_written_out(k_of, sinks, first, last):
    layers, prompt, total = 3, 40, 46
    method = methods.make("lessismore", selections=[1], top_k=k_of, sinks=sinks, recent=0.25)
    tokens = draw(layers, 1, total)
    stack = Stack(method, layers, prompt)
    stack.feed(part(tokens, prompt))
    for i in range(prompt, total):
        out = stack.feed(part(tokens, i, i + 1))
        q, k, _ = (x[0] for x in tokens[1])
        middle = range(first, i + 1 - last)
        ranked = [sorted(middle, key=lambda j, h=h: -weights(q, k, i)[h, j]) for h in range(HEADS)]
        union = dict.fromkeys(itertools.chain.from_iterable(zip(*ranked)))
        chosen = {*range(first), *range(i + 1 - last, i + 1), *list(union)[: k_of - first - last]}
        for layer, (q, k, v) in enumerate((x[0] for x in layer) for layer in tokens):
            sparse = layer == 2
            assert_close(out[layer, 0, :, 0], read(q, k, v, i, [chosen if sparse else set(range(i + 1))] * KV_HEADS))


@pytest.mark.parametrize("recent", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("sinks", [0, 4])
def test_lessismore_reads_every_key_once_where_its_budget_is_the_context(recent, sinks):
    method = methods.make("lessismore", recent=recent, sinks=sinks)
    for length in range(1, 20):
        ((q, k, v),) = draw(1, 1, length)
        chosen = method.select(cache_of(k, v, HEADS), q[:, :, -1:], SCALING)
        assert [sorted(head[head >= 0].tolist()) for head in chosen[0]] == [list(range(length))] * KV_HEADS


@pytest.mark.parametrize(
    "method",
    [
        methods.make("omnikv", filters=[0, 3], wait=0, top_k=5),
        methods.make("lessismore", selections=[0, 3], top_k=9, sinks=1),
        kascade_by_head(anchors=[0, 2], top_k=5, tile=12),
        kascade_by_head(anchors=[0, 2], top_k=0.4, min_k=3, tile=12, pool="layer"),
        kascade_by_head(anchors=[0, 2], top_k=5, tile=12, pool="layer", pooling="sqrt"),
    ],
    ids=lambda method: method.spec,
)
def test_capped_logits_choose_as_those_of_other_keys(method):
    """Where a KV head has its queries and keys along one axis, keys can be moved to where their logits are capped."""
    softcap, axis = 1.0, torch.zeros(DIM).index_fill(0, torch.tensor(3), 1.0)
    loudness = torch.tensor([1.0, 4.0])[:, None, None]  # of the KV heads, so that a cap changes who attends most
    tokens, moved = [], []
    for q, k, v in draw(5, 2, 50):
        q, k = loudness.repeat_interleave(GROUP, 0) * axis.expand(q.shape), 2 * k * axis
        tokens.append((q, k, v))
        slope = loudness * SCALING
        moved.append((q, softcap * (slope * k / softcap).tanh() / slope, v))
    outs = []
    for cap, some in ((softcap, tokens), (None, moved)):
        stack = Stack(method, 5, 40, cap)
        outs.append(
            torch.cat([stack.feed(part(some, *piece)) for piece in ((0, 40), *((n, n + 1) for n in range(40, 50)))], 3)
        )
    assert_close(*outs)


def test_oracle_chooses_in_every_layer():
    tokens = draw(3, 1, 30)
    method = methods.make("oracle_topk", top_k=6, decode_only=True)
    stack = Stack(method, 3, 29)
    stack.feed(part(tokens, 29))
    out = stack.feed(part(tokens, 29, 30))
    for layer, (q, k, v) in enumerate((x[0] for x in layer) for layer in tokens):
        chosen = by_mass(q, k, [29], 30, lambda _, k_of=30 if layer == 0 else 6: k_of)
        assert_close(out[layer, 0, :, 0], read(q, k, v, 29, chosen))


def test_evenly_spaced_anchors_and_depths():
    def roles(method, layers):
        return [method.for_layer(n, layers).role for n in range(layers)]

    def of(name, layers, kinds):
        return [role.layer for role in roles(methods.make(name), layers) if role.name in kinds]

    choosing = ("choosing", "dense, choosing")
    assert of("kascade", 32, choosing) == [0, 6, 13, 19, 26]
    assert of("kascade", 4, ("reading",)) == []  # nobody asked for five
    assert of("omnikv", 32, choosing) == [2, 8, 18]
    assert of("omnikv", 32, ("dense",)) == [0, 1, 3, 9, 19]
    assert of("lessismore", 36, choosing) == [2, 15]


def test_layers_that_the_method_is_not_applied_to_choose_nothing():
    read = [kascade_by_head(anchors=2).for_layer(n, 8, (3, 5, 6, 7)).role.reads_choice_of for n in (3, 5, 6, 7)]
    assert read == [None, 3, None, 6]
    mixed = methods.make("per_layer", layers={"0-1": "dense", "rest": "lessismore:selections=[0.0, 0.5]"})
    roles = [mixed.for_layer(n, 6).role for n in (2, 3, 4, 5)]
    assert [(role.reads_choice_of, role.reads_all, role.has_readers) for role in roles] == [
        (None, True, True),
        (2, False, False),
        (None, True, True),
        (4, False, False),
    ]
    with pytest.raises(ValueError, match="anchors must be among"):
        kascade_by_head(anchors=[0, 5]).for_layer(5, 8, (3, 5, 6, 7))


@pytest.mark.parametrize("heads", [[0], [0, 2], [0, -1], [0, 1, 1]])
def test_head_maps_that_do_not_fit_the_model(heads):
    stack = Stack(kascade_by_head(anchors=[0], heads={"1": heads}), 2, 9)
    with pytest.raises(ValueError, match="heads of layer 1 must be 2 numbers below 2, one for each KV head"):
        stack.feed(draw(2, 1, 9))


@pytest.mark.parametrize(
    ("method", "layers", "left"),
    [
        ("oracle_topk", 3, 0),
        ("kascade_paper:anchors=[0,2]", 3, 1),
        ("lessismore:selections=[1]", 3, 1),
        ("kascade_paper:anchors=[0,2,4]", 6, 1),  # of several anchors, the last one's
        ("kascade_paper:anchors=[0,2,3,5]", 7, 1),
    ],
)
def test_nothing_is_left_for_layers_that_do_not_read_it(method, layers, left):
    def handed_on():
        return [key for key in stack.phase.forward if key[0] != "most" and not callable(key[0])]

    stack = Stack(methods.parse(method), layers, 9)
    stack.feed(draw(layers, 1, 9))
    assert len(handed_on()) <= left  # lessismore reads prompts densely
    stack.feed(draw(layers, 1, 1))
    assert len(handed_on()) == left


@pytest.mark.parametrize(
    ("method", "layers", "choosing"),
    [
        ("kascade_paper:anchors=[0,1]", 3, [1]),
        ("kascade_paper:anchors=[0,2]", 3, [0]),  # the last layer reads its own choice
        ("omnikv:filters=[0,2]", 4, []),  # one dense layer waits after each filter
        ("omnikv:filters=[0,2],wait=0", 4, [0, 2]),
        ("lessismore:selections=[1,2]", 4, [2]),
        ("lessismore:selections=[0,3]", 4, [0]),
    ],
)
def test_dense_layers_choose_at_a_step_only_for_others(monkeypatch, method, layers, choosing):
    method, chose = methods.parse(method), []
    real = runtime_decode.hand_on
    monkeypatch.setattr(
        runtime_decode, "hand_on", lambda cache, one, *a: chose.append(one.role.layer) or real(cache, one, *a)
    )
    stack = Stack(method, layers, 9)
    stack.feed(draw(layers, 1, 9))
    chose.clear()
    for step in range(2):
        stack.feed(draw(layers, 1, 1, seed=step))
    assert chose == choosing * 2


def test_prompts_and_steps_in_half_precision_with_queries_of_any_size():
    tokens = [tuple(x.half() for x in layer) for layer in draw(2, 1, 40)]
    tokens = [(q * 600, k, v) for q, k, v in tokens]
    for pooling in ("post_softmax", "sqrt"):
        stack = Stack(kascade_by_head(anchors=[1], top_k=5, tile=24, pooling=pooling), 2, 39)
        assert stack.feed(part(tokens, 39)).isfinite().all()
        assert stack.feed(part(tokens, 39, 40)).isfinite().all()


def test_methods_on_record_within_others_are_as_they_were():
    for exact in (False, True):
        own = methods.make("per_layer", layers={"0-1": "dense", "rest": f"kascade:dense_anchor_prefill={exact}"})
        assert methods.make(own.name, **methods.settings_of(own)) == own


def test_dense_prompts_have_no_anchors_that_could_read_less():
    method, other = (kascade_by_head(decode_only=True, dense_anchor_prefill=x) for x in (True, False))
    assert method == other == methods.make("kascade", **methods.settings_of(method))
    assert method.spec == "kascade:pool=kv_head,pooling=post_softmax"
    assert not {"dense_anchor_prefill", "rest"} & methods.settings_of(method).keys()


def test_a_mean_of_keys_is_refused_where_prompts_are_dense():
    sparse = kascade_by_head(rest="mean")
    assert methods.parse(sparse.spec) == sparse
    assert methods.settings_of(sparse)["rest"] == "mean"
    for how in ({"method": "kascade"}, {"method": "oracle_topk", "decode_only": True}):
        with pytest.raises(ValueError, match="rest must be none with decode_only=true, under which prompts are read d"):
            methods.make(**how, rest="mean")
    with pytest.raises(ValueError, match="rest must be one of none, mean, not 'sum'"):
        kascade_by_head(rest="sum")


@functools.cache
def summary_of_page(k, channel_weights, own, page, form):
    """The keys of a full page of a KV head as its record has them, fp64 ``[size, D]``."""
    keys = k[None, own : own + 1, page * form.page_size : (page + 1) * form.page_size] * channel_weights[own]
    return factors(ops.compress_pages(keys, form), form).keys()[0, 0, 0].double()


def best_keys_of_best_pages(q, k, i, channel_weights, count, pool, pooling, page_size=8, rank=2):
    """What ``kascade_pages`` reads for the query at position i and the keys that it scores, by KV head; and the
    share of the attention to full pages that the pages of these hold by their summaries, the mean over the heads."""
    size, third, length = page_size, kascade_pages.ONE_PAGE_IN, i + 1
    form, number, full = ops.PageRecord(DIM, size, rank), math.ceil(length / size), length // size
    power = 0.5 if pooling == "sqrt" else 1.0
    mass = torch.zeros(2, KV_HEADS, number, dtype=torch.float64)  # as pages are scored by it, and itself
    for own, weight in enumerate(channel_weights):
        held = torch.stack([summary_of_page(k, channel_weights, own, page, form) for page in range(full)])
        for h in range(own * GROUP, (own + 1) * GROUP):
            share = (held @ (q[h, i] / weight).double() * SCALING).logsumexp(-1).softmax(0)
            mass[:, own, :full] += torch.stack([share**power, share / HEADS])
    mass, shares = mass
    mass = mass.sum(0, keepdim=True).expand(KV_HEADS, -1) if pool == "layer" else mass
    sets, held = [], 0.0
    scores = torch.zeros(KV_HEADS, length, dtype=torch.float64)
    for own in range(KV_HEADS):
        others = best(
            mass[own, : number - 1], min(max(math.ceil(number / third), math.ceil((count - 1) / size) + 1), number) - 1
        )
        slots = [slot for slot in range(length) if slot // size in others | {number - 1}]
        sets.append(set(slots))
        held += float(shares[own, sorted(others | {number - 1})].sum())
        for h in range(own * GROUP, (own + 1) * GROUP):
            scores[own, slots] += (logits(q, k, i)[h, slots]).softmax(0) ** power
    scores = scores.sum(0, keepdim=True).expand(KV_HEADS, -1) if pool == "layer" else scores
    return [best(row, count) for row in scores], sets, held


@pytest.mark.parametrize("top_k", [9, 40, 0.1], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pooling": "sqrt"},
        {"pool": "layer"},
        {"pool": "layer", "pooling": "sqrt"},
        {"page_size": 16},
        {"page_size": 5},
    ],
    ids=str,
)
def test_anchors_that_score_pages_choose_keys_of_the_best_third(settings, top_k):
    """Layer 0 is dense, and chooses by exact scores."""
    layers, prompt, total = 3, 150, 163
    method = kascade_by_head("kascade_pages", anchors=[0, 1], top_k=top_k, min_k=5, **settings)
    method = methods.make(method, decode_only=True)
    tokens, stack = draw(layers, 1, total), Stack(method, layers, prompt)
    stack.feed(part(tokens, prompt))
    q, k, _ = (x[0] for x in tokens[1])
    weighted = ops.channel_weights(q[None, :, prompt - 16 : prompt], KV_HEADS)[0]
    read_and_scored, different = [0.0, 0.0], 0
    how = {"pool": "kv_head", "pooling": "post_softmax"} | {x: settings[x] for x in settings if "pool" in x}
    summaries = {x: settings[x] for x in settings if "pool" not in x}
    for i in range(prompt, total):
        out, count = stack.feed(part(tokens, i, i + 1)), max(int(top_k * (i + 1)), 5) if top_k == 0.1 else top_k
        chosen, scored, _ = best_keys_of_best_pages(q, k, i, weighted, count, **how, **summaries)
        exact = by_mass(q, k, [i], i + 1, lambda length, count=count: count, **how)
        different += chosen != exact
        for layer, (own_q, own_k, own_v) in enumerate((x[0] for x in layer) for layer in tokens):
            if layer:
                assert_close(out[layer, 0, :, 0], read(own_q, own_k, own_v, i, chosen))
        share = ops.PageRecord(DIM, method.page_size, method.rank).bytes / (method.page_size * 2 * DIM * 4)
        read_and_scored[0] += count
        read_and_scored[1] += sum(map(len, scored)) / KV_HEADS / 2 + share * (i + 1)
    assert [float(layer.counters.keys_read) for layer in stack.layers[1:]] == pytest.approx(
        [sum(read_and_scored), read_and_scored[0]]
    )
    assert different > 3, "keys are random, and some of the best are in other pages"


@every_pair(
    ("anchors", [[0, 2], [1], [0, 1]]),
    (
        "settings",
        [{}, {"pooling": "sqrt"}, {"pool": "layer"}, {"pool": "layer", "pooling": "sqrt"}, {"page_size": 16}],
    ),
    ("top_k", [9, 40, 0.1]),
)
def test_layer_0_reads_the_best_third_and_chooses_among_it(anchors, settings, top_k):
    """Where it has readers; its prompt is dense, as are the layers that come before any anchor."""
    layers, prompt, total = 3, 150, 163
    settings = {"first_layer": "pages", "decode_only": True, "min_k": 5} | settings
    method = kascade_by_head("kascade_pages", anchors=anchors, top_k=top_k, **settings)
    tokens, stack = draw(layers, 1, total), Stack(method, layers, prompt)
    close_to_dense = stack.feed(part(tokens, prompt))[0, 0]
    (q, k, v), everything = (x[0] for x in tokens[0]), [set(range(prompt))] * KV_HEADS
    assert_close(close_to_dense[:, -1], read(q, k, v, prompt - 1, everything))
    weighted = ops.channel_weights(q[None, :, prompt - 16 : prompt], KV_HEADS)[0]
    own = ("pool", "pooling", "page_size")
    how = {"pool": "kv_head", "pooling": "post_softmax"} | {x: settings[x] for x in settings if x in own}
    counted, mass, missed = 0.0, 0.0, 0
    share = ops.PageRecord(DIM, method.page_size, method.rank).bytes / (method.page_size * 2 * DIM * 4)
    readers = anchors == [0, 2]
    for i in range(prompt, total):
        out, count = stack.feed(part(tokens, i, i + 1)), max(int(top_k * (i + 1)), 5) if top_k == 0.1 else top_k
        chosen, pages, held = best_keys_of_best_pages(q, k, i, weighted, count, **how)
        assert_close(out[0, 0, :, 0], read(q, k, v, i, pages))
        if readers:
            assert_close(out[1, 0, :, 0], read(*(x[0] for x in tokens[1]), i, chosen))
        counted += sum(map(len, pages)) / KV_HEADS * (1.5 if readers else 1.0) + share * (i + 1)
        mass += held
        missed += i + 1 - len(pages[0])
    counters = stack.layers[0].counters
    assert float(counters.keys_read) == pytest.approx(counted)
    assert float(counters["mass_read"]) == pytest.approx(mass, rel=1e-5)
    assert missed > 60 * (total - prompt)
    assert not any("mass_read" in layer.counters.own for layer in stack.layers[1:])
    assert stack.layers[0].method.role.name == ("pages, choosing" if readers else "pages")


@pytest.mark.parametrize("anchors", [[0, 2], [1]])
def test_layer_0_reads_prompts_densely_whatever_steps_read(anchors):
    """Also where other layers read tiles of keys, and anchors what they chose."""
    summaries = {"first_layer": "pages", "page_size": 4, "dense_anchor_prefill": False}
    method = kascade_by_head("kascade_pages", anchors=anchors, top_k=5, min_k=1, tile=4, **summaries)
    assert not method.dense_anchor_prefill
    tokens = draw(3, 1, 40)
    pages, dense = Stack(method, 3, 40).feed(tokens), Stack(methods.make("dense"), 3, 40).feed(tokens)
    assert_close(pages[0], dense[0])
    assert not torch.allclose(pages[-1], dense[-1], atol=1e-2)


def test_layer_0_reads_no_keys_of_other_pages():
    """They, and their values, may hold anything, in rows of any length; so may a row without a full page."""
    summaries = {"first_layer": "pages", "page_size": 16}
    method = kascade_by_head("kascade_pages", anchors=[0], top_k=9, decode_only=True, **summaries)
    layers, size = [method.for_layer(layer, 2) for layer in range(2)], method.page_size
    lengths, generator = [160, 157, 9], torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, KV_HEADS, 160, DIM, generator=generator) for _ in "kv")
    given = cache_of(k, v, HEADS)
    caches = [
        branch_of(given, one.channels(given.geometry), Evicts.NEVER, Counters().declare(one.counters), {})
        for one in layers
    ]
    for cache in caches:
        cache.forward = caches[0].forward
        for name in ("lengths", "counts", "live"):
            cache.rows[name] = list(lengths)
    caches[0].channel("records")[:, :, : 160 // size] = ops.compress_pages(k, ops.PageRecord(DIM, size))
    q = torch.randn(3, HEADS, 1, DIM, generator=generator)

    def step():
        return [decode(one, cache, q, SCALING)[0].out for one, cache in zip(layers, caches)]

    wanted, pages = step(), layers[0]._best_pages(caches[0], q, SCALING)
    assert (pages >= 0).sum(-1).tolist() == [[4] * KV_HEADS, [4] * KV_HEADS, [1] * KV_HEADS]
    read_keys = torch.zeros(3, KV_HEADS, 10, dtype=torch.bool)
    read_keys = read_keys.scatter_(2, pages.clamp_min(0).long(), True).repeat_interleave(size, 2)
    read_keys &= torch.arange(160) < torch.tensor(lengths)[:, None, None]
    assert torch.equal(read_keys.sum(-1), torch.tensor([[64], [61], [9]]).expand(-1, KV_HEADS))
    for x in (k, v):
        x[~read_keys] = float("nan")
    for found, expected in zip(step(), wanted, strict=True):
        assert torch.equal(found, expected)
    v[0, :, 159] += 1.0
    assert not torch.equal(step()[0][0], wanted[0][0])


def test_keys_of_other_pages_are_not_scored():
    """They may hold anything; the newest page is scored, open or just filled."""
    method = kascade_by_head("kascade_pages", anchors=[1], page_size=16, top_k=9, decode_only=True)
    anchor, size = method.for_layer(1, 2), method.page_size
    lengths, k = [160, 157, 9], torch.randn(3, KV_HEADS, 160, DIM, generator=torch.manual_seed(0))
    given = cache_of(k, k, HEADS)
    cache = branch_of(given, anchor.channels(given.geometry), Evicts.NEVER, Counters(), {})
    cache.rows["observed"] = [0, 0, 0]
    anchor.prompt_end(cache, SCALING)
    for name in ("lengths", "counts", "live"):
        cache.rows[name] = list(lengths)
    form = ops.PageRecord(DIM, size)
    cache.channel("records")[:, :, : 160 // size] = ops.compress_pages(k, form)
    q = torch.randn(3, HEADS, 1, DIM, generator=torch.manual_seed(1))
    pages, wanted = anchor._best_pages(cache, q, SCALING), anchor.select(cache, q, SCALING)
    assert (pages >= 0).sum(-1).tolist() == [[4] * KV_HEADS, [4] * KV_HEADS, [1] * KV_HEADS]
    assert (pages == torch.tensor([9, 9, 0])[:, None, None]).any(-1).all()
    kept = torch.zeros(3, KV_HEADS, 10, dtype=torch.bool).scatter_(2, pages.clamp_min(0).long(), True)
    newest = torch.zeros(10, dtype=torch.bool).index_fill_(0, torch.tensor([9]), True)
    poisoned = ~(kept | newest).repeat_interleave(size, 2)
    poisoned[2, :, 9:] = True
    cache.keys[poisoned] = float("nan")
    assert torch.equal(anchor.select(cache, q, SCALING), wanted)
    assert wanted[2].sort(-1).values.tolist() == [list(range(9))] * KV_HEADS


@pytest.mark.parametrize(("page_size", "missed", "recall"), [(16, 0, 0.85), (8, 1, 0.9)])
def test_scores_by_pages_find_what_exact_scores_choose(page_size, missed, recall):
    """Keys that stand out in a few pages, as a model's do, are found, all or all but one; of the others most, of
    smaller pages more."""
    settings = {"anchors": [0, 1], "top_k": 0.05, "min_k": 1, "decode_only": True}
    both = kascade_by_head(**settings), kascade_by_head("kascade_pages", page_size=page_size, **settings)
    exact, method = (one.for_layer(1, 2) for one in both)
    generator = torch.manual_seed(0)
    q = torch.randn(4, HEADS, 1, DIM, generator=generator)
    k = torch.randn(4, KV_HEADS, 2000, DIM, generator=generator)
    k[:, :, 300:360] += 2 * q.unflatten(1, (KV_HEADS, GROUP)).mean(2)
    cache = cache_of(k, k, HEADS)
    cache = branch_of(cache, method.channels(cache.geometry), Evicts.NEVER, Counters(), {})
    cache.rows["observed"] = [2000] * 4
    cache.channel("queries").copy_(q.expand(-1, -1, 16, -1))
    method.prompt_end(cache, SCALING)
    wanted, found = (one.select(cache, q, SCALING).long() for one in (exact, method))
    chosen = torch.zeros(k.shape[:3], dtype=torch.bool).scatter_(2, wanted, True)
    both = chosen & torch.zeros_like(chosen).scatter_(2, found, True)
    assert found.shape == wanted.shape
    assert chosen[:, :, 300:360].sum() > 300
    assert int((chosen & ~both)[:, :, 300:360].sum()) <= missed
    assert recall < float(both.sum() / chosen.sum()) < 1


def test_scores_of_a_prompt_are_there_of_a_few_tiles_at_a_time(monkeypatch):
    """Those of the tiles before are let go first."""
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 1 << 12)
    real, seen = ops.tile_mass, []

    def watched(*args, **more):
        for first, mass in real(*args, **more):
            assert all(one() is None for one in seen)
            seen.append(weakref.ref(mass))
            yield first, mass
            del mass

    monkeypatch.setattr(ops, "tile_mass", watched)
    method = kascade_by_head(anchors=[0, 1], top_k=9, tile=12)
    Stack(method, 3, 200).feed(part(draw(3, 1, 200), 200))
    assert len(seen) > 10


@pytest.mark.parametrize(("exact", "choosing"), [(False, [1, 3]), (True, [1])])
def test_anchors_that_read_all_choose_for_others_alone(monkeypatch, exact, choosing):
    """Nobody reads the choice of layers 0 and 3; the first is dense; with `dense_anchor_prefill` so is the other."""
    kascade, chose = methods.get("kascade"), []
    real = kascade.select_tiles
    monkeypatch.setattr(kascade, "select_tiles", lambda self, *a: chose.append(self.role.layer) or real(self, *a))
    method = kascade_by_head(anchors=[0, 1, 3], dense_anchor_prefill=exact, top_k=5, tile=12)
    Stack(method, 4, 40).feed(part(draw(4, 1, 40), 40))
    assert chose == choosing
