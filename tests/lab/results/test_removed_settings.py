"""Settings of Kascade and of the methods by pages that are gone: specs refuse them, rows that record them are read.

Former names of a method and of a setting: specs and rows may use both.
"""

import json
from pathlib import Path

import pytest

from benchmarks import tables
from foveate import methods
from foveate.lab.report.rows import chosen, spelled
from foveate.lab.results.resultfile import method_of

ROOT = Path(__file__).resolve().parents[3]
BY_MASS = {"top_p": (1.0, 0.95)}
BY_HEAD = "pool=kv_head,pooling=post_softmax"
"""What Kascade was by default when the rows were measured."""
PAGES = {"min_k": (128, 64)}
RECORDED = {
    "kascade": {**BY_MASS, "remap": (True, False), "rank": (2, 1)},
    "oracle_topk": BY_MASS,
    "pages": {
        **{**PAGES, "score": ("lowrank", "bound"), "dense_layers": (0, 1)},
        **{"sinks": (4, 0), "window": (16, 1), "pool": ("kv_head", "layer")},
    },
    "quest": {**PAGES, "min_pages": (3, 1), "pool": ("head", "kv_head")},
    "locks": {**PAGES, "sink_pages": (1, 0), "window_pages": (1, 2), "dense_layers": (0, 2)},
}
"""By method: settings that rows have, their values without effect, and others."""
RECORDED_WHERE_USED = {
    name: {"score_queries": 0.25, "tile_pooling": "max", "dense_last": 128, "window": 64}
    for name in ("kascade", "oracle_topk")
}
VALUES = {"pooling": ("pre_softmax", "post_softmax, sqrt"), "score_keys": ("fp8", "exact, pages")}
"""Settings of Kascade that are left, values that are gone, and those that are allowed."""


def each(settings):
    return [(name, setting, value) for name, of in settings.items() for setting, value in of.items()]


def row(method, **settings):
    pieces = ",".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    made = {**json.loads(json.dumps(methods.make(method).settings())), **settings}
    return {"method": method, "spec": f"{method}:{pieces}", "settings": made, "task_settings": {}}


@pytest.mark.parametrize(("name", "setting", "values"), each(RECORDED))
def test_a_setting_without_effect_is_left_out_of_its_row(name, setting, values):
    old = row(name, **{setting: values[0]})
    assert method_of(old) == methods.make(name)
    assert (spelled(old)["spec"], setting in spelled(old)["settings"]) == (name, False)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [*((name, setting, values[1]) for name, setting, values in each(RECORDED)), *each(RECORDED_WHERE_USED)],
)
def test_a_row_that_used_a_setting_stands_as_it_was_written_and_its_spec_is_refused(name, setting, value):
    old = row(name, **{setting: value})
    assert method_of(old) is None
    assert spelled(old) == old
    assert chosen([row("dense"), old, row(name)], [f"spec={old['spec']}"]) == [row("dense"), old]
    with pytest.raises(ValueError, match=f"{name} has no setting {setting!r}"):
        methods.parse(old["spec"])


def test_a_row_that_lacks_a_setting_or_has_it_otherwise_is_of_no_method():
    old = row("pages", top_k=77)
    assert method_of(old).top_k == 77
    del old["settings"]["top_k"]
    assert method_of(old) is None
    assert spelled(old) == old


@pytest.mark.parametrize(("setting", "value", "allowed"), [(name, *values) for name, values in VALUES.items()])
def test_the_same_of_a_value_that_is_gone(setting, value, allowed):
    old = row("kascade", **{setting: value})
    assert spelled(old) == old
    with pytest.raises(ValueError, match=f"kascade: {setting} must be one of {allowed}, not {value!r}"):
        methods.parse(f"kascade:{setting}={value}")


