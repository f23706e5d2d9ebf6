"""What the documentation says is what the result files and the program say."""

import ast
import importlib.metadata
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import foveate
from benchmarks import tables
from foveate import methods
from foveate.cli import app
from foveate.errors import DataError
from foveate.integrations.transformers import releases
from foveate.integrations.vllm import settings
from foveate.lab.checks import check
from foveate.lab.evaluation import tasks
from foveate.lab.results.measurements import needed
from foveate.lab.results.rows import LATER_FIELDS, ROW_FIELDS
from foveate.methods import base, spec
from foveate.runtime import policy
from foveate.state import Geometry
from tests import tiny
from tests.matrix import PROMPT, SCALING, Driver, Tokens, close

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guide"
PAPERS = sorted((ROOT / "docs" / "papers").glob("*.md"))
TABLES = sorted((ROOT / "benchmarks" / "tables").glob("*.md"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
GENERATED = re.compile(r"<!-- report:.*?<!-- end -->", re.DOTALL)
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
_MADE = {"model", "device", "versions", "commit"}
KINDS = {
    "cache-memory": _MADE - {"model"} | {"case", "points"},
    "hybrid-curves": _MADE | {"tokens", "loss", "held_out", "held_out_tokens", "retention", "parameters"},
    "hybrid-needles": _MADE | {"case", "answered", "kept", "heads", "tokens"},
    "transformers-tests": _MADE | {"method", "tests", "passed", "refused", "failed", "skipped", "plain", "seed"},
    "sparse-prompts": _MADE
    | {"task", "task_settings", "spec", "n", "score", "dense_score", "diff_to_dense", "diff_low"},
}
"""What rows of programs in `benchmarks/` have, beside those of commands."""


def blocks(text: str) -> list[str]:
    """The paragraphs, items of lists and cells of tables that people wrote: no headings, code or generated tables."""
    text = re.sub(r"```.*?```", "", GENERATED.sub("", text), flags=re.DOTALL)
    found = [""]
    for line in map(str.strip, text.splitlines()):
        if line.startswith("|"):
            found += [*line.strip("|").split(" | "), ""]
        elif not line or line.startswith("#"):
            found.append("")
        elif item := re.fullmatch(r"(?:[-*]|\d+\.) (.*)", line):
            found.append(item[1])
        else:
            found[-1] += f" {line}"
    return [block.strip() for block in found if re.search(r"[^\W_]", block)]


def sentences(block: str) -> list[str]:
    """The sentences of a block, without what marks code, links and bold words; code is one word."""
    plain = re.sub(r"\]\([^)]*\)", "", re.sub(r"`[^`]*`", "Code", block))
    return re.split(r"(?<=[.?!])\s+(?=[^a-z])", re.sub(r"[*\[]|(?<!\w)!", "", plain).strip())


def test_tables_are_those_of_the_result_files(capsys, methods_of_package):
    assert tables.main(["--check"]) == 0, f"stale: {capsys.readouterr().out}; run `make tables`"


@pytest.mark.parametrize("kind", ["decode-speedup", "decode-table decode-kinds"])
def test_marks_have_one_known_kind(kind):
    with pytest.raises(
        ValueError, match=f"a mark has one kind at most, of summary, .*; found {kind.replace(' ', ', ')}"
    ):
        tables.written(f"<!-- report: benchmarks/results/decode.jsonl {kind} -->\n<!-- end -->\n")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_result_rows_have_the_fields_that_they_must(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "cell" in row:  # of recheck.py: a comparison of two rows
            row |= row["new"]
            assert row["old"]["commit"] != row["commit"]
        else:
            assert (
                KINDS[row["kind"]]
                if "kind" in row
                else set(needed(row))
                if "bench" in row
                else ROW_FIELDS.keys() - LATER_FIELDS
            ) <= row.keys()
        assert row["commit"] != "unknown"
        assert not row["commit"].endswith("-dirty")
        assert not re.search(r'"(/[a-z]+)+/', line), "a path of one machine"


def test_every_result_file_is_explained():
    explained = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert all(f"results/{path.name}" in explained for path in RESULTS)


def test_the_demos_calibration_is_of_its_model_and_made_as_described():
    file = ROOT / "foveate" / "calibrations" / "smollm2-135m.json"
    artefact = json.loads(file.read_text(encoding="utf-8"))
    assert artefact["found"]["run"]["model"] == "smollm2-135m"
    made = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for option in ("--anchors", "--limit", "--seed", "--answer-tokens", "--batch-size", "--rounds"):
        (value,) = re.findall(rf"{option} (\d+)", artefact["found"]["command"])
        assert f"{option} {value} " in made, option


def test_every_method_has_its_line(methods_of_package):
    page = (ROOT / "docs" / "guide" / "choose.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in methods_of_package)


def test_the_method_that_the_guide_prints_is_one(monkeypatch):
    """And `foveate check` says of it what the page prints."""
    monkeypatch.setattr(base, "REGISTRY", base.REGISTRY.copy())
    monkeypatch.setattr(spec, "REGISTRY", base.REGISTRY)
    page = (GUIDE / "extend.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    names: dict = {}
    exec(example, names)
    method = names["ShortKeys"](**names["ShortKeys"].about.small_budget)
    assert method.spec == "short_keys:top_k=12,window=8"
    assert {"top_k", "sinks", "window", "evict_every", "order"} == methods.settings_of(method).keys()
    driver, tokens = Driver(method), Tokens.random(1, PROMPT + 1)
    driver.feed(tokens[:PROMPT])
    lengths, held = tokens.k[0, :, 4 : PROMPT - 8].norm(dim=-1), driver.store.positions[0]
    for head in range(2):
        shortest = sorted((lengths[head].topk(8, largest=False).indices + 4).tolist())
        assert held[head].tolist() == [*range(4), *shortest, *range(PROMPT - 8, PROMPT)]
    driver.feed(tokens[PROMPT:])
    assert float(driver.layer.counters.keys_read) == 21
    assert f"{method.spec}\n{check(method)}\n" in page


WHOLE_FILES = re.findall(r"```python\n(.*?)```", (GUIDE / "extend.md").read_text(encoding="utf-8"), re.DOTALL)
"""The methods that the guide prints: one evicts, one selects, one changes rotary positions."""


@pytest.fixture
def printed(monkeypatch):
    """Gives the class of a method that the guide prints."""
    monkeypatch.setattr(base, "REGISTRY", base.REGISTRY.copy())
    monkeypatch.setattr(spec, "REGISTRY", base.REGISTRY)

    def load(number):
        names: dict = {}
        exec(WHOLE_FILES[number], names)
        return next(one for one in names.values() if getattr(one, "__module__", "") == "builtins")

    return load


@pytest.mark.parametrize("number", range(3))
def test_the_methods_that_the_guide_prints_are_checked(tmp_path, monkeypatch, number):
    """Each is a whole file, which `foveate check --import` takes and finds right in every line."""
    assert len(WHOLE_FILES) == 3
    monkeypatch.setattr(base, "REGISTRY", base.REGISTRY.copy())
    monkeypatch.setattr(spec, "REGISTRY", base.REGISTRY)
    file, (name,) = tmp_path / "mine.py", re.findall(r'^    name = "(\w+)"', WHOLE_FILES[number], re.MULTILINE)
    file.write_text(WHOLE_FILES[number], encoding="utf-8")
    done = CliRunner().invoke(app, ["check", "--import", str(file), "--method", name])
    assert done.exit_code == 0, done.output
    outcomes = {line.split("  ")[0] for line in done.output.splitlines()[1:]}
    assert outcomes == {"passed", "told"}
    told = [line for line in done.output.splitlines() if line.startswith("told")]
    assert [line.split()[1] for line in told] == ["vLLM"], "every other line compares something"


def test_the_method_that_selects_reads_the_keys_with_the_best_signs(printed):
    cls = printed(1)
    driver, tokens = Driver(cls(top_k=12, window=4)), Tokens.random(1, PROMPT + 1)
    driver.feed(tokens[:PROMPT])
    found = driver.feed(tokens[PROMPT:])
    logits = torch.einsum("hgd,hkd->hgk", tokens.q[0, :, -1].unflatten(0, (2, -1)), tokens.k[0].sign()) * SCALING
    scores = logits.softmax(-1).sum(1)
    scores[:, -4:] = torch.inf
    mask = torch.zeros_like(scores).scatter(1, scores.topk(12).indices, 1.0).bool()
    exact = torch.einsum("hgd,hkd->hgk", tokens.q[0, :, -1].unflatten(0, (2, -1)), tokens.k[0]) * SCALING
    weights = exact.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    close(found[0, :, 0], torch.einsum("hgk,hkd->hgd", weights, tokens.v[0]).flatten(0, 1))


def test_the_method_that_changes_positions_bounds_distances(printed):
    cls = printed(2)
    driver, tokens = Driver(cls(near=24)), Tokens.random(1, PROMPT + 1)
    driver.feed(tokens[:PROMPT])
    found, rotary = driver.feed(tokens[PROMPT:]), driver.layer.rotary
    q = rotary.remove(tokens.q[0, :, -1], torch.tensor(PROMPT))
    k = rotary.remove(tokens.k[0], torch.arange(PROMPT + 1))
    distances = (PROMPT - torch.arange(PROMPT + 1)).clamp_max(24)
    outs = []
    for head in range(len(q)):  # each pair of tokens by its distance alone
        turned = torch.stack([rotary.apply(q[head], distance) for distance in distances])
        weights = ((turned * k[head * 2 // len(q)]).sum(-1) * SCALING).softmax(-1)
        outs.append(weights @ tokens.v[0, head * 2 // len(q)])
    close(found[0, :, 0], torch.stack(outs))


def test_packages_are_named_without_the_host_of_a_registry():
    """A package is had from whichever index a machine uses; its name and release say what it is."""
    files = [*PAGES, *sorted((ROOT / "foveate").rglob("*.py"))]
    hosts = re.compile(r"pypi\.org|pythonhosted|anaconda\.org|registry\.npmjs")
    assert [str(path) for path in files if hosts.search(path.read_text(encoding="utf-8"))] == []
    assert methods.get("locks").about.source.endswith("Python package locks-kv, release 0.1.4")


def test_every_extra_has_its_line():
    page = (ROOT / "docs" / "guide" / "choose.md").read_text(encoding="utf-8")
    extras = importlib.metadata.metadata("foveate").get_all("Provides-Extra")
    assert {"dev", "plot"} <= set(extras)
    assert all(f"| `{name}` |" in page for name in extras)


def test_the_readme_leads_to_all_documents_and_to_questions():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"](docs/README.md)", "](docs/guide/questions.md)"} <= set(re.findall(r"\]\([^)#]*\)", readme))


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_readme_begins_with_commands_and_their_minutes(target):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"```bash\n(.*?)```", readme, re.DOTALL)[1]
    (said,) = re.findall(rf"^make {target}\b(.*)$", first, re.MULTILINE)
    assert re.search(r"\d+ minutes", said)
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").glob("*/*.md"):
        assert f"]({path.relative_to(ROOT / 'docs')})" in index, path


QUESTIONS = {
    "vLLM with 50 users of 4K?": r"not measured.*\[serve\.md\]\(",
    "24 GB and 128K tokens?": r"[\d.]+ GB.*\]\(memory\.md\).*`streaming`",
    "An agent of 30 turns to 100K tokens?": r"All keys stay.*\d+ GB.*gone for later turns",
    "64 documents of 8K, one field each?": r"Dense attention.*batches of",
    "Reasoning?": r"MATH-500 \(1\.5B, n = 500\): .*`kascade` -4\.0 .*not measured.*AIME",
    "Several questions about one document?": r"copy.*\]\(#",
    "Several documents on one GPU?": r"GB.*`foveate\.save_cache`",
    "How much memory does a prompt take?": r"\d+K tokens in chunks of \d+K.*GB.*GB",
    "How long does a prompt take?": r"[\d.]+ s for",
    "Short prompts?": r"below \d+K tokens.*`dense_below=0`",
    "500K tokens?": r"\d+ GB.*\]\(",
    "Does it hold for my data?": r"`foveate compare --model",
    "MoE, gpt-oss, Mistral?": r"refused.*\]\(models\.md\)",
    "Apple, ROCm, T4, Windows?": r"capability 8\.0.*not tested",
    "Structured output and tools?": r"tested beside vLLM's own.*\]\(serve\.md",
    "AWQ, GPTQ, FP8, MXFP4 weights?": r"Not tested.*shape alone",
    "torch.compile?": r"brings nothing to decoding",
    "lm-eval?": r"`python -m foveate\.lab\.lm_eval --model foveate`",
    "LoRA?": r"\[tested\]\(.*`--enable-lora`.*\[served and tested\]\(serve\.md",
    "How fast against FlashAttention-3?": r"[\d.]+ with 128K \(\[table\]\(.*kascade-table3\.sh",
    "Same answers as dense attention?": r"lossless=True.*--lossless 4.*\]\(lossless\.md",
    "bitsandbytes?": r"\[Tested\]\(",
    "70B over several GPUs?": r"`device_map` is tested.*not on several GPUs",
    "Beams, assisted decoding?": r"Tested.*refused",
    "vLLM?": r"\[serve\.md\]\(",
    "Is it deterministic?": r"equal scores go to the earlier key.*not the same for every batch size",
    "Is it sparse at all?": r"`print\(foveate\.stats\(model\)\)`.*\]\(#",
    "A method of my own?": r"--import mine\.py.*`foveate\.attach\(model, \"mine\"\)`",
    "Turn it off?": r"`foveate\.detach\(model\)`.*`with foveate\.attached\(",
    "PyPI, pinning, stability?": r"not on PyPI.*pin.*CHANGELOG",
    "How to cite it?": r"CITATION\.cff.*URL",
}
"""What newcomers ask, and what the answer must hold: a number, a command or a link."""


def test_the_guide_answers_what_newcomers_ask():
    page = (GUIDE / "questions.md").read_text(encoding="utf-8")
    answers = dict(re.findall(r"^\| (.*\?) \| (.*) \|$", page, re.MULTILINE))
    assert answers.keys() == QUESTIONS.keys()
    assert [question for question, answer in answers.items() if not re.search(QUESTIONS[question], answer)] == []


def _section(page: str, title: str) -> str:
    return re.search(rf"^## {re.escape(title)}$(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE)[1]


def _rows(name: str) -> list[dict]:
    text = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_what_two_gpus_gain_is_what_rows_say():
    text = _section((GUIDE / "questions.md").read_text(encoding="utf-8"), "Two GPUs")
    gains = {
        (case["batch"], case["tokens"] // 1024): f"{row['baseline_ms'] / row['ms']:.2f}"
        for row in _rows("serving")
        if (case := row["case"]).get("ranks") == 2
    }
    for batch, thousands in ((8, 32), (1, 128), (1, 32), (8, 8)):
        assert re.search(rf"\b{batch} × {thousands}K(?: tokens)? are\s+{gains[batch, thousands]} times", text), (
            batch,
            thousands,
        )
    exchanges = _rows("serving-ranks")
    microseconds = [1000 * (row["ms"] - row["baseline_ms"]) for row in exchanges]
    assert f"{min(microseconds):.0f} to {max(microseconds):.0f} µs" in " ".join(text.split())
    assert {row["agreement"] for row in exchanges} == {1.0}
    bound = policy.sparse_from_length([methods.make("kascade:anchors=10")], Geometry(16, 4, 128, 128), 8, 2)
    assert f"eight requests of {bound // 1024}K" in " ".join(text.split())
    for method, factor in (("kascade:anchors=10", 4), ("pages:weighted=false", 2)):
        one = policy.pays_from([methods.make(method)], Geometry(32, 8, 128, 128))
        assert policy.pays_from([methods.make(method)], Geometry(16, 4, 128, 128), 2) == factor * one == 128 * 1024


def test_methods_beside_presses_are_methods_and_their_gains_those_of_rows():
    text = _section((GUIDE / "questions.md").read_text(encoding="utf-8"), "Llama-3.1-8B beside kvpress")
    for line in re.findall(r"^\| (?:`\w+Press.*?|none) \| (.*?) \|", text, re.MULTILINE):
        assert [methods.make(one) for one in re.findall(r"`(.*?)`", line)]
    options = dict(re.findall(r"--(task|split|question) (\S+)", text))
    tasks.parse(options.pop("task"), length=8192, **options)  # raises for what there is not
    rows = _rows("recommended-times")
    times = {
        row["case"]["method"]: row["speedup"]
        for row in rows
        if (row["case"].get("model"), row["case"].get("batch"), row["case"].get("context"))
        == ("llama-3.1-8b", 8, 32768)
    }
    for method, gain in (("snapkv:top_k=0.25", "1.64"), ("kascade:anchors=10", "1.51"), ("pages", "1.27")):
        assert f"{times[method]:.2f}" == gain
        assert gain in text


def test_the_guide_lists_the_options_of_vllm_that_are_refused():
    page = (GUIDE / "serve.md").read_text(encoding="utf-8")
    source = "".join(map(inspect.getsource, (settings.check_options,)))
    options = set(re.findall(r"--[a-z-]+[a-z]", source))
    assert len(options) > 5
    assert [option for option in options if f"`{option}" not in page] == []


def test_releases_that_the_guide_names_are_those_that_are_tested():
    page = (GUIDE / "questions.md").read_text(encoding="utf-8")
    oldest, newest = (version.rpartition(".")[0] for version in (releases.OLDEST, releases.NEWEST))
    assert f"Transformers {oldest} to {newest} are tested" in page


@pytest.mark.filterwarnings("error::FutureWarning")
def test_the_python_of_the_readme_and_of_several_questions_runs(tmp_path, monkeypatch, capsys):
    (start,), (questions,) = (
        re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        for path in (ROOT / "README.md", GUIDE / "questions.md")
    )
    assert len([line for line in start.splitlines() if line]) <= 9
    use, detach = start.replace('"cuda"', '"cpu"').rsplit("\n", 2)[:2]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "document.txt").write_text("The whale swam on. " * 20, encoding="utf-8")
    names = {"DIR": str(tiny.build(tmp_path / "tiny-llama")), "questions": ["Who swam?", "Where to?"]}
    exec(use, names)
    if "cache" not in inspect.signature(type(names["model"]).forward).parameters:  # an older Transformers
        questions = questions.replace("cache=", "past_key_values=")
    exec(questions, names)
    assert "decode steps" in capsys.readouterr().out
    assert names["cache"].get_seq_length() == names["inputs"].input_ids.shape[1]
    assert (tmp_path / "document.safetensors").exists()
    exec(detach, names)
    assert "foveate" not in names["model"].__dict__


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_that_nobody_needs_to_read_come_with_a_sentence_a_section(path):
    text = path.read_text(encoding="utf-8")
    assert GENERATED.search(text)
    sections = re.split("^#", GENERATED.sub("", text), flags=re.MULTILINE)
    assert [section for section in sections if len(section.split()) > 60] == []
    assert any(f"tables/{path.name}" in page.read_text(encoding="utf-8") for page in PAGES)


INTERVAL = re.compile(r"([+-]?[\d.]+) \[([+-]?[\d.]+), ([+-]?[\d.]+)\]")


def test_the_points_of_the_readme_are_those_of_rows_or_generated_tables():
    known = set()
    for path in PAGES:
        for table in re.findall(r"<!-- report:.*?<!-- end -->", path.read_text(encoding="utf-8"), re.DOTALL):
            known |= {tuple(map(float, found)) for found in INTERVAL.findall(table)}
    for path in RESULTS:
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            points = [row.get(name) for name in ("diff_to_dense", "diff_low", "diff_high")]
            if None not in points:
                known.add(tuple(float(f"{value:.1f}") for value in points))
    said = [tuple(map(float, found)) for found in INTERVAL.findall((ROOT / "README.md").read_text(encoding="utf-8"))]
    assert len(said) >= 10
    assert [points for points in said if points not in known] == []


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted(GUIDE.glob("*.md")), *PAPERS, ROOT / "benchmarks" / "README.md"],
    ids=lambda path: path.stem,
)
def test_sentences_are_short(path):
    found = [one for block in blocks(path.read_text(encoding="utf-8")) for one in sentences(block)]
    assert len(found) > 3
    assert [one for one in found if len(one.split()) > 40] == []


def test_the_page_of_errors_quotes_what_the_code_says():
    page = (GUIDE / "errors.md").read_text(encoding="utf-8")
    quoted = [one for line in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for one in re.findall(r"`(.*?)`", line)]
    said = {
        "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in getattr(node, "values", [node]))
        for path in (ROOT / "foveate").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    }
    assert len(quoted) > 20
    for part in (part.strip() for one in quoted for part in one.split("…")):
        assert any(part in message for message in said), part


def test_sentences_are_those_of_paragraphs_items_and_cells():
    text = (
        "# A heading\n\nOne, `a. B`. Two\nand\n- a [link](x.md). **Three** goes on\n  here\n\n| cell. Four | five |\n"
        "|---|--:|\n```\nno. Code\n```\n<!-- report: a -->\n\nmade. By a tool\n\n<!-- end -->\n1. six"
    )
    assert [sentences(block) for block in blocks(text)] == [
        ["One, Code.", "Two and"],
        ["a link.", "Three goes on here"],
        ["cell.", "Four"],
        ["five"],
        ["six"],
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, part = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        if part:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert part in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads], link


def test_changelog_and_citation_are_of_this_version():
    changelog, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    assert re.search(r"^## \[(.*?)\]", changelog, re.MULTILINE)[1] == foveate.__version__
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == foveate.__version__


def test_every_task_has_its_files_explained(tmp_path):
    """By the page on data, which every error names, and by the error: format and public source."""
    page = (ROOT / "docs" / "guide" / "data.md").read_text(encoding="utf-8")
    for name in tasks.names():
        for split in tasks.get(name).splits:
            task = tasks.parse(name, split=split)
            try:
                task.files(tmp_path)
            except DataError as error:
                message = str(error)
                assert "docs/guide/data.md" in message, message
                assert "source: " in message, message
                assert (named := re.search(r"([\w.-]+): no such file", message)) is None or f"`{named[1]}`" in page
            else:
                assert name == "ruler", "needs no file"
        assert f"`{name}`" in page
