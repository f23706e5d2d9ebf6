"""Every table and figure of the four papers beside what was measured here: `<!-- report: papers -->`.

`papers.json` has the lines: what is compared, what the paper has, the name of what the rows have, which is made from
them, the rows and their command, and how the two compare.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.csa_tables import PUBLISHED
from foveate.calibration import load
from foveate.lab.report import pooled
from foveate.lab.report.markdown import markdown_table
from foveate.lab.report.rows import Row, all_spelled, grouped

RESULTS = Path(__file__).parent / "results"
MODELS = {"0.5B": "qwen2.5-coder-0.5b-instruct", "1.5B": "qwen2.5-coder-1.5b-instruct"}
VERDICTS = ("reproduced", "surpassed", "another test", "differs because", "not run because")
_K = 1024


class Line(NamedTuple):
    """One table or figure, or a part of it with a verdict of its own."""

    item: str
    theirs: str
    ours: str
    """A name in :data:`OURS`, or words; empty: nothing."""
    file: str
    """Of `benchmarks/results/`, without its ending; or a path in the repository."""
    command: str
    """A script of `benchmarks/`, or a command whose flags benchmarks/README.md has; empty: none."""
    verdict: str


# Rows


@functools.cache
def _rows(file: str) -> list[Row]:
    lines = (RESULTS / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = list(map(json.loads, lines))
    return all_spelled(rows) if "settings" in rows[0] and "bench" not in rows[0] else rows


def _some(file: str, **asked: Any) -> list[Row]:
    """Rows of benches or of training by values of their case, or of themselves."""
    return [row for row in _rows(file) if asked.items() <= (row.get("case") or row).items()]


def _compared(file: str, spec: str, model: str, tasks: Sequence[str], **asked: Any) -> list[Row]:
    """Rows of `foveate compare`, of one method."""
    where = {"spec": spec, "model": model, **asked}
    return [row for row in _rows(file) if row["task"] in tasks and where.items() <= row.items()]


def _joined(cells: Iterable[str]) -> str:
    return "; ".join(cells)


def _by_model(cell: Callable[[str], str]) -> str:
    found = {short: cell(model) for short, model in MODELS.items()}
    if not any(found.values()):
        raise ValueError("no row is of the settings that this line names")
    return _joined(f"{short} {value}" for short, value in found.items() if value)


# LuKA


_SPLITS = ("easy", "medium", "hard", "very_hard")


def _salad(spec: str, over: str = "dense") -> Callable[[], str]:
    """Differences on the whole sets, points, split by split; each is to the dense attention of its own run."""

    def of(model: str, split: str) -> str:
        how = {"split": split, "limit": 100}
        (row,), (base,) = (_compared("luka-wikisalad", one, model, ["wikisalad"], **how) for one in (spec, over))
        return f"{row['diff_to_dense'] - base['diff_to_dense']:+.1f}"

    return lambda: _by_model(lambda model: ", ".join(of(model, split) for split in _SPLITS))


def _default() -> str:
    """The default, split by split."""

    def of(model: str) -> str:
        rows = {row["split"]: row for row in _compared("luka-table1", "luka", model, ["wikisalad"])}
        return ", ".join(f"{rows[split]['diff_to_dense']:+.1f}" for split in _SPLITS)

    return _by_model(of)


def _perplexity(model: str, spec: str, tokens: int = 512) -> float:
    (row,) = [
        row
        for row in _rows("luka-perplexity")
        if (row["model"], row["spec"], row["task_settings"]["continuation"]) == (model, spec, tokens)
    ]
    return row["metrics"]["perplexity"]["value"]


def _page(compressor: str, top_k: str, zero: bool = False) -> str:
    parts = ["tail=16", *([f"compressor={compressor}"] if compressor != "attention" else []), "temperature=1"]
    return f"luka_paper:{','.join([*parts, *['zero_values=true'] * zero, f'top_k={top_k}', 'mass=exact'])}"


def _compressors(top_k: str) -> str:
    kinds = ("attention", "mean", "random")
    return _by_model(
        lambda model: ", ".join(
            f"{_perplexity(model, _page(kind, top_k)) / _perplexity(model, 'dense'):.2f}" for kind in kinds
        )
    )


def _zeroed() -> str:
    def of(model: str) -> str:
        ratios = (
            _perplexity(model, _page(kind, "0", True)) / _perplexity(model, _page(kind, "0"))
            for kind in ("attention", "mean", "random")
        )
        return ", ".join(f"{ratio:.2f}" for ratio in ratios)

    return _by_model(of)


def _modes() -> str:
    specs = ("h2o", "luka_paper", "mixed:clustered=luka_paper")
    return _by_model(
        lambda model: ", ".join(
            f"{_perplexity(model, spec, 1024) - _perplexity(model, 'dense', 1024):+.1f}" for spec in specs
        )
    )


def _step_parts() -> str:
    """Microseconds of a layer's step at 2K tokens: attending with nothing refined, what refining adds, finding pages,
    and summarising them, the last two on average over steps; empty without rows."""
    rows = {row["case"]["method"]: row for row in _some("decode", level="kernel", context=2048, heads=16)}
    if not rows:
        return ""

    def of(method: str, alone: str) -> str:
        (kind,) = rows[method]["layers"].values()
        attention = rows[alone]["ms"]
        found = kind["shared_upkeep_ms"] / kind["layers"]
        parts = (attention, kind["ms"] - attention, found, kind["upkeep_ms"])
        return ", ".join(f"{1000 * ms:.1f}" for ms in parts)

    alone = {size: f"luka:page_size={size},top_k=0,score=summary,prior=0.0" for size in (16, 32)}
    names = {
        "`luka`": ("luka", alone[32]),
        "its kernels by the paper's settings": ("luka:page_size=16,top_k=3,score=summary,prior=0.0", alone[16]),
        "`luka_paper`": ("luka_paper", "luka_paper:top_k=0"),
    }
    dense = 1000 * rows["luka"]["baseline_ms"]
    return _joined([f"dense {dense:.1f}", *(f"{name} {of(*specs)}" for name, specs in names.items())])


# StreamIndex


def _time(ms: float) -> str:
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms"


def _indexer(tokens: int, top_k: int = 512, impl: str = "foveate") -> Row:
    (row,) = _some("indexer", tokens=tokens, top_k=top_k, impl=impl, dtype="bfloat16", gpus=1)
    return row


def _cost(row: Row) -> str:
    return f"{_time(row['ms'])}, {row['peak_bytes'] / 1e9:.2f} GB"


def _parity() -> str:
    return _joined(f"{tokens // _K}K {_indexer(tokens)['recall_min']:.4f}" for tokens in (2048, 4096, 8192))


def _study(study: str, value: Any) -> Row:
    (row,) = _some("indexer-study", study=study, value=value, tokens=262144)
    return row


def _tiles() -> str:
    first, last = (_study("key_chunk", value)["ms"] for value in (1024, 262144))
    return f"{_time(first)} to {_time(last)}, {first / last:.1f}×"


def _settings() -> str:
    ours = _some("indexer-study", tokens=262144)
    values = {(row["case"]["study"], str(row["case"]["value"])) for row in ours}
    settings = PUBLISHED["streamindex"]["settings"]
    theirs = {(name, value) for name, found in settings.items() for value in found}
    least = min(row["recall_min"] for row in ours)
    return f"{len(theirs & values)} of {len(theirs)} cells, recall ≥ {least:.4f}"


def _ablations() -> str:
    found = {row["case"]["value"][:3]: row for row in _some("indexer-study", study="ablation")}
    means = f"{found['A1:']['recall_mean']:.4f}, {found['A2:']['recall_mean']:.4f}"
    return f"{means}; {100 * found['A3:']['recall_whole']:.2f} %"


def _layer(tokens: int) -> str:
    (row,) = _some("csa", tokens=tokens)
    return _cost(row)


# Kascade


def _loss(spec: str, *tasks: str) -> str:
    """Paired differences to dense, points, with intervals, of the models that have such rows."""

    def of(model: str) -> str:
        if not (rows := _compared("kascade-accuracy", spec, model, tasks)):
            return ""
        dense = {row["run"]["items"]: row for row in _compared("kascade-accuracy", "dense", model, tasks)}
        found = pooled.difference(rows, [dense[row["run"]["items"]] for row in rows])
        return f"{found.value:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"

    return _by_model(of)


def _found(model: str, name: str = "musique") -> dict[str, Any]:
    return load(RESULTS / "calibrations" / model / f"{name}.json").found


def _coverage() -> str:
    def of(model: str) -> str:
        heads = [share for layer in _found(model)["coverage"][1:] for share in layer]
        return f"{100 * sum(share >= 0.95 for share in heads) / len(heads):.0f} %"

    return _by_model(of)


def _neighbours() -> str:
    similarity = _found("qwen2.5-coder-0.5b-instruct", "figure-3")["mean_similarity"]
    near = [similarity[layer][layer + 1] for layer in range(len(similarity) - 1)]
    return f"0.5B {min(near):.2f} to {max(near):.2f}, median {statistics.median(near):.2f}"


def _importance() -> str:
    return _by_model(lambda model: "{:.2f} and {:.2f}".format(*(_found(model)["importance"][at] for at in (0, -1))))


_DECODE = "kascade:pool=kv_head,pooling=post_softmax"
_PREFILL = "kascade:pool=kv_head,pooling=post_softmax,decode_only=false"


def _over_flash(file: str, method: str, **case: Any) -> float:
    flash, ours = (_some(file, level="kernel", method=one, **case)[0]["ms"] for one in ("flash-attention-3", method))
    return flash / ours


def _table3(file: str, method: str, cases: Iterable[tuple[int, int]]) -> str:
    """Reading a tenth, a fifth and three tenths of the keys, of so many tokens and sequences."""
    specs = (method, *(method.replace(":", f":top_k={share},") for share in (0.2, 0.3)))
    return _joined(
        f"{tokens // _K}K " + ", ".join(f"{_over_flash(file, spec, context=tokens, batch=batch):.2f}" for spec in specs)
        for tokens, batch in cases
    )


def _decode_speed() -> str:
    return _table3("kascade-table3", _DECODE, (*((_K << n, 64) for n in range(3, 9)), (_K << 9, 32)))


def _prompt_speed() -> str:
    """As a decode step's; then a tenth of the keys, where anchors, too, read what they choose."""
    file, lengths = "kascade-table3-prompts", [_K << n for n in range(3, 9)]
    own = _PREFILL.replace(":", ":dense_anchor_prefill=false,")
    chosen = (f"{_over_flash(file, own, context=tokens, batch=1):.2f}" for tokens in lengths)
    return f"{_table3(file, _PREFILL, ((tokens, 1) for tokens in lengths))}; own choice {', '.join(chosen)}"


