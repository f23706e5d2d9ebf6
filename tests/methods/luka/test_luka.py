"""LuKA against the paper's formulas and against the whole method written out; its settings, good and bad."""

import itertools
import math
import random
import re

import pytest
import torch
from luka_written_out import Sequence
from matrix import DIM, HEADS, KV_HEADS, PROMPT, SCALING, VARIANTS, Driver, Tokens, close, padded

from foveate import methods
from tests.helpers import LargestTensor
from tests.selection import in_full, representative

GROUP = HEADS // KV_HEADS
SMALL = {"page_size": 4, "sinks": 2, "tail": 9}


# The paper's formulas


def test_attention_weighted_summaries_are_those_of_the_paper():
    """w_i: mass over all queries, averaged over the heads of the KV group; pi = softmax(w / tau) over a page."""
    page, tail, tau, length = 4, 6, 7.0, 30
    tokens = Tokens.random(1, length)
    method = methods.make("luka_paper", page_size=page, tail=tail)
    driver = Driver(method, length)
    driver.feed(tokens)
    pages = (length - tail) // page
    logits = tokens.q @ tokens.k.repeat_interleave(GROUP, 1).transpose(-1, -2) * SCALING
    future = torch.ones(length, length).triu(1).bool()
    mass = logits.masked_fill(future, float("-inf")).softmax(-1).sum(2).view(1, KV_HEADS, GROUP, length).mean(2)
    weights = (mass[:, :, : pages * page].view(1, KV_HEADS, pages, page) / tau).softmax(-1)[..., None]
    for name, x in (("summary_k", tokens.k), ("summary_v", tokens.v)):
        expected = (weights * x[:, :, : pages * page].view(1, KV_HEADS, pages, page, DIM)).sum(3)
        close(driver.store.channel(name)[:, :, :pages], expected)


@pytest.mark.parametrize("pool", ["layer", "kv_head"])
def test_preserved_mass_is_equation_3_written_out(pool):
    page, tail, length = 4, 6, 31
    tokens = Tokens.random(1, length)
    method = methods.make("luka_paper", page_size=page, tail=tail, top_k=2, compressor="mean", pool=pool)
    driver = Driver(method, length - 1)
    driver.feed(tokens[: length - 1])
    out = driver.feed(tokens[length - 1 :])
    pages = (length - 1 - tail) // page
    q, k, v = tokens.q[0, :, -1].unflatten(0, (KV_HEADS, GROUP)), tokens.k[0], tokens.v[0]
    summaries_k, summaries_v = (x[:, : pages * page].view(KV_HEADS, pages, page, DIM).mean(2) for x in (k, v))
    cover = torch.cat([summaries_k, k[:, pages * page :]], 1)
    alpha = (q @ cover.transpose(1, 2) * SCALING).softmax(-1)
    for kv_head in range(KV_HEADS):
        masses = alpha[..., :pages]
        masses = masses.amax((0, 1)) if pool == "layer" else masses[kv_head].mean(0)
        refined = masses.topk(2).indices.tolist()
        expected = alpha[kv_head, :, pages:] @ v[kv_head, pages * page :]
        for index in range(pages):
            tokens_of = slice(index * page, (index + 1) * page)
            beta = (q[kv_head] @ k[kv_head, tokens_of].T * SCALING).softmax(-1)
            value = beta @ v[kv_head, tokens_of] if index in refined else summaries_v[kv_head, index]
            expected = expected + alpha[kv_head, :, index, None] * value
        close(out[0, kv_head * GROUP : (kv_head + 1) * GROUP, 0], expected)


def test_the_paper_s_settings():
    paper = methods.make("luka_paper")
    assert (paper.sizes, paper.tail, paper.compressor) == ((16,), 128, "attention")
    assert (paper.top_k, paper.pool, paper.pages.every) == (3, "layer", 16)
    assert (paper.mass, paper.bias, paper.score, paper.sinks) == ("preserve", "none", "summary", 0)


# The method written out


