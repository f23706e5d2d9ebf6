"""Every method through every invariant.

A method enters by being registered: its class gives the settings of a full and of a small budget and declares its
exceptions, and the matrix tests the declarations too. Methods are driven through one attention layer, without a model,
so that states can be compared; `tests/integrations` drives them through `generate`. What `foveate check` asks of a
model, too, is stated in `foveate/lab/invariants.py`; here are the promises that need a look at one layer.
"""

import collections
import copy
import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch

import benchmarks.methods.h2o_as_published  # noqa: F401  (where no conftest.py makes it known)
from foveate import methods
from foveate.calibration.eviction_scores import LEVELS, EvictionScores
from foveate.integrations.transformers.layers import CacheLayer
from foveate.lab import invariants
from foveate.lab.invariants import LENGTHS, PROMPT
from foveate.lab.invariants import STEPS as DECODED
from foveate.methods.pages import PageMethod
from foveate.ops import Logits, Rotary
from foveate.runtime import Phase, handover
from foveate.state import Channel, Counters, Geometry
from tests import promises
from tests.helpers import kascade_by_head

NAMES = methods.names()
HEADS, KV_HEADS, DIM = 6, 2, 16
GEOMETRY = Geometry(HEADS, KV_HEADS, DIM, DIM)
SCALING = DIM**-0.5


def small(name, layer=0):
    """A registered method as one of three layers gets it, under its small budget."""
    return methods.make(name, **methods.get(name).about.small_budget).for_layer(layer, 3, [layer])


def by_layers(name):
    """Whether a method makes an instance for each layer, which may be equal and yet keep other state of its own."""
    method = methods.make(name, **methods.get(name).about.small_budget)
    return method.for_layer(1, 3, [1]) is not method


def estimates(method):
    """Whether a method chooses keys by something else than their logits."""
    return method.about.chooses_by_estimates(method)


_FOLDER = tempfile.TemporaryDirectory()


def lte_file():
    """Untrained scores of three layers, by which the heads of layer 1 get budgets of their own, some of them small."""
    torch.manual_seed(0)
    frequencies = (10000.0 ** -(torch.arange(0, DIM, 2) / DIM)).expand(3, -1)
    scores = EvictionScores({}, range(3), KV_HEADS, DIM, DIM, frequencies, torch.ones(3), window=16, length=PROMPT)
    spread = torch.tensor([[1.0, 1.0], [0.3, 1.0], [1.0, 1.4]])[..., None]
    scores.quantiles.copy_(torch.linspace(-1, 1, LEVELS) * spread)
    path = Path(_FOLDER.name) / "lte.safetensors"
    scores.save(path)
    return str(path)


LTE = {"file": lte_file(), "top_k": 0.3, "window": 13, "sinks": 2}

