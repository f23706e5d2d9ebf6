"""Defaults that have changed: rows and files from before mean what they meant, and specs are by the defaults of now."""

import json
from pathlib import Path

import pytest

from foveate import methods
from foveate.lab.report.rows import of_cases, read_any, read_bench, spelled
from foveate.lab.results import measurements

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
FORMER = {
    "kascade": "kascade:pool=kv_head,pooling=post_softmax,decode_only=false",
    "kascade:decode_only=true": "kascade:pool=kv_head,pooling=post_softmax",
    "kascade:top_k=0.2,decode_only=true": "kascade:top_k=0.2,pool=kv_head,pooling=post_softmax",
    "kascade:calibration=a.json,pool=layer,pooling=sqrt,decode_only=true": 'kascade:calibration="a.json"',
    "kascade:pool=layer": "kascade:pooling=post_softmax,decode_only=false",
    "kascade:decode_only=true,score_keys=fp8": "kascade:pool=kv_head,pooling=post_softmax,score_keys=fp8",
    "kascade:exact_anchors=false,decode_only=true": (
        "kascade:dense_anchor_prefill=false,pool=kv_head,pooling=post_softmax"
    ),
    "pages": "pages:top_k=0.1",
    "pages:top_k=0.25,page_size=16": "pages:page_size=16",
    "luka:top_k=3,page_size=16": "luka:top_k=3,page_size=16",
    "lined_as_published": "h2o_as_published",
    "transformers-sdpa": "transformers-sdpa",
}
"""Specs by former defaults, and by those of now."""


def test_the_defaults_are_what_is_recommended():
    kascade, paper, pages = (methods.make(name) for name in ("kascade", "kascade_paper", "pages"))
    assert (kascade.pool, kascade.pooling, kascade.decode_only) == ("layer", "sqrt", True)
    assert not kascade.for_layer(1, 28).sparse_prompt
    assert (paper.pool, paper.pooling, paper.decode_only) == ("kv_head", "post_softmax", False)
    assert not paper.dense_anchor_prefill
    assert paper.for_layer(1, 28).sparse_prompt
    assert pages.top_k == 0.25


@pytest.mark.parametrize(("former", "now"), FORMER.items())
def test_specs_are_restated(former, now):
    assert methods.restated(former) == now


def test_where_settings_are_on_record_these_tell():
    spec = "kascade:remap=false"
    by_head = {"pool": "kv_head", "pooling": "post_softmax", "decode_only": True, "remap": False}
    assert methods.restated(spec, by_head) == "kascade:pool=kv_head,pooling=post_softmax,remap=false"
    assert methods.restated(spec, {"remap": False} | methods.make("kascade").settings()) == spec


@pytest.mark.parametrize("file", ["kascade-accuracy.jsonl", "kascade-data-free.jsonl", "pages-accuracy.jsonl"])
def test_labels_of_old_rows_have_their_settings(file):
    """The spec that a row is labelled with makes the method whose settings the row records, and no other."""
    rows = [json.loads(line) for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()]
    seen = 0
    for old in rows:
        label = spelled(old)["spec"]
        if old["method"] not in ("kascade", "pages"):
            continue
        name, given = label.partition(":")[0], methods.spec._split(label.partition(":")[2], label)
        defaults = {key: methods.make(name).settings().get(key) for key in methods.get(name).former_defaults}
        for key, default in defaults.items():
            assert given.get(key, default) == old["settings"][key], (label, key)
            seen += 1
    assert seen > 50


@pytest.mark.parametrize("file", ["decode.jsonl", "prefill.jsonl", "serving.jsonl", "cpu-decode.jsonl"])
def test_cases_of_old_benches_are_by_the_defaults_of_now(file):
    raw = [json.loads(line) for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()]
    rows = read_any(RESULTS / file)
    for old, now in zip(raw, rows, strict=True):
        assert "schema" not in old
        assert now["case"] == old["case"] | {"method": methods.restated(old["case"]["method"])}
    assert of_cases(rows, []) == rows == of_cases(raw, [])


def test_new_rows_of_a_bench_are_by_their_own_defaults(tmp_path):
    """And stand beside old ones of the same words, which mean another method."""
    out = tmp_path / "rows.jsonl"

    def row(method):
        return measurements.speed_row(
            "decode", {"method": method, "context": 9}, "cpu", 1.0, ("dense", 2.0), peak_bytes=1
        )

    old = {name: value for name, value in row("kascade").items() if name != "schema"}
    measurements.write(out, [old])
    measurements.write(out, [row("kascade")])
    found = [one["case"]["method"] for one in read_bench([out], "decode")]
    assert found == ["kascade:pool=kv_head,pooling=post_softmax,decode_only=false", "kascade"]
    measurements.write(out, [row("kascade:pool=kv_head,pooling=post_softmax,decode_only=false")])
    assert [one["case"]["method"] for one in read_bench([out], "decode")] == ["kascade", found[0]]


def test_a_setting_of_an_older_tune_is_what_it_was(tmp_path):
    path = tmp_path / "foveate.json"
    for schema, spec in ((1, "pages:top_k=0.1"), (2, "pages")):
        facts = {"architecture": {}, "objective": "bytes", "max_loss": 1.0, "measured": {}}
        found = {"kind": "foveate_setting", "schema": schema, "method": "pages"} | facts
        path.write_text(json.dumps(found), encoding="utf-8")
        assert methods.make(str(path)).spec == spec
