import dataclasses
import itertools
import json
import shlex
import sys

import pytest
from safetensors.torch import load_file, save_file

import foveate
from foveate.calibration import Calibration
from foveate.errors import DataError, UserError
from foveate.integrations.transformers import loading
from foveate.integrations.transformers.facts import kv_heads, model_facts
from foveate.integrations.transformers.graphs import Graphs
from foveate.lab.evaluation import generation, runner, tasks
from foveate.lab.evaluation.tasks.fidelity import Fidelity
from foveate.lab.recorded import record
from foveate.lab.results import resultfile
from foveate.lab.results.rows import ROW_FIELDS
from tests import tiny
from tests.helpers import ONE_OF_EACH

SPECS = ["h2o:top_k=8,window=8", "luka:page_size=4,tail=8"]
COSTS = ("prefill_ms", "decode_ms_per_token", "request_ms", "peak_bytes", "commit")
SHARED = ("timing", "peak_kind", "command")
"""What tells, beside the costs, whether a row's prompts were shared."""


@pytest.fixture
def plan(tiny_folder, sample, tmp_path):
    methods, _ = runner.parse_methods(SPECS)
    task = tasks.parse("perplexity:continuation=12", length=60)
    return runner.Comparison(tiny_folder, task, sample, methods, limit=5, out=tmp_path / "rows.jsonl", batch_size=2)


def without_costs(rows, *more):
    return [{key: value for key, value in row.items() if key not in (*COSTS, *more)} for row in rows]


class StoppedError(Exception):
    pass


def stop_after(calls):
    """A progress callback that ends the run after a number of batches, as a kill would."""
    left = [calls]

    def progress(method, items):
        left[0] -= 1
        if not left[0]:
            raise StoppedError

    return progress


def test_a_row_names_the_shipped_calibration_that_was_used(plan, tmp_path, monkeypatch):
    """Also where it is asked for a second time by its name, and when the run goes on."""
    model = loading.load_model(plan.model, "float32", "cpu")
    layers = {number: layer.self_attn for number, layer in enumerate(model.model.layers)}
    heads = {str(number): [0] * kv_heads(model.config) for number in list(layers)[1:]}
    (shipped := tmp_path / "shipped").mkdir()
    Calibration(model_facts(model.config, layers), (0,), heads).write(shipped / "tiny.json")
    monkeypatch.setattr("foveate.calibration.artefact.SHIPPED", shipped)
    specs = ["kascade:decode_only=true,top_k=9", 'kascade:top_k=9,calibration="shipped:tiny"']
    plan = dataclasses.replace(plan, methods=runner.parse_methods(specs)[0])
    with pytest.warns(UserWarning, match="kascade: 1 anchors of calibration 'shipped:tiny'"):
        rows = runner.run(runner.prepare(plan))
    assert [row["spec"] for row in rows] == ["dense", 'kascade:top_k=9,calibration="shipped:tiny"']
    assert (rows[1]["settings"]["anchors"], rows[1]["settings"]["calibration"]) == ((0,), "shipped:tiny")
    assert not runner.prepare(plan).missing


def test_rows_say_what_happened(plan):
    prepared = runner.prepare(plan)
    rows = runner.run(prepared)
    assert [json.loads(line) for line in plan.out.read_text(encoding="utf-8").splitlines()] == rows
    assert [row["spec"] for row in rows] == ["dense", *SPECS]
    dense, h2o, luka = rows
    for row in rows:
        assert list(row) == list(ROW_FIELDS)
        assert row["model"] == "tiny-llama"
        assert (row["task"], row["split"], row["length"], row["n"], row["limit"]) == ("perplexity", "books", 60, 5, 5)
        assert 0 <= row["low"] <= row["score"] <= row["high"] <= 100
        assert list(row["metrics"]) == ["inverse_perplexity", "perplexity", "nll", "bits_per_byte"]
        assert row["score"] == row["metrics"]["inverse_perplexity"]["value"]
        assert row["score"] == pytest.approx(100 / row["metrics"]["perplexity"]["value"])
        assert row["diff_to_dense"] == pytest.approx(row["score"] - row["dense_score"])
        assert row["diff_low"] <= row["diff_to_dense"] <= row["diff_high"]
        assert row["dense_score"] == dense["score"]
        assert row["decode_steps"] == 3 * 11  # batches times the continuation's steps after its first token
        assert len(row["examples"]) == 5
        assert row["prefill_ms"] is None
        assert row["timing"] == "teacher-forced, shared prompt"
        assert row["peak_bytes"] > 0
        assert row["peak_kind"].endswith(", shared prompt")
        words = shlex.split(row["command"])
        assert [after for word, after in itertools.pairwise(words) if word == "--method"] == (
            ["dense"] if row is dense else ["dense", row["spec"]]
        )
        assert not any("/" in word for word in words)
    assert dense["keys_read_share"] == 1
    assert 0 < h2o["keys_read_share"] < 0.5
    assert 0 < luka["keys_read_share"] < 0.8
    assert h2o["tokens_evicted"] > 0
    assert luka["pages_refined"] > 0
    assert h2o["item_values"]["nll"] != dense["item_values"]["nll"]
    assert h2o["settings"]["window"] == 8


