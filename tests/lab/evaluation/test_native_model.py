"""Models that run as they are in `compare`, hybrids first of all."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import foveate
from foveate.cli.terminal import console
from foveate.errors import UserError
from foveate.hybrids.models import HybridForCausalLM, make_config
from foveate.integrations.transformers import loading
from foveate.lab.evaluation import generation, runner, tasks
from foveate.lab.evaluation.native_model import NativeModel, applied
from foveate.lab.evaluation.tasks.base import Item
from foveate.lab.evaluation.tasks.fidelity import Fidelity
from foveate.lab.report import terminal
from foveate.lab.report.tables import general as markdown
from foveate.lab.results.rows import ROW_FIELDS
from tests import tiny

PRESETS = ("lalte", "lansa", "gdn_attn")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of tiny random hybrids with a tokenizer that has no chat template."""
    root = tmp_path_factory.mktemp("hybrids")
    for preset in PRESETS:
        torch.manual_seed(3)
        config = make_config(
            preset, "tiny", vocab_size=600, pad_token_id=0, eos_token_id=1, max_position_embeddings=2048
        )
        HybridForCausalLM(config).save_pretrained(root / preset)
        tiny.make_tokenizer(None).save_pretrained(root / preset)
    return root


def plan_of(folder, tmp_path, spec, methods=("own",), **more):
    chosen, _ = runner.parse_methods(methods)
    defaults = {"limit": 3, "out": tmp_path / "rows.jsonl", "batch_size": 2}
    return runner.Comparison(folder, tasks.parse(spec), tiny.SAMPLE, chosen, **(defaults | more))


def test_own_alone_needs_no_dense():
    assert runner.parse_methods(["own", " own"]) == ((NativeModel(),), False)
    methods, added = runner.parse_methods(["own", "tova"])
    assert [method.name for method in methods] == ["dense", "own", "tova"]
    assert added


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("spec", ["perplexity:length=90,continuation=70", "ruler:length=300,max_new_tokens=4"])
def test_a_hybrid_as_it_is(folders, tmp_path, preset, spec):
    plan = plan_of(folders / preset, tmp_path, spec)
    (row,) = runner.run(runner.prepare(plan))
    assert list(row) == list(ROW_FIELDS)
    assert (row["method"], row["spec"], row["settings"], row["model"]) == ("own", "own", {}, preset)
    assert row["architecture"]["model_type"] == "foveate_hybrid"
    assert (row["keys_read_share"], row["kv_bytes_per_step"]) == (None, None)
    assert (row["diff_to_dense"], row["dense_score"]) == (0.0, row["score"])
    assert "--method own" in row["command"]
    assert "dense" not in row["command"]
    steps = 69 if spec.startswith("perplexity") else 3
    assert row["decode_steps"] == 2 * steps  # of two batches
    assert row["prefill_ms"] > 0
    assert runner.run(runner.prepare(plan)) == [row]  # finished

    model, tokenizer = load_model(plan.model), loading.load_tokenizer(plan.model)
    items = runner.prepare(plan).items
    batches = [generation.run_batch(model, tokenizer, group) for group in (items[:2], items[2:])]
    assert row["resident_bytes"] == batches[0].cache.nbytes > batches[1].cache.nbytes
    if spec.startswith("perplexity"):
        with torch.inference_mode():
            logits = model(torch.tensor([items[0].prompt_ids + items[0].target_ids])).logits[0, 89:-1]
        expected = F.cross_entropy(logits, torch.tensor(items[0].target_ids), reduction="sum")
        assert row["item_values"]["nll"][0] == pytest.approx(expected.item(), rel=1e-4)
        assert "– |" in markdown.tables([row])
    else:
        assert "| – | – |" in markdown.tables([row])
        assert "+0.0" not in markdown.tables([row])
    wide = console()
    with wide.capture() as text:
        wide.print(terminal.Comparison([row]))
    assert row["spec"] in text.get()


def test_an_interrupted_run_goes_on(folders, tmp_path):
    plan = plan_of(folders / "lalte", tmp_path, "perplexity:length=60,continuation=20", batch_size=1)

    class StoppedError(Exception):
        pass

    def stop(method, items):
        raise StoppedError

    with pytest.raises(StoppedError):
        runner.run(runner.prepare(plan), stop)
    assert runner.prepare(plan).kept == 1
    (row,) = runner.run(runner.prepare(plan))
    (whole,) = runner.run(runner.prepare(dataclasses.replace(plan, out=tmp_path / "whole.jsonl")))
    assert row["item_values"] == whole["item_values"]


def test_own_beside_methods(folders, tmp_path):
    """On a model with full attention it gives what dense gives, and the others are compared with dense."""
    specs = ["own", "tova:top_k=24", "uniform:top_k=16,window=16"]
    rows = runner.run(
        runner.prepare(plan_of(folders / "gdn_attn", tmp_path, "perplexity:length=200,continuation=70", specs))
    )
    assert [row["spec"] for row in rows] == ["dense", *specs]
    dense, own, *sparse = rows
    assert own["item_values"]["nll"] == pytest.approx(dense["item_values"]["nll"], rel=1e-5)
    assert own["timing"] == "teacher-forced"
    assert own["dense_score"] == dense["score"]
    for row in sparse:
        assert row["item_values"]["nll"] != pytest.approx(dense["item_values"]["nll"], rel=1e-5)
        assert 0 < row["keys_read_share"] < 0.5
        assert row["timing"] == "teacher-forced, shared prompt"
    assert "keys read" in markdown.tables(rows)


@pytest.mark.parametrize("preset", PRESETS)
def test_texts_of_any_lengths_share_a_batch(folders, preset):
    model, tokenizer = (load(folders / preset) for load in (load_model, loading.load_tokenizer))
    ids = tuple(
        tokenizer.encode("Call me Ishmael. Some years ago - never mind how long precisely - having little. " * 4)
    )
    cuts = [(9, 2), (70, 6), (31, 66)]
    items = [Item(f"{size}", "", ids[:size], target_ids=ids[size : size + count]) for size, count in cuts]
    outputs = generation.run_batch(model, tokenizer, items).outputs
    for (size, count), output in zip(cuts, outputs):
        with torch.inference_mode():
            logits = model(torch.tensor([ids[: size + count]])).logits[0, size - 1 : -1]
        target = torch.tensor(ids[size : size + count])
        assert output.nll == pytest.approx(float(F.cross_entropy(logits, target, reduction="sum")), rel=1e-4)
        assert output.hits == tuple((logits.argmax(-1) == target).tolist())


def load_model(folder):
    return loading.load_model(folder, "float32", "cpu")


def test_no_method_stays_behind(folders):
    model = load_model(folders / "gdn_attn")
    with applied(model, NativeModel()):
        assert not hasattr(model, "foveate")
    with applied(model, foveate.methods.parse("tova")):
        assert model.foveate.method.name == "tova"


def test_bad_input(folders, tmp_path):
    spec = "perplexity:length=60,continuation=20"
    plan = plan_of(folders / "lalte", tmp_path, spec, methods=())
    with pytest.raises(
        UserError, match=r"all of its layers are gdn or lte .* method 'own' alone runs the model as it is"
    ):
        runner.run(runner.prepare(plan))
    task = Fidelity(of=tasks.parse("niah:length=300"))
    with pytest.raises(UserError, match="compares with dense attention"):
        runner.prepare(dataclasses.replace(plan_of(folders / "lalte", tmp_path, spec), task=task))
