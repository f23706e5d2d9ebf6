"""Hybrids trained on the same tokens, task by task, as in the tables 1 to 3 of the laLTE/laNSA paper."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from foveate.errors import UserError
from foveate.hybrids.layers.gated_deltanet import CONV_SIZE
from foveate.hybrids.models import PRESETS, HybridCache, HybridConfig, make_config
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.metrics import Interval, Values, estimate
from foveate.lab.report.markdown import NONE, context_length, interval, markdown_table, titled
from foveate.lab.report.rows import Row
from foveate.lab.report.terminal import size as size_of

_GROUPS = (
    ("needles (S-NIAH-1 in noise, 2 and 3 in novels, and one of several keys)", ("ruler",)),
    ("associative recall (MQAR)", ("mqar",)),
    ("recall from a passage", ("recall",)),
    ("language modelling and common sense", ("perplexity", "lambada", "choice")),
)
_NEEDLES = {
    "niah_single_1": "S-NIAH-1",
    "niah_single_2": "S-NIAH-2",
    "niah_single_3": "S-NIAH-3",
    "niah_multikey_1": "multi-key",
}
_SEED = re.compile(r"^(?P<model>.+)-(?P<seed>\d+)$")
_RECALLED = {
    "numbers in novels": ("niah_single_2",),
    "uuids": ("niah_single_3",),
    "several keys": ("niah_multikey_1",),
    "in noise": ("niah_single_1",),
    "64 pairs": (64,),
    "256 pairs": (256,),
}
"""What the table of a recipe says of recall: splits with a distance, or numbers of pairs."""
_WORDED = {"niah_single_2": "alone", "niah_multikey_1": "among four keys"}
_WORDINGS = {"ruler": "RULER's wording", "taught": "taught wordings", "untaught": "untaught wordings"}
_SIZES, _LENGTHS = ("27M", "1.4B"), {"4K": 4096, "64K": 65536, "1M": 1048576}
Column = tuple[str, str, str]
"""Task, and the words of its head: what is asked, and of how many tokens or pairs."""
_OWN = ("own", "dense")
"""Methods that leave a model as it is."""


def table(rows: Sequence[Row]) -> str:
    """A table for each group of tasks: a line for each model, a column for each comparison.

    Models are preset-size-seed. Seeds are averaged, with the 95 % interval over items and the range of the seeds. Full
    attention under a method has a line of its own. Perplexity is better where it is lower.

    Raises:
        UserError: for a model name of another form, a task of no table, or seeds that answered other items.
    """
    known = {name for _, names in _GROUPS for name in names}
    if strange := sorted({row["task"] for row in rows} - known):
        raise UserError(f"task must be of {', '.join(sorted(known))}, not {', '.join(strange)}")
    groups = ((title, [row for row in rows if row["task"] in names]) for title, names in _GROUPS)
    return "\n\n".join(_group(title, some) for title, some in groups if some)


def recipe(rows: Sequence[Row]) -> str:
    """A line for each model that one recipe trained: its loss on held-out text, and recall from beyond its windows.

    Recall is the mean over lengths of needles, and associative recall; seeds are averaged, with their range. The losses
    are those of curves (`hybrid-curves`); where a seed was trained twice, of the run that ended.
    """
    curves, rows = ([row for row in rows if (row.get("kind") == "hybrid-curves") == kind] for kind in (True, False))
    losses: dict[str, dict[str, float]] = {}
    for row in curves:
        if row["held_out"]:
            model, seed = _line(row | {"method": "own"})
            losses.setdefault(model, {})[seed] = row["held_out"][-1]
    found: dict[str, list[Row]] = {line: [] for line in losses}
    for row in rows:
        if row["task"] == "mqar" or row["task_settings"].get("beyond"):
            found.setdefault(_line(row)[0], []).append(row)
    lines = [["model", "seeds", "held-out loss", *_RECALLED]]
    for line in sorted(found, key=lambda line: list(PRESETS).index(_preset(line))):
        asked = sorted({_line(row)[1] for row in found[line]}, key=int)
        seeds = sorted({*asked, *losses.get(line, {})}, key=int)
        loss = _spread(list(losses.get(line, {}).values()), 2)
        lines.append([line, ", ".join(seeds), loss, *(_recalled(found[line], asked, of) for of in _RECALLED.values())])
    title = "one recipe: loss on held-out text, and recall from beyond every window in percent (range of the seeds)"
    return titled(title, [*rows, *curves], markdown_table(lines))


def wordings(rows: Sequence[Row]) -> str:
    """A line for each model: needles in RULER's wording, in the others of `foveate train`, and in untaught ones.

    Args:
        rows: of `benchmarks/hybrid_wordings.py`.

    Raises:
        UserError: for rows that no table can hold.
    """
    cells = {
        (row["split"], row["task_settings"]["wording"], row["model"]): interval(row["metrics"]["string_match"])
        for row in rows
    }
    splits = [split for split in _NEEDLES if split in {split for split, *_ in cells}]
    columns = [(split, wording) for split in splits for wording in _WORDINGS]
    heads = [f"{_WORDED[split]}, {_WORDINGS[wording]}" for split, wording in columns]
    lines = [["model", *heads]]
    models = sorted({row["model"] for row in rows}, key=lambda name: (list(PRESETS).index(_preset(name)), name))
    for model in models:
        lines.append([model, *(cells.get((*column, model), NONE) for column in columns)])
    if len({(row["n"], row["task_settings"]["length"]) for row in rows}) > 1 or len(cells) < len(rows):
        raise UserError("rows of wordings must have one length and number of items, and each be there once")
    n, length = rows[0]["n"], rows[0]["task_settings"]["length"]
    title = f"needles by their wording, in prompts of {context_length(length)} tokens, percent [95 %], n = {n} each"
    return titled(title, rows, markdown_table(lines))


def caches() -> str:
    """What the cache of one sequence holds by the configuration, in bfloat16: a line for each preset."""
    lines = [["preset", *(f"{size}, {length}" for size in _SIZES for length in _LENGTHS)]]
    for preset in PRESETS:
        configs = [make_config(preset, size) for size in _SIZES]
        lines.append([preset, *(size_of(cache_bytes(one, tokens)) for one in configs for tokens in _LENGTHS.values())])
    return markdown_table(lines)


def cache_bytes(config: HybridConfig, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that a cache of one sequence holds while it generates, after ``tokens`` tokens.

    Nothing is computed or allocated: the memories take in tensors without storage.
    """
    cache = HybridCache(config)
    for layer, mixer in zip(cache.layers, config.mixers):
        _take_in(layer, config, mixer, tokens, dtype)
    return cache.nbytes