def assert_equals_written_out(method, prompts, decoded, seed=0, loudness=1.0, softcap=math.inf):
    """Every output of a batch of sequences, and what was counted."""
    rows = [Tokens.random(1, prompt + decoded, seed + b) for b, prompt in enumerate(prompts)]
    for row in rows:
        row.q.mul_(loudness)
    batch, mask = padded(rows, max(prompts) + decoded)
    driver = Driver(method, max(prompts), softcap=None if math.isinf(softcap) else softcap)
    driver.feed(batch[: max(prompts)], mask[:, : max(prompts)])
    sequences = [
        Sequence(method, *(x[0].double().numpy() for x in (row.q, row.k, row.v)), prompt, SCALING, softcap)
        for row, prompt in zip(rows, prompts)
    ]
    for step in range(decoded):
        out = driver.feed(batch[max(prompts) + step :][:1])[:, :, 0].double()
        for b, (sequence, prompt) in enumerate(zip(sequences, prompts)):
            close(out[b], torch.from_numpy(sequence.decode(prompt + step)))
    counters = driver.layer.counters
    assert float(counters.keys_read) == pytest.approx(sum(sequence.keys_read for sequence in sequences))
    assert float(counters["pages_refined"]) == pytest.approx(sum(sequence.pages_refined for sequence in sequences))
    return driver


LUKAS = [(name, method) for name, method in VARIANTS if name.startswith("luka")]


@pytest.mark.parametrize("method", [method for _, method in LUKAS], ids=[name for name, _ in LUKAS])
def test_every_variant_of_the_matrix_equals_the_method_written_out(method):
    assert_equals_written_out(method, [PROMPT - 5], 13)


CHOICES = {
    "page_size": [2, 3, 4, 8, 20, [4, 8], [2, 6], [3, 6, 12], [2, 4, 12], [5, 10, 20]],
    "sinks": [0, 1, 4],
    "tail": [1, 3, 9, 14],
    "compressor": ["attention", "mean"],
    "top_k": [0, 1, 2, 0.2, 0.5],
    "expand": [1, 2, 0.3, 0.7],
    "pool": ["kv_head", "layer"],
    "score": ["summary", "spread", "spread"],
    "prior": [0.0, 0.0, 0.5, 0.8],
    "window": [1, 5, 64],
    "mass": ["exact", "preserve"],
    "bias": ["none", "log", "entropy"],
}


def drawn(seed):
    """A value of every setting."""
    chance = random.Random(seed)
    return {name: chance.choice(choices) for name, choices in CHOICES.items()}


def any_settings(seed):
    return methods.make("luka", **drawn(seed))


def few_of(seeds):
    """Seeds of :func:`any_settings`, `full` but for few that draw every value that any of them draws."""
    kept = representative([drawn(seed) for seed in seeds])
    return pytest.mark.parametrize("seed", in_full(seeds, [seeds[index] for index in kept]))


@few_of(range(56))
def test_any_settings_equal_the_method_written_out(seed):
    chance, method = random.Random(seed), any_settings(seed)
    loudness = chance.choice([0.3, 1.0, 3.0])
    assert_equals_written_out(method, [chance.randint(15, 60)], 13, seed, loudness)


@few_of(range(100, 116))
def test_rows_of_a_batch_equal_the_method_written_out(seed):
    chance = random.Random(seed)
    prompts = [chance.randint(1, 60) for _ in range(3)]
    assert_equals_written_out(any_settings(seed), prompts, 8, seed, chance.choice([0.3, 1.0, 3.0]))


@few_of(range(200, 232))
def test_capped_logits_equal_the_method_written_out(seed):
    """Some by far, some hardly at all; none so far that what is capped is alike in fp32."""
    chance, method = random.Random(seed), any_settings(seed)
    assert_equals_written_out(method, [60, chance.randint(1, 60)], 6, seed, 1.0, chance.choice([1.5, 3.0]))


@few_of(range(300, 316))
def test_choices_by_low_rank_summaries_equal_the_method_written_out(seed):
    chance, sizes = random.Random(seed), [2, 4, 8, [4, 8], [2, 6], [3, 6, 12]]
    fitting = {"score": "lowrank", "page_size": chance.choice(sizes)}
    method = methods.make(any_settings(seed), **fitting)
    prompts = [60, chance.randint(1, 60)]
    assert_equals_written_out(method, prompts, 9, seed, 1.0, chance.choice([math.inf, 3.0]))


