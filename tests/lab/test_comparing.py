"""`lab.compare` on a model in memory gives the rows of `foveate compare`, and answers by item."""

import numpy as np
import pytest

import foveate
from foveate import lab
from foveate.errors import UserError
from foveate.integrations.transformers import loading
from foveate.lab.evaluation import runner, tasks
from foveate.lab.report.plots import figure
from foveate.lab.report.plots.frontier import frontier
from foveate.lab.report.rows import read

SPECS = ["h2o:top_k=8,window=8", "luka:page_size=4,tail=8", "luka:page_size=8,tail=8"]
COSTS = ("prefill_ms", "decode_ms_per_token", "request_ms", "peak_bytes", "commit", "command", "run")


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    return loading.load_model(tiny_folder, "float32", "cpu"), loading.load_tokenizer(tiny_folder)


@pytest.fixture
def asked(sample):
    return lab.task("perplexity:continuation=12", sample, length=60)


def test_rows_are_those_of_the_command(loaded, asked, sample, tiny_folder, tmp_path):
    found = lab.compare(*loaded, asked, SPECS, limit=3, batch_size=2, out=tmp_path / "memory.jsonl")
    methods, _ = runner.parse_methods(SPECS)
    task = tasks.parse("perplexity:continuation=12", length=60)
    plan = runner.Comparison(tiny_folder, task, sample, methods, 3, tmp_path / "folder.jsonl", batch_size=2)
    expected = runner.run(runner.prepare(plan))
    assert len(found.rows) == len(expected) == 4
    for one, other in zip(found.rows, expected):
        assert {name: x for name, x in one.items() if name not in COSTS} == {
            name: x for name, x in other.items() if name not in COSTS
        }
        differ = {name for name in one["run"] if one["run"][name] != other["run"][name]}
        assert differ == {"weights"}
    assert read([tmp_path / "memory.jsonl"])[1]["command"].startswith(
        "lab.compare(model, tokenizer, lab.task('perplexity:"
    )
    again = lab.compare(*loaded, asked, SPECS, limit=3, batch_size=2, out=tmp_path / "memory.jsonl")
    assert again.rows == found.rows
    assert again.items() == [], "nothing was left to answer"


def test_a_bound_makes_short_contexts_dense(loaded, sample):
    asked = lab.task("wikisalad:max_new_tokens=4", sample)
    spec = "kascade:top_k=8,min_k=1,anchors=1"
    rows = [lab.compare(*loaded, asked, [spec], limit=1, dense_below=bound).row(spec) for bound in (0, 10**6)]
    assert [row["dense_steps"] > 0 for row in rows] == [False, True]
    assert rows[1]["command"].endswith("dense_below=1000000)")


def test_methods_are_compared_item_by_item(loaded, asked):
    done = []
    run = lab.compare(*loaded, asked, SPECS, limit=3, progress=lambda method, items: done.append((method, items)))
    assert sum(items for _, items in done) == 4 * 3
    pair = run.difference(SPECS[0])
    row = run.row("h2o")
    assert (pair.value, pair.low, pair.high) == (row["diff_to_dense"], row["diff_low"], row["diff_high"])
    between = run.difference(SPECS[1], SPECS[2])
    assert between.value == pytest.approx(run.row(SPECS[1])["score"] - run.row(SPECS[2])["score"])
    assert run.row(foveate.methods.parse(SPECS[1])) is run.row(SPECS[1])
    lines = run.items()
    assert [line["item"] for line in lines[:3]] == [line["item"] for line in lines[3:6]]
    assert {line["method"] for line in lines} == {"dense", *SPECS}
    frame = run.frame()
    assert len(frame) == 12
    assert frame.groupby("method").keys_read_share.mean()["dense"] == 1.0
    assert str(run).splitlines()[0].startswith("perplexity, n = 3")


def test_a_file_of_ones_own_and_a_saved_run(loaded, doors, tmp_path):
    run = lab.compare(*loaded, lab.documents(doors, max_new_tokens=4, length=512), ["streaming:window=20"], limit=2)
    assert run.rows[0]["task"] == "documents"
    run.save(tmp_path / "rows.jsonl")
    assert [row["spec"] for row in read([tmp_path / "rows.jsonl"])] == ["dense", "streaming:window=20"]
    with pytest.raises(UserError, match="is there already; choose another name"):
        run.save(tmp_path / "rows.jsonl")


def test_recall_tells_which_layer_misses_what(loaded, asked, doors):
    """Dense attention reads all; what evicts little of the attention holds more of it than what evicts much."""
    small, large = "streaming:window=8,sinks=2", "streaming:window=60"
    run = lab.compare(*loaded, lab.documents(doors, max_new_tokens=6, length=512), [small, large], limit=3, recall=2)
    assert run.recall("dense") == pytest.approx({0: 1.0, 1: 1.0}, abs=1e-3)
    little, much = run.recall(small), run.recall(large)
    assert all(0 < little[layer] < much[layer] < 1 for layer in (0, 1))
    lines = [line for line in run.items() if line["method"] == large]
    assert sum(line["recall"] for line in lines[:2]) / 2 == pytest.approx(sum(much.values()) / 2)
    assert "recall" not in lines[2]
    with pytest.raises(UserError, match="no recall was measured: compare with recall=4"):
        lab.compare(*loaded, asked, [], limit=1).recall("dense")
    with pytest.raises(UserError, match="recall is measured on answers that are generated, and those of task 'perpl"):
        lab.compare(*loaded, asked, [], limit=1, recall=1)
    with pytest.raises(UserError, match="recall must be a number of items, or 0"):
        lab.compare(*loaded, asked, [], limit=1, recall=-1)


