"""Lossless decoding: how many drafts dense passes accept, and the time of a token beside dense decoding.

    python -m benchmarks.lossless --model models/smollm2-135m --out runs/lossless.jsonl --case 2048x1
    python -m benchmarks.lossless --shape 8b --accept 0.91 --out runs/lossless.jsonl --case 32768x8

A case is a prompt's number of tokens and the rows of a batch. The prompts of a task are parts of a novel to be
summarised, code to be explained, or entries of a JSON object to be repeated. Answers are greedy and have --new tokens.
For each method and length of draft a row of the file has the drafts accepted in a pass, the part of an answer that
equals the dense answer up to their first difference, the share of keys that passes read, and milliseconds of a token
over the milliseconds of dense decoding by foveate in the same run. Passes before the graphs are captured do not count.

--shape: random weights of that shape, for times; its drafts are accepted with the probability --accept instead of by
what they are worth.
"""

import argparse
import collections
import contextlib
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from foveate.errors import UserError
from foveate.lab.results import measurements

ROOT = Path(__file__).resolve().parents[1]
METHODS = ["kascade", "kascade:top_k=0.05", "pages"]
DRAFTS = ["auto", "4"]
BASELINE = "dense"
SHAPES = {
    "1.5b": (28, 1536, 12, 2, 8960, 151_936),
    "8b": (32, 4096, 32, 8, 14_336, 128_256),
}
"""Layers, width, query and KV heads (of 128 dimensions), width of the MLPs, and tokens of the vocabulary."""
_FULLNESS = 0.97
"""The least share of a case's tokens that its longest prompt has."""
_ASKING = 100
"""Tokens that a chat's template and question may take, or leave free."""
BEFORE = 8
"""Cycles, or steps of dense decoding, that are left out of the times."""


def prompts() -> Mapping[str, Callable[[int], tuple[str, str]]]:
    """For each task the text of a row, and what is asked about it."""

    def book(row: int) -> tuple[str, str]:
        text = (ROOT / "examples" / "data" / "books" / "moby_dick.txt").read_text(encoding="utf-8")
        return _turned(text, 20_000 + 70_000 * row), "Summarize the text above in detail."

    def code(row: int) -> tuple[str, str]:
        files = sorted((ROOT / "foveate").rglob("*.py"))
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
        return _turned(text, 150_000 * row), "Explain what the classes above do."

    def entries(row: int) -> tuple[str, str]:
        draw = random.Random(row)
        pairs = (f'"{draw.getrandbits(32):08x}": "{draw.getrandbits(64):016x}"' for _ in range(8000))
        return "{\n" + ",\n".join(pairs), "Repeat the first ten entries above exactly."

    return {"book": book, "code": code, "json": entries}


def _turned(text: str, first: int) -> str:
    return text[first % len(text) :] + text[: first % len(text)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, help="a folder of Hugging Face")
    what.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--accept", type=float, default=0.9, help="of --shape: the share of drafts that are accepted")
    parser.add_argument("--yarn", type=float, help="factor of the rotary positions, for prompts beyond the model's")
    parser.add_argument("--case", action="append", type=_case, required=True, help="tokens of a prompt x rows")
    parser.add_argument("--method", action="append", help=f"by default {', '.join(METHODS)}")
    parser.add_argument(
        "--draft", action="append", help=f"tokens of a draft, or auto; by default {' and '.join(DRAFTS)}"
    )
    parser.add_argument("--task", action="append", choices=prompts(), help="of --model; by default all")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    given = parser.parse_args(arguments)
    measurements.check_out(given.out, "lossless")
    model, tokenizer = _shaped(given.shape) if given.shape else _loaded(given.model, given.yarn)
    tasks = ["random"] if given.shape else given.task or list(prompts())
    for (tokens, rows), task in itertools.product(given.case, tasks):
        ids = _batch(tokenizer, task, tokens, rows, model)
        dense, baseline = _answer(model, ids, given.new, "dense", False)
        for method, draft in itertools.product(given.method or METHODS, given.draft or DRAFTS):
            with _accepting(given.accept) if given.shape else contextlib.nullcontext():
                answers, found = _answer(model, ids, given.new, method, draft == "auto" or int(draft))
            case = {"model": given.shape or given.model.name, "task": task, "tokens": tokens, "rows": rows}
            case |= {"new": given.new, "method": method, "draft": draft}
            case |= {"accept": given.accept} if given.shape else {}
            case |= {"yarn": given.yarn} if given.yarn else {}
            equal = None if given.shape else alike(answers, dense)
            row = _row(case, model.device.type, found, baseline["ms"], equal)
            measurements.write(given.out, [row])
            shown = ("case", "accepted", "equal", "ms", "baseline_ms", "speedup")
            print(json.dumps({key: row[key] for key in shown}), flush=True)


