"""What sparse prompts lose, and what mends it: variants of Kascade on development items, beside dense attention.

    python benchmarks/sparse_prompts.py --model MODEL --data DATA --calibrations FOLDER --out runs/sparse-prompts.jsonl

MODEL is a Hugging Face folder, DATA a folder with `ruler/` and `books/` (docs/data.md), FOLDER has the file that --base
names. The tasks are RULER's needles at a length and with a seed that no other file reports, so that settings may be
chosen by them. The model is loaded once; every method reads every prompt itself, and decodes sparsely unless it is
dense. A line of OUT is a method on a task: its score, dense attention's on the same items, the difference with its 95 %
interval, the time of the prompts. The methods that tell most come first, and the first two tasks before the others. The
same command goes on where it was stopped, by `--seconds` or otherwise.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import foveate
from foveate.evaluation import generation, runner, tasks
from foveate.evaluation.metrics import columns, paired_bootstrap
from foveate.evaluation.tasks.base import Item, Task
from foveate.inputs import loading
from foveate.results import circumstances
from foveate.results.errors import UserError

TASKS = {
    "multikey_2": "ruler:split=niah_multikey_2,max_new_tokens=16",
    "multikey_3": "ruler:split=niah_multikey_3,max_new_tokens=48",
    "single_3": "ruler:split=niah_single_3,max_new_tokens=48",
    "multikey_1": "ruler:split=niah_multikey_1,max_new_tokens=16",
}
BASE = 'kascade:calibration="divergence.json",pool=layer'
VARIANTS: tuple[dict[str, Any], ...] = (
    {"decode_only": True},
    {"exact_anchors": False},
    {},
    {"pool": "kv_head"},
    {"oracle": True, "pool": "kv_head"},
    {"min_k": 1024},
    {"pool": "kv_head", "min_k": 1024},
    {"oracle": True},
    {"oracle": True, "tile": 1},
    {"rest": "mean"},
    {"tile": 1},
    {"pooling": "sqrt"},
    {"top_k": 0.2},
    {"oracle": True, "tile": 32},
    {"oracle": True, "rest": "mean"},
    {"exact_anchors": False, "rest": "mean"},
    {"tile": 32},
)
"""Settings that are changed in the base; `oracle`: the same keys chosen anew in every layer."""
_OF_ANCHORS = ("calibration", "anchors", "heads", "exact_anchors", "score_keys", "first_layer")


def variant(base: str, changed: dict[str, Any]) -> str:
    """The spec of a base with some settings changed."""
    if not changed.get("oracle"):
        return foveate.methods.make(base, **changed).spec
    kept = {name: value for name, value in foveate.methods.make(base).settings().items() if name not in _OF_ANCHORS}
    changed = {name: value for name, value in changed.items() if name != "oracle"}
    return foveate.methods.make("oracle_topk", **kept | changed).spec


def measured(model: Any, tokenizer: Any, task: Task, items: Sequence[Item], spec: str, batch: int) -> dict[str, Any]:
    """Graded values of each item under a method, and the times of prompts and steps."""
    values, times = [], []
    for group in generation.batches(items, batch):
        with foveate.attached(model, spec, dense_below=0):
            outputs = generation.run_batch(model, tokenizer, group)
        values += [task.grade(item, output) for item, output in zip(group, outputs.outputs)]
        times.append((outputs.prefill_ms, outputs.decode_ms_per_token))
    prefill, steps = zip(*times)
    shown = columns(values)
    return {
        "item_values": {name: column.tolist() for name, column in shown.items()},
        "prefill_ms_per_item": sum(prefill) / len(items),
        "decode_ms_per_token": float(np.mean([step for step in steps if step is not None] or [float("nan")])),
    }


def study(given: argparse.Namespace, specs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each method on each task, dense attention first; those that OUT has are not measured again."""
    begun = time.perf_counter()
    device = loading.choose_device(given.device)
    dtype = loading.choose_dtype(given.dtype, given.model, device)
    tokenizer = loading.load_tokenizer(given.model)
    about = {"model": given.model.name, "limit": given.limit, "seed": given.seed, "dtype": dtype}
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    made = {row["task"] + row["spec"]: row for row in rows if about.items() <= row.items()}
    made = {key: row for key, row in made.items() if row["task_settings"].get("length") == given.length}
    model = loading.load_model(given.model, dtype, device)
    for names in (given.tasks[:2], given.tasks[2:]):
        chosen = {name: tasks.parse(TASKS[name], length=given.length) for name in names}
        items = {name: task.items(given.data, tokenizer, given.limit, given.seed) for name, task in chosen.items()}
        for spec in ("dense", *specs):
            for name, task in chosen.items():
                if name + spec in made:
                    continue
                if time.perf_counter() - begun > given.seconds:
                    return
                row = {"kind": "sparse-prompts", "task": name, "task_settings": task.settings(), "spec": spec}
                row |= about | {"n": len(items[name])}
                shown = measured(model, tokenizer, task, items[name], spec, given.batch_size)
                values = {key: np.array(column) for key, column in shown["item_values"].items()}
                dense = made.get(name + "dense", shown)
                theirs = {key: np.array(column) for key, column in dense["item_values"].items()}
                aggregate = task.metrics[task.main]
                difference = paired_bootstrap(aggregate, values, theirs, given.seed)
                row |= {
                    "score": float(aggregate(values)),
                    "dense_score": float(aggregate(theirs)),
                    "diff_to_dense": difference.value,
                    "diff_low": difference.low,
                    "diff_high": difference.high,
                    **shown,
                    "batch_size": given.batch_size,
                    **circumstances.of(device),
                }
                made[name + spec] = row
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                yield row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--calibrations", type=Path, help="folder of the file that --base names")
    parser.add_argument("--base", default=BASE, help="the method that the variants change")
    parser.add_argument("--variants", type=json.loads, nargs="+", default=list(VARIANTS), help="as JSON objects")
    parser.add_argument("--methods", nargs="+", default=[], help="specs of other methods, measured first")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--length", type=int, default=6144, help="tokens of a prompt")
    parser.add_argument("--limit", type=int, default=48, help="items of each task")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=270.0, help="after which nothing new is begun")
    parser.add_argument("--dtype", choices=loading.DTYPES, default="auto")
    parser.add_argument("--device", choices=loading.DEVICES, default="auto")
    given = parser.parse_args(arguments)
    for name in ("model", "data", "out"):
        setattr(given, name, getattr(given, name).resolve())
    given.out.parent.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(given.calibrations or before)  # so that specs in rows name the file alone, and not a path of this machine
    try:
        specs = [*given.methods, *(variant(given.base, changed) for changed in given.variants)]
        methods, _ = runner.parse_methods(specs)
        for row in study(given, [method.spec for method in methods if method.name != "dense"]):
            print(
                f"{row['task']:10} {row['score']:6.1f} {row['diff_to_dense']:+6.1f} [{row['diff_low']:+6.1f}, "
                f"{row['diff_high']:+6.1f}] {row['prefill_ms_per_item']:7.0f} ms  {row['spec']}",
                flush=True,
            )
    finally:
        os.chdir(before)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
