"""What a method costs in answers where a server runs it: vLLM with foveate's plugin beside vLLM's own attention, on the
same questions.

    python -m benchmarks.serving_accuracy --model DIR --data DIR --task hotpotqa --length 8192 --out runs/answers.jsonl

Needs vLLM (docs/guide/serve.md). Questions are those of `foveate compare`, asked --rows at a time, with prompts in
chunks and answers chosen greedily. An engine runs in a process of its own. A row has the score with its 95 % interval,
that of vLLM's own attention, the difference over the same items, and how many answers are the same to the last token.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from benchmarks import serving
from foveate.integrations.transformers import loading
from foveate.io import circumstances
from foveate.lab.evaluation import generation, metrics, tasks
from foveate.lab.evaluation.tasks.base import Output
from foveate.lab.results import measurements

PROGRAM = ("-m", "benchmarks.serving_accuracy")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a folder of Hugging Face")
    parser.add_argument("--data", type=Path, required=True, help="as in foveate compare")
    parser.add_argument("--task", action="append", required=True, help="of questions that are answered in words")
    parser.add_argument("--length", type=int, help="tokens of a prompt")
    parser.add_argument("--method", action="append", help=f"by default {serving.METHODS[0]}")
    parser.add_argument("--limit", type=int, default=200, help="questions of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16, help="requests that the engine runs at a time")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory")
    given = parser.parse_args(arguments)
    measurements.check_out(given.out, "serving-accuracy")
    tokenizer = loading.load_tokenizer(given.model)
    asked = {spec: tasks.parse(spec, length=given.length) for spec in given.task}
    items = {spec: task.items(given.data, tokenizer, given.limit, given.seed) for spec, task in asked.items()}
    for spec, of_task in items.items():
        if unfit := [item for item in of_task if item.texts or item.sampling or item.context_tokens]:
            parser.error(f"--task {spec} must ask for answers that are chosen greedily; {unfit[0].id} does not")
    ends = GenerationConfig.from_pretrained(given.model).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    job = {"model": str(given.model), "dummy": False, "rows": given.rows, "memory": given.memory, "ends": ends}
    job["questions"] = {spec: [(item.prompt_ids, item.max_new_tokens) for item in items[spec]] for spec in asked}
    own = serving.run(job | {"method": None}, PROGRAM)
    for method in given.method or serving.METHODS[:1]:
        method = serving.settled(given.model, method)
        found = serving.run(job | {"method": method}, PROGRAM)
        rows = []
        for spec, task in asked.items():
            grades = [
                metrics.columns(
                    task.grade(item, Output(generation.answer_text(tokenizer, answer, ends, item.stop)))
                    for item, answer in zip(items[spec], engine[spec]["answers"], strict=True)
                )
                for engine in (found, own)
            ]
            same = sum(map(list.__eq__, found[spec]["answers"], own[spec]["answers"]))
            case = {"model": given.model.name, "method": method, "task": task.name, "settings": task.settings()}
            rows.append(_row(case, task, found[spec], grades, same, given.seed))
        measurements.write(given.out, rows)
        for row in rows:
            print(_line(row), flush=True)


def _row(case: Any, task: Any, found: Any, grades: list[Any], same: int, seed: int) -> dict[str, Any]:
    aggregate, (ours, theirs) = task.metrics[task.main], grades
    score = metrics.estimate(aggregate, ours, seed)
    difference = metrics.paired_bootstrap(aggregate, ours, theirs, seed)
    return {
        "schema": measurements.SCHEMA,
        "bench": "serving-accuracy",
        "case": case,
        "n": len(found["answers"]),
        "score": score.value,
        "low": score.low,
        "high": score.high,
        "baseline": "vllm-flash-attention" if found["device"] == "cuda" else serving.BASELINE,
        "baseline_score": float(aggregate(theirs)),
        "diff": difference.value,
        "diff_low": difference.low,
        "diff_high": difference.high,
        "same_answers": same,
        "keys_read_share": found["keys_read_share"],
        "item_values": {key: values.tolist() for key, values in ours.items()},
        "baseline_item_values": {key: values.tolist() for key, values in theirs.items()},
        **circumstances.of(found["device"]),
    }


def _line(row: dict[str, Any]) -> str:
    case = row["case"]
    scores = f"{row['score']:.1f} [{row['low']:.1f}, {row['high']:.1f}], {row['baseline']} {row['baseline_score']:.1f}"
    return f"{case['task']} {case['settings']} (n = {row['n']}) {case['method']}: {scores}, {row['diff']:+.1f}"


# In an engine's process


def measure(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    import torch
    from vllm import SamplingParams

    longest = max(len(prompt) + new for asked in job["questions"].values() for prompt, new in asked)
    llm = serving.engine(job, max_model_len=longest, max_num_seqs=job["rows"])
    found = {}
    for spec, asked in job["questions"].items():
        before = serving._keys(llm)
        how = {"temperature": 0, "stop_token_ids": job["ends"], "detokenize": False}
        sampling = [SamplingParams(max_tokens=new, **how) for _, new in asked]
        outs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in asked], sampling, use_tqdm=False)
        read, available = (after - then for after, then in zip(serving._keys(llm), before))
        found[spec] = {
            "answers": [list(out.outputs[0].token_ids) for out in outs],
            "keys_read_share": read / available if available else None,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
        }
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure(json.load(sys.stdin))))
    else:
        main()