def _case(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is not TOKENSxROWS, such as 32768x8")
    tokens, rows = text.split("x")
    return int(tokens), int(rows)


def _row(
    case: dict[str, Any], device: str, found: dict[str, Any], own_ms: float, equal: float | None
) -> dict[str, Any]:
    more = {name: found[name] for name in ("accepted", "drafted", "ties", "keys_read_share", "peak_bytes")}
    return measurements.speed_row("lossless", case, device, found["ms"], (BASELINE, own_ms), equal=equal, **more)


def alike(answers: list[list[int]], others: list[list[int]]) -> float:
    """The share of answers before their first difference from others, the mean over answers."""
    pairs = [list(zip(*both)) for both in zip(answers, others)]
    return sum(next((n for n, (a, b) in enumerate(pair) if a != b), len(pair)) / len(pair) for pair in pairs) / len(
        pairs
    )


def _loaded(folder: Path, yarn: float | None) -> tuple[Any, Any]:
    import torch
    import transformers

    cuda = torch.cuda.is_available()
    config = transformers.AutoConfig.from_pretrained(folder)
    if yarn:
        config.rope_parameters |= {"rope_type": "yarn", "factor": yarn}
        config.rope_parameters["original_max_position_embeddings"] = config.max_position_embeddings
        config.max_position_embeddings = int(yarn * config.max_position_embeddings)
    how = {"dtype": torch.bfloat16 if cuda else torch.float32, "config": config}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    return model.to("cuda" if cuda else "cpu"), transformers.AutoTokenizer.from_pretrained(folder)


def _shaped(name: str) -> tuple[Any, None]:
    import torch
    import transformers

    layers, width, heads, kv_heads, inner, vocabulary = SHAPES[name]
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=1 << 20,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval(), None


@contextlib.contextmanager
def _accepting(share: float) -> Iterator[None]:
    """Accept each draft with a probability, whatever dense attention writes."""
    import torch

    from foveate.integrations.transformers import lossless

    real = lossless.accept_greedy

    def drawn(drafts: Any, scores: Any) -> tuple[Any, Any]:
        accepted = (torch.rand(drafts.shape, device=drafts.device) < share).long().cumprod(1).sum(1)
        return accepted, scores.argmax(-1).gather(1, accepted[:, None])[:, 0]

    lossless.accept_greedy = drawn
    try:
        yield
    finally:
        lossless.accept_greedy = real


def _batch(tokenizer: Any, task: str, tokens: int, rows: int, model: Any) -> dict[str, Any]:
    """Prompts of a task that are padded on the left, or random ids."""
    import torch

    if tokenizer is None:
        ids = torch.randint(model.config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids.to(model.device), "attention_mask": torch.ones_like(ids).to(model.device)}
    prompts_ = [prompt(tokenizer, *prompts()[task](row), tokens) for row in range(rows)]
    longest = max(map(len, prompts_))
    if longest < _FULLNESS * tokens - _ASKING:
        raise UserError(
            f"--case {tokens}x{rows}: the text of --task {task} makes prompts of at most {longest:,} tokens; take "
            "another task or shorter prompts"
        )
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts_])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts_])
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def prompt(tokenizer: Any, text: str, question: str, length: int) -> list[int]:
    """Token ids of a chat that asks about the first ``length`` tokens of a text, less what the question takes."""
    length -= 40 + len(tokenizer(question).input_ids)
    cut = tokenizer.decode(tokenizer(text[: 6 * length]).input_ids[:length])
    asked = [{"role": "user", "content": f"{cut}\n\n{question}"}]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)


class _Times:
    """A streamer that notes when tokens come, and begins to count once graphs are captured."""

    def __init__(self, model: Any):
        self._model, self._at = model, []

    def put(self, value: Any) -> None:
        import foveate

        if len(self._at) == 1 + BEFORE:  # the prompt is put first, and then the token that follows it
            foveate.stats(self._model, reset=True)
        lossless = self._model.foveate.lossless
        cycles, drafted = (lossless.use.cycles, lossless.use.drafted) if lossless else (0, 0)
        self._at.append((time.perf_counter(), cycles, drafted))

    def end(self) -> None:
        pass

    def ms(self) -> float:
        """Of a cycle or a step: the mean over lengths of drafts of their medians, since some are captured anew."""
        of_length, at = collections.defaultdict(list), self._at[1 + BEFORE :]
        for (begun, *before), (ended, *after) in itertools.pairwise(at):
            cycles, drafted = (b - a for a, b in zip(before, after))
            of_length[drafted // cycles if cycles else 0].append(ended - begun)
        return 1000 * sum(len(took) * median(took) for took in of_length.values()) / (len(at) - 1)


def _answer(
    model: Any, batch: dict[str, Any], new: int, method: str, lossless: bool | int
) -> tuple[list[list[int]], dict[str, Any]]:
    """The tokens of each row's answer, and what was counted and timed."""
    import torch

    import foveate

    cuda, times = model.device.type == "cuda", _Times(model)
    how = {"max_new_tokens": new, "eos_token_id": -1, "do_sample": False, "pad_token_id": 0}
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with foveate.attached(model, method, dense_below=0, lossless=lossless):
        out = model.generate(**batch, **how, streamer=times)
        stats = foveate.stats(model)
    drafts = stats.drafts
    return out[:, batch["input_ids"].shape[1] :].tolist(), {
        "ms": times.ms() / (1 + (drafts.per_cycle if drafts else 0)),
        "accepted": drafts and drafts.per_cycle,
        "drafted": drafts and drafts.drafted / max(1, drafts.cycles),
        "ties": drafts and drafts.ties,
        "keys_read_share": stats.keys_read_share,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


if __name__ == "__main__":
    main()
