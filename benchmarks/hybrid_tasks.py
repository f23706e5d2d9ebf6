"""Hybrids trained on the same tokens, then compared: `python benchmarks/hybrid_tasks.py --help`.

    python benchmarks/hybrid_tasks.py --text TEXT --data DATA --out OUT

TEXT is a folder of tokenised text (`foveate train prepare`, as `hybrids/27m.toml` says), DATA a data folder
(docs/guide/data.md) with novels, SQuAD, DROP, NaturalQuestions and the multiple-choice sets. All presets of a seed are
trained by `hybrids/27m.toml` on the same rows in the same order; all models answer the same items. OUT gets `runs/NAME`
with the log, `models/NAME` and `rows/NAME/`, a file for each comparison; NAME is preset-size-seed. `--gather FILE`
joins the rows. What `--set` changes is told apart by `--label WORD`: NAME is then preset_WORD-size-seed.

One command trains and answers; `--do train` and `--do answer` are its halves, so that a model can answer while the next
one trains. Both go on where they were stopped.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from foveate.errors import UserError
from foveate.hybrids.models import PRESETS, make_config
from foveate.lab.evaluation import runner, tasks

CONFIG = Path(__file__).parent / "hybrids" / "27m.toml"
LENGTHS = (1024, 2048, 4032)
"""Tokens of a prompt with a needle; the longest and its answer fit into the 4,096 tokens of the longest rows."""
FAR = 400
"""Least tokens from a needle to the end of its prompt in the columns beyond the window: more than any window of 27M."""
RATIOS = (384, 768, 1536)
"""Tokens of a prompt that are as many times the window as the paper's 1K, 2K and 4K are of its 1,024."""
SIZES = ("27M", "60M")
CHOICES = ("piqa", "siqa", "boolq", "arc_easy", "arc_challenge", "hellaswag", "winogrande")
RETRIEVAL = ("ruler", "mqar", "recall", "perplexity")
"""Tasks with prompts longer than what the baselines keep."""


def beyond(limit: int) -> list[tuple[str, int]]:
    """Tasks whose answers are further away than any window reaches, and the number of their items."""
    splits = (("niah_single_1", 16), ("niah_single_2", 16), ("niah_single_3", 64), ("niah_multikey_1", 16))
    asked = [(split, tokens, length) for split, tokens in splits for length in LENGTHS]
    found = [
        (f"ruler:split={split},length={length},max_new_tokens={tokens},beyond={FAR}", limit)
        for split, tokens, length in asked
    ]
    return [*found, *((f"mqar:length=2048,pairs={pairs}", max(1, limit // 4)) for pairs in (16, 64, 256))]


def questions(limit: int) -> list[tuple[str, int]]:
    """All tasks and the number of their items."""
    found = beyond(limit)
    for length in (*RATIOS, *LENGTHS):
        for split, tokens in (("niah_single_1", 16), ("niah_single_2", 16), ("niah_single_3", 64)):
            found.append((f"ruler:split={split},length={length},max_new_tokens={tokens}", limit))
    for length in LENGTHS[1:]:
        found.append((f"ruler:split=niah_multikey_1,length={length},max_new_tokens=16", limit))
    found += [(f"recall:split={split},max_length=2048", limit) for split in ("squad", "drop", "nq")]
    found.append(("lambada", 2 * limit))
    found += [(f"choice:split={split}", 2 * limit) for split in CHOICES]
    for split in ("", "split=wikitext,"):
        found.append((f"perplexity:{split}length=3072,continuation=512", max(1, limit // 4)))
    return found


def methods(preset: str, size: str) -> list[str]:
    """A model as it is; full attention also under the baselines that keep as many tokens as the others hold."""
    if preset != "gdn_attn":
        return ["own"]
    held = make_config("lalte", size)
    slots = held.lte_window + held.lte_buffer
    return [
        "dense",
        f"tova:top_k={slots},pool=kv_head",
        f"uniform:top_k={held.lte_buffer},window={held.lte_window}",
    ]


def _name(preset: str, size: str, seed: int, label: str | None) -> str:
    return f"{preset}_{label}-{size}-{seed}" if label else f"{preset}-{size}-{seed}"


def train(preset: str, size: str, seed: int, given: argparse.Namespace) -> None:
    """Trains one model and moves it to `models/`."""
    name = _name(preset, size, seed, given.label)
    run, final = given.out / "runs" / name, given.out / "models" / name
    if final.is_dir():
        return
    changes = [f"model.preset={preset}", f"model.size={size}", f"seed={seed}", f"data.folder={given.text}"]
    if "lte" not in PRESETS[preset]["mixers"]:
        changes += ["sparsity.hold=0", "sparsity.release=0", "sparsity.recall=none", "sparsity.budget=none"]
    changes += given.set
    command = ["-m", "foveate", "train", "--config", str(CONFIG), "--out", str(run), "--resume"]
    subprocess.run([sys.executable, *command, *(part for one in changes for part in ("--set", one))], check=True)
    final.parent.mkdir(parents=True, exist_ok=True)
    os.replace(run / "model", final)


def answer(preset: str, size: str, seed: int, given: argparse.Namespace) -> None:
    """Answers what is missing of one model's rows."""
    name = _name(preset, size, seed, given.label)
    folder = given.out / "rows" / name
    folder.mkdir(parents=True, exist_ok=True)
    chosen, _ = runner.parse_methods(methods(preset, size))
    for spec, limit in (beyond if given.beyond else questions)(given.limit):
        task = tasks.parse(spec)
        asked = chosen if task.name in RETRIEVAL else chosen[:1]
        out = folder / f"{spec.replace(':', '-').replace('=', '-').replace(',', '-')}.jsonl"
        plan = runner.Comparison(
            given.out / "models" / name, task, given.data, asked, limit, out, batch_size=given.batch_size
        )
        for row in runner.run(runner.prepare(plan)):
            print(f"{name:16} {row['score']:6.1f}  {row['spec']:8.8} {spec}", flush=True)


def gather(out: Path, file: Path) -> None:
    """Joins the rows of all models."""
    rows = sorted((out / "rows").glob("*/*.jsonl"))
    if not rows:
        raise UserError(f"--gather {file}: {out / 'rows'} has no rows")
    file.write_text("".join(path.read_text(encoding="utf-8") for path in rows), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="folder of tokenised text")
    parser.add_argument("--data", type=Path, help="folder of the tasks' data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--size", choices=SIZES, default="27M")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--limit", type=int, default=200, help="items of a split of needles")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--set", nargs="+", default=[], help="NAME=VALUE over the configuration")
    parser.add_argument("--label", help="a word in the models' names, for what --set changes")
    parser.add_argument("--beyond", action="store_true", help="ask only what is beyond every window")
    parser.add_argument("--do", choices=("train", "answer", "both"), default="both")
    parser.add_argument("--gather", type=Path, help="file for the rows of all models")
    given = parser.parse_args(arguments)
    for name in ("text", "data"):
        if getattr(given, name) is None and given.do in ("both", {"text": "train", "data": "answer"}[name]):
            parser.error(f"--{name} is needed")
    for seed in given.seeds:
        for preset in given.presets:
            if given.do != "answer":
                train(preset, given.size, seed, given)
            if given.do != "train":
                answer(preset, given.size, seed, given)
    if given.gather:
        gather(given.out, given.gather)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
