"""`foveate generate · compare · calibrate · tune`: a model answers with methods, or is read for a method.

torch and Transformers are imported inside the commands, so that help and bad names answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.cli.imports import Import
from foveate.cli.progress import Progress, resumable, sayer
from foveate.cli.quiet import quiet
from foveate.cli.terminal import console
from foveate.integrations.early import check_model
from foveate.io import outfile
from foveate.io.outfile import announce

Model = Annotated[Path, typer.Option("--model", help="Folder of a Hugging Face model.")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, or auto: float32 on a CPU, else the model's own.")
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        help="Whether the model thinks aloud first, in chat templates that know it; else as they do by default."
    ),
]
Day = Annotated[
    str | None, typer.Option("--date", help="The day in chat templates that write it; else as they do by default.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]


def generate(
    model: Model,
    method: Annotated[
        str, typer.Option(help='Such as h2o or "luka:page_size=16,top_k=3"; auto: what attach would choose.')
    ] = "auto",
    prompt: Annotated[str | None, typer.Option(help="The prompt's text.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with it (.txt, .xz).")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    thinking: Thinking = None,
    date: Day = None,
    lens: Annotated[
        Path | None,
        typer.Option(
            help="File (.json) for what each of the first 8 decoded tokens reads, token by token: foveate report "
            "FILE --out page.html shows it.",
            callback=announce,
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    imported: Import = None,
) -> None:
    """Answer a prompt with a method, greedily, and print the share of the keys that was read."""
    from foveate.errors import UserError, check_text, require

    if (prompt is None) == (prompt_file is None):
        raise UserError("give either --prompt or --prompt-file")
    require(max_new_tokens >= 1, "max-new-tokens", "at least 1", max_new_tokens)
    check_model(model, needs_weights=True)

    from foveate.io.reading import read_text
    from foveate.lab.evaluation.runner import parse_method

    chosen = parse_method(method)
    text = prompt if prompt_file is None else read_text(prompt_file)
    if not text.strip():
        raise UserError("the prompt is empty")
    check_text(text, "the prompt")
    if lens is not None:
        outfile.check(lens)
        if max_new_tokens < 2:
            raise UserError("the lens is of decoded tokens: max-new-tokens must be at least 2, got 1")

    import torch
    from transformers import TextStreamer

    import foveate
    from foveate.integrations.transformers import loading, model_folder
    from foveate.io import circumstances
    from foveate.lab.evaluation import generation
    from foveate.lab.evaluation import lens as recorded
    from foveate.lab.report import terminal
    from foveate.prompting import encode, template_settings

    quiet()
    facts = model_folder.model_facts(model)
    place = loading.choose_device(device)
    form = loading.choose_dtype(dtype, model, place)
    tokenizer = loading.load_tokenizer(model)
    if chat and not tokenizer.chat_template:
        raise UserError(f"{model}: the tokenizer has no chat template; leave --chat away")
    if not chat and (thinking is not None or date is not None):
        raise UserError("--thinking and --date are for chat templates: give --chat, too")
    template = template_settings(thinking, date)
    ids = encode(tokenizer, [{"role": "user", "content": text}] if chat else text, template=template)
    model_folder.check_positions(len(ids) + max_new_tokens, facts, "prompt and answer need")
    if lens is not None and len(ids) > recorded.MOST_TOKENS:
        raise UserError(f"the lens takes prompts of {recorded.MOST_TOKENS:,} tokens at most, this one has {len(ids):,}")
    network = loading.load_model(model, form, place)
    tensor = torch.tensor([ids], device=place)
    graphs = "auto" if lens is None else False  # whose steps nobody sees
    with (
        foveate.attached(network, chosen, dense_below=0, cuda_graph=graphs) as attachment,
        recorded.recording(network) if lens is not None else contextlib.nullcontext() as recorder,
        torch.inference_mode(),
    ):
        made = network.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=max_new_tokens,
            pad_token_id=generation.pad_token(network, tokenizer),
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            return_dict_in_generate=True,
        )
        summary = foveate.stats(network).summary()
        if lens is not None:
            facts = {"model": model.resolve().name, "dtype": str(form).removeprefix("torch.")}
            recall = recorded.of_layers(recorder.recall())
            recorder.save(
                lens, tokenizer, made.sequences[0].tolist(), len(ids), **facts, **circumstances.of(str(place))
            )
        del made  # the statistics are of the live cache
    line = f"{attachment.method.spec} · {len(ids):,} prompt tokens · {terminal.reading(summary)}"
    console(stderr=True).print(line, style="dim", markup=False)
    if lens is not None:
        worst = min(recall, key=recall.get)
        mean = sum(recall.values()) / len(recall)
        line = f"the tokens read hold {mean:.1%} of the exact attention; least in layer {worst}, {recall[worst]:.1%}"
        console(stderr=True).print(line, style="dim", markup=False)


def compare(
    model: Model,
    task: Annotated[
        str,
        typer.Option(
            help="documents (your own), probes, niah, ruler, wikisalad, wikisalad_long, hotpotqa, musique, 2wiki, "
            "longbench, longproc, math, recall, mqar, lambada, choice, perplexity; settings as in niah:length=8192."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File for the rows (JSON Lines).", callback=announce)],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the task's data (docs/guide/data.md lists the files); of documents also one file; of "
            "probes it may be left out."
        ),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method, or own: the model as it is; may be repeated.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="The task's split; its first if left out.")] = None,
    length: Annotated[int | None, typer.Option(help="Prompt tokens, for tasks that can choose.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer, for tasks that generate.")] = None,
    question: Annotated[
        str | None,
        typer.Option(
            help="with: read with its context; after: as a second turn, when methods have evicted what they evict."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Items at most (wikisalad: examples of several questions).")] = 10,
    batch_size: Annotated[int, typer.Option(help="Items answered at once.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the items and of the bootstrap.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    share_prompt: Annotated[
        bool, typer.Option(help="Read each prompt once for all methods that are dense in prefill; else time each.")
    ] = True,
    dense_below: Annotated[
        str,
        typer.Option(
            help="Tokens of all sequences together, below which decode steps read everything; auto: as attach and the "
            "server do. By default short prompts, too, tell what a method loses."
        ),
    ] = "0",
    recall: Annotated[
        int,
        typer.Option(
            help="On how many of the first items the recall of each layer is measured, too: the share of exact "
            "attention that the tokens hold that a method reads."
        ),
    ] = 0,
    fidelity: Annotated[
        bool, typer.Option("--fidelity", help="Instead of own answers: how each token of dense's answers is predicted.")
    ] = False,
    imported: Import = None,
) -> None:
    """Compare methods on a task: resumable, one row of results per method, a table at the end."""
    from foveate.errors import UserError
    from foveate.lab.evaluation import tasks

    chosen_task = tasks.parse(task, split=split, length=length, max_new_tokens=max_new_tokens, question=question)
    if (data := chosen_task.own_data if data is None else data) is None:
        raise UserError(f"task '{chosen_task.name}' reads files: give their folder as --data (docs/guide/data.md)")
    check_model(model, needs_weights=True, attached=any(one.strip() != "own" for one in method or ["dense"]))
    chosen_task.files(data)

    from foveate.lab.evaluation.runner import Comparison, parse_methods, prepare, run
    from foveate.lab.evaluation.tasks.fidelity import Fidelity
    from foveate.lab.report import terminal

    notes = console(stderr=True)
    say = sayer(notes)
    if not fidelity and chosen_task.needs_dense(data):
        say("no answers in these documents: methods go along dense attention's (--fidelity)")
        fidelity = True
    if fidelity:
        chosen_task = Fidelity(of=chosen_task)
    chosen, added = parse_methods(method or [])
    quiet()
    below = int(dense_below) if dense_below.isdecimal() else dense_below
    how = (batch_size, seed, dtype, device, share_prompt, tuple(imported or ()), below, recall)
    prepared = prepare(Comparison(model, chosen_task, data, chosen, limit, out, *how))
    if method and added:
        say("dense runs too: every row is compared with it")
    total = len(prepared.items) * len(prepared.missing)
    if not prepared.missing:
        say(f"{out} is complete; nothing to run")
    elif prepared.kept:
        say(f"resuming: {prepared.kept} of {total} answers are there")
    with resumable(say, f"the answers so far are in {out}.partial"), Progress(notes, total) as progress:
        rows = run(prepared, progress.answered)
    console().print(terminal.Comparison(rows))


def calibrate(
    model: Model,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Whose prompts to read: documents, musique, ruler, …, with settings; repeatable. Left out: prompts "
            "made of a novel that comes with foveate."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The tasks' data (docs/guide/data.md lists the files).")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A file for the calibration (JSON), besides the one in the cache folder.", callback=announce),
    ] = None,
    anchors: Annotated[
        int | None,
        typer.Option(help="Anchor layers to choose; if left out ten for every 28 layers, by similarity five."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="The first task's split; its first if left out.")] = None,
    length: Annotated[int | None, typer.Option(help="Prompt tokens, if the first task can choose.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each task; if left out 20, of the novel 8 of each kind.")
    ] = None,
    keys: Annotated[int, typer.Option(help="Keys compared: the heaviest of each tile.")] = 64,
    tile: Annotated[int, typer.Option(help="Queries that share keys, those of a group counted; 1: each token.")] = 128,
    by: Annotated[
        str,
        typer.Option(
            help="What anchors keep. together: predictions with all layers sparse; divergence: with one layer sparse "
            "at a time; similarity: attention of each layer (the paper, for kascade_paper)."
        ),
    ] = "together",
    method: Annotated[
        str | None,
        typer.Option(
            help="kascade with the settings that divergence and time are measured under: pool, top_k, …; by similarity "
            "kascade_paper, whose pool says whether a layer or a KV head chooses."
        ),
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer along which predictions are compared.")] = 16,
    batch_size: Annotated[int, typer.Option(help="Prompts answered together.")] = 8,
    rounds: Annotated[
        int, typer.Option(help="Together: how often each anchor is tried in every other place, at most.")
    ] = 0,
    prompts: Annotated[
        str, typer.Option(help="Together: how prompts are read, dense, or sparse by --method as in use.")
    ] = "dense",
    time_share: Annotated[
        float | None, typer.Option(help="Instead of --anchors: share of dense attention's decode time.")
    ] = None,
    time_context: Annotated[int, typer.Option(help="Tokens at which that time is measured.")] = 32768,
    time_batch: Annotated[int, typer.Option(help="Sequences at which that time is measured.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Choose Kascade's anchor layers for a model, and keep them where attach finds them: resumable, one JSON file."""
    given = dict(locals())

    from foveate.errors import UserError
    from foveate.lab.evaluation import tasks

    if task:
        if data is None:
            raise UserError("--task reads files: give their folder as --data, or leave --task away")
        read, usual_limit = [tasks.parse(task[0], split=split, length=length), *map(tasks.parse, task[1:])], 20
    elif data is not None or split is not None:
        raise UserError("--data and --split are of a --task; without one the novel of the package is read")
    check_model(model, needs_weights=True)
    if task:
        for one in read:
            one.files(data)

    from foveate.calibration import kept_name
    from foveate.lab.evaluation.calibration.calibrate import keep, partial_folder, run
    from foveate.lab.evaluation.calibration.plan import Plan, kept_at, without_data
    from foveate.lab.evaluation.runner import parse_method
    from foveate.lab.evaluation.tasks import probes

    notes = console(stderr=True)
    say = sayer(notes)
    if not task:
        quiet()
        read, data, usual_limit = without_data(model, length), probes.TEXT, 8
    chosen = None if method is None else parse_method(method)
    quiet()
    settings = {field.name: given[field.name] for field in dataclasses.fields(Plan) if field.name in given}
    settings |= {"task": read[0], "also": tuple(read[1:]), "data": data, "out": out or Path(), "method": chosen}
    plan = Plan(**settings | {"limit": usual_limit if limit is None else limit})
    place = kept_at(plan)
    if out is None:
        plan = dataclasses.replace(plan, out=place, kept=True)
    with (
        resumable(say, f"what is read so far is in {partial_folder(plan.out)}"),
        Progress(notes, plan.limit * len(plan.tasks)) as progress,
    ):
        found = run(plan, progress.at, say)
    kept = f"kept in {place}"
    if out is not None:
        try:
            keep(plan, found)
        except UserError as error:
            kept = f"not kept for attach to find: {error}"
    typer.echo(f"anchors {list(found.anchors)}, {kept}; use them as --method")
    typer.echo(_pasted(plan.in_use, str(out) if out is not None else kept_name(place)))


