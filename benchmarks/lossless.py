"""Lossless decoding of real text: how many drafts dense passes accept, and the time of a token beside dense decoding.

    python -m benchmarks.lossless --model models/smollm2-135m --out runs/lossless.jsonl --length 2048

Each task is one prompt of about --length tokens: a novel to be summarised, code to be explained, and entries of a JSON
object to be repeated. Answers are greedy and have --new tokens. For each method and length of draft a row has the
drafts accepted in a pass, the share of tokens that dense attention writes, too, the share of keys that passes read, and
milliseconds of a generated token, the prompt left out, over dense decoding's by foveate in the same run.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foveate.lab.results import measurements

ROOT = Path(__file__).resolve().parents[1]
METHODS = ["kascade", "kascade:top_k=0.2", "pages"]
DRAFTS = [2, 4, 8]
BASELINE = "dense"


def prompts() -> Mapping[str, Callable[[], tuple[str, str]]]:
    """For each task its text, longer than any prompt, and what is asked about it."""

    def book() -> tuple[str, str]:
        text = (ROOT / "examples" / "data" / "books" / "moby_dick.txt").read_text(encoding="utf-8")
        return text[20_000:], "Summarize the text above in detail."

    def code() -> tuple[str, str]:
        files = sorted((ROOT / "foveate" / "runtime").glob("*.py"))
        return "\n".join(path.read_text(encoding="utf-8") for path in files), "Explain what the classes above do."

    def entries() -> tuple[str, str]:
        draw = random.Random(0)
        pairs = (f'"{draw.getrandbits(32):08x}": "{draw.getrandbits(64):016x}"' for _ in range(8000))
        return "{\n" + ",\n".join(pairs), "Repeat the first ten entries above exactly."

    return {"book": book, "code": code, "json": entries}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a folder of Hugging Face")
    parser.add_argument("--method", action="append", help=f"by default {', '.join(METHODS)}")
    parser.add_argument("--draft", action="append", type=int, help=f"tokens of a draft, by default {DRAFTS}")
    parser.add_argument("--task", action="append", choices=prompts(), help="by default all")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt, about")
    parser.add_argument("--new", type=int, default=96, help="tokens of an answer")
    given = parser.parse_args(arguments)
    measurements.check_out(given.out, "lossless")
    model, tokenizer = _loaded(given.model)
    for task in given.task or prompts():
        ids = _prompt(tokenizer, *prompts()[task](), given.length).to(model.device)
        dense, baseline = _answer(model, ids, given.new, "dense", False)
        for method, length in itertools.product(given.method or METHODS, given.draft or DRAFTS):
            tokens, found = _answer(model, ids, given.new, method, length)
            case = {"model": given.model.name, "task": task, "tokens": ids.shape[1], "new": given.new}
            case |= {"method": method, "draft": length}
            same = sum(a == b for a, b in zip(tokens, dense)) / len(dense)
            row = _row(case, model.device.type, found, baseline["ms"], same)
            measurements.write(given.out, [row])
            print(json.dumps({key: row[key] for key in ("case", "accepted", "equal", "ms", "baseline_ms")}), flush=True)


def _row(case: dict[str, Any], device: str, found: dict[str, Any], own_ms: float, same: float) -> dict[str, Any]:
    more = {name: found[name] for name in ("accepted", "ties", "keys_read_share", "peak_bytes")}
    return measurements.speed_row("lossless", case, device, found["ms"], (BASELINE, own_ms), equal=same, **more)


def _loaded(folder: Path) -> tuple[Any, Any]:
    import torch
    import transformers

    cuda = torch.cuda.is_available()
    how = {"dtype": torch.bfloat16 if cuda else torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    return model.to("cuda" if cuda else "cpu"), transformers.AutoTokenizer.from_pretrained(folder)


def _prompt(tokenizer: Any, text: str, question: str, length: int) -> Any:
    """Token ids ``[1, n]`` of a chat that asks about the first ``length`` tokens of a text."""
    import torch

    cut = tokenizer.decode(tokenizer(text[: 12 * length]).input_ids[:length])
    asked = [{"role": "user", "content": f"{cut}\n\n{question}"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    return torch.tensor([ids])


def _answer(model: Any, ids: Any, new: int, method: str, lossless: bool | int) -> tuple[list[int], dict[str, Any]]:
    """The tokens of an answer, and what was counted and timed; the prompt's time is that of an answer of one token."""
    import torch

    import foveate

    cuda = model.device.type == "cuda"

    def run(number: int) -> tuple[list[int], float]:
        start = time.perf_counter()
        how = {"max_new_tokens": number, "min_new_tokens": number, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        if cuda:
            torch.cuda.synchronize()
        return out[0, ids.shape[1] :].tolist(), 1000 * (time.perf_counter() - start)

    with foveate.attached(model, method, dense_below=0, lossless=lossless):
        run(8)
        prompt = min(run(1)[1] for _ in range(2))
        foveate.stats(model, reset=True)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        tokens, ms = run(new)
        stats = foveate.stats(model)
    drafts = stats.drafts
    return tokens, {
        "ms": (ms - prompt) / (new - 1),
        "accepted": drafts and drafts.per_cycle,
        "ties": drafts and drafts.ties,
        "keys_read_share": stats.keys_read_share,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


if __name__ == "__main__":
    main()