@pytest.mark.parametrize(
    ("mark", "spec"),
    [
        (
            "kascade-accuracy.jsonl summary task=2wiki split=dev length=1202",
            'kascade:pool=kv_head,pooling=post_softmax,calibration="divergence.json",remap=false',
        ),
        (
            "kascade-accuracy.jsonl differences task=2wiki split=dev length=1202",
            'kascade:pooling=pre_softmax,decode_only=false,calibration="divergence.json"',
        ),
        (
            "kascade-accuracy.jsonl task=2wiki split=dev length=1202",
            'kascade:top_k=0.2,pooling=post_softmax,calibration="divergence.json",top_p=0.95',
        ),
        (
            "prefill.jsonl prefill-layers level=kernel context=131072",
            f"kascade:{BY_HEAD},decode_only=false,score_queries=0.25",
        ),
        ("decode.jsonl decode-speedups level=kernel context=131072", f"kascade:{BY_HEAD},score_keys=fp8"),
        ("pages-accuracy.jsonl summary task=hotpotqa", "pages:top_k=0.125"),
        ("pages-accuracy.jsonl summary task=hotpotqa", "quest:top_k=0.125"),
        ("pages-accuracy.jsonl summary task=hotpotqa", "locks:top_k=0.125"),
    ],
)
def test_tables_have_the_rows_of_the_result_files(mark, spec):
    file, *words = mark.split()
    name = "method" if {"prefill.jsonl", "decode.jsonl"} & {file} else "spec"
    table = tables.marked([f"benchmarks/results/{file}", *words, f"{name}={spec}"], ROOT)
    assert f"`{spec}`" in table


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("lined_as_published:window=9", "h2o_as_published:window=9"),
        ("kascade:exact_anchors=false,tile=7", "kascade:tile=7,dense_anchor_prefill=false"),
        ('mixed:lined="lined_as_published:top_k=9"', 'mixed:lined="h2o_as_published:top_k=9"'),
    ],
)
def test_former_names_are_read_in_specs_and_rows(former, present):
    method = methods.parse(present)
    assert methods.parse(former) == method
    settings = json.loads(json.dumps(method.settings()))
    if "lined" in settings:
        settings["lined"]["method"] = "lined_as_published"
    settings = {"exact_anchors" if name == "dense_anchor_prefill" else name: x for name, x in settings.items()}
    old = row("dense") | {"method": former.partition(":")[0], "spec": former, "settings": settings}
    assert method_of(old) == method
    now = spelled(old)
    assert (now["method"], now["spec"], "exact_anchors" in now["settings"]) == (method.name, method.spec, False)
    for spec in (former, present):
        assert chosen([row("dense"), now], [f"spec={spec}"]) == [row("dense"), now]


def test_former_names_are_not_listed_and_a_setting_is_given_once():
    assert "lined_as_published" not in methods.names()
    with pytest.raises(ValueError, match="dense_anchor_prefill is given twice, as false and as true"):
        methods.parse("kascade:exact_anchors=false,dense_anchor_prefill=true")
    assert methods.make("kascade", exact_anchors=False) == methods.make("kascade", dense_anchor_prefill=False)


def test_a_bench_row_with_a_former_name_is_found_by_either():
    words = ["benchmarks/results/prefill.jsonl", "prefill-layers", "level=kernel", "context=131072"]
    for name in ("exact_anchors", "dense_anchor_prefill"):
        method = f"kascade:{{}}=false,{BY_HEAD},decode_only=false"
        marked = tables.marked([*words, f"method={method.format(name)}"], ROOT)
        assert f"`{method.format('dense_anchor_prefill')}`" in marked


def test_kascade_beside_its_paper_has_the_rows_of_fp8_keys():
    words = ["benchmarks/results/decode.jsonl", "decode-kascade", "context=131072", "method=flash-attention-3"]
    table = tables.marked([*words, f"method=kascade:{BY_HEAD},score_keys=fp8"], ROOT)
    assert "10 %, chosen by fp8 keys (recall 0.979)" in table