VARIANTS = [
    *((name, small(name)) for name in NAMES),
    *((f"{name}/another_layer", small(name, 1)) for name in NAMES if by_layers(name)),
    *(
        (f"kascade/{name}", kascade_by_head(**{"top_k": 9, "tile": 12} | settings).for_layer(1, 3))
        for name, settings in {
            "tiles": {"anchors": [1], "dense_anchor_prefill": False},
            "decode_only": {"anchors": [1], "decode_only": True},
            "layer": {"anchors": [1], "pool": "layer", "tile": 5, "dense_anchor_prefill": False},
            "sqrt": {"anchors": [1], "pooling": "sqrt", "dense_anchor_prefill": False},
            "dense_anchor_prefill": {"anchors": [1]},
            "rest": {"anchors": [1], "rest": "mean", "dense_anchor_prefill": False},
            "rest_layer": {"anchors": [1], "pool": "layer", "tile": 5, "rest": "mean", "dense_anchor_prefill": False},
            "share": {"anchors": [1], "top_k": 0.3, "min_k": 6, "dense_anchor_prefill": False},
            "every": {"anchors": [1], "decode_only": True, "every": 3},
            "every_layer": {"anchors": [1], "pool": "layer", "top_k": 0.3, "min_k": 6, "every": 2},
        }.items()
    ),
    *(
        (
            f"kascade_pages/{name}",
            kascade_by_head("kascade_pages", **{"top_k": 9, "tile": 12} | settings).for_layer(1, 3),
        )
        for name, settings in {
            "sqrt": {"anchors": [1], "pooling": "sqrt"},
            "layer": {"anchors": [1], "pool": "layer", "decode_only": True, "top_k": 20},
            "small": {"anchors": [1], "page_size": 4},
        }.items()
    ),
    *(
        (
            f"kascade_pages/first_layer{name}",
            kascade_by_head("kascade_pages", first_layer="pages", **settings).for_layer(0, 3),
        )
        for name, settings in {
            "": {"anchors": [0, 2], "top_k": 9, "tile": 12, "pooling": "sqrt"},
            "_layer": {"anchors": [0], "top_k": 17, "pool": "layer", "decode_only": True},
            "_no_anchor": {"anchors": [1], "top_k": 0.2, "min_k": 6},
        }.items()
    ),
    ("quest/pages", methods.make("quest", top_k=12, page_size=4).for_layer(2, 3)),
    *(
        (f"pages/{name}", methods.make("pages", **settings))
        for name, settings in {
            "rank": {"page_size": 3, "top_k": 33, "rank": 1},
            "large": {"page_size": 6, "top_k": 42},
            "unweighted": {"page_size": 4, "top_k": 32, "weighted": False},
            "every": {"page_size": 4, "top_k": 40, "every": 4},
        }.items()
    ),
    ("locks/rank", methods.make("locks", page_size=3, rank=1, top_k=16)),
    ("locks/directions", methods.make("locks", page_size=4, rank=4, top_k=20)),
    ("omnikv/logit", methods.make("omnikv", top_k=9, filters=[0], wait=0, score="logit").for_layer(0, 2)),
    ("h2o_as_published/layer", methods.make("h2o_as_published", top_k=0.15, window=8, pool="layer")),
    ("streaming/share", methods.make("streaming", sinks=2, window=0.2)),
    ("streaming/nothing_kept", methods.make("streaming", sinks=0, window=1)),
    ("streaming/little_kept", methods.make("streaming", sinks=0, window=0.1)),
    ("adakv/share", methods.make("adakv", top_k=0.3, window=4, kernel_size=3, pooling="max")),
    ("adakv/no_pooling", methods.make("adakv", top_k=9, window=5, kernel_size=1)),
    ("rocketkv/share", methods.make("rocketkv", keep=0.25, top_k=15, page_size=7, window=3, kernel_size=1)),
    ("snapkv/max", methods.make("snapkv", top_k=0.2, window=4, kernel_size=5, pooling="max")),
    *(
        (f"lte/{name}", methods.make("lte", **LTE | settings).for_layer(1, 3))
        for name, settings in {
            "learned": {},
            "count": {"top_k": 20, "window": 14, "sinks": 0},
            "layer": {"allocation": "layer"},
            "global": {"allocation": "global"},
            "global_count": {"allocation": "global", "top_k": 20, "sinks": 1},
        }.items()
    ),
    *(
        (f"{name}/evict_every", methods.make(name, **methods.get(name).about.small_budget, evict_every=17))
        for name in ("uniform", "h2o", "tova", "snapkv", "adakv", "rocketkv", "lte")
    ),
    *(
        (
            f"lte/evict_every_{allocation}",
            methods.make("lte", **LTE, allocation=allocation, evict_every=20).for_layer(1, 3),
        )
        for allocation in ("uniform", "global")
    ),
    ("expected_attention/evict_every", methods.make("expected_attention", top_k=0.25, evict_every=17)),
    *(
        (f"composed/{name}", methods.parse(spec).for_layer(0, 3))
        for name, spec in {
            "quest": "snapkv:top_k=0.25,window=5+quest:top_k=12,page_size=4,dense_layers=0",
            "evict_every": "snapkv:top_k=17,window=8,kernel_size=3,evict_every=17"
            "+quest:top_k=9,page_size=3,dense_layers=0",
            "weighted": "snapkv:top_k=20,window=8+pages:top_k=24,page_size=3",
            "unweighted": "expected_attention:top_k=20+pages:top_k=26,page_size=4,weighted=false",
            "unevenly": "adakv:top_k=12,window=5+twilight:p=0.4,min_k=4",
            "in_decode": "uniform:top_k=14,window=5+twilight:p=0.4,min_k=4",
            "sparse_prompt": "streaming:sinks=2,window=17+twilight:p=0.4,min_k=4",
            "by_norm": "lte:top_k=0.3,window=7,sinks=2,score=key_norm,evict_every=20+twilight:p=0.4,min_k=4",
        }.items()
    ),
    ("twilight/large", methods.make("twilight", p=0.6, min_k=6)),
    ("duo/other_head", methods.make("duo", heads=[[1], [], [0]], sinks=0, recent=6).for_layer(0, 3)),
    ("duo/all", methods.make("duo", heads=[0, 1], sinks=3, recent=12)),
    ("sparq/share", methods.make("sparq", top_k=0.2, min_k=6, rank=4, window=3)),
    ("tova/kv_head", methods.make("tova", top_k=15, pool="kv_head")),
    *(
        (
            f"luka/{name}",
            methods.make("luka", **({"page_size": 4, "sinks": 2, "tail": 9} | settings)),
        )
        for name, settings in {
            "few_tokens": {"page_size": 3, "sinks": 0, "tail": 5, "top_k": 0.2, "score": "summary"},
            "many_tokens": {"page_size": 20, "top_k": 1},
            "preserve": {"score": "spread", "mass": "preserve", "top_k": 3, "page_size": 5},
            "summary": {"tail": 3, "score": "summary"},
            "preserve_lowrank": {"mass": "preserve", "bias": "none"},
            "layer": {"score": "spread", "pool": "layer"},
            "attention": {"compressor": "attention", "bias": "entropy", "score": "summary"},
            "none_refined": {"top_k": 0},
            "spread": {"score": "spread", "prior": 0.0, "top_k": 2},
            "prior_layer": {"prior": 0.8, "window": 5, "pool": "layer", "page_size": [4, 8], "top_k": 2},
            "lowrank": {"top_k": 2, "prior": 0.0},
            "lowrank_levels": {"page_size": [4, 8], "top_k": 2, "expand": 2, "bias": "entropy"},
            "two_levels": {"score": "spread", "page_size": [4, 8], "top_k": 2, "expand": 2},
            "two_levels_preserve": {"page_size": [4, 12], "top_k": 2, "expand": 1, "mass": "preserve"},
            "three_levels": {
                "score": "spread",
                "page_size": [3, 6, 12],
                "top_k": 1,
                "expand": 1,
                "compressor": "attention",
            },
            "levels_share": {"page_size": [3, 6], "top_k": 0.2, "expand": 0.5},
        }.items()
    ),
]


def each(variants=VARIANTS):
    """Parametrise a test by methods, ``(name, method)`` each."""
    return pytest.mark.parametrize("method", [m for _, m in variants], ids=[name for name, _ in variants])