def _by_tokens() -> str:
    """Anchors of single tokens, then of tiles."""

    def of(model: str, name: str) -> str:
        spec = f'kascade:pool=kv_head,pooling=post_softmax,calibration="{name}.json"'
        found = (_compared("kascade-tokens", spec, model, [task]) for task in ("ruler", "hotpotqa"))
        return ", ".join(f"{statistics.mean(row['diff_to_dense'] for row in rows):+.1f}" for rows in found)

    return _by_model(lambda model: f"{of(model, 'tokens')} (by tiles {of(model, 'paper')})")


def _chains() -> str:
    """AIME-24 by dense attention, percent of all answers."""
    (row,) = _some("short-contexts", task="math", split="aime24")
    return f"1.5B, dense: {row['score']:.1f} % of {row['n']} answers"


def _math() -> str:
    specs = ('kascade:calibration="together-10.json"', 'kascade:top_k=0.2,calibration="together-10.json"')
    return " and ".join(_loss(spec, "math") for spec in specs)


def _passes() -> str:
    (row,) = _some("decode", level="kernel", method=_DECODE, context=131072, batch=64)
    kind = row["layers"]["choosing"]
    return " and ".join(f"{100 * kind['parts_ms'][part] / kind['ms']:.0f} %" for part in ("score", "select"))