EVERY = [
    foveate.methods.make(name, **foveate.methods.get(name).about.small_budget)
    for name in foveate.methods.names()
    if name in ONE_OF_EACH
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "some"),
    [("wikisalad:max_new_tokens=6", EVERY[::2]), ("perplexity:length=60,continuation=40", EVERY[1::2])],
)
def test_a_shared_prompt_changes_no_row(plan, tmp_path, task, some):
    methods = (*runner.parse_methods(SPECS)[0], *(method for method in some if method.name != "dense"))
    shared = dataclasses.replace(plan, task=tasks.parse(task), methods=methods, limit=1, batch_size=4)
    single = dataclasses.replace(shared, share_prompt=False, out=tmp_path / "single" / "rows.jsonl")
    rows, alone = runner.run(runner.prepare(shared)), runner.run(runner.prepare(single))
    assert without_costs(rows, *SHARED) == without_costs(alone, *SHARED)
    assert [row["spec"] for row in rows] == [method.spec for method in methods]
    kind = alone[0]["timing"]
    for method, row, own in zip(methods, rows, alone):
        sparse = foveate.methods.sparse_prompt(method.for_layer(0, 2))
        assert row["timing"] == (kind if sparse else f"{kind}, shared prompt")
        assert (row["prefill_ms"] is None) == (not sparse)
        assert own["prefill_ms"] > 0
        assert own["timing"] in ("generate", "teacher-forced")
        assert own["command"] == row["command"] + " --no-share-prompt"


def test_specs_in_the_command_survive_a_shell(plan):
    method = foveate.methods.parse("luka:page_size=[4,8],tail=8")
    row = runner.run(runner.prepare(dataclasses.replace(plan, methods=(plan.methods[0], method), limit=1)))[1]
    words = shlex.split(row["command"])
    assert foveate.methods.parse(words[words.index("--method", words.index("dense")) + 1]) == method


def test_fidelity_to_dense(plan, tmp_path):
    task = Fidelity(of=tasks.parse("wikisalad:max_new_tokens=6"))
    plan = dataclasses.replace(plan, task=task, limit=1, batch_size=4)
    rows = runner.run(runner.prepare(plan))
    assert [row["spec"] for row in rows] == ["dense", *SPECS]
    for row in rows:
        values = row["item_values"]
        assert row["task"] == "fidelity"
        assert row["task_settings"] == {"of": "wikisalad", **task.of.settings()}
        assert "--task wikisalad:" in row["command"]
        assert " --fidelity " in row["command"]
        assert list(row["metrics"]) == ["agreement", "kl"]
        assert row["score"] == pytest.approx(100 * sum(values["agreed"]) / sum(values["tokens"]))
        assert row["metrics"]["kl"]["value"] == pytest.approx(sum(values["divergence"]) / sum(values["tokens"]))
        assert row["timing"] == "tokens given, decode not timed, shared prompt"
        assert values["tokens"] == rows[0]["item_values"]["tokens"]
    dense, *others = rows
    assert (dense["score"], dense["metrics"]["kl"]["value"]) == (100, 0)
    assert all(row["metrics"]["kl"]["value"] > 0.001 for row in others)

    alone = dataclasses.replace(plan, share_prompt=False, out=tmp_path / "alone" / "rows.jsonl")
    assert without_costs(runner.run(runner.prepare(alone)), *SHARED) == without_costs(rows, *SHARED)

    later = dataclasses.replace(plan, methods=(*plan.methods, *runner.parse_methods(["streaming:window=9"])[0][1:]))
    [*kept, new] = runner.run(runner.prepare(later))  # dense has its row, and yet its answers are needed again
    assert kept == rows
    assert new["item_values"]["tokens"] == dense["item_values"]["tokens"]
    assert new["metrics"]["kl"]["value"] > 0.001


