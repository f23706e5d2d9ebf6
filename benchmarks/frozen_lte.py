"""Learned eviction on a frozen model: train it, then compare it with other methods at the same memory.

    python benchmarks/frozen_lte.py --model Qwen2.5-Coder-0.5B-Instruct --text TEXT --data DATA --out OUT

TEXT is plain text to learn on (`foveate train lte`), DATA a data folder (docs/data.md) with novels, which TEXT should
not contain, and multi-hop questions. OUT gets `lte.safetensors`, its log, and a file of rows for each task and place of
the question; the same command goes on where it was stopped. `--gather FILE` joins the rows. The defaults are sized for
15 minutes of one H100.

Every method keeps the same number of tokens of a KV head, its window included, at 3, 5, 10 and 25 % of the context;
with allocation=layer and global these are the mean over KV heads.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from foveate.evaluation import runner, tasks
from foveate.results.errors import UserError
from foveate.training.frozen_lte import Plan, train

TASKS = {
    "uuid": "ruler:split=niah_single_3,max_new_tokens=48",
    "multikey": "ruler:split=niah_multikey_1,max_new_tokens=24",
    "hotpotqa": "hotpotqa",
    "musique": "musique",
}
FILE = "lte.safetensors"
WINDOW, SINKS = 32, 4
ALLOCATIONS = ("uniform", "layer", "global")
PLACES = ("after", "with")


def methods(file: Path, length: int, share: float, allocations: list[str]) -> list[str]:
    """Specs of methods that keep `share` of a context of `length` tokens."""
    kept = max(round(share * length), WINDOW + SINKS + 8)
    learned = f"lte:file={json.dumps(str(file))},top_k={kept},window={WINDOW},sinks={SINKS}"
    return [
        *(f"{learned},allocation={allocation}" for allocation in allocations),
        f"lte:score=key_norm,top_k={kept},window={WINDOW},sinks={SINKS}",
        f"snapkv:top_k={kept - WINDOW},window={WINDOW}",
        f"tova:top_k={kept},min_k=1",
        f"h2o:top_k={kept - kept // 2},window={kept // 2}",
        f"streaming:sinks={SINKS},window={kept - SINKS}",
    ]


def compare(given: argparse.Namespace, file: Path) -> None:
    """Rows of all methods for each task and place of the question. Paths are those of the working directory."""
    specs = [methods(file, given.length, share, given.allocations) for share in given.shares]
    chosen, _ = runner.parse_methods([spec for some in specs for spec in some])
    for place in given.questions:
        for name in given.tasks:
            task = tasks.parse(TASKS[name], length=given.length, question=place)
            how = {"limit": given.limit, "out": Path(_rows(name, place)), "batch_size": given.batch_size}
            for row in runner.run(runner.prepare(runner.Comparison(given.model, task, given.data, chosen, **how))):
                print(
                    f"{place:5} {name:9} {row['score']:6.1f} {row['keys_read_share']:6.1%}  {row['spec']}", flush=True
                )


def gather(out: Path, file: Path) -> None:
    """Joins the rows of all tasks and places that `out` has."""
    found = [out / _rows(name, place) for place in PLACES for name in TASKS]
    texts = [path.read_text(encoding="utf-8") for path in found if path.exists()]
    if not texts:
        raise UserError(f"--gather {file}: {out} has no rows")
    file.write_text("".join(texts), encoding="utf-8")


def _rows(task: str, place: str) -> str:
    return f"{task}-{place}.jsonl"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence and of a prompt")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, at most")
    parser.add_argument("--limit", type=int, default=32, help="items of each task")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.03, 0.05, 0.1, 0.25])
    parser.add_argument("--allocations", nargs="+", choices=ALLOCATIONS, default=["uniform", "global"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--questions", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--gather", type=Path, help="file for the rows of all tasks and places")
    given = parser.parse_args(arguments)
    for name in ("model", "text", "data", "out"):
        setattr(given, name, getattr(given, name).resolve())
    if not (given.out / FILE).exists():
        plan = Plan(given.model, given.text, given.out / FILE, given.steps, given.minutes, given.length, WINDOW)
        outcome = train(plan, lambda text: print(text, flush=True), _say)
        if not outcome.finished:
            raise SystemExit(130)
        print(f"trained: held-out loss {outcome.loss:.4f}, recall {outcome.recall:.1%}", flush=True)
    before = Path.cwd()
    os.chdir(given.out)  # so that specs in rows name the file alone, and not a path of this machine
    try:
        compare(given, Path(FILE))
    finally:
        os.chdir(before)
    if given.gather:
        gather(given.out, given.gather)


def _say(step: int, steps: int, row: dict[str, float]) -> None:
    if row and row["step"] == step:
        print(f"step {step} of {steps}: loss {row['loss']:.4f}, recall {row['recall']:.1%}, {row['seconds']:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