def _prompt_passes() -> str:
    """Shares of a choosing layer's time, percent: the passes of the paper's section 3.6; and the layer over the fastest
    dense attention. The last pass is what a layer that reads attends with; the first is the rest of the attention."""

    def of(tokens: int) -> str:
        method = _PREFILL.replace(":", ":dense_anchor_prefill=false,")
        row = _some("prefill", level="kernel", method=method, context=tokens)[-1]
        kind, last = row["layers"]["choosing"], row["layers"]["reading"]["parts_ms"]["attend"]
        parts = kind["parts_ms"]
        passes = (parts["attend"] - last, parts["score"], parts["select"], last)
        shares = ", ".join(f"{100 * ms / kind['ms']:.0f}" for ms in passes)
        return f"{tokens // _K}K {shares} %, {kind['ms'] / row['baseline_ms']:.1f}×"

    return _joined(map(of, (8192, 32768, 131072)))


# laLTE and laNSA


def _needles(*presets: str) -> str:
    return ", ".join(f"{preset} {_singles('hybrids-tasks', f'{preset}-27M-0'):.1f}" for preset in presets)


def _singles(file: str, model: str, methods: Sequence[str] = ("own", "dense")) -> float:
    """The mean score of single needles, of a model as it is unless ``methods`` are named."""
    rows = [row for row in _some(file, task="ruler", model=model) if row["method"] in methods]
    return statistics.fmean(row["score"] for row in rows if row["split"].startswith("niah_single"))


def _lesson(preset: str) -> list[float]:
    """The mean of each seed by our recipe."""
    names = sorted({row["model"] for row in _rows("hybrids-lesson") if row["model"].startswith(f"{preset}-")})
    return [_singles("hybrids-lesson", name) for name in names]


