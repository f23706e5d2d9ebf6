"""Rows of kascade with score_keys, which kascade_pages has replaced: files keep them, and tables respell them."""

import json

import pytest

from foveate import methods
from foveate.lab.report.rows import chosen, of_cases, read, read_bench, spelled
from foveate.lab.results.earlier import as_now
from foveate.lab.results.resultfile import method_of

PAGES = {"score_keys": "pages", "first_layer": "pages", "page_size": 16, "weighted": False}
EXACT = {"score_keys": "exact", "first_layer": "dense", "page_size": 8, "weighted": True}


def row(spec, name="kascade", **settings):
    made = json.loads(json.dumps(methods.settings_of(methods.make(name, top_k=0.125)))) | settings
    return {"method": name, "spec": spec, "settings": made, "task_settings": {}}


def test_a_row_by_pages_is_one_of_kascade_pages():
    old = row('kascade:top_k=0.125,calibration="a.json",score_keys=pages,first_layer=pages,page_size=16', **PAGES)
    now = spelled(old)
    assert now["spec"] == 'kascade_pages:top_k=0.125,calibration="a.json",first_layer=pages,page_size=16'
    assert now["method"] == "kascade_pages"
    assert method_of(now).spec == "kascade_pages:top_k=0.125,first_layer=pages,page_size=16,weighted=false"
    assert method_of(old) is None
    assert chosen([old, now], [f"spec={now['spec']}"]) == [now]
    assert as_now(now) is now


def test_a_row_that_spells_the_default_out_is_one_of_kascade():
    old = row("kascade:top_k=0.125", **EXACT)
    assert spelled(old)["spec"] == "kascade:top_k=0.125"
    assert method_of(spelled(old)) == methods.parse("kascade:top_k=0.125")
    assert spelled(row("kascade:top_k=0.125,score_keys=exact", **EXACT))["spec"] == "kascade:top_k=0.125"
    paper = spelled(row("kascade_paper:top_k=0.125", "kascade_paper", **EXACT))
    assert method_of(paper) == methods.parse("kascade_paper:top_k=0.125")


def test_a_row_with_another_setting_that_is_gone_keeps_it():
    old = row("kascade:top_k=0.125,remap=false", **EXACT, remap=False)
    assert spelled(old)["spec"] == old["spec"]
    assert method_of(spelled(old)) is None


def test_the_paper_by_pages_has_the_settings_of_the_paper():
    old = row("kascade_paper:top_k=0.125,score_keys=pages,decode_only=true", "kascade_paper", **PAGES, decode_only=True)
    now = spelled(old)
    assert now["spec"] == "kascade_pages:top_k=0.125,pool=kv_head,pooling=post_softmax"
    sparse = methods.parse(methods.respelled("kascade_paper:score_keys=pages"))
    assert {name: getattr(sparse, name) for name in ("pool", "pooling", "decode_only", "dense_anchor_prefill")} == {
        "pool": "kv_head",
        "pooling": "post_softmax",
        "decode_only": False,
        "dense_anchor_prefill": False,
    }


@pytest.mark.parametrize(
    ("spec", "now"),
    [
        ("kascade:anchors=10,score_keys=pages,weighted=false", "kascade_pages:anchors=10,weighted=false"),
        ("kascade:score_keys=exact,anchors=10", "kascade:anchors=10"),
        ("kascade:score_keys=pages,every=1", "kascade_pages"),
        *(
            (spec, spec)
            for spec in (
                *("kascade:anchors=10", "kascade:score_keys=fp8", "pages:top_k=0.1", "flash-attention-3"),
                *("kascade:score_keys=pages,remap=false", "kascade:score_keys=pages,every=2", "kascade:pages"),
            )
        ),
    ],
)
def test_specs(spec, now, tmp_path):
    assert methods.respelled(spec) == now
    bench = {"bench": "decode", "case": {"method": spec, "context": 8}}
    assert as_now(bench) == {"bench": "decode", "case": {"method": now, "context": 8}}
    assert of_cases([bench], [f"method={now}"]) == [as_now(bench)]


def test_an_earlier_spec_is_refused_with_what_to_write_instead():
    old = "kascade:anchors=10,score_keys=pages,weighted=false"
    with pytest.raises(ValueError, match=r"any more: write kascade_pages:anchors=10,weighted=false$"):
        methods.parse(old)
    with pytest.raises(
        ValueError, match="kascade_paper has no setting 'score_keys' any more: write kascade_pages:dense"
    ):
        methods.make("kascade_paper", score_keys="pages")


def test_files_of_rows_are_read_so(request):
    results = request.config.rootpath / "benchmarks" / "results"
    specs = {one["spec"] for one in read([results / "pages-accuracy.jsonl"])}
    assert 'kascade_pages:top_k=0.125,calibration="divergence.json",first_layer=pages' in specs
    served = {one["case"]["method"] for one in read_bench([results / "serving.jsonl"], "serving")}
    assert "kascade_pages:anchors=10,weighted=false" in served
    assert not any("score_keys=pages" in spec for spec in specs | served)


def test_rows_with_a_mean_of_keys_are_methods(request):
    """Their calibrations need not be here: rows have anchors and heads."""
    file = request.config.rootpath / "benchmarks" / "results" / "kascade-accuracy.jsonl"
    rows = [as_now(row) for row in map(json.loads, file.read_text().splitlines()) if "rest" in row["settings"]]
    assert len(rows) == 72
    for one in rows:
        assert methods.make(one["method"], **one["settings"]).rest == "mean"
        assert "rest=mean" in methods.spelled(one["spec"])
        assert one in chosen(rows, [f"spec={one['spec']}"])


def test_rows_without_a_method_stay_as_they_are():
    curve = {"kind": "hybrid-curves", "model": "lalte-27M-0"}
    assert as_now(curve) is curve