@pytest.mark.parametrize("settings", [{}, {"page_size": [4, 8]}, {"compressor": "attention"}], ids=str)
def test_a_second_turn_after_which_rows_are_equally_long(settings):
    """Rows that are alike now had different pages before."""
    method = methods.make("luka", **SMALL | settings)
    rows = [Tokens.random(1, 50, seed) for seed in range(2)]
    turns, steps = [(31, 12), (14, 29)], 3
    lone = []
    for row, (first, second) in zip(rows, turns):
        driver = Driver(method, first)
        driver.feed(row[:first])
        driver.feed_steps(row[first : first + steps])
        driver.layer.phase.prompt_end = first + steps + second
        driver.feed(row[first + steps : first + steps + second])
        lone.append(driver.feed_steps(row[first + steps + second :]))
    driver = Driver(method, 31)
    prompt, mask = padded([row[:first] for row, (first, _) in zip(rows, turns)], 31)
    decoded, _ = padded([row[first : first + steps] for row, (first, _) in zip(rows, turns)], steps)
    more, more_mask = padded([row[first + steps : 46] for row, (first, _) in zip(rows, turns)], 29)
    driver.feed(prompt, mask)
    driver.feed_steps(decoded)
    assert len(set(driver.store.rows["pages"])) == 2
    driver.layer.phase.prompt_end = 31 + steps + 29
    driver.feed(more, torch.cat([mask, torch.ones(2, steps, dtype=torch.bool), more_mask], 1))
    assert len(set(driver.store.lengths)) == len(set(driver.store.rows["pages"])) == 1
    close(driver.feed_steps(padded([row[46:] for row in rows], 4)[0]), torch.cat(lone))


def test_pages_of_an_earlier_turn_learn_what_the_next_one_looks_at():
    """A turn of a whole window takes the place of all that was recent before."""
    tokens = Tokens.random(1, 60)
    settings = SMALL | {"page_size": [4, 8], "score": "spread", "window": 7}
    driver = Driver(methods.make("luka", **settings), 40)
    driver.feed(tokens[:40])
    driver.feed_steps(tokens[40:43])
    driver.layer.phase.prompt_end = 60
    driver.feed(tokens[43:])
    store, pages = driver.store, driver.layer.method.pages
    recent, sinks = store.channel("recent")[0], driver.layer.method.sinks
    edges_of_pages = [sinks + 4 * page for page in range(store.rows["pages"][0] + 1)]
    logits = tokens.q[0, : HEADS // KV_HEADS, 53:] @ tokens.k[0, 0].T * SCALING
    future = torch.ones(7, 60).triu(54).bool()
    close(recent[0], logits.masked_fill(future, float("-inf")).softmax(-1).mean((0, 1)))
    for level, size in enumerate((1, 2)):
        edges = edges_of_pages[::size]
        beneath = torch.stack([recent[:, a:b].sum(-1) for a, b in itertools.pairwise(edges)], -1)
        close(store.channel(pages.channel("recent", level))[0, :, : beneath.shape[1]], beneath)


# Memory


@pytest.mark.parametrize("score", ["spread", "lowrank"])
@pytest.mark.parametrize("page_size", [16, [16, 64]])
def test_a_decode_step_copies_no_cache(page_size, score):
    """Low-rank summaries give every head a logit of every key, which is more than an eighth of so narrow a cache."""
    tokens = Tokens.random(1, 2050)
    driver = Driver(methods.make("luka", page_size=page_size, top_k=4, expand=2, score=score), 2048)
    driver.feed(tokens[:2048])
    driver.feed(tokens[2048:2049])
    with LargestTensor() as largest:
        driver.feed(tokens[2049:])
    most = driver.store.keys.nbytes / 8 if score == "spread" else HEADS * 2050 * 4
    assert largest.bytes < most, largest.what


# Settings

NESTS = "page_size must be an integer of at least 2, or several, each a multiple of the one before, not "
COUNT = "an integer of at least "
BUDGET = "(a number) or a float in (0, 1] (a share), not "

BAD = [
    *(({"page_size": sizes}, NESTS + repr(sizes)) for sizes in (0, 1, -4, True, 4.0, "16", None, {"a": 1})),
    *(({"page_size": list(sizes)}, NESTS + str(sizes)) for sizes in ((), (16, 24), (16, 16), (32, 16), (0, 4))),
    *(({"page_size": list(sizes)}, NESTS + str(sizes)) for sizes in ((True, 4), (4, True), (4, 8.0), (4, 8, 20))),
    ({"page_size": [0]}, NESTS + "0"),
    *(
        ({name: value}, f"{name} must be {COUNT}{least}, not {value!r}")
        for name, least in (("tail", 1), ("window", 1), ("sinks", 0))
        for value in (least - 1, 1.0, True, "3", None)
    ),
    *(
        ({name: value}, f"{name} must be {COUNT}{least} {BUDGET}{value!r}")
        for name, least in (("top_k", 0), ("expand", 1))
        for value in (least - 1, 0.0, 1.01, -0.5, float("nan"), True, "all", None)
    ),
    *(
        ({name: value}, f"{name} must be one of {allowed}, not {value!r}")
        for name, allowed in {
            "compressor": "mean, attention",
            "pool": "kv_head, layer",
            "score": "summary, spread, lowrank",
            "mass": "exact, preserve",
            "bias": "none, log, entropy",
        }.items()
        for value in ("", "Mean", None, 1, ["mean"])
    ),
    *(
        (
            {"score": "lowrank"} | settings,
            f"{name} must be {rule} with score=lowrank (score=spread takes others), not {value!r}",
        )
        for name, rule, value, settings in (
            ("page_size", "at most 64 on every level", 65, {"page_size": 65}),
            ("page_size", "at most 64 on every level", (32, 128), {"page_size": [32, 128]}),
        )
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[str(settings) for settings, _ in BAD])
def test_bad_settings_are_named_with_what_is_allowed(settings, message):
    for name in ("luka", "luka_paper"):
        with pytest.raises(ValueError, match=f"^{name}: {re.escape(message)}$"):
            methods.make(name, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": [2, 128], "score": "spread"},
        {"top_k": 0},
        {"expand": 1},
        {"sinks": 0, "tail": 1, "window": 1},
    ],
    ids=str,
)
def test_settings_at_the_edge_of_what_is_allowed(settings):
    made = methods.make("luka", **settings)
    assert {name: methods.settings_of(made)[name] for name in settings} == settings | (
        {"page_size": (2, 128)} if "page_size" in settings else {}
    )


def test_unknown_settings_are_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"luka has no setting 'page_sizes' \(did you mean 'page_size'\?\)"):
        methods.parse("luka:page_sizes=16")


