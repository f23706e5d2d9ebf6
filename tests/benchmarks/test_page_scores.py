"""Scores of pages: what they miss follows from how they are made, agrees with LuKA itself, and stands in the rows."""

import itertools

import pytest
import torch
from helpers import assert_close, tiny_model
from matrix import SCALING, Driver, Tokens, dense

from benchmarks import bound, page_scores
from benchmarks.page_estimates import (
    CERTIFYING,
    COSTS,
    LIMIT,
    PRIOR,
    RECORDS,
    SINKS,
    TAIL,
    WINDOW,
    LayerPages,
    measure,
)
from benchmarks.probe import Seen
from benchmarks.table_kinds import page_scores as tables
from foveate import methods, ops
from foveate.errors import UserError
from foveate.lab.evaluation.tasks import Item
from foveate.lab.results.measurements import needed
from foveate.ops.compress.low_rank import factors
from tests import tiny

PROMPT, SIZES = 500, (16, 32)
TOKENS = Tokens.random(1, PROMPT + 3)
QUERIES = [PROMPT, PROMPT + 2]
SETTINGS = {
    "summary": {"compressor": "mean", "score": "summary", "bias": "log"},
    "spread": {"compressor": "mean", "score": "spread", "bias": "log"},
}


def measured(budgets, queries=QUERIES, sizes=SIZES, tokens=TOKENS):
    """Every case with its measures, those of the queries one after the other."""
    found = {}
    seen = Seen(0, tokens.q, tokens.k, tokens.v, None, SCALING)
    for case, values in measure(seen, PROMPT, queries, sizes, budgets):
        found.setdefault(case, []).append(values)
    return found


def cost_of(score, size):
    """In keys with their values: a record is read in place of the mean key."""
    if score in COSTS:
        return COSTS[score]
    dim, value_dim = TOKENS.k.shape[3], TOKENS.v.shape[3]
    form = ops.PageRecord(dim, size, RECORDS[score].rank, RECORDS[score].coefficient_bits)
    record = form.bytes / TOKENS.k.element_size()
    return (record + value_dim) / (dim + value_dim)


def page_count(size):
    return (PROMPT - SINKS - TAIL) // size


def test_the_true_mass_misses_least():
    found = measured((0.45, 0.6, 0.75))
    assert {case.score for case in found} == {*COSTS, *RECORDS}
    for case in (case for case in found if case.budget is not None):
        for ours, best in zip(found[case], found[case._replace(score="oracle")]):
            more = ours["refined_share"] > best["refined_share"]  # records may be smaller than the oracle's summaries
            assert more or best["missed_mass"] <= ours["missed_mass"] + 1e-6


def test_at_full_budget_nothing_is_missed():
    found = measured((2.0,))
    for case, values in found.items():
        if case.budget is not None:
            assert all(one["refined_share"] == 1.0 and one["missed_mass"] == 0.0 for one in values)
            assert max(one["output_error"] for one in values) < 1e-5


def test_as_many_pages_as_the_budget_pays_for():
    found = measured(budgets := (0.1, 0.34, 0.45, 0.6))
    scores = [*COSTS, *RECORDS]
    for size, score, budget, (number, query) in itertools.product(SIZES, scores, budgets, enumerate(QUERIES)):
        keys, pages = query + 1, page_count(size)
        least = keys - pages * size + pages * cost_of(score, size)
        values = found.get((size, budget, score))
        assert (values is not None) == (least <= budget * keys)
        if values is not None:
            refined = round(values[number]["refined_share"] * pages)
            assert values[number]["read_share"] == pytest.approx((least + refined * size) / keys)
            assert least + refined * size <= budget * keys < least + (refined + 1) * size


@pytest.mark.parametrize("prior", ["", "+prior"])
@pytest.mark.parametrize("score", SETTINGS)
@pytest.mark.parametrize("size", SIZES)
def test_errors_and_reads_are_those_of_luka(score, size, prior):
    settings = SETTINGS[score] | {"prior": PRIOR if prior else 0.0}
    score += prior
    (case, values), *_ = [one for one in measured((0.6,), [PROMPT], (size,)).items() if one[0].score == score]
    count = round(values[0]["refined_share"] * page_count(size))
    assert count > 0
    assert_like_luka(values[0], methods.make("luka", page_size=size, top_k=count, **settings), case.score)


