"""The table of the papers' tables and figures: it has all of them, and every line a verdict and rows that exist."""

import re
from pathlib import Path

import pytest

from benchmarks import paper_table

ROOT = Path(__file__).resolve().parents[2]
LINES = [line for own in paper_table.lines().values() for line in own]
PAPERS = {  # tables, figures
    "LuKA": (1, 6),
    "StreamIndex": (7, 3),
    "Kascade": (3, 8),
    "laLTE, laNSA": (3, 6),
}


def numbers(text):
    return [float(one) for one in re.findall(r"(?<![\d.])\d+\.\d+", text)]


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_has_a_line(paper):
    found = {"table": set(), "figure": set()}
    for line in paper_table.lines()[paper]:
        for kind, which in re.findall(r"(table|figure)s? ((?:\d[abc]?(?:, )?)+)", line.item.partition(":")[0]):
            found[kind] |= {int(one) for one in re.findall(r"\d", which)}
    tables, figures = PAPERS[paper]
    assert found == {"table": set(range(1, tables + 1)), "figure": set(range(1, figures + 1))}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.item)
def test_a_line_has_a_verdict_and_rows_that_exist(line):
    verdicts = re.findall(r"\*(.*?)\*", line.verdict)
    assert verdicts
    assert set(verdicts) <= set(paper_table.VERDICTS)
    assert line.verdict.startswith("*")
    if line.ours in paper_table.OURS:
        path = ROOT / line.file if "/" in line.file else paper_table.RESULTS / f"{line.file}.jsonl"
        assert path.exists()
        assert line.command
    else:
        assert verdicts[0] == "not run because" or line.ours.startswith("[")
    if line.command.endswith(".sh"):
        assert (ROOT / "benchmarks" / line.command).exists()
    elif line.command.startswith("python"):
        name = line.command.partition(" --")[0].split()[-1].removesuffix(".py").replace(".", "/")
        assert (ROOT / f"{name}.py").exists()


def test_every_value_is_shown():
    assert sorted(line.ours for line in LINES if line.ours in paper_table.OURS) == sorted(paper_table.OURS)


@pytest.mark.parametrize(("name", "cells", "slower"), [("decode", 21, []), ("prompts", 24, [0, 1, 18])])
def test_what_surpasses_a_speed_is_faster(name, cells, slower):
    (line,) = [line for line in LINES if line.ours == name]
    ours, theirs = (numbers(text) for text in (paper_table.OURS[name](), line.theirs))
    theirs += theirs[::3] if name == "prompts" else []  # anchors by their own choice, a tenth
    assert len(theirs) == len(ours) == cells
    assert [at for at in range(cells) if ours[at] < theirs[at]] == slower


def test_a_setting_of_a_line_matters():
    assert paper_table.OURS["clustered, text"]() != paper_table.OURS["clustered, code"]()
    assert paper_table.OURS["mapped"]() != paper_table.OURS["unmapped"]()


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "papers" / "README.md").read_text(encoding="utf-8")
    assert all(f"| {line.item} |" in page for line in LINES)


def test_parts_of_a_step_are_a_steps_share(monkeypatch):
    """Refining is what a step takes more than one that refines nothing; layers share finding the pages."""

    def row(method, ms):
        kind = {"layers": 28, "ms": ms, "upkeep_ms": 0.002, "shared_upkeep_ms": 0.0084}
        return {"case": {"method": method}, "ms": ms, "layers": {"luka": kind}, "baseline_ms": 0.0101}

    plain = [f"luka:page_size={size},top_k=0,score=summary,prior=0.0" for size in (16, 32)]
    refining = ["luka", "luka:page_size=16,top_k=3,score=summary,prior=0.0", "luka_paper"]
    alone = [row(method, 0.005) for method in (*plain, "luka_paper:top_k=0")]
    rows = [*alone, *(row(method, 0.0085) for method in refining)]
    monkeypatch.setattr(paper_table, "_some", lambda file, **asked: rows)
    found = paper_table.OURS["step, LuKA"]()
    assert found.startswith("dense 10.1; `luka` 5.0, 3.5, 0.3, 2.0; ")
    assert found.count("5.0, 3.5, 0.3, 2.0") == 3
    rows.clear()
    assert paper_table.OURS["step, LuKA"]() == ""


def test_whole_layers_are_beside_the_windows(monkeypatch):
    def row(what, context, ms, commit="a"):
        more = {"without_scores_ms": 0.75 * ms, "kernels_ms": ms / 2}
        return {"case": {"what": what, "context": context}, "ms": ms, "commit": commit} | more

    sizes = {"lte": (2.0, 3.0), "swa": (1.0, 4.0), "attn": (0.5, 6.0)}
    rows = [row(what, context, ms) for what, both in sizes.items() for context, ms in zip((1024, 4096), both)]
    rows.append(row("swa", 1024, 9.0, commit="b"))  # a later run without LTE
    monkeypatch.setattr(paper_table, "_some", lambda file, **asked: rows)
    assert paper_table.OURS["layers, prompt"]() == (
        "1K 2.00×, 25 % scores, full attention 0.50×; 4K 0.75×, 25 % scores, full attention 1.50×"
    )
    assert paper_table.OURS["layers, step"]() == "1K 2.00×, kernels 2.00×; 4K 0.75×, kernels 0.75×"
    rows.clear()
    assert paper_table.OURS["layers, prompt"]() == ""


def test_needles_without_rulers_wording_are_single_and_far(monkeypatch):
    def row(preset, score, split="niah_single_2", **settings):
        case = {"task": "ruler", "split": split, "task_settings": settings}
        return case | {"model": f"{preset}_plain-27M-0", "score": score}

    rows = [row(preset, score, beyond=400) for preset in ("lalte", "gdn", "gdn_attn") for score in (1.0, 2.0)]
    rows += [row("gdn", 90.0), row("gdn", 80.0, "niah_multikey_1", beyond=400)]
    monkeypatch.setattr(paper_table, "_rows", lambda file: rows)
    assert paper_table.OURS["needles, plain"]() == "lalte 1.5, gdn 1.5, gdn_attn 1.5"


def test_seeds_are_shown_in_order_and_with_their_mean(monkeypatch):
    """Of single needles alone; a preset whose name begins with another's is its own."""

    def row(model, score, split="niah_single_1", task="ruler", method="own"):
        return {"model": model, "task": task, "split": split, "score": score, "method": method}

    rows = [row("lte_lesson-27M-1", 90.0), row("lte_lesson-27M-0", 80.0)]
    rows += [row("lte_lesson-27M-0", 60.0, "niah_single_3"), row("lte_lesson-27M-0", 1.0, "niah_multikey_1")]
    rows += [row("lte_lesson-27M-0", 2.0, "books", "mqar"), row("lte_mlp_lesson-27M-0", 50.0)]
    rows += [row("lte_mlp_lesson-27M-0", 3.0, method="tova")]
    monkeypatch.setattr(paper_table, "_rows", lambda file: rows)
    assert paper_table._of_seeds("lte_mlp_lesson") == "50.0"
    assert paper_table._of_seeds("lte_lesson") == "80.0 (70.0, 90.0)"