def test_fidelity_needs_answers():
    with pytest.raises(UserError, match="--fidelity is for tasks that ask for answers, and 'perplexity'"):
        Fidelity(of=tasks.parse("perplexity"))


def test_a_prompt_is_read_once_for_all_methods_that_are_dense_in_prefill(plan, monkeypatch):
    methods = (*plan.methods, *runner.parse_methods(["streaming:window=9", "snapkv:top_k=9", "tova:top_k=9"])[0][1:])
    read, load_model = [], loading.load_model

    def counting(*args):
        model = load_model(*args)
        model.register_forward_pre_hook(
            lambda model, args, kwargs: read.append(len(args[0])) if args and args[0].shape[1] == 70 else None,
            with_kwargs=True,
        )
        return model

    monkeypatch.setattr(loading, "load_model", counting)
    task = tasks.parse("perplexity:continuation=12", length=70)  # warming up takes 64 tokens, and blocks are shorter
    runner.run(runner.prepare(dataclasses.replace(plan, task=task, methods=methods)))
    assert read == [2, 2, 2, 2, 1, 1]  # three batches: for streaming, and for all others


def test_a_run_ended_without_sharing_goes_on_with_it(plan):
    with pytest.raises(StoppedError):
        runner.run(runner.prepare(dataclasses.replace(plan, share_prompt=False)), stop_after(4))
    rows = runner.run(runner.prepare(plan))
    timings = {row["method"]: row["timing"] for row in rows}
    assert timings["dense"] == "teacher-forced / teacher-forced, shared prompt"
    assert timings["luka"] == "teacher-forced / teacher-forced, shared prompt"
    assert all(row["prefill_ms"] > 0 for row in rows)  # of the batches where it was timed
    alone = runner.run(runner.prepare(dataclasses.replace(plan, out=plan.out.with_name("alone.jsonl"))))
    assert without_costs(rows, *SHARED) == without_costs(alone, *SHARED)


def test_a_method_that_has_no_company_reads_alone(plan):
    methods = runner.parse_methods(["streaming:window=9"])[0]
    rows = runner.run(runner.prepare(dataclasses.replace(plan, methods=methods)))
    assert [row["method"] for row in rows] == ["dense", "streaming"]
    assert all(row["timing"] == "teacher-forced" and row["prefill_ms"] > 0 for row in rows)


def test_dense_is_what_the_model_does_by_itself(plan, tokenizer):
    prepared = runner.prepare(dataclasses.replace(plan, batch_size=1))
    rows = runner.run(prepared)
    model = loading.load_model(plan.model, "float32", "cpu")
    alone = [generation.run_batch(model, tokenizer, [item]).outputs[0].nll for item in prepared.items]
    assert rows[0]["item_values"]["nll"] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("batches", [1, 4, 8])
def test_an_ended_run_goes_on_where_it_was(plan, batches, monkeypatch, tmp_path):
    whole = runner.run(runner.prepare(dataclasses.replace(plan, out=tmp_path / "whole" / "rows.jsonl")))
    with pytest.raises(StoppedError):
        runner.run(runner.prepare(plan), stop_after(batches))
    assert not plan.out.exists()
    assert len(resultfile.partial_path(plan.out).read_text().splitlines()) == 1 + batches

    answered = []
    decode = generation.Prompt.decode
    monkeypatch.setattr(generation.Prompt, "decode", lambda *args, **more: answered.append(1) or decode(*args, **more))
    prepared = runner.prepare(plan)
    assert prepared.kept == {1: 2, 4: 8, 8: 14}[batches]  # the last batch of a method has one item
    reported = []
    rows = runner.run(prepared, lambda method, items: reported.append(items))
    waiting = 9 - batches
    assert waiting < len(answered) <= waiting + 3  # each method still needed is tried once before
    assert sum(reported) == 3 * 5
    assert without_costs(rows) == without_costs(whole)
    assert list(tmp_path.glob("rows.jsonl*")) == [plan.out]