def tune(
    model: Model,
    data: Annotated[Path, typer.Option(help="Folder or file of documents (docs/guide/data.md).")],
    out: Annotated[
        Path, typer.Option(help="File for the setting, which attach takes in the place of a method.", callback=announce)
    ] = Path("foveate.json"),
    max_loss: Annotated[float, typer.Option(help="Points of the score that may be lost against dense.")] = 1.0,
    objective: Annotated[str, typer.Option(help="What to minimise: latency or memory.")] = "latency",
    task: Annotated[str, typer.Option(help="documents with settings, such as documents:length=8192.")] = "documents",
    calibration: Annotated[
        Path | None, typer.Option(help="A file of foveate calibrate: kascade is tried, too.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Most items to choose on, and most items to check on. Left out: enough items to choose by --max-loss, "
            "enough to show it, or 20 of documents without answers."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time after which nothing new is tried.")] = 15.0,
    batch_size: Annotated[int, typer.Option(help="Items answered at once.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the items.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    imported: Import = None,
) -> None:
    """Search methods and budgets on one half of your documents, check the best on the other, write it: resumable."""
    from foveate.lab.evaluation import tasks

    chosen = tasks.parse(task, split="tune")
    check_model(model, needs_weights=True)
    chosen.files(data)

    from foveate.lab.evaluation.tune import Plan, search

    say = sayer(console(stderr=True))
    quiet()
    how = (max_loss, objective, calibration, limit, minutes, batch_size, seed, dtype, device, tuple(imported or ()))
    plan = Plan(model, chosen, data, out, *how)
    with resumable(say, f"the trials so far are in {plan.rows('tune')}"):
        found = search(plan, say)
    typer.echo(f"{found.spec}; in Python: foveate.attach(model, {str(out)!r}), else --method {shlex.quote(str(out))}")


def _pasted(method: Any, calibration: str) -> str:
    """A spec with a calibration as a shell takes it, without quotes where it needs none."""
    spec = dataclasses.replace(method, calibration=calibration).spec
    if re.fullmatch(r"[\w./+:@-]+", calibration):
        spec = spec.replace(json.dumps(calibration), calibration)
    return shlex.quote(spec)