def deal(hand, hands=2, variants=VARIANTS):
    """Each method under its small budget, each setting that evicts or keeps other state, and a share of the rest.

    Tests of one mechanism, such as undoing, have a hand each, so that together they try most settings.
    """
    kinds = {}
    for name, method in variants:
        kinds.setdefault((method.name, *method.channels(GEOMETRY)), name)
    return [
        (name, method)
        for number, (name, method) in enumerate(variants)
        if name in {*NAMES, *kinds.values()} or method.evicts or number % hands == hand
    ]


each_variant = each()


def each_in_turn(name, values, variants=VARIANTS):
    """Each method under its small budget with each value, its other settings with one of them in turn."""
    cases = [
        pytest.param(method, values[index], id=f"{variant}-{values[index]}")
        for number, (variant, method) in enumerate(variants)
        for index in (range(len(values)) if variant in NAMES else [number % len(values)])
    ]
    return pytest.mark.parametrize(("method", name), cases)


pytestmark = pytest.mark.usefixtures("little_room")


@dataclasses.dataclass
class Tokens:
    """Queries, keys and values of a batch of sequences."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, batch, length, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        shapes = ((batch, HEADS, length, DIM), (batch, KV_HEADS, length, DIM), (batch, KV_HEADS, length, DIM))
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        # some keys are loud for a while, so that methods have something to find
        k[:, :, ::7] *= 2.0
        return cls(q.to(dtype), k.to(dtype), v.to(dtype))

    def __getitem__(self, tokens):
        return Tokens(self.q[:, :, tokens], self.k[:, :, tokens], self.v[:, :, tokens])

    def rows(self, index):
        return Tokens(self.q[index], self.k[index], self.v[index])

    def cat(self, other):
        return Tokens(*(torch.cat(pair, 2) for pair in zip((self.q, self.k, self.v), (other.q, other.k, other.v))))

    def __len__(self):
        return self.k.shape[2]


class Driver:
    """One attention layer fed with tokens, as a model feeds it."""

    def __init__(self, method, prompt_end=PROMPT, softcap=None):
        phase, self.softcap = Phase(prompt_end=prompt_end), softcap
        self.layer = CacheLayer(method, Counters(), phase)
        self.layer.rotary = Rotary(10000.0 ** -(torch.arange(0, DIM, 2) / DIM))

    def feed(self, tokens, mask=None):
        handover.begin("driver", self.layer.phase)
        key, value = self.layer.update(tokens.k, tokens.v)
        return self.layer.attend(tokens.q, key, value, mask, Logits(SCALING, softcap=self.softcap))

    def feed_steps(self, tokens):
        return torch.cat([self.feed(tokens[i : i + 1]) for i in range(len(tokens))], 2)

    @property
    def store(self):
        return self.layer.cache


def dense(tokens, softcap=None):
    """Causal attention of every token over all earlier ones, materialised."""
    group = HEADS // KV_HEADS
    k, v = (x.double().repeat_interleave(group, 1) for x in (tokens.k, tokens.v))
    logits = tokens.q.double() @ k.transpose(-1, -2) * SCALING
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    return (logits.masked_fill(future, float("-inf")).softmax(-1) @ v).float()


def close(a, b, tolerance=2e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def entries(store, row, spec):
    """How many entries of a channel of pages a row has: by its count of pages, or as many as its tokens fill.

    An entry that is written again before it is read may say anything of a page that is not full.
    """
    if "summary_k" in store.specs:
        finest = min(spec.per for spec in store.specs.values() if spec.per > 1)
        return store.rows["pages"][row] // (spec.per // finest)
    count = store.rows["counts"][row]
    return count // spec.per if spec.recomputed else -(-count // spec.per)


def slot_specs(store):
    """What a cache has for each slot or page, keys and values included."""
    return {"keys": Channel((DIM,)), "values": Channel((DIM,)), **store._slot_specs()}


def memory(store, name):
    """The tensor in which a cache has keys, values or a channel."""
    return getattr(store.store, name) if name in ("keys", "values") else store.tensors[name]


def assert_same_state(a, b):
    """Two caches hold the same tokens with the same state, in whatever order of slots."""
    assert a.rows["lengths"] == b.rows["lengths"]
    assert a.rows["live"] == b.rows["live"]
    assert [a.rows[name] for name in a.own_numbers] == [b.rows[name] for name in b.own_numbers]
    for row in range(a.batch_size):
        ordered = []
        for store in (a, b):
            positions = store.positions[row]
            held = [(positions[head] >= 0).nonzero()[:, 0] for head in range(KV_HEADS)]
            held = [slots[positions[head, slots].argsort()] for head, slots in enumerate(held)]
            picked = {"positions": [positions[head, slots] for head, slots in enumerate(held)]}
            for name, spec in slot_specs(store).items():
                if spec.per == 1:
                    tensor = getattr(store, name) if name in ("keys", "values") else store.tensors[name]
                    tensor = tensor[row]
                    picked[name] = [tensor[head, slots] for head, slots in enumerate(held)]
                else:
                    picked[name] = [store.tensors[name][row, :, : entries(store, row, spec)].float()]
            for name, spec in store.specs.items():
                if spec.per == 0 and name in store.tensors:
                    picked[name] = [store.tensors[name][row].float()]
            ordered.append(picked)
        assert ordered[0].keys() == ordered[1].keys()
        for name in ordered[0]:
            for one, other in zip(ordered[0][name], ordered[1][name], strict=True):
                close(one, other, 1e-4)


class LayerRun(invariants.Run):
    """A driver, as the promises of foveate.lab.invariants see it: outputs are ``[B, n, Hq, D]``."""

    def __init__(self, driver, real=None):
        self.driver, self.real = driver, real

    def feed(self, tokens, real=None):
        new = torch.ones(len(tokens.k), len(tokens), dtype=torch.bool) if real is None else real
        self.real = new if self.real is None else torch.cat([self.real, new], 1)
        return self.driver.feed(tokens, None if real is None else self.real).transpose(1, 2)

    def steps(self, tokens):
        self.real = torch.nn.functional.pad(self.real, (0, len(tokens)), value=True)
        return self.driver.feed_steps(tokens).transpose(1, 2)

    def draft(self, tokens):
        return self.driver.feed(tokens).transpose(1, 2)

    def turn(self, columns):
        self.driver.layer.phase.prompt_end = self.driver.layer.seen + columns

    def record(self):
        self.driver.layer.activate_past_recording()

    def settle(self):
        self.driver.layer.stop_recording_past()

    def crop(self, tokens):
        self.driver.layer.crop(-tokens)

    def reorder(self, rows):
        self.driver.layer.reorder_cache(rows)

    def repeat(self, times):
        self.driver.layer.batch_repeat_interleave(times)

    def select(self, rows):
        self.driver.layer.batch_select_indices(rows)

    def copy(self):
        return LayerRun(copy.deepcopy(self.driver), self.real)


class OneLayer(invariants.Subject):
    """A method in one attention layer. Outputs are compared closely, and so is the state."""

    def __init__(self, method, softcap=None):
        super().__init__(method, HEADS // KV_HEADS)
        self.softcap = softcap

    def tokens(self, rows, length, seed=0):
        return Tokens.random(rows, length, seed)

    def stacked(self, rows):
        return Tokens(*(torch.cat([getattr(one, name) for one in rows]) for name in "qkv"))

    def padded(self, rows, columns):
        return padded(rows, columns)

    def start(self, prompt=PROMPT):
        return LayerRun(Driver(self.method, prompt, self.softcap))

    def dense(self, tokens):
        return dense(tokens, self.softcap).transpose(1, 2)

    def same(self, found, expected, what, exact=False):
        close(found, expected, 1e-6 if exact else 2e-5)

    def same_state(self, one, other, what):
        assert_same_state(one.driver.store, other.driver.store)

    def same_rows(self, batch, alone, what):
        counted = collections.Counter()
        for row, run in enumerate(alone):
            with batch.driver.store.row(row) as one:
                assert_same_state(one, run.driver.store)
            counted.update(counted_of_rows(run.driver.layer.counters))
        assert batch.driver.layer.counters.decode_steps == DECODED
        assert counted_of_rows(batch.driver.layer.counters) == pytest.approx(dict(counted))


# Budgets


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_full_budget_is_dense(name, layer, softcap):
    method = methods.make(name, **methods.get(name).about.full_budget).for_layer(layer, 3, [layer])
    invariants.full_budget(OneLayer(method, softcap))


def test_preserved_mass_is_not_dense():
    method = methods.make("luka", page_size=4, tail=9, top_k=1.0, mass="preserve")
    tokens = Tokens.random(1, PROMPT + 1)
    driver = Driver(method)
    driver.feed(tokens[:PROMPT])
    assert (driver.feed(tokens[PROMPT:]) - dense(tokens)[:, :, PROMPT:]).abs().max() > 1e-3


@each_variant
def test_context_shorter_than_the_budget_is_dense(method):
    tokens = Tokens.random(2, 6)
    driver = Driver(method, prompt_end=4)
    out = torch.cat([driver.feed(tokens[:4]), driver.feed_steps(tokens[4:5])], 2)
    if promises.short_is_dense(method, 5):
        close(out, dense(tokens[:5]))


@each([one for one in VARIANTS if not (estimates(one[1]) or getattr(one[1], "rest", "none") == "mean")])
def test_capped_logits_are_those_of_other_keys(method):
    """Where all queries and all keys are along one axis, keys can be moved to where their logits are capped. What
    stands for several keys, such as their mean, moves elsewhere."""
    softcap, tokens = 0.7, Tokens.random(2, PROMPT + DECODED)
    axis = torch.zeros(DIM).index_fill(0, torch.tensor(3), 1.0)
    tokens.q = 2.0 * axis.expand(tokens.q.shape)
    tokens.k = tokens.k * axis
    moved = dataclasses.replace(tokens, k=softcap * (2.0 * tokens.k * SCALING / softcap).tanh() / (2.0 * SCALING))
    outs = []
    for cap, some in ((softcap, tokens), (None, moved), (None, tokens)):
        driver = Driver(method, softcap=cap)
        outs.append(torch.cat([driver.feed(some[:PROMPT]), driver.feed_steps(some[PROMPT:])], 2))
    close(outs[0], outs[1])
    if driver.layer.counters.keys_read > driver.layer.counters.decode_rows:  # reads more than one key
        assert not torch.allclose(outs[0], outs[2], atol=1e-3)


# Causality


@each_variant
def test_a_later_token_never_changes_an_earlier_output(method):
    invariants.later_tokens(OneLayer(method))


# What is read


def influences(driver, token):
    """Which raw slots, and which summaries of each level, change the next output: bools ``[Hkv, N]`` by channel."""
    levels = [name for name in driver.store.tensors if name.startswith("summary_v")]
    entries = [driver.store.used, *(nodes(driver, level) for level in range(len(levels)))]
    values, *summaries = (
        changes(driver, token, name, torch.cartesian_prod(torch.arange(KV_HEADS), torch.arange(of)), 1e4)
        .any(1)
        .view(KV_HEADS, of)
        for name, of in zip(("values", *levels), entries)
    )
    return values, summaries


BYTES = (0x4B, 0xCB, 0x00, 0xFF, 0xF0, 0x0F)
"""What is written to bytes: numbers of both signs and about as large, whether they are read as fp32, as int8 or by
halves; then the least and the largest halves, which differ from any code in one of them."""


def vectors(store):
    """The tensors of a cache, beside values and summaries, that hold a vector for each slot or page."""
    apart = ("values", "summary_")
    return [name for name in slot_specs(store) if memory(store, name).dim() > 3 and not name.startswith(apart)]


def changes(driver, token, name, places, value):
    """Which places of a tensor of the cache change the next output, each by itself: bool ``[n, Hkv]``, by KV head.

    Args:
        places: int64 ``[n, 2]``, KV heads and entries; or ``[n, 3]``, with a number of the entry.
        value: what is written there, or the nearest that the dtype has.
    """
    found = []
    for some in places.split(1024):
        probe = copy.deepcopy(driver)
        probe.layer.batch_repeat_interleave(len(some) + 1)  # a row for each place, and one that stays as it is
        tensor = memory(probe.store, name)
        bounds = torch.iinfo(tensor.dtype) if tensor.dtype == torch.uint8 else torch.finfo(tensor.dtype)
        written = torch.tensor(value).clamp(bounds.min, bounds.max).to(tensor.dtype)
        tensor[(torch.arange(len(some)), *some.T)] = written
        rows = [getattr(token, part).expand(len(some) + 1, -1, -1, -1) for part in "qkv"]
        out = probe.feed(Tokens(*rows))[:, :, 0].unflatten(1, (KV_HEADS, -1)).flatten(2)
        found.append(~out[:-1].isclose(out[-1:], atol=1e-5, rtol=1e-5).all(-1))
    return torch.cat(found)


def looked_at(driver, token, keys):
    """What the choice of the next step depends on, in keys with their values: fp64 ``[Hkv, N]``.

    Args:
        keys: bool ``[Hkv, N]``: keys that the step does not read whole. These are tried, and what stands for them.
    """
    store, found = driver.store, torch.zeros(keys.shape, dtype=torch.float64)
    for name in vectors(store):
        per, tensor = slot_specs(store)[name].per, memory(store, name)
        entries = torch.nn.functional.pad(keys, (0, -keys.shape[1] % per)).unflatten(1, (-1, per)).any(-1)
        numbers_of, whole = tensor.shape[-1], tensor.dtype == torch.uint8  # packed numbers are tried together
        places = entries.nonzero() if whole else entries[..., None].expand(-1, -1, numbers_of).nonzero()
        changed = torch.zeros(len(places), dtype=torch.bool)
        for value in BYTES if whole else (1e4, -1e4):
            rest = (~changed).nonzero()[:, 0]
            if len(rest):
                changed[rest] = changes(driver, token, name, places[rest], value).any(1)
        numbers = torch.zeros(entries.shape, dtype=torch.float64)
        found_of = changed.double() * (numbers_of if whole else 1)
        numbers.index_put_((places[:, 0], places[:, 1]), found_of, accumulate=True)
        share = tensor.dtype.itemsize / per / (store.counters.bytes_per_key / KV_HEADS)
        found += share * numbers.repeat_interleave(per, 1)[:, : keys.shape[1]]
    return found * keys


def scored(driver, token):
    """What a step scores of each key, in keys with their values: fp64 ``[Hkv, N + 1]``, the newest last.

    A key that the step does not read whole can change the output only through the choice, by the numbers that are
    scored. Queries are drawn until each key has been unread once. Keys that every query reads count as the median of
    the others, and the newest key, which is not in the cache yet, as the one before it.
    """
    driver, used = copy.deepcopy(driver), driver.store.used
    found = torch.full((KV_HEADS, used), float("nan"), dtype=torch.float64)
    slots = torch.cartesian_prod(torch.arange(KV_HEADS), torch.arange(used))
    for seed in range(1, 16):
        q = Tokens.random(1, 1, seed).q
        # each dimension has both signs in a group: either corner of a box matters to one of them alone
        q = q[:, :1].sign() * q.abs() * (-1.0) ** torch.arange(HEADS)[:, None, None]
        token = dataclasses.replace(token, q=q)
        read = changes(driver, token, "values", slots, float("nan"))
        read = read.gather(1, slots[:, :1]).view(KV_HEADS, used)
        unread = found.isnan() & ~read
        found[unread] = looked_at(driver, token, unread)[unread]
        if not found.isnan().any():
            break
    found = found.where(~found.isnan(), found.nanmedian())
    return torch.cat([found, found[:, -1:]], 1)


def bytes_of_summary(method, level, geometry, dtype):
    """Of LuKA's, over those of a token's key and value."""
    record = method.pages.record(level, geometry).bytes if method.score == "lowrank" else 0
    return 1.0 + 0.5 * (method.score == "spread") + record / ((geometry.head_dim + geometry.value_dim) * dtype.itemsize)


def nodes(driver, level):
    """Summaries of a level that exist."""
    hierarchy, (pages,) = driver.layer.method.pages, driver.store.rows["pages"]
    return hierarchy.count(level, pages)


@each_variant
def test_unselected_keys_may_be_nan_and_counters_tell_the_truth(method):
    tokens = Tokens.random(1, PROMPT + 10)  # the newest page, of three or four, has more keys than one and is not full
    driver = Driver(method)
    driver.feed(tokens[:PROMPT])
    driver.feed_steps(tokens[PROMPT:-1])
    raw, summaries = influences(driver, tokens[-1:])
    louder = dataclasses.replace(tokens[-1:], v=tokens[-1:].v + 1e4)
    own = copy.deepcopy(driver).feed(louder) - copy.deepcopy(driver).feed(tokens[-1:])
    own = own.abs().amax(-1)[0, :, 0].view(KV_HEADS, -1).any(1)

    counted = copy.deepcopy(driver)
    counters = counted.layer.counters
    counters.reset()
    base = counted.feed(tokens[-1:])
    assert counters.decode_steps == counters.decode_rows == 1
    # Of the coarsest summaries all are looked at, below only the children of refined ones and those at the end that
    # stand under none; of those looked at, the ones that do not change the output were refined.
    summarised, refined, about = 0.0, 0.0, (driver.store.geometry, driver.store.dtype)
    for level in reversed(range(len(summaries))):
        exist = nodes(driver, level)
        if level + 1 < len(summaries):
            branch = driver.layer.method.pages.branch(level + 1)
            exist = refined * branch + exist - nodes(driver, level + 1) * branch
        changing = summaries[level].sum(1).float().mean().item()
        summarised, refined = summarised + exist * bytes_of_summary(method, level, *about), exist - changing
    if (
        isinstance(method.parts[-1], PageMethod) and "pages_refined" in method.counters
    ):  # whose summaries are in no value's place: pages of which some key is read
        slots = torch.cat([raw, own[:, None]], 1)
        size = method.parts[-1].page_size
        paged = torch.nn.functional.pad(slots, (0, -slots.shape[1] % size)).unflatten(1, (-1, size)).any(-1)
        refined = paged.sum(1).float().mean().item()
    assert float(counters.own.get("pages_refined", 0)) == pytest.approx(refined)
    read = raw.sum(1).add(own).float().mean().item() + summarised
    declared = method.scored(driver.store.rows["live"][0] + 1, *about)
    if driver.store.uneven and declared:  # by what each KV head holds
        held = (driver.store.positions[0] >= 0).sum(-1).double() + 1
        declared = method.scored(held, *about).mean().item()
    if "scored_at" in counted.store.specs:  # not in every step
        declared *= int(counted.store.channel("scored_at")[0]) == counted.store.lengths[0]
    assert float(counters.keys_read) == pytest.approx(read + declared)
    assert method.attended_keys(len(tokens)) in (None, read)
    assert counters.keys_available == len(tokens)

    poisoned = copy.deepcopy(driver)
    unread = ~raw & (driver.store.positions[0] >= 0)  # a slot without a token holds an earlier one, or zeros
    for name in ("values",) if declared else ("keys", "values"):
        memory(poisoned.store, name)[0, :, : driver.store.used][unread] = float("nan")
    close(poisoned.feed(tokens[-1:]), base, 1e-6)
    if method.name == "kascade_pages":
        return  # which keys are scored depends on the query: tests/methods/test_anchored.py
    if declared or vectors(driver.store) != ["keys"]:
        assert scored(driver, tokens[-1:]).sum(1).mean().item() == pytest.approx(declared)


PROMISING = [one for one in VARIANTS if list(promises.always_read(one[1], PROMPT, PROMPT + 9))]


def test_every_setting_that_promises_tokens_is_held_to_it():
    for name in NAMES:
        if any("always" in str(field.metadata) for field in dataclasses.fields(methods.get(name))):
            assert list(promises.always_read(small(name), PROMPT, PROMPT + 9)), name
    assert len(PROMISING) > 30


@each_in_turn("prompt", [PROMPT, 5], PROMISING)
def test_what_is_always_kept_is_always_read(method, prompt):
    """Also where these tokens get less attention than others."""
    tokens = Tokens.random(1, prompt + 16)
    tokens.k[:, :, max(prompt - 20, 3) :] *= 0.01
    driver = Driver(method, prompt)
    driver.feed(tokens[:prompt])
    for length in range(prompt, prompt + 16):
        if prompt == 5 or length in (prompt, prompt + 1, prompt + 15):
            raw, _ = influences(driver, tokens[length : length + 1])
            promised = {position for position in promises.always_read(method, prompt, length) if 0 <= position < length}
            for head in range(KV_HEADS):
                positions = driver.store.positions[0, head, : driver.store.used]
                assert promised <= set(positions[raw[head]].tolist())
        driver.feed(tokens[length : length + 1])


@each_variant
def test_small_budget_reads_less_than_dense(method):
    tokens = Tokens.random(1, PROMPT + DECODED)
    driver = Driver(method)
    driver.feed(tokens[:PROMPT])
    driver.feed_steps(tokens[PROMPT:])
    counters = driver.layer.counters
    assert counters.decode_steps == DECODED
    available = sum(range(PROMPT + 1, PROMPT + DECODED + 1))
    assert counters.keys_available == available
    if method.role.reads_all:
        assert float(counters.keys_read) == available
    else:
        assert float(counters.keys_read) < 0.8 * available
        assert (counters.tokens_evicted > 0) == bool(method.evicts)
        looks = "pages_refined" in method.counters and method.parts[-1].top_k != 0
        assert (float(counters.own.get("pages_refined", 0)) > 0) == looks
        assert (float(counters.own.get("mass_read", 0)) > 0) == ("mass_read" in method.counters)


@each([one for one in VARIANTS if one[1].evicts])
def test_evicting_methods_free_the_memory(method):
    driver = Driver(method, 1024)
    driver.feed(Tokens.random(1, 1024))
    assert driver.store.resident_bytes < 0.45 * 2 * 1024 * KV_HEADS * DIM * 4
    assert driver.store.used < 0.35 * 1024


# Padding, chunks, turns, company


def padded(rows, pad_to):
    """Left-padded batch of sequences of unequal length, its mask, garbage in the padding."""
    batch = Tokens.random(len(rows), pad_to, seed=99)
    mask = torch.zeros(len(rows), pad_to, dtype=torch.bool)
    for b, row in enumerate(rows):
        start = pad_to - len(row)
        mask[b, start:] = True
        for name in ("q", "k", "v"):
            getattr(batch, name)[b, :, start:] = getattr(row, name)[0]
    return batch, mask


def counted_of_rows(counters):
    """What is counted of each row: of a batch the sum."""
    names = ("decode_rows", "keys_read", "keys_available", "prompt_tokens", "tokens_evicted")
    return {name: float(getattr(counters, name)) for name in names} | {
        name: float(value) for name, value in counters.own.items()
    }


@pytest.mark.parametrize(
    ("method", "chunks"),
    [(method, (PROMPT, 20) if name in NAMES else ((PROMPT, 20)[n % 2],)) for n, (name, method) in enumerate(deal(0))],
    ids=[name for name, _ in deal(0)],
)
def test_left_padded_rows_equal_batch_size_one(method, chunks):
    """With prompts in one piece and in chunks; under other settings than the small budget's one of both in turn."""
    invariants.padded_batch(OneLayer(method), chunks)