@pytest.mark.parametrize(
    ("spec", "settings", "short"),
    [
        ("luka", {}, "luka"),
        ("luka:page_size=[16, 64],top_k=0.1", {"page_size": (16, 64), "top_k": 0.1}, None),
        ("luka:top_k=3,page_size=[4,8,32],bias=log", {"page_size": (4, 8, 32), "top_k": 3, "bias": "log"}, None),
        ("luka: page_size = [8] , mass = preserve", {"page_size": 8, "mass": "preserve"}, None),
        ("luka:page_size=[16],prior=0.3", {"prior": 0.3}, "luka:page_size=16,prior=0.3"),
        ("luka:page_size=[8,32],prior=0.3", {"prior": 0.3}, "luka:prior=0.3"),
        ("luka:prior=0.3,tail=128", {"prior": 0.3}, "luka:prior=0.3"),
        ("luka_paper:page_size=[16, 64]", {"page_size": (16, 64), "mass": "preserve"}, "luka_paper:page_size=[16, 64]"),
    ],
)
def test_spec_strings(spec, settings, short):
    method = methods.parse(spec)
    assert {name: getattr(method, name) for name in settings} == settings
    assert methods.parse(method.spec) == method
    assert methods.make(method.spec) == methods.make(method.name, **methods.settings_of(method))
    if short is not None:
        assert method.spec == short


@pytest.mark.parametrize("budget", [1, 1.0])
def test_one_page_is_not_all_pages(budget):
    method = methods.make("luka", top_k=budget, expand=budget)
    for other in (
        methods.parse(method.spec),
        methods.per_layer({"rest": method}).for_layer(0, 1),
        methods.make("mixed", clustered=method).for_layer(1, 3),
    ):
        for name in ("top_k", "expand"):
            assert type(getattr(other, name)) is type(budget), (other.spec, name)


@pytest.mark.parametrize("seed", range(20))
def test_spec_of_any_settings_reads_back_as_the_same_method(seed):
    method = any_settings(seed)
    assert methods.parse(method.spec) == method
    assert methods.parse(method.spec).sizes == method.sizes


@pytest.mark.parametrize(
    "spec", ["luka:page_size=[16, 24]", "luka:page_size=[16", "luka:page_size=16 32", "luka:page_size="]
)
def test_specs_with_pages_that_do_not_nest(spec):
    with pytest.raises(ValueError, match="luka: page_size must be"):
        methods.parse(spec)