def test_a_finished_run_only_reads_its_rows(plan, monkeypatch):
    rows = runner.run(runner.prepare(plan))
    before = plan.out.stat().st_mtime_ns
    monkeypatch.setattr(loading, "load_model", None)
    assert runner.run(runner.prepare(plan)) == rows
    assert plan.out.stat().st_mtime_ns == before


def test_a_row_of_other_settings_is_of_another_method(plan):
    rows = [dict(row) for row in runner.run(runner.prepare(plan))]
    (luka,) = (row for row in rows if row["method"] == "luka")
    luka["settings"] |= {"first": 1}
    resultfile.write_rows(plan.out, rows)
    assert [method.name for method in runner.prepare(plan).missing] == ["luka"]


def test_a_method_can_join_a_finished_run(plan, monkeypatch):
    first = runner.run(runner.prepare(dataclasses.replace(plan, methods=plan.methods[:2])))
    prepared = runner.prepare(plan)
    assert [method.name for method in prepared.missing] == ["luka"]
    measured, record = [], runner._Examiner._record

    def noting(self, method, *more):
        measured.append(method.name)
        return record(self, method, *more)

    monkeypatch.setattr(runner._Examiner, "_record", noting)
    rows = runner.run(prepared)
    assert set(measured) == {"luka"}
    assert rows[:2] == first
    assert without_costs(rows[2:])[0]["dense_score"] == first[0]["score"]
    assert [row["spec"] for row in resultfile.read_rows(plan.out, prepared.run)] == ["dense", *SPECS]


def test_results_of_a_method_left_out_later_are_kept(plan):
    with pytest.raises(StoppedError):
        runner.run(runner.prepare(plan), stop_after(4))
    runner.run(runner.prepare(dataclasses.replace(plan, methods=plan.methods[:2])))
    assert runner.prepare(plan).kept == 2
    assert len(runner.run(runner.prepare(plan))) == 3
    assert not resultfile.partial_path(plan.out).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 0 there, 1 here"),
        ({"limit": 4}, "limit is 5 there, 4 here"),
        ({"batch_size": 1}, "batch_size is 2 there, 1 here"),
        ({"dtype": "bfloat16"}, "dtype is 'float32' there, 'bfloat16' here"),
        ({"task": tasks.parse("perplexity:continuation=13", length=60)}, "continuation is 12 there, 13 here"),
        ({"task": tasks.parse("niah", length=300)}, "task is 'perplexity' there, 'niah' here"),
    ],
)
def test_another_run_is_refused_before_the_model_is_loaded(plan, monkeypatch, change, message):
    with pytest.raises(StoppedError):
        runner.run(runner.prepare(plan), stop_after(2))
    kept = resultfile.partial_path(plan.out).read_bytes()
    monkeypatch.setattr(loading, "load_model", None)
    with pytest.raises(UserError, match=message):
        runner.prepare(dataclasses.replace(plan, **change))
    assert resultfile.partial_path(plan.out).read_bytes() == kept


def test_another_model_of_the_same_name_is_another_run(plan, tmp_path):
    runner.run(runner.prepare(plan))
    other = tiny.build(tmp_path / "tiny-llama", seed=1)
    with pytest.raises(UserError, match="weights is"):
        runner.prepare(dataclasses.replace(plan, model=other))


def test_other_prompts_make_another_run(plan, tmp_path):
    plan = dataclasses.replace(plan, task=tasks.parse("wikisalad:max_new_tokens=1"), limit=1, methods=plan.methods[:1])
    runner.run(runner.prepare(plan))
    other = tiny.build(tmp_path / "tiny-llama")
    tiny.make_tokenizer(chat_template=None).save_pretrained(other)
    (other / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"another run: items is '\w+' there, '\w+' here\. Choose"):
        runner.prepare(dataclasses.replace(plan, model=other))