def _take_in(layer: CacheLayerMixin, config: HybridConfig, mixer: str, tokens: int, dtype: torch.dtype) -> None:
    """Gives a layer's memory a prompt on the device `meta`, of the shapes that its mixer has."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(1, *shape, dtype=dtype, device="meta")

    if mixer == "gdn":
        heads, width = config.gdn_heads, config.gdn_head_dim
        tail = empty(CONV_SIZE - 1, 3 * heads * width)
        layer.memory.tensors = {"tail": tail, "state": empty(heads, width, width, dtype=torch.float32)}
        return
    nsa = mixer == "nsa"
    heads = config.nsa_kv_heads if nsa else config.num_key_value_heads
    k = empty(heads, tokens, config.nsa_head_dim if nsa else config.head_dim)
    if nsa:
        layer.memory.append(k, k, None)
        layer.memory.summaries(lambda keys, values: (keys[:, :, :: config.nsa_block],) * 2)
    elif mixer == "attn":
        layer.update(k, k)
    else:
        layer.memory.start(k, k, empty(tokens, dtype=torch.int64))


def by_seed(rows: Sequence[Row]) -> str:
    """A line for each seed of a model as it is: each kind of needle alone, and pairs, so that no mean hides one."""
    of = [row for row in rows if row["method"] in _OWN and row["task"] in ("ruler", "mqar")]
    columns = sorted({_column(row) for row in of}, key=_place)
    found: dict[tuple[str, int], dict[Column, float]] = {}
    for row in of:
        line, seed = _line(row)
        found.setdefault((line, int(seed)), {})[_column(row)] = row["score"]
    lines = [["model", "seed", *(_head(column, of) for column in columns)]]
    for (line, seed), scores in sorted(found.items()):
        lines.append([line, str(seed), *(f"{scores[one]:.1f}" if one in scores else NONE for one in columns)])
    return titled("each kind and seed, scores", of, markdown_table(lines))


def _preset(line: str) -> str:
    """The preset that a model's name begins with."""
    return max((preset for preset in PRESETS if re.match(rf"{preset}(_|-|$)", line)), key=len)


def _recalled(rows: Sequence[Row], seeds: Sequence[str], asked: Sequence[str | int]) -> str:
    """The mean over the columns that are asked for, of all seeds; nothing where a seed has none of them."""
    kept = [row for row in rows if row["task_settings"].get("pairs", row["split"]) in asked]
    of = [[row["score"] for row in kept if _line(row)[1] == seed] for seed in seeds]
    if not of or not all(of):
        return NONE
    return _spread([float(np.mean(scores)) for scores in of], 1)


def _spread(values: Sequence[float], digits: int) -> str:
    """The mean and, of several, the least and the largest."""
    if not values:
        return NONE
    mean, low, high = (f"{value:.{digits}f}" for value in (np.mean(values), min(values), max(values)))
    return f"{mean} ({low}–{high})" if len(values) > 1 else mean


