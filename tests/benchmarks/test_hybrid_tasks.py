"""The table of hybrids' tasks on made-up rows: seeds averaged, columns in order, methods in lines of their own."""

import numpy as np
import pytest

from benchmarks import hybrid_task_tables as hybrid_tasks
from foveate.errors import UserError

MADE = {"device": "H100", "versions": {"torch": "2", "transformers": "5"}, "commit": "abc", "seed": 0}


def row(model, values, task="ruler", split="niah_single_1", method="own", metric="string_match", items="x", **settings):
    """A row as the runner writes it, from the percentages of its items, or from all of their values by name."""
    score = {"value": float(np.mean(values)) if isinstance(values, list) else 0.0}
    values = {metric: [value / 100 for value in values]} if isinstance(values, list) else values
    named = {"method": method, "spec": method if method in ("own", "dense") else f"{method}:top_k=384"}
    which = {"task": task, "split": split, "task_settings": settings, "run": {"items": items}}
    return {"model": model, **named, **which, "n": 4, "metrics": {metric: score}, "item_values": values, **MADE}


def cells(text):
    """Cells of each line by its first."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: rest for name, *rest in lines}


NEEDLES = [
    row("lalte-27M-0", [100, 100, 100, 100], length=2048),
    row("lalte-27M-0", [100, 100, 0, 0], length=1024),
    row("lalte-27M-1", [100, 0, 0, 0], length=1024),
    row("lalte-27M-0", [0, 0, 0, 0], split="niah_multikey_1", length=2048),
    row("gdn_attn-27M-0", [100, 100, 100, 0], method="dense", length=1024),
    row("gdn_attn-27M-0", [100, 0, 0, 0], method="tova", length=1024),
]


def test_seeds_are_averaged_with_their_range():
    found = cells(hybrid_tasks.table(NEEDLES))
    assert found["model"][:3] == ["seeds", "S-NIAH-1, 1K tokens (n = 4)", "S-NIAH-1, 2K tokens (n = 4)"]
    assert found["model"][3:] == ["multi-key, 2K tokens (n = 4)", "mean"]
    seeds, first, second, third, mean = found["lalte-27M"]
    assert seeds == "0, 1"
    assert first.startswith("37.5 [")
    assert first.endswith("] (25.0–50.0)")
    assert (second, third) == ("100.0 [100.0, 100.0]", "0.0 [0.0, 0.0]")
    assert mean == "45.8"


def test_an_item_weighs_as_the_mean_of_its_seeds():
    """Seeds that are right on different items: the mean is the same for every resample."""
    rows = [row("lalte-27M-0", [100, 0, 100, 0], length=1024), row("lalte-27M-1", [0, 100, 0, 100], length=1024)]
    assert cells(hybrid_tasks.table(rows))["lalte-27M"][1] == "50.0 [50.0, 50.0] (50.0–50.0)"


def test_full_attention_under_a_method_has_its_own_line():
    found = cells(hybrid_tasks.table(NEEDLES))
    assert found["gdn_attn-27M"][1].startswith("75.0 [")
    assert found["gdn_attn-27M, `tova:top_k=384`"][1].startswith("25.0 [")
    assert found["gdn_attn-27M"][2:] == ["–", "–", "–"]


def test_begun_answers_have_a_column_where_rows_have_them():
    rows = [row(f"lalte-27M-{seed}", [100, 0], length=1024) for seed in (0, 1)]
    rows[1]["metrics"]["begun"] = {"value": 75.0}  # seed 0 was not asked
    found = cells(hybrid_tasks.table([*rows, row("gdn-27M-0", [0, 0], length=1024)]))
    assert found["model"][-1] == "first three characters, mean"
    assert (found["lalte-27M"][-1], found["gdn-27M"][-1]) == ("75.0", "–")
    assert cells(hybrid_tasks.table(NEEDLES))["model"][-1] == "mean"


def test_groups_are_tables_and_pairs_are_in_the_order_of_their_number():
    rows = [row("gdn-27M-0", [50] * 4, "mqar", "books", metric="accuracy", length=2048, pairs=n) for n in (256, 16, 64)]
    rows += [row("gdn-27M-0", [100] * 4, "recall", "squad", metric="contains")]
    nll = {"nll": [60.0, 80.0], "bytes": [100.0, 100.0], "tokens": [20.0, 20.0]}
    perplexity = row("gdn-27M-0", nll, "perplexity", "books", metric="inverse_perplexity", length=3072)
    perplexity["metrics"]["perplexity"] = {"value": float(np.exp(3.5))}
    needles, recall, passages, language = hybrid_tasks.table([*rows, perplexity, *NEEDLES]).split("\n\n")[1::2]
    assert [head.split(",")[0] for head in cells(recall)["model"][1:-1]] == ["16 pairs", "64 pairs", "256 pairs"]
    assert cells(passages)["gdn-27M"] == ["0", "100.0 [100.0, 100.0]"]
    assert cells(language)["gdn-27M"][1].startswith(f"{np.exp(3.5):.1f} [")
    assert "mean" not in cells(language)["model"]
    assert "lalte-27M" in cells(needles)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("lalte", [1], length=8)], "model must be preset-size-seed, not 'lalte'"),
        ([row("lalte-27M-0", [1], task="niah")], "task must be of .*, not niah"),
        (
            [row("lalte-27M-0", [1], length=8)] * 2 + [row("lalte-27M-0", [2], length=8)],
            "two rows of lalte-27M, seed 0",
        ),
        (
            [row("lalte-27M-0", [1], length=8), row("lalte-27M-1", [1], length=8, items="y")],
            "seeds of lalte-27M answered other items of ruler niah_single_1",
        ),
    ],
)
def test_rows_that_make_no_table(rows, message):
    with pytest.raises(UserError, match=message):
        hybrid_tasks.table(rows)


def test_each_seed_has_a_line_of_its_own():
    rows = [one | {"score": one["metrics"]["string_match"]["value"]} for one in NEEDLES]
    found = [line.strip("| ").split(" | ") for line in hybrid_tasks.by_seed(rows).splitlines() if line.startswith("| ")]
    assert found[0][2:] == [
        "S-NIAH-1, 1K tokens (n = 4)",
        "S-NIAH-1, 2K tokens (n = 4)",
        "multi-key, 2K tokens (n = 4)",
    ]
    assert found[1:] == [
        ["gdn_attn-27M", "0", "75.0", "–", "–"],  # as it is, not under a method
        ["lalte-27M", "0", "50.0", "100.0", "0.0"],
        ["lalte-27M", "1", "25.0", "–", "–"],
    ]


def test_a_recipe_has_the_loss_beside_recall():
    def curve(model, *held_out):
        return {"kind": "hybrid-curves", "model": model, "held_out": list(held_out), **MADE}

    def needle(model, score, split="niah_single_2", **how):
        return row(model, [score] * 4, split=split, length=1024, beyond=400, **how)

    curves = [
        curve("lalte_x-27M-0", 3.5),
        curve("lalte_x-27M-1"),
        curve("lalte_x-27M-1", 4.1, 3.7),
        curve("lalte_x-27M-1"),
        curve("gdn_x-27M-0", 3.9),
    ]
    needles = [needle("lalte_x-27M-0", 100), needle("lalte_x-27M-1", 50), needle("gdn_x-27M-0", 75, "niah_single_1")]
    pairs = row("lalte_x-27M-0", [25] * 4, "mqar", "books", metric="accuracy", length=2048, pairs=256)
    near = row("gdn_x-27M-0", [0] * 4, split="niah_single_2", length=1024)  # not from beyond
    made = [{**one, "score": one["metrics"]["string_match"]["value"]} for one in (*needles, near)]
    found = cells(hybrid_tasks.recipe([*curves, *made, {**pairs, "score": 25.0}]))
    assert found["model"] == ["seeds", "held-out loss", *hybrid_tasks._RECALLED]
    assert found["gdn_x-27M"] == ["0", "3.90", "–", "–", "–", "75.0", "–", "–"]
    lalte = found["lalte_x-27M"]
    assert lalte[:3] == ["0, 1", "3.60 (3.50–3.70)", "75.0 (50.0–100.0)"]
    assert lalte[-1] == "–", "a seed has no pairs"
    assert list(found)[-2:] == ["gdn_x-27M", "lalte_x-27M"], "in the order of the presets"


def test_caches_follow_from_the_configuration():
    found = cells(hybrid_tasks.caches())
    assert found.pop("preset")[:2] == ["27M, 4K", "27M, 64K"]
    assert {*found} - {"---"} >= {*hybrid_tasks.PRESETS}
    assert found["gdn_attn"] == ["13.8 MB", "203 MB", "3.2 GB", "126 MB", "1.6 GB", "25.8 GB"]
    assert found["lalte"][0] == found["lalte"][2] == "2.4 MB"