def test_bad_plans_end_before_the_model_is_loaded(plan, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "load_model", None)
    long = tasks.parse("perplexity:continuation=100", length=2000)
    for change, message in [
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"batch_size": -1}, "batch-size must be at least 1, got -1"),
        ({"out": tmp_path / "a\udc80.jsonl"}, "the command of method dense, which its row holds, is not UTF-8"),
        ({"task": long}, r"'perplexity' .* needs 2,100 positions, the model has 2,048"),
        ({"model": tmp_path / "none"}, "no such model folder"),
        ({"data": tmp_path / "none"}, "no such folder"),
        ({"device": "tpu"}, "unknown device"),
    ]:
        with pytest.raises(UserError, match=message):
            runner.prepare(dataclasses.replace(plan, **change))
    assert not plan.out.exists()


def test_methods_are_unique_and_dense_comes_first():
    methods, added = runner.parse_methods(["h2o", "luka:top_k=0.11,page_size=[8,32]", "h2o", "luka"])
    assert [method.spec for method in methods] == ["dense", "h2o", "luka"]
    assert added
    methods, added = runner.parse_methods(["h2o", "dense", "h2o:window=9"])
    assert [method.spec for method in methods] == ["dense", "h2o", "h2o:window=9"]
    assert not added
    for spec, message in [("h20", "h2o"), ("h2o:widnow=3", "window"), ("h2o:window=-1", "window")]:
        with pytest.raises(UserError, match=message):
            runner.parse_methods([spec])


def test_a_method_that_does_not_fit_ends_the_run_before_any_item(plan):
    wrong = (*plan.methods[:1], foveate.methods.parse('per_layer:layers={"0": "dense"}'))
    with pytest.raises(UserError, match=r"cannot be applied to tiny-llama.*layer 1"):
        runner.run(runner.prepare(dataclasses.replace(plan, methods=wrong)))
    assert len(resultfile.partial_path(plan.out).read_text().splitlines()) == 1


def test_a_value_that_is_no_number_is_an_error(plan, monkeypatch):
    monkeypatch.setattr(type(plan.task), "grade", lambda self, item, output: {"nll": float("nan")})
    with pytest.raises(ArithmeticError, match="'dense' gave a value that is not a number"):
        runner.run(runner.prepare(plan))