def _group(title: str, rows: Sequence[Row]) -> str:
    columns = sorted({_column(row) for row in rows}, key=_place)
    found: dict[str, dict[Column, dict[str, Row]]] = {}
    for row in rows:
        line, seed = _line(row)
        seeds = found.setdefault(line, {}).setdefault(_column(row), {})
        if seeds.setdefault(seed, row) is not row:
            raise UserError(f"two rows of {line}, seed {seed}, on {' '.join(filter(None, _column(row)[1:]))}")
    average = len(columns) > 1 and not any(column[0] == "perplexity" for column in columns)
    head = ["model", "seeds", *(_head(column, rows) for column in columns), *(["mean"] if average else [])]
    begun = any("begun" in row["metrics"] for row in rows)
    lines = [[*head, *(["first three characters, mean"] if begun else [])]]
    for line, of in found.items():
        cells = [_score(list(of[column].values()), line) if column in of else None for column in columns]
        numbers = sorted({seed for seeds in of.values() for seed in seeds}, key=int)
        shown = [NONE if cell is None else _cell(*cell) for cell in cells]
        if average:
            whole = all(cell is not None for cell in cells)
            shown.append(f"{np.mean([cell[0].value for cell in cells]):.1f}" if whole else NONE)
        if begun:
            whole = all(column in of for column in columns)
            shown.append(_begun([list(of[column].values()) for column in columns]) if whole else NONE)
        lines.append([line, ", ".join(numbers), *shown])
    return titled(f"{title}, scores [95 %] (range of the seeds)", rows, markdown_table(lines))


def _begun(columns: Sequence[Sequence[Row]]) -> str:
    """The share of answers whose beginning is right, mean over the columns; of the seeds that were asked for it."""
    seeds = [[row["metrics"]["begun"]["value"] for row in rows if "begun" in row["metrics"]] for rows in columns]
    return f"{np.mean([np.mean(some) for some in seeds]):.1f}" if all(seeds) else NONE


def _line(row: Row) -> tuple[str, str]:
    """The model without its seed, with the method where it is not as it is; and the seed."""
    parts = _SEED.match(row["model"])
    if parts is None:
        raise UserError(f"model must be preset-size-seed, not '{row['model']}'")
    method = "" if row["method"] in _OWN else f", `{row['spec']}`"
    return f"{parts['model']}{method}", parts["seed"]


def _column(row: Row) -> Column:
    settings = row["task_settings"]
    if row["task"] == "ruler":
        far = f" beyond {settings['beyond']:,}" if settings.get("beyond") else ""
        return "ruler", _NEEDLES.get(row["split"], row["split"]), f"{context_length(settings['length'])} tokens{far}"
    if row["task"] == "mqar":
        return "mqar", f"{settings['pairs']:,} pairs", f"{context_length(settings['length'])} tokens"
    if row["task"] == "perplexity":
        of = "" if row["split"] == "books" else f" of {row['split']}"
        return "perplexity", f"perplexity{of}", f"after {context_length(settings['length'])} tokens"
    return row["task"], "lambada" if row["task"] == "lambada" else row["split"], ""


def _place(column: Column) -> tuple[int, int, str, int, int]:
    """Where a column stands: by task, what is asked (pairs by their number), length, and least distance."""
    task, what, size = column
    order, needles = [name for _, names in _GROUPS for name in names], [*_NEEDLES.values()]
    first = needles.index(what) if what in needles else _number(what) if task == "mqar" else len(needles)
    length, _, beyond = size.partition(" beyond ")
    return order.index(task), first, what, _number(length), _number(beyond)


def _number(text: str) -> int:
    return int("".join(filter(str.isdigit, text)) or 0) * (1024 if "K" in text else 1)


def _head(column: Column, rows: Sequence[Row]) -> str:
    counts = sorted({row["n"] for row in rows if _column(row) == column})
    return f"{', '.join(filter(None, column[1:]))} (n = {', '.join(map(str, counts))})"


def _score(rows: Sequence[Row], line: str) -> tuple[Interval, list[float]]:
    """The mean over the seeds with its interval over the items, and the score of each seed."""
    if len({row["run"]["items"] for row in rows}) > 1:
        raise UserError(f"seeds of {line} answered other items of {rows[0]['task']} {rows[0]['split']}")
    task = rows[0]["task"]
    metric = "perplexity" if task == "perplexity" else next(iter(rows[0]["metrics"]))
    aggregate = tasks.get(task).metrics[metric]
    seeds = [{name: np.array(values, dtype=np.float64) for name, values in row["item_values"].items()} for row in rows]

    def mean(values: Values) -> np.ndarray:
        own = [{name: values[f"{number} {name}"] for name in seed} for number, seed in enumerate(seeds)]
        return np.mean([aggregate(one) for one in own], axis=0)

    together = {f"{number} {name}": values for number, seed in enumerate(seeds) for name, values in seed.items()}
    return estimate(mean, together, rows[0]["seed"]), [row["metrics"][metric]["value"] for row in rows]


def _cell(score: Interval, seeds: Sequence[float]) -> str:
    beside = f" ({min(seeds):.1f}–{max(seeds):.1f})" if len(seeds) > 1 else ""
    return interval(vars(score)) + beside