COMPANY = [
    methods.make("h2o", top_k=60, window=8),  # evicts nothing before it has decoded a while
    methods.make("snapkv", top_k=9, window=5),
    methods.make("tova", top_k=20),
    methods.make("luka", page_size=3, tail=7, compressor="attention"),
]


@each_in_turn("chunk", [PROMPT, 20], deal(0))
def test_a_prompt_read_together_is_the_same_to_the_last_bit(method, chunk):
    """Whoever else reads along, and whoever went on before: also past the room that is left after the prompt.

    All read along, and two of them go on before in each case: the other two after a prompt in other chunks, and after
    a prompt in the same chunks where another variant is tested. They evict and make pages within a dozen steps; the
    method itself goes past the room both times.
    """
    if methods.sparse_prompt(method):
        with pytest.raises(ValueError, match="sparse in prefill"):
            methods.SharedPrompt((*COMPANY, method))
        return
    batch, mask = padded([Tokens.random(1, length, seed=length) for length in LENGTHS], PROMPT)
    steps = Tokens.random(len(LENGTHS), 20, seed=1)

    def read(driver):
        ends = range(chunk, PROMPT + chunk, chunk)
        return torch.cat([driver.feed(batch[end - chunk : end], mask[:, :end]) for end in ends], 2)

    alone, together = Driver(method), Driver(methods.SharedPrompt((*COMPANY, method)))
    assert torch.equal(read(alone), read(together))
    expected = alone.feed_steps(steps)
    turn = sum(map(ord, method.spec)) + (chunk == PROMPT)
    for one in (method, *COMPANY[turn % 2 :: 2], method):
        branch = Driver(one)
        branch.layer.continue_from(together.layer)
        out = branch.feed_steps(steps if one == method else steps[:12])
        if one == method:
            assert torch.equal(out, expected)
            assert method.evicts or branch.store.capacity > together.store.capacity
            assert branch.layer.counters == alone.layer.counters
            assert branch.store.resident_bytes == alone.store.resident_bytes
            assert_same_state(branch.store, alone.store)