@pytest.mark.parametrize("score", ["bound", CERTIFYING])
@pytest.mark.parametrize("size", SIZES)
def test_the_certified_bound_holds(size, score):
    blocks = TOKENS.k[:, :, SINKS:].unfold(2, 32, 32).mean(-1).repeat_interleave(32, 2)
    k = TOKENS.k.clone()  # pages of keys that are much alike: elsewhere the bound refines all of them
    k[:, :, SINKS : SINKS + blocks.shape[2]] = 8 * blocks + 0.05 * k[:, :, SINKS : SINKS + blocks.shape[2]]
    tokens = Tokens(TOKENS.q, k, TOKENS.v)
    found = measured((0.6,), [PROMPT], (size,), tokens)
    (values,), (best,) = (found[size, None, name] for name in (score, "oracle"))
    assert best["missed_mass"] <= LIMIT
    assert values["missed_mass"] <= LIMIT
    assert 0 < best["refined_share"] <= values["refined_share"] < 1


def test_the_true_masses_are_within_the_bounds(monkeypatch):
    """Of boxes and of records: above and below, of every page, head and query."""
    calls, by_bound = [], bound.by_bound
    monkeypatch.setattr(bound, "by_bound", lambda *args: calls.append(args[:2]) or by_bound(*args))
    measured(())
    for (upper, lower), (true, _), (more, less) in zip(calls[::3], calls[1::3], calls[2::3], strict=True):
        for above, below in ((upper, lower), (more, less)):
            assert (below <= true + 1e-4).all()
            assert (true <= above + 1e-4).all()


@pytest.mark.parametrize("size", SIZES)
def test_a_query_along_the_rest_of_a_key_reaches_the_bound(size):
    keys = torch.randn(1, 2, 3 * size, 8, generator=torch.Generator().manual_seed(0))
    channels = torch.tensor([0.5, 1.0, 2.0, 1.0]).repeat(1, 2, 2)
    pages = LayerPages(keys, keys, torch.ones(1, 2, 3 * size), channels, size)
    weighed = (keys * channels[:, :, None]).unflatten(2, (3, size))
    rest = weighed - factors(pages.records[CERTIFYING], pages.forms[CERTIFYING]).keys()
    longest = rest.square().sum(-1).argmax(-1)
    for head, page in itertools.product(range(2), range(3)):
        along = rest[0, head, page, longest[0, head, page]]
        rows = torch.ones(1, 2, 1, 8).index_fill(1, torch.tensor(head), 0.0)
        rows[0, head, 0] = along * channels[0, head]
        assert_close(pages.reach(rows, 0.3)[0, head, 0, page], 0.3 * along.square().sum())


def assert_like_luka(values, method, score):
    driver, tokens = Driver(method, PROMPT), TOKENS
    driver.feed(tokens[:PROMPT])
    driver.layer.counters.reset()
    out, exact = driver.feed(tokens[PROMPT : PROMPT + 1]), dense(tokens[: PROMPT + 1])[:, :, PROMPT:]
    counters = driver.layer.counters
    error = ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean().item()
    assert values["output_error"] == pytest.approx(error, rel=1e-3, abs=1e-5)
    assert values["read_share"] * (PROMPT + 1) == pytest.approx(float(counters.keys_read))
    assert values["refined_share"] * page_count(method.page_size) == pytest.approx(float(counters["pages_refined"]))
    assert COSTS[score] == 1.0 + 0.5 * (method.score == "spread")


def test_what_summaries_weigh_does_not_change_what_is_chosen():
    """Of keys and values without a pattern, summaries that weigh what their pages do leave less error."""
    found = measured((0.6,))
    for size in SIZES:
        by_record, by_mean = (
            sum(one["output_error"] for one in found[size, 0.6, score]) for score in ("low_rank2", "low_rank2_order")
        )
        masses = (found[size, 0.6, score][0]["missed_mass"] for score in ("low_rank2", "low_rank2_order"))
        assert len(set(masses)) == 1
        assert by_record < by_mean


def test_pages_too_small_or_too_large_for_a_record():
    scores = {size: {case.score for case in measured((0.9,), sizes=(size,))} for size in (3, 100)}
    assert "low_rank2" in scores[3]
    assert "low_rank4" not in scores[3]
    assert not scores[100] & RECORDS.keys()


