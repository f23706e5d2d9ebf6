"""Short tables of the guide that people wrote: their factors are those of the result files."""

import re

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
        (row["case"]["batch"], row["case"]["tokens"], row["case"]["kv_cache_dtype"]): row
        for row in rows("serving")
        if (row["case"]["method"], row["case"]["runner"]) == ("kascade:anchors=10", "v2")
    }
    head = "| requests | vLLM | `kascade` | times as fast | vLLM, fp8 | `kascade`, fp8 | times as fast |"
    table = cells("serve.md", head)
    assert len(table) == 5
    for place, numbers in table.items():
        batch, tokens = map(int, re.match(r"(\d+) × (\d+)K", place).groups())
        found = [served[batch, tokens * 1024, dtype] for dtype in ("auto", "fp8")]
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


def test_of_a_whole_model_of_8b():
    found = {}
    for row in rows("decode"):
        case = row["case"]
        of_it = case["level"] == "model" and case["model"] == "llama-3.1-8b"
        if of_it and case["batch"] == 1 and not case["liger"]:
            found[case["method"], case["context"]] = row
    lines = cells("speed.md", "| factor over `dense` | 2K | 32K | 128K | cache at 128K | peak at 128K |")
    names = [
        "kascade:pool=kv_head,pooling=post_softmax",
        "luka:score=spread",
        "h2o",
        "snapkv",
        "streaming",
        "transformers-sdpa",
    ]
    for factors, name in zip(lines.values(), names, strict=True):
        for said, length in zip(factors, (2048, 32768, 131000), strict=False):
            if said == "not measured":
                assert (name, length) not in found
            elif "¹" not in said:
                row = found[name, length]
                whole = (row["stats"] or {}).get("keys_read_share") == 1 if name != "transformers-sdpa" else False
                assert said == f"{row['speedup']:.2f}" + " (dense)" * whole, (name, length)