@each_variant
def test_chunked_prefill_equals_one_piece(method):
    assert (method.prompt_tile(HEADS // KV_HEADS) or 1) < PROMPT - 1, "a prompt has more tiles than one"
    invariants.prompt_in_pieces(OneLayer(method))


TILED = [
    (name, method)
    for name, method in VARIANTS
    if method.prompt_tile(HEADS // KV_HEADS) not in (0, 1, None)
    and not getattr(method, "dense_anchor_prefill", False)  # such an anchor chooses by tiles for others alone
]


@each(TILED)
def test_tiles_of_prompts_are_declared_truthfully(method):
    """Where a tile of several tokens is declared, a prompt cut within one gives something else after the cut."""
    tile = method.prompt_tile(HEADS // KV_HEADS)
    tokens, cut = Tokens.random(1, PROMPT), PROMPT // 2 // tile * tile + tile // 2
    expected, chunked = Driver(method).feed(tokens), Driver(method)
    out = torch.cat([chunked.feed(tokens[:cut]), chunked.feed(tokens[cut:])], 2)
    begin, end = cut // tile * tile, (cut // tile + 1) * tile
    close(out[:, :, :begin], expected[:, :, :begin])
    close(out[:, :, end:], expected[:, :, end:])
    assert (out - expected)[:, :, begin:end].abs().max() > 1e-4


@each_variant
def test_needs_prompt_end_is_declared_truthfully(method):
    """Where it is not declared, a prompt given as two (the second decoded) gives the same; where it is, it differs."""
    tokens = Tokens.random(1, PROMPT + 8)
    declared, undeclared = Driver(method), Driver(method, prompt_end=40)
    a = torch.cat([declared.feed(tokens[:PROMPT]), declared.feed_steps(tokens[PROMPT:])], 2)
    b = torch.cat([undeclared.feed(part) for part in (tokens[:40], tokens[40:PROMPT], tokens[PROMPT:])], 2)
    if method.needs_prompt_end:
        assert (a - b).abs().max() > 1e-4
    else:
        close(a, b)


@each_variant
def test_several_tokens_at_once_after_the_prompt_equal_single_steps(method):
    tokens = Tokens.random(2, PROMPT + 12)
    together, apart = Driver(method), Driver(method)
    for driver in (together, apart):
        driver.feed(tokens[:PROMPT])
    close(together.feed(tokens[PROMPT:]), apart.feed_steps(tokens[PROMPT:]))
    assert_same_state(together.store, apart.store)
    assert float(together.layer.counters.keys_read) == pytest.approx(float(apart.layer.counters.keys_read))


def beside_what_is_held(store, row, tokens):
    """Causal attention, in fp64, of new tokens of a row over what each KV head holds and over themselves."""
    outs, future = [], torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for head, queries in enumerate(tokens.q[0].double().unflatten(0, (KV_HEADS, -1))):
        held = store.positions[row, head] >= 0
        pairs = ((store.keys, tokens.k), (store.values, tokens.v))
        k, v = (torch.cat([old[row, head, held], new[0, head]]).double() for old, new in pairs)
        hidden = torch.nn.functional.pad(future, (int(held.sum()), 0))
        outs.append((queries @ k.T * SCALING).masked_fill(hidden, float("-inf")).softmax(-1) @ v)
    return torch.cat(outs)[None].float()


@each(deal(1))
def test_second_turn_in_chunks_and_batches(method):
    """A second prompt on the same cache, in chunks and a padded batch, is that of a lone sequence in one piece."""
    invariants.second_turn(OneLayer(method))


@each(deal(1))
def test_a_second_prompt_attends_to_what_is_held(method):
    """So does a token after it that is decoded by a method that evicts and reads all that it holds."""
    if methods.sparse_prompt(method) and (method.role.chooses or not method.evicts):
        return
    subject, second, last = OneLayer(method), Tokens.random(2, 29, seed=300), Tokens.random(2, 1, seed=400)
    run, _ = subject.whole(Tokens.random(2, 38), 31)
    run.turn(29)
    expected = [beside_what_is_held(run.driver.store, row, second.rows([row])) for row in range(2)]
    read = run.feed(second).transpose(1, 2)
    held = [beside_what_is_held(run.driver.store, row, last.rows([row])) for row in range(2)]
    out = run.steps(last).transpose(1, 2)
    for row in range(2):
        if not methods.sparse_prompt(method):
            close(read[row : row + 1], expected[row])
        if method.evicts and not method.role.chooses:
            close(out[row : row + 1], held[row])


# Undoing and rearranging


@each_in_turn("removed", [4, 9], deal(0, 3))
def test_crop_leaves_what_a_fresh_run_would_have(method, removed):
    invariants.crop(OneLayer(method), removed)


@each(deal(1, 3))
def test_crop_back_over_growth_of_the_cache(method):
    driver, fresh = Driver(method), Driver(method)
    tokens = Tokens.random(1, PROMPT + 3)
    driver.layer.activate_past_recording()
    driver.feed(tokens[:PROMPT])
    room = driver.store.capacity - driver.store.used
    drafts = Tokens.random(1, room + 5, seed=5)
    driver.feed(drafts[:4])
    driver.layer.crop(0)
    driver.feed(drafts[4:])
    assert method.evicts or driver.store.capacity > PROMPT + room
    driver.layer.crop(-(len(drafts) - 4 - 2))
    fresh.feed(tokens[:PROMPT])
    fresh.feed_steps(drafts[:6])
    close(driver.feed(tokens[PROMPT:]), fresh.feed_steps(tokens[PROMPT:]))
    driver.layer.crop(0)
    driver.layer.stop_recording_past()
    assert_same_state(driver.store, fresh.store)


@each(deal(2, 3))
def test_recording_can_start_and_stop_in_mid_sequence(method):
    tokens = Tokens.random(1, PROMPT + DECODED)
    driver, fresh = Driver(method), Driver(method)
    for one in (driver, fresh):
        one.feed(tokens[:PROMPT])
        one.feed_steps(tokens[PROMPT : PROMPT + 6])
    driver.layer.activate_past_recording()
    driver.feed(Tokens.random(1, 3, seed=7))
    driver.layer.crop(-3)
    driver.layer.stop_recording_past()
    close(driver.feed_steps(tokens[PROMPT + 6 :]), fresh.feed_steps(tokens[PROMPT + 6 :]))
    assert_same_state(driver.store, fresh.store)


@each_variant
def test_crop_of_what_is_final_is_refused_or_exact(method):
    invariants.crop_of_final_tokens(OneLayer(method))


@each(deal(0))
def test_reordered_rows_continue_like_fresh_ones(method):
    invariants.reordered_rows(OneLayer(method))


@each(deal(1))
def test_repeated_and_selected_rows_continue_like_fresh_ones(method):
    invariants.repeated_rows(OneLayer(method))


@each(deal(0))
def test_a_copy_of_a_cache_continues_like_the_cache(method):
    invariants.copied_cache(OneLayer(method))


# Precision and settings


@each_in_turn("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_precision_stays_close_to_the_same_choice_in_fp32(method, dtype):
    tokens = Tokens.random(1, PROMPT + 1, dtype=dtype)
    driver = Driver(method)
    driver.feed(tokens[:PROMPT])
    wide = copy.deepcopy(driver)
    for name, tensor in wide.store.tensors.items():
        wide.store.tensors[name] = tensor.float() if tensor.dtype == dtype else tensor
    wide.store.store.keys, wide.store.store.values = wide.store.store.keys.float(), wide.store.store.values.float()
    wide.store.dtype = torch.float32
    out = driver.feed(tokens[PROMPT:])
    assert out.dtype == dtype
    exact = wide.feed(Tokens(*(getattr(tokens[PROMPT:], name).float() for name in "qkv")))
    close(out.float(), exact, 2e-2)


@pytest.mark.parametrize("name", NAMES)
def test_spec_reads_back_as_the_same_method(name):
    cls = methods.get(name)
    assert cls.about.source
    assert cls.__doc__
    for settings in (cls.about.full_budget, cls.about.small_budget):
        method = methods.make(name, **settings)
        invariants.spec(method)
        idle = {"dense_anchor_prefill", "rest"} if getattr(method, "decode_only", False) else set()
        assert set(methods.settings_of(method)) == {field.name for field in dataclasses.fields(cls)} - idle
        assert all(field.metadata.get("help") for field in dataclasses.fields(cls))
