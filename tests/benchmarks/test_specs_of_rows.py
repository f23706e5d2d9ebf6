"""Every committed row names something that can still be measured: a method of today, or what stands in its place."""

import json
import re
from pathlib import Path

import pytest

from foveate.methods.spec import respelled, spelled

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))

LIBRARIES = re.compile(r"sdpa-\w+|flash-attention-\d|transformers-\w+|vllm[\w-]*")
"""Dense attention of others."""
PROGRAMS = re.compile(r"own|h2o_as_published|(kascade|luka)_ablated(:.*)?")
"""Hybrids as they are, and the methods of benchmarks/methods."""
NOW_ABLATED = re.compile(
    r"(kascade|kascade_paper|oracle_topk):.*(remap=false|pooling=pre_softmax).*"
    r"|(luka|luka_paper|mixed|per_layer).*(temperature=|zero_values=|compressor=random|refine=threshold).*"
)
"""Settings that benchmarks/methods have in place of the methods (benchmarks/README.md, Ablations)."""


def specs_of(path):
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    found = {row.get("spec") or (row.get("case") or {}).get("method") for row in rows}
    return sorted(spec for spec in found if isinstance(spec, str))


def obstacle(spec):
    if any(known.fullmatch(spec) for known in (LIBRARIES, PROGRAMS, NOW_ABLATED)):
        return None
    try:
        spelled(respelled(spec))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_rows_name_what_can_be_measured(path):
    assert {spec: why for spec in specs_of(path) if (why := obstacle(spec))} == {}


@pytest.mark.parametrize("spec", ["kascade:dense_last=128", "luka:refine=top_p", "quost", "kascade_ablated2"])
def test_what_cannot_be_measured_is_seen(spec):
    assert obstacle(spec)