def test_layers_with_a_window_are_left_out(monkeypatch):
    looked = []
    monkeypatch.setattr(
        page_scores.page_estimates, "measure", lambda seen, *rest: looked.append(seen.layer) or iter(())
    )
    item = Item("0", "", tuple(range(3, 63)))
    plan = page_scores.Plan(tiny.SAMPLE, tiny.SAMPLE, (None,))
    with pytest.raises(UserError, match="no layer attends to all tokens"):  # it knows by what was measured: nothing
        page_scores._measured(plan, tiny_model("gemma3"), item, [3, 4])
    assert looked == [1, 3]


# Rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


def rows_of(folder, task, **more):
    plan = {"budgets": (0.6,), "limit": 2} | more
    return page_scores.run(page_scores.Plan(folder, tiny.SAMPLE, (task,), **plan), lambda text: None)


def test_from_items_to_rows_and_table(folder):
    task = "niah:split=multi,length=700"
    rows = rows_of(folder, task, budgets=(0.6, 0.01))
    assert {row["case"]["score"] for row in rows} == {*COSTS, *RECORDS}
    assert {row["case"]["budget"] for row in rows} == {0.6, None}  # 0.01 does not pay for the summaries
    for row in rows:
        assert set(needed(row)) <= row.keys()
        assert (row["n"], row["case"]["context"]) == (2, 700)
        for name in ("missed_mass", "lost_heads", "output_error", "refined_share", "read_share"):
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]
        for name, values in row["item_values"].items():
            assert sum(values) / 2 == pytest.approx(row[name]["value"], abs=1e-5)
    assert tables(rows).startswith("page-scores, tiny-llama, niah (multi), 700 tokens")
    assert rows_of(folder, task, budgets=(0.6, 0.01)) == rows


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("perplexity:length=64,continuation=32", "no item has an answer to read"),
        ("niah:length=2044", "2,048"),
        ("nihah", "Did you mean 'niah'"),
    ],
)
def test_bad_input(folder, task, message):
    with pytest.raises(UserError, match=message):
        rows_of(folder, task)


def row(score, errors, budget=0.1, **more):
    case = {"task": "niah", "split": "multi", "model": "m", "context": 4096, "dtype": "float32", "page_size": 16}
    limit = LIMIT if budget is None else None
    value = sum(errors) / len(errors)
    return {
        "bench": "page-scores",
        "case": case | {"budget": budget, "max_missed_mass": limit, "score": score},
        "n": len(errors),
        "missed_mass": {"value": 0.25},
        "lost_heads": {"value": 0.125},
        "output_error": {"value": value},
        "refined_share": {"value": 0.5},
        "baseline": "spread",
        "item_values": {"output_error": errors},
        "seed": 0,
        "device": "cpu",
        "versions": {"torch": "2", "transformers": "5"},
        "commit": "abc",
    } | more


def test_table_marks_what_differs_on_every_item():
    ours = [0.1, 0.3, 0.5]
    lines = tables(
        [
            row("spread", ours),
            row("spread", ours, 0.2),
            row("summary", [x + 0.01 for x in ours]),
            row("oracle", [x - 0.01 for x in ours]),
            row("halves", [0.2, 0.3, 0.4]),
            row("quarters", [0.01, 0.02, 0.51]),
            row("bound", ours, None),
        ]
    ).splitlines()
    assert lines[0].startswith("page-scores, m, niah (multi), 4K tokens, n = 3, float32; attention missed")
    assert "by keys read, ▼ less error than `spread` on each of the 3 items, ▲ more (cpu;" in lines[0]
    assert lines[2] == "| page | score | 10 % | 20 % | pages for ≤ 10 % |"
    assert lines[4:] == [
        "| 16 | `spread` | 25.0 % / 12.5 % / 0.300 | 25.0 % / 12.5 % / 0.300 |  |",
        "| 16 | `summary` | 25.0 % / 12.5 % / 0.310▲ | – |  |",
        "| 16 | `oracle` | 25.0 % / 12.5 % / 0.290▼ | – |  |",
        "| 16 | `halves` | 25.0 % / 12.5 % / 0.300 | – |  |",
        "| 16 | `quarters` | 25.0 % / 12.5 % / 0.180 | – |  |",
        "| 16 | `bound` | – | – | 50.0 % |",
    ]


def test_the_baseline_is_luka_without_low_rank_summaries():
    luka = methods.get("luka")(score="spread")
    settings = SETTINGS[page_scores.BASELINE.removesuffix("+prior")] | {"prior": PRIOR}
    assert {name: getattr(luka, name) for name in settings} == settings
    assert (luka.sinks, luka.tail, luka.window) == (SINKS, TAIL, WINDOW)
