"""How trained hybrids learned and what they retain: figures 5 and 6 of the laLTE/laNSA paper.

    python benchmarks/hybrid_curves.py --out OUT --text TEXT --write benchmarks/results/hybrids-curves.jsonl
    python -m benchmarks.hybrid_plots benchmarks/results/hybrids-curves.jsonl docs/figures

OUT is the folder of `hybrid_tasks.py`, TEXT its text. A row for each run has the losses of its log, mean over every
hundred steps, those on held-out text, and the answers near and far; and, of a run with a sparsity budget, how many
tokens of a row the heads retained in its first steps, with the largest λ, and how many heads were silent or saturated.
Of models with LTE layers that are in OUT it has the share of tokens that each KV head retains (score above 0.5) among
those that the window has left, mean over 16 held-out sequences (appendix B).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foveate.errors import UserError
from foveate.hybrids.layers.lte import THRESHOLD
from foveate.hybrids.models import HybridConfig, HybridForCausalLM
from foveate.hybrids.training import journal
from foveate.hybrids.training.mixture import held_out_batches
from foveate.hybrids.training.tokens import TokenStore
from foveate.io import outfile

EVERY = 100
"""Steps whose mean loss is a point of the curve."""
HEADS = ("retained_mean", "retained_max", "heads_silent", "heads_saturated", "lambda_max", "retained")
"""What a log has about the heads of LTE layers."""
BEGINNING = 400
"""Steps of which a row tells how many tokens were retained."""


def curve(run: Path) -> dict[str, Any]:
    """Tokens and mean loss of every hundred steps, the held-out losses with their tokens, and what heads retained."""
    rows = journal.read(run)
    read = [row for row in rows if "loss" in row]
    if not read:
        raise UserError(f"--out: {run} has no log of a training run")
    by_point: dict[int, list[Mapping[str, Any]]] = {}
    for row in read:
        by_point.setdefault(-(-row["step"] // EVERY), []).append(row)
    tokens = {row["step"]: row["tokens"] for row in read}
    held_out = [row for row in rows if "held_out" in row and row["step"] in tokens]
    return {
        "tokens": [some[-1]["tokens"] for some in by_point.values()],
        "loss": [statistics.fmean(row["loss"] for row in some) for some in by_point.values()],
        "held_out_tokens": [tokens[row["step"]] for row in held_out],
        "held_out": [row["held_out"] for row in held_out],
        "retained_at_first": [
            {name: row[name] for name in ("step", "retained_mean", "lambda_max")}
            for row in read
            if row["step"] <= BEGINNING and "retained_mean" in row
        ],
        "answers": [{"step": row["step"], **row["answers"]} for row in rows if "answers" in row],
        "heads": [
            {name: some[-1][name] for name in ("step", *HEADS)}
            for some in by_point.values()
            if "heads_silent" in some[-1]
        ],
        "tokens_per_s": statistics.median([row["tokens_per_s"] for row in read][1:] or [read[0]["tokens_per_s"]]),
    }


@torch.no_grad()
def retention(model: HybridForCausalLM, store: TokenStore, length: int, sequences: int) -> list[list[float]]:
    """Share of the tokens older than the window that a KV head retains: a list for each LTE layer."""
    place = next(model.parameters()).device
    found = []
    for batch in held_out_batches(store, length, 4, sequences * length):
        scores = model(input_ids=batch["input_ids"].to(place), use_cache=False, output_retention=True).retention
        left = torch.stack(tuple(scores))[..., : length - model.config.lte_window - 1]
        found.append((left > THRESHOLD).float().mean(-1))  # [layers, B, Hkv]
    return torch.cat(found, 1).mean(1).tolist()


def row(out: Path, name: str, store: TokenStore, given: argparse.Namespace) -> dict[str, Any]:
    """What one model has to show."""
    run = out / "runs" / name
    header = json.loads((run / journal.LOG).read_text(encoding="utf-8").partition("\n")[0])
    folder, kept = out / "models" / name, None
    if folder.is_dir() and "lte" in (config := HybridConfig.from_pretrained(folder)).mixers:
        model = HybridForCausalLM.from_pretrained(folder).to(given.device)
        kept = {
            "length": given.length,
            "sequences": given.sequences,
            "window": config.lte_window,
            "layers": [index for index, mixer in enumerate(config.mixers) if mixer == "lte"],
            "share": retention(model, store, given.length, given.sequences),
        }
    facts = {name: header[name] for name in ("parameters", "device", "versions", "commit")}
    return {"kind": "hybrid-curves", "model": name, **curve(run), "retention": kept, **facts}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    names = sorted(path.parent.name for path in (given.out / "runs").glob(f"*/{journal.LOG}"))
    if not names:
        raise UserError(f"--out {given.out}: no run of a training in it")
    store = TokenStore(given.text)
    rows = [row(given.out, name, store, given) for name in names]
    outfile.write(given.write, "".join(f"{json.dumps(one)}\n" for one in rows).encode())


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