def _of_seeds(preset: str) -> str:
    """Their mean, and each."""
    seeds = _lesson(preset)
    mean = f"{statistics.fmean(seeds):.1f}"
    return mean if len(seeds) == 1 else f"{mean} ({', '.join(f'{one:.1f}' for one in seeds)})"


def _recipe() -> str:
    beside = ", ".join(f"{name} {_of_seeds(f'{name}_recipe')}" for name in ("gdn", "gdn_swa", "gdn_attn", "lansa"))
    return f"laLTE {_of_seeds('lalte_lesson')}; {beside}"


def _plain() -> str:
    """Models whose training had no needle in RULER's wording."""

    def of(preset: str) -> str:
        rows = _some("hybrids-plain", task="ruler", model=f"{preset}_plain-27M-0")
        far = [row for row in rows if row["task_settings"].get("beyond")]
        return f"{preset} {statistics.fmean(row['score'] for row in far if row['split'].startswith('niah_single')):.1f}"

    return ", ".join(map(of, ("lalte", "gdn", "gdn_attn")))


def _recipe_evicting() -> str:
    methods = {"gdn_attn": "dense", "TOVA": "tova", "uniform": "uniform"}
    found = {name: _singles("hybrids-lesson", "gdn_attn_recipe-27M-0", [method]) for name, method in methods.items()}
    means = {"laLTE": statistics.fmean(_lesson("lalte_lesson")), **found}
    return ", ".join(f"{name} {mean:.1f}" for name, mean in means.items())


def _means(*tasks: str) -> str:
    """The mean over some tasks of each model by today's recipe."""
    found: dict[str, list[float]] = {}
    for row in _rows("hybrids-recipe-tasks"):
        if row["task"] in tasks:
            found.setdefault(row["model"].partition("_recipe")[0], []).append(row["score"])
    (number,) = {len(scores) for scores in found.values()}
    return f"{', '.join(f'{name} {statistics.fmean(found[name]):.1f}' for name in sorted(found))} on {number} sets"


def _attention(phase: str, **whats: str) -> str:
    """Times of kinds of attention over the fastest window's."""
    some = _some("hybrids-speed", phase=phase, batch=32 if phase == "decode" else 1)
    rows = {row["case"]["what"]: row["ms"] for row in some}
    window = min(ms for what, ms in rows.items() if what.startswith("swa"))
    return ", ".join(f"{words.replace('_', ' ')} {rows[what] / window:.2f}×" for words, what in whats.items())


def _whole_layers(phase: str, cell: Callable[[dict[str, Row]], str]) -> str:
    """Whole layers of the last run that had LTE's, by context; a cell is made of the rows by their kind."""
    runs = grouped(_some("hybrids-speed", phase=phase, size="1.4B", batch=32), lambda row: row["commit"]).values()
    found: dict[int, dict[str, Row]] = {}
    with_lte = [run for run in runs if any(row["case"]["what"] == "lte" for row in run)]
    for row in with_lte[-1] if with_lte else ():
        found.setdefault(row["case"]["context"], {})[row["case"]["what"]] = row
    return _joined(f"{tokens // _K}K {cell(found[tokens])}" for tokens in sorted(found))


def _layer_prompts() -> str:
    def cell(of: dict[str, Row]) -> str:
        lte, window = of["lte"], of["swa"]["ms"]
        scores = 100 * (1 - lte["without_scores_ms"] / lte["ms"])
        return f"{lte['ms'] / window:.2f}×, {scores:.0f} % scores, full attention {of['attn']['ms'] / window:.2f}×"

    return _whole_layers("layer prompt", cell)


def _layer_steps() -> str:
    def cell(of: dict[str, Row]) -> str:
        host, kernels = (of["lte"][name] / of["swa"][name] for name in ("ms", "kernels_ms"))
        return f"{host:.2f}×, kernels {kernels:.2f}×"

    return _whole_layers("layer decode", cell)


def _held_out(*models: str) -> str:
    """The mean of all seeds that were trained to the end, and each."""
    found: dict[str, dict[str, float]] = {}
    for row in _rows("hybrids-lesson-curves"):
        if row["held_out"]:
            found.setdefault(row["model"].rpartition("-27M-")[0], {})[row["model"]] = row["held_out"][-1]

    def of(name: str) -> str:
        seeds = [f"{found[name][seed]:.2f}" for seed in sorted(found[name])]
        each = f" ({', '.join(seeds)})" if len(seeds) > 1 else ""
        return f"{name.rpartition('_')[0]} {statistics.fmean(found[name].values()):.2f}{each}"

    return ", ".join(map(of, models))


