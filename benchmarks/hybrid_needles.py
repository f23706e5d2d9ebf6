"""Whether the scores of a hybrid with LTE layers keep a needle, and whether the model then answers.

    python -m benchmarks.hybrid_needles MODEL DATA OUT_FILE

MODEL: a folder of `foveate train` with LTE layers; DATA: a folder with ruler/ and books/ (docs/guide/data.md). Writes a
row for numbers in noise and in novels, each in prompts of 384, 768 and 1,536 tokens, and for the wordings of
`hybrid_wordings.py`: how many are answered, and in how many prompts a KV head of an LTE layer retains every token of
the number (score above 0.5). Of wordings it also says how many are answered when all tokens are retained, so that no
answer is lost to the scores. An hour of a CPU core.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.hybrid_wordings import FAR, LENGTH, WORDINGS, Reworded
from foveate.errors import UserError
from foveate.hybrids.layers.lte import THRESHOLD, LearnedEviction
from foveate.hybrids.models import HybridConfig, HybridForCausalLM
from foveate.io import circumstances, outfile
from foveate.lab.evaluation import tasks

SPLITS = ("niah_single_1", "niah_single_2")
LENGTHS = (384, 768, 1536)
NEW = 12


def all_kept(path: Path) -> HybridForCausalLM:
    """A model of `foveate train` whose LTE layers retain every token of a prompt of up to `LENGTH` tokens."""
    model = HybridForCausalLM.from_pretrained(path, lte_buffer=LENGTH)
    for layer in model.model.layers:
        if isinstance(layer.mixer, LearnedEviction):
            layer.mixer._margins = functools.partial(_highest, layer.mixer._margins)
    return model


def _highest(margins: Callable[..., Tensor], *given: Any) -> Tensor:
    return torch.full_like(margins(*given), torch.inf)


def answers(model: HybridForCausalLM, tokenizer: PreTrainedTokenizerBase, item: Any) -> bool:
    """Whether a model answers an item."""
    ids = torch.tensor([item.prompt_ids], device=model.device)
    said = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
    return item.answers[0] in tokenizer.decode(said)


def measure(model: HybridForCausalLM, tokenizer: PreTrainedTokenizerBase, items: Sequence[Any]) -> dict[str, Any]:
    """Of some needles: shares, in percent, of prompts that are answered and whose needle a head retains; and of heads
    that retain it; and of all tokens that heads retain."""
    answered, kept, heads, tokens = [], [], [], []
    for item in items:
        ids = torch.tensor([item.prompt_ids], device=model.device)
        with torch.no_grad():
            scores = model(ids, use_cache=False, output_retention=True).retention
        retained = torch.cat(tuple(scores)).flatten(0, 1) > THRESHOLD  # [layers * Hkv, n]
        whole = retained[:, place(item, tokenizer)].all(-1).float()
        answered.append(answers(model, tokenizer, item))
        kept.append(bool(whole.any()))
        heads.append(whole.mean().item())
        tokens.append(retained.float().mean().item())
    names = ("answered", "kept", "heads", "tokens")
    return {name: 100 * statistics.fmean(some) for name, some in zip(names, (answered, kept, heads, tokens))}


def place(item: Any, tokenizer: PreTrainedTokenizerBase) -> slice:
    """The tokens of the answer in the prompt."""
    ids = list(item.prompt_ids)
    for begin in (" ", ""):
        answer = tokenizer(begin + item.answers[0], add_special_tokens=False)["input_ids"]
        for at in range(len(ids) - len(answer) + 1):
            if ids[at : at + len(answer)] == answer:
                return slice(at, at + len(answer))
    raise UserError(f"{item.id}: its answer, {item.answers[0]}, is not in its prompt")


def cases() -> Iterator[tuple[dict[str, Any], tasks.Task]]:
    """What is asked: lengths in noise and in novels, then wordings in novels."""
    for split in SPLITS:
        for length in LENGTHS:
            yield {"split": split, "length": length}, tasks.parse(f"ruler:split={split},length={length}")
    for wording in WORDINGS:
        of = {"split": SPLITS[-1], "length": LENGTH}
        yield of | {"wording": wording}, Reworded(**of, wording=wording, beyond=FAR)


def main(model: Path, data: Path, out: Path, limit: int = 60, device: str = "cpu", wordings: bool = False) -> None:
    """Measure one model; with ``wordings`` in wordings alone. Rows of other models and cases stay in OUT_FILE."""
    config = HybridConfig.from_pretrained(model)
    if "lte" not in config.mixers:
        raise UserError(f"{model}: no layer of it has LTE scores ({', '.join(dict.fromkeys(config.mixers))})")
    outfile.check(out)
    network, keeping = (made(model).to(device).eval() for made in (HybridForCausalLM.from_pretrained, all_kept))
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = list(map(json.loads, out.read_text(encoding="utf-8").splitlines())) if out.exists() else []
    for case, task in cases():
        if wordings and "wording" not in case:
            continue
        items = task.items(data, tokenizer, limit, 0)
        case = case | {"n": len(items)}
        facts = {"kind": "hybrid-needles", "model": model.name, "case": case, **measure(network, tokenizer, items)}
        if "wording" in case:
            facts["answered_all_kept"] = 100 * statistics.fmean(answers(keeping, tokenizer, one) for one in items)
        rows = [row for row in rows if (row["model"], row["case"]) != (model.name, case)]
        rows.append(facts | circumstances.of(device))
        outfile.write(out, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        print(f"{case}: {facts['answered']:.1f} % answered, {facts['kept']:.1f} % kept", flush=True)


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