def test_a_run_is_drawn_as_its_rows_are(loaded, asked, tmp_path, coarse):
    """A frontier is the picture that `foveate plot frontier` draws of the saved rows, byte for byte."""
    run = lab.compare(*loaded, asked, ["h2o:top_k=8,window=8", "h2o:top_k=20,window=8", "uniform:top_k=8"], limit=2)
    assert run.plot("frontier", tmp_path / "run.png") == []
    run.save(tmp_path / "rows.jsonl")
    frontier(read([tmp_path / "rows.jsonl"]), tmp_path / "rows.png")
    assert (tmp_path / "run.png").read_bytes() == (tmp_path / "rows.png").read_bytes()
    run.plot("frontier", tmp_path / "bytes.png", against="kv_bytes_per_step")
    assert (tmp_path / "bytes.png").read_bytes() != (tmp_path / "run.png").read_bytes()
    wrong = {
        ("frontiers", "run.png"): r"run.plot: unknown kind of plot 'frontiers'. Did you mean 'frontier'\? Allowed: "
        "frontier, recall",
        ("frontier", "run.pdf"): r"run\.pdf: plots are PNG files, so the name must end in \.png",
        ("recall", "run.png"): "no recall was measured: compare with recall=4",
    }
    for (kind, name), message in wrong.items():
        with pytest.raises(UserError, match=message):
            run.plot(kind, tmp_path / name)
    with pytest.raises(UserError, match="against must be left out of a plot of kind recall, got kv_bytes_per_step"):
        run.plot("recall", tmp_path / "run.png", against="kv_bytes_per_step")
    with pytest.raises(UserError, match=r"unknown field 'keys'\..*Allowed: keys_read_share, kv_bytes_per_step"):
        run.plot("frontier", tmp_path / "run.png", against="keys")


def test_recall_is_drawn_by_layer_and_method(loaded, doors, tmp_path, coarse, pages_of):
    small = "streaming:sinks=2,window=8"
    run = lab.compare(*loaded, lab.documents(doors, max_new_tokens=6, length=512), [small], limit=2, recall=1)
    pages = pages_of(figure)
    assert run.plot("recall", tmp_path / "recall.png") == []
    axis, colours = pages[0].axes
    assert pages[0].get_suptitle().endswith("n = 2, recall of the first 1")
    del run.rows[0]["recall"]
    assert run.plot("recall", tmp_path / "recall.png") == ["dense: no recall was measured, not drawn"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["dense", small]
    cells = axis.images[0].get_array()
    assert cells.shape == (2, 2)
    assert cells[1].tolist() == pytest.approx([100 * share for share in run.recall(small).values()])
    assert colours.get_ylabel() == "recall, %"


def test_a_sweep_gives_a_spec_for_each_value(loaded, asked):
    assert lab.sweep("snapkv", top_k=[0.1, 0.25, 0.5]) == [f"snapkv:top_k={share}" for share in (0.1, 0.25, 0.5)]
    assert lab.sweep("snapkv:window=16", top_k=np.array([0.1, 0.5])) == [
        "snapkv:top_k=0.1,window=16",
        "snapkv:top_k=0.5,window=16",
    ]
    both = lab.sweep("h2o", window=range(8, 10), top_k=[8, 8.0 / 16])
    assert both == [f"h2o:top_k={top_k},window={window}" for window in (8, 9) for top_k in (8, 0.5)]
    assert lab.sweep("kascade", anchors=[(0,), (0, 1)]) == ["kascade:anchors=[0]", "kascade:anchors=[0, 1]"]
    assert lab.sweep("snapkv", top_k=[0.125, 0.125]) == ["snapkv"], "a default is not written, and no spec repeated"
    assert lab.sweep(foveate.methods.parse("h2o:window=8"), top_k=4) == ["h2o:top_k=4,window=8"]
    run = lab.compare(*loaded, asked, lab.sweep("h2o:window=8", top_k=[8, 16]), limit=1)
    assert [row["spec"] for row in run.rows] == ["dense", "h2o:top_k=8,window=8", "h2o:top_k=16,window=8"]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("snapkw", {"top_k": [1]}, r"unknown method 'snapkw' \(did you mean 'snapkv'\?\)"),
        ("snapkv", {"topk": [1]}, r"snapkv has no setting 'topk' \(did you mean 'top_k'\?\)"),
        ("snapkv", {"top_k": [0.1, 1.5]}, r"top_k.*1\.5"),
        ("snapkv", {"top_k": []}, r"top_k must have at least one value to sweep, got \[\]"),
        ("snapkv", {"top_k": ["x"]}, "top_k"),
    ],
)
def test_a_sweep_refuses_what_no_method_takes(method, settings, message):
    with pytest.raises(UserError, match=message):
        lab.sweep(method, **settings)


def test_mistakes_are_told_before_an_item_is_answered(loaded, asked):
    model, tokenizer = loaded
    with pytest.raises(UserError, match="unknown method 'h2p'"):
        lab.compare(model, tokenizer, asked, ["h2p"], limit=2)
    with pytest.raises(UserError, match="task 'niah' reads files: give their folder as data"):
        lab.task("niah")
    run = lab.compare(model, tokenizer, asked, SPECS, limit=2)
    with pytest.raises(UserError, match="luka is more than one of what was compared: dense, h2o"):
        run.row("luka")
    with pytest.raises(UserError, match="snapkv is not of what was compared"):
        run.difference("snapkv")
    with pytest.raises(UserError, match=r"metric must be one of .*, not 'f2'"):
        run.difference("h2o", metric="f2")
    foveate.attach(model, "dense")
    try:
        with pytest.raises(UserError, match="the model has a method already"):
            lab.compare(model, tokenizer, asked, SPECS)
    finally:
        foveate.detach(model)