def _silent() -> str:
    (row,) = _some("hybrids-curves", model="lalte-27M-0")
    heads = [share for layer in row["retention"]["share"] for share in layer]
    return f"{sum(share < 1e-3 for share in heads)} of {len(heads)} heads of laLTE retain less than 0.1 %"


_CODE = "luka_paper:mass=exact,bias=entropy"
_HEADS = ("min_k=16,pool=kv_head,pooling=post_softmax,decode_only=false", 'calibration="divergence.json"')
_SPARSE = "kascade:dense_anchor_prefill=false,"
OURS: dict[str, Callable[[], str]] = {
    "clustered over lined": _salad(_CODE, "h2o_as_published"),
    "clustered, text": _salad("luka_paper"),
    "clustered, code": _salad(_CODE),
    "default": _default,
    "mixed": _salad("mixed:clustered=luka_paper"),
    "step, LuKA": _step_parts,
    "compressors": lambda: _compressors("0.05"),
    "modes": _modes,
    "zeroed": _zeroed,
    "parity": _parity,
    "flash 1M": lambda: _cost(_indexer(1048576)),
    "flash 32K": lambda: _cost(_indexer(32768)),
    "materialised": lambda: _cost(_indexer(32768, impl="materialised")),
    "pro 1M": lambda: _cost(_indexer(1048576, 1024)),
    "layer": lambda: _layer(262144),
    "settings": _settings,
    "tiles": _tiles,
    "ablations": _ablations,
    "coverage": _coverage,
    "oracle": lambda: _loss("oracle_topk:top_k=0.025,min_k=16", "2wiki"),
    "neighbours": _neighbours,
    "importance": _importance,
    "mean queries": lambda: _loss("oracle_topk:min_k=16,pooling=pre_softmax,tile=256", "musique"),
    "mean attention": lambda: _loss("oracle_topk:min_k=16,tile=256", "musique"),
    "mapped": lambda: _loss(f"{_SPARSE}{','.join(_HEADS)}", "musique"),
    "unmapped": lambda: _loss(f"kascade:{','.join(_HEADS)},remap=false", "musique"),
    "shares": _math,
    "passes": _passes,
    "passes, prompt": _prompt_passes,
    "questions": lambda: _loss(f'{_SPARSE}{_HEADS[0][9:]},calibration="paper.json"', "hotpotqa", "2wiki"),
    "decode": _decode_speed,
    "prompts": _prompt_speed,
    "chains": _chains,
    "by tokens": _by_tokens,
    "common sense": lambda: _means("lambada", "choice"),
    "needles, published gradient": lambda: _needles("lalte", "gdn_swa", "lansa", "nsa", "transformer"),
    "needles, lesson": _recipe,
    "needles, plain": _plain,
    "needles, lesson, MLP": lambda: f"LTE-MLP {_of_seeds('lte_mlp_lesson')}",
    "needles, lesson, pure": lambda: f"pure LTE {_of_seeds('pure_lte_lesson')}",
    "needles, lesson, evicting": _recipe_evicting,
    "passages": lambda: _means("recall"),
    "prefill": lambda: _attention("prefill", LTE="lte", with_its_choice="lte, with selection"),
    "step": lambda: _attention("decode", half_full="lte, buffer half full", full="lte, buffer full"),
    "layers, prompt": _layer_prompts,
    "layers, step": _layer_steps,
    "silent": _silent,
    "losses": lambda: _held_out("gdn_recipe", "lansa_recipe", "lalte_lesson", "gdn_attn_recipe", "gdn_swa_recipe"),
}
"""What the rows have, by the name in `papers.json`."""


def lines() -> dict[str, list[Line]]:
    """The lines of each paper."""
    found = json.loads((Path(__file__).parent / "papers.json").read_text(encoding="utf-8"))
    return {paper: [Line(*line) for line in own] for paper, own in found.items()}


def table() -> str:
    """All lines, a paper after the other."""
    found = [("paper", "table or figure", "paper", "here", "rows", "command", "verdict")]
    for paper, own in lines().items():
        for line in own:
            ours = (OURS[line.ours]() if line.ours in OURS else line.ours) or "–"
            path = line.file if "/" in line.file else f"benchmarks/results/{line.file}.jsonl"
            name = line.file.rpartition("/")[2]
            rows = f"[`{name}`](../../{path})" if line.file else "–"
            command = f"`{line.command}`" if line.command else "–"
            found.append((paper, line.item, line.theirs or "–", ours, rows, command, line.verdict))
    return markdown_table(found).replace("|--:", "|---")
