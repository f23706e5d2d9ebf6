"""What `make demo` shows: a small model looks numbers up in a novel by four methods, and a page shows what was read.

python examples/demo.py --model models/smollm2-135m --out runs/demo
"""

import argparse
import json
import textwrap
from pathlib import Path

import torch

import foveate
from foveate.cli.quiet import quiet
from foveate.cli.terminal import console
from foveate.integrations.transformers import loading
from foveate.io import circumstances
from foveate.lab.evaluation import generation, lens, runner, tasks, verdict
from foveate.lab.report import page, terminal
from foveate.lab.report.markdown import context_length

HERE = Path(__file__).parent
METHODS = {
    "dense": ("dense", "everything, as the model does itself"),
    "kascade": ("", "keys that a few layers have chosen"),
    "pages": ("pages", "pages whose summaries promise most"),
    "snapkv": ("snapkv:top_k=0.25,kernel_size=31,pooling=max", "what it kept when the prompt ended"),
}
"""Spec (of kascade, that of the model) and words of each method."""
LENSES = ("kascade", "snapkv")
QUESTIONS, TOKENS, ANSWER = 4, 1536, 10
SPEEDS = HERE.parent / "benchmarks" / "results" / "decode.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--out", type=Path, required=True, help="folder for rows, lenses and the page")
    parser.add_argument(
        "--kascade", default='kascade:calibration="shipped:smollm2-135m"', help="its spec for the model"
    )
    given = parser.parse_args()

    quiet()
    specs = {name: spec or given.kascade for name, (spec, _) in METHODS.items()}
    task = tasks.parse(f"niah:length={TOKENS},max_new_tokens={ANSWER}")
    methods, _ = runner.parse_methods(list(specs.values()))
    how = {"limit": QUESTIONS, "out": given.out / "rows.jsonl", "dtype": "float32"}
    prepared = runner.prepare(runner.Comparison(given.model, task, HERE / "data", methods, **how))
    notes = console(stderr=True)
    with notes.status(f"{given.model.name} answers {QUESTIONS} questions by {len(METHODS)} methods; about two minutes"):
        rows = runner.run(prepared)
        model = loading.load_model(prepared.plan.model, prepared.plan.dtype, prepared.plan.device)
        files = [given.out / f"{name}.json" for name in LENSES]
        for name, file in zip(LENSES, files):
            look(model, prepared, specs[name], file)
    page.write(files, given.out / "read.html")
    print(story(given.model.name, prepared.items[0], rows))
    print(wrapped(shown(rows)))
    print(wrapped(speed()))
    print("What next: foveate methods; foveate chat --model DIR --file TEXT --method auto")
    print(f"What two of them read, token by token: {given.out / 'read.html'}")


def story(model: str, item, rows: list[dict]) -> str:
    """The first question, what each method answered, how often it was right, and what that took."""
    key, value = item.meta["key"], item.answers[0]
    lines = [
        wrapped(f"{model} reads {len(item.prompt_ids):,} tokens of Moby-Dick. One sentence is hidden in them:"),
        f"    One of the special magic numbers for {key} is: {value}.",
        wrapped(f"Question: {item.prompt[0]['content'].splitlines()[-1]}"),
        "",
        f"{'method':9}{'answer':10}{'right':8}{'read':6}{'memory':9}what it reads",
    ]
    for (name, (_, words)), row in zip(METHODS.items(), rows, strict=True):
        said = " ".join(row["examples"][0]["answer"].split())[:9].rstrip(" .")
        right = f"{round(row['n'] * row['score'] / 100)} of {row['n']}"
        held = terminal.size(row["resident_bytes"])
        lines.append(f"{name:9}{said:10}{right:8}{row['keys_read_share']:<6.0%}{held:9}{words}")
    legend = (
        f"right: of {rows[0]['n']} such questions, each about another piece of the novel. read: share of the text so "
    )
    legend += "far that is read for a token of the answer. memory: keys and values that are kept."
    return "\n".join([*lines, "", wrapped(legend)])


def shown(rows: list[dict]) -> str:
    """What these few questions show, which is mostly that they are few."""
    names = {row["spec"]: name for name, row in zip(METHODS, rows, strict=True)}
    return verdict.judge(rows, named=lambda row: names[row["spec"]]).words


def wrapped(text: str) -> str:
    return textwrap.fill(text, 79)


def speed() -> str:
    """One sentence on speed, of the newest row of a whole model with the most tokens by kascade."""
    rows = [json.loads(line) for line in SPEEDS.read_text(encoding="utf-8").splitlines()]
    cases = [row for row in rows if row["case"]["level"] == "model" and row["case"]["method"].startswith("kascade")]
    row = max(reversed(cases), key=lambda row: row["case"]["context"] * row["case"]["batch"])
    case = row["case"]
    held = f"{case['batch']} sequence{'s' * (case['batch'] > 1)} of {context_length(case['context'])} tokens"
    return (
        f"Speed: at this length, on a CPU, none is faster. On an {row['device']} a decode step of {case['model']} with "
        f"{held} takes {row['ms']:.1f} ms by kascade, and {row['baseline_ms']:.1f} ms with dense attention "
        "(benchmarks/results/decode.jsonl)."
    )


def look(model, prepared, spec: str, out: Path) -> None:
    """Record what the first tokens of the first answer read."""
    ids = list(prepared.items[0].prompt_ids)
    tensor = torch.tensor([ids], device=model.device)
    with foveate.attached(model, spec, dense_below=0), lens.recording(model) as recorder, torch.inference_mode():
        made = model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=lens.STEPS + 1,
            do_sample=False,
            pad_token_id=generation.pad_token(model, prepared.tokenizer),
        )
        facts = {"model": prepared.plan.model.name, "dtype": prepared.plan.dtype, **circumstances.of(str(model.device))}
        recorder.save(out, prepared.tokenizer, made[0].tolist(), len(ids), **facts)


if __name__ == "__main__":
    main()