@pytest.fixture
def broken_folder(tmp_path):
    """A model with a weight that is no number."""
    folder = tiny.build(tmp_path / "tiny-llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


BROKEN = r"item \S+: the predictions of the model are not finite \(NaN or infinite\); .* float32 not hold"


@pytest.mark.parametrize(
    "task",
    [
        tasks.parse("niah", length=300),
        tasks.parse("perplexity:continuation=12", length=60),
        Fidelity(of=tasks.parse("niah", length=300)),
    ],
    ids=["answers", "likelihood", "fidelity"],
)
@pytest.mark.parametrize("spec", ["quest", "omnikv", "lessismore", "kascade"])
def test_predictions_that_are_not_finite_are_an_error(plan, broken_folder, task, spec):
    methods, _ = runner.parse_methods([spec])
    broken = dataclasses.replace(plan, model=broken_folder, methods=methods, task=task, limit=2)
    message = r"method 'dense' cannot be applied to tiny-llama: layer 1 \(dense\): .* not finite .* torch.float32"
    with pytest.raises(UserError, match=message):
        runner.run(runner.prepare(broken))
    assert not plan.out.exists()


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("task", ["niah:max_new_tokens=4", "perplexity:continuation=12"])
def test_predictions_of_a_method_that_are_not_finite_name_it_and_the_item(plan, monkeypatch, task, share_prompt):
    """Of one row of a batch, from a step on that no warm-up reaches."""
    learn = foveate.methods.get("pages").learn

    def broken(self, cache, choice, attended):
        learn(self, cache, choice, attended)
        if cache.lengths[0] > 70:
            attended.out[1] = float("nan")

    monkeypatch.setattr(foveate.methods.get("pages"), "learn", broken)
    methods, _ = runner.parse_methods(["pages"])
    own = dataclasses.replace(plan, methods=methods, task=tasks.parse(task, length=300), share_prompt=share_prompt)
    prepared = runner.prepare(own)
    with pytest.raises(UserError, match=f"method 'pages', item {prepared.items[1].id}: the predictions of the model"):
        runner.run(prepared)


def test_questions_in_batches_of_unequal_length(plan):
    task = tasks.parse("wikisalad:max_new_tokens=4")
    one = dataclasses.replace(plan, task=task, limit=1, batch_size=1)
    four = dataclasses.replace(one, batch_size=4, out=plan.out.with_name("four.jsonl"))
    alone, together = runner.run(runner.prepare(one)), runner.run(runner.prepare(four))
    for a, b in zip(alone, together):
        assert a["examples"] == b["examples"]
        assert a["item_values"] == b["item_values"]
        assert (a["n"], a["ceiling"]) == (b["n"], b["ceiling"]) == (4, 75.0)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ({"values": 1, "texts": 1}, r"1 values of the batch of item \S+, which has 2; remove the record"),
        ({"first": "nobody"}, "2 values of the batch of item nobody, which has no place in the run; remove the record"),
    ],
)
def test_kept_values_are_those_of_their_batch(plan, damage, fault):
    with pytest.raises(StoppedError):
        runner.run(runner.prepare(plan), stop_after(1))
    path = resultfile.partial_path(plan.out)
    header, record = path.read_text(encoding="utf-8").splitlines()
    record = json.loads(record)
    for name, value in damage.items():
        record[name] = value if isinstance(value, str) else record[name][:value]
    path.write_text(f"{header}\n{json.dumps(record)}\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"rows\.jsonl\.partial: {fault}"):
        runner.prepare(plan)


def test_steps_are_dense_below_the_bound_that_is_asked_for(plan):
    methods, _ = runner.parse_methods(["kascade:top_k=8,min_k=1,anchors=1"])
    task = tasks.parse("wikisalad:max_new_tokens=6")
    rows = {}
    for bound in (0, 10**6):
        out = plan.out.with_name(f"{bound}.jsonl")
        one = dataclasses.replace(plan, methods=methods, task=task, out=out, limit=2, dense_below=bound)
        dense, row = runner.run(runner.prepare(one))
        assert (dense["dense_below"], dense["dense_steps"]) == (bound, 0)
        assert row["command"].endswith(f" --dense-below {bound}") == bool(bound)
        rows[bound] = row
    assert rows[0]["dense_steps"] == 0
    assert rows[0]["keys_read_share"] < 1
    assert rows[10**6]["dense_steps"] == rows[10**6]["decode_steps"] > 0
    assert rows[10**6]["keys_read_share"] == 1
    assert rows[10**6]["diff_to_dense"] == 0
    with pytest.raises(UserError, match="another run"):
        runner.prepare(dataclasses.replace(one, dense_below=0))
    with pytest.raises(UserError, match="dense_below must be a number of tokens, at least 0, or 'auto', not 'soon'"):
        runner.prepare(dataclasses.replace(one, dense_below="soon"))


@pytest.mark.parametrize("along", [False, True])
def test_answers_are_replayed_as_in_generate(plan, monkeypatch, along):
    """On a CPU by the stand-in for CUDA graphs; steps that are run one by one give the same rows."""
    uses = []

    class Replayed(Graphs):
        def __init__(self, mode):
            super().__init__(mode)
            self.recorder = record
            uses.append(self.use)

    methods, _ = runner.parse_methods(["kascade:top_k=8,min_k=1,anchors=1", "pages:top_k=0.2"])
    task = tasks.parse("wikisalad:max_new_tokens=12")
    plan = dataclasses.replace(plan, task=Fidelity(of=task) if along else task, methods=methods, limit=2)
    expected = runner.run(runner.prepare(plan))
    monkeypatch.setattr(sys.modules[foveate.attach.__module__], "Graphs", Replayed)
    found = runner.run(runner.prepare(dataclasses.replace(plan, out=plan.out.with_name("replayed.jsonl"))))
    assert [row["examples"] for row in found] == [row["examples"] for row in expected]
    for one, other in zip(found, expected):
        for name, values in one["item_values"].items():
            assert values == pytest.approx(other["item_values"][name], abs=1e-5)
    shares = [row["keys_read_share"] for row in expected]
    assert [row["keys_read_share"] for row in found] == pytest.approx(shares, rel=1e-4)  # counted in float32
    assert sum(use.replayed for use in uses) > 3 * 2 * 5


class TestRecall:
    """Which share of exact attention the tokens hold that a method reads, in rows."""

    @pytest.fixture
    def asking(self, tiny_folder, doors, tmp_path):
        methods, _ = runner.parse_methods(["streaming:sinks=2,window=8"])
        task = tasks.parse("documents", max_new_tokens=6, length=512)
        return runner.Comparison(tiny_folder, task, doors, methods, 3, tmp_path / "recall.jsonl", 2, recall=1)

    def test_rows_have_the_mean_over_the_first_items(self, asking, tmp_path):
        """And are otherwise those of the run without it; a run that was stopped goes on with what it has measured."""
        more = dataclasses.replace(asking, recall=3, out=tmp_path / "more.jsonl")
        answered = []
        with pytest.raises(StoppedError):
            runner.run(runner.prepare(more), stop_after(3))
        rows = runner.run(runner.prepare(more), answered=answered)
        of_items = [one for record in answered if record["spec"] != "dense" for one in record["recall"]]
        assert [len(record["recall"]) for record in answered] == [2, 1, 2, 1]
        assert set(rows[0]["recall"]) == {"0", "1"}
        assert rows[0]["recall"]["1"] == pytest.approx(1, abs=1e-3)
        for layer in "01":
            assert 0 < rows[1]["recall"][layer] < 0.9
            assert rows[1]["recall"][layer] == pytest.approx(sum(one[layer] for one in of_items) / 3)
        few = runner.run(runner.prepare(asking))
        assert few[1]["recall"] == of_items[0]
        assert few[1]["command"].endswith(" --recall 1")
        plain = runner.run(runner.prepare(dataclasses.replace(asking, recall=0, out=tmp_path / "plain.jsonl")))
        assert plain[1]["recall"] is None
        assert without_costs(plain, "recall", "command", "run") == without_costs(few, "recall", "command", "run")
        with pytest.raises(UserError, match="recall"):
            runner.prepare(dataclasses.replace(asking, recall=2))

    def test_steps_that_short_contexts_make_dense_read_everything(self, asking, tmp_path):
        methods, _ = runner.parse_methods(["twilight:p=0.3,min_k=6"])
        for bound, whole in ((0, False), (10**6, True)):
            how = {"methods": methods, "dense_below": bound, "out": tmp_path / f"{bound}.jsonl"}
            row = runner.run(runner.prepare(dataclasses.replace(asking, **how)))[1]
            assert (min(row["recall"].values()) > 0.999) == whole

    def test_rows_of_before_there_was_recall_go_on(self, asking):
        plan = dataclasses.replace(asking, recall=0)
        rows = runner.run(runner.prepare(plan))
        old = [{name: value for name, value in row.items() if name != "recall"} for row in rows]
        plan.out.write_text("".join(json.dumps(row) + "\n" for row in old), encoding="utf-8")
        assert not runner.prepare(plan).missing
        assert runner.run(runner.prepare(plan)) == old

    def test_a_layer_without_the_verbs_is_told_before_an_item_is_answered(self, asking, monkeypatch):
        def refuse(recorder):
            raise UserError("layer 1 (streaming) attends without foveate's verbs")

        monkeypatch.setattr("foveate.lab.evaluation.lens.Recorder.recall", refuse)
        with pytest.raises(UserError, match=r"layer 1 \(streaming\) attends without"):
            runner.run(runner.prepare(asking))
        assert not resultfile.read_partial(asking.out, runner.prepare(asking).run)

    def test_a_model_without_a_method_has_none(self, asking):
        methods, _ = runner.parse_methods(["own", "h2o"])
        with pytest.raises(UserError, match="recall cannot be measured of 'own', the model without a method"):
            runner.prepare(dataclasses.replace(asking, methods=methods))

    def test_a_damaged_recall_is_told(self, asking):
        with pytest.raises(StoppedError):
            runner.run(runner.prepare(asking), stop_after(1))
        path = resultfile.partial_path(asking.out)
        path.write_text(path.read_text(encoding="utf-8").replace('"recall": [{"0": ', '"recall": [{"0": 7'), "utf-8")
        with pytest.raises(DataError, match="'recall' must be a list of objects of numbers from 0 to 1, or nulls"):
            runner.prepare(asking)
