"""Short tables of the guide that people wrote: their factors are those of the result files."""

import re

import pytest

from benchmarks.readme_figures import ROOT, rows

GUIDE = ROOT / "docs" / "guide"


def cells(page, head):
    """The lines of the table below a head, by their first cell."""
    lines = (GUIDE / page).read_text(encoding="utf-8").split(f"{head}\n", 1)[1].splitlines()[1:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]
    return {first: rest for first, *rest in found}


def test_of_serving():
    served = {
        (*(row["case"][name] for name in ("batch", "tokens", "kv_cache_dtype")), row["case"].get("ranks", 1)): row
        for row in rows("serving")
        if (row["case"]["method"], row["case"]["runner"]) == ("kascade:anchors=10", "v2")
    }
    own, ours = ("vLLM", "`kascade`", "times as fast"), ("vLLM, fp8", "`kascade`, fp8", "times as fast")
    for columns, number, engines in (
        ((*own, *ours), 5, [("auto", 1), ("fp8", 1)]),
        (own, 6, [("auto", 2)]),  # over two GPUs
    ):
        table = cells("serve.md", f"| requests | {' | '.join(columns)} |")
        assert len(table) == number
        for place, numbers in table.items():
            batch, tokens = map(int, re.match(r"(\d+) × (\d+)K", place).groups())
            found = [served[(batch, tokens * 1024, *engine)] for engine in engines]
            fields = ("baseline_ms", "ms", "speedup")
            assert numbers == [f"{row[field]:.2f}" for row in found for field in fields], place


def test_of_prompts():
    found = {
        (row["case"]["method"], row["case"]["context"]): row
        for row in rows("prefill")
        if row["case"].get("level") == "kernel"  # measured twice: the later row
    }
    lines = cells("costs.md", "| attention of a layer | 8K tokens | 32K | 128K |")
    paper = "pool=kv_head,pooling=post_softmax,decode_only=false"
    methods = [f"kascade:{paper}", f"kascade:top_k=0.2,{paper}", "streaming", "h2o"]
    for factors, method in zip(lines.values(), methods, strict=True):
        assert factors == [f"{found[method, length]['speedup']:.2f}" for length in (8192, 32768, 131072)], method


def test_of_attention_alone():
    found = {
        (row["case"]["method"], row["case"]["context"], row["case"]["batch"]): row["speedup"]
        for row in rows("recommended-times")
        if row["case"]["level"] == "kernel"
    }
    head = "| you want | method | points | attention: 1 × 32K, 1 × 128K, 64 × 128K | memory |"
    table = {name: factors for name, _, factors, _ in cells("choose.md", head).values()}
    for said, method in (("`kascade`, ten anchors", "kascade:anchors=10"), ("`pages`", "pages"), ("`luka`", "luka")):
        places = ((1024 * 32, 1), (1024 * 128, 1), (1024 * 128, 64))
        assert table[said] == ", ".join(f"{found[(method, *place)]:.1f}" for place in places)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-coder-1.5b-instruct"])
def test_of_a_dense_step(model):
    steps = [row for row in rows("recommended-times") if row["case"].get("model") == model]
    found, plain = (
        {(row["case"]["batch"], row["case"]["context"]): row for row in steps if row["case"]["method"] == method}
        for method in ("dense", "transformers-sdpa")
    )
    page = " ".join((GUIDE / "speed.md").read_text(encoding="utf-8").split())
    made = [
        (int(batch), int(number.replace(",", "")) * (1024 if k else 1))
        for batch, number, k in re.findall(rf"\| {re.escape(model)}, whole steps, (\d+) × ([\d,]+)(K?)", page)
    ]
    assert set(made) == found.keys()
    *first, last = (f"{found[place]['ms']:.1f}" for place in made)
    assert f"`dense` take {', '.join(first)} and {last} ms" in page
    if plain:
        longer = [plain[place]["ms"] / found[place]["ms"] for place in made]
        assert f"without CUDA graphs, takes {min(longer):.0f} to {max(longer):.0f} times as long" in page
