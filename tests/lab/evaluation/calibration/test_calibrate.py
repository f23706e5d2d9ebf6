"""Calibrating Kascade on the prompts of a task: what is written, what goes on where it was, what is refused."""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import foveate
from foveate.calibration import load
from foveate.errors import UserError
from foveate.integrations.transformers import loading
from foveate.lab.evaluation import generation, tasks
from foveate.lab.evaluation.calibration import calibrate, divergence, layer_costs
from foveate.lab.evaluation.calibration.anchors import choose, counterparts
from foveate.lab.evaluation.calibration.plan import Plan
from foveate.lab.evaluation.calibration.study import Study
from foveate.lab.evaluation.tasks.base import Sampling
from foveate.lab.results import timing
from foveate.methods.h2o import H2O
from foveate.methods.kascade import Kascade
from foveate.methods.kascade_pages import KascadePages
from foveate.methods.kascade_paper import KascadePaper
from foveate.runtime import decode as runtime_decode
from tests import tiny
from tests.helpers import COMMON, CONFIGS, prepare, tiny_model, tokens

LAYERS = 4
STUBBED = {"dense": 1.0, "first": 1.5, "anchor": 0.8, "reuse": 0.2}
"""With four layers and one to four anchors 2.1, 2.7, 3.3 and 3.9, while dense attention takes 4."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama", layers=LAYERS)


@pytest.fixture
def plan(folder, sample, tmp_path):
    task = tasks.parse("niah", length=300)
    out = tmp_path / "deep" / "tiny.json"
    return Plan(folder, task, sample, out, anchors=2, limit=3, keys=16, tile=24, by="similarity")


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(loading, "load_model", None)


@pytest.fixture
def read(monkeypatch):
    """The prompts that a model reads."""
    lengths, studied = [], calibrate._studied

    def noting(plan, model, attachment, prompt):
        lengths.append(prompt)
        return studied(plan, model, attachment, prompt)

    monkeypatch.setattr(calibrate, "_studied", noting)
    return lengths


def run(plan, **more):
    return calibrate.run(plan, say=more.pop("say", lambda text: None), **more)


def stop_at(number, error=KeyboardInterrupt):
    def progress(done, of):
        if done == number:
            raise error

    return progress


def without_time(artefact):
    found = {name: value for name, value in artefact.found.items() if name not in ("seconds", "commit")}
    return artefact.model, artefact.anchors, artefact.heads, found


def prompts(plan):
    tokenizer = loading.load_tokenizer(plan.model)
    items = plan.task.items(plan.data, tokenizer, plan.limit, plan.seed)
    return [[*item.prompt_ids, *item.target_ids] for item in items]


def studied(plan):
    """What each prompt shows."""
    model, shown = loading.load_model(plan.model, "float32", "cpu"), []
    with foveate.attached(model, "dense") as attachment, torch.no_grad():
        for prompt in prompts(plan):
            study = Study(model, attachment.policies, plan.keys, plan.tile)
            model(torch.tensor([prompt]))
            shown.append(study.result())
    return shown


class _NormedAndDropped(LlamaDecoderLayer):
    """A block whose attention goes through two modules before it is added."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.behind, self.dropout = torch.nn.LayerNorm(config.hidden_size), torch.nn.Dropout(0.5)

    def forward(self, hidden_states, **more):
        attention, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **more)
        hidden_states = hidden_states + self.dropout(self.behind(attention))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@torch.no_grad()
def importance(model, ids, adds="self_attn"):
    """1 - cosine of what enters each block and the same with its attention added, from what the modules give."""
    entered, added = [], []
    for block in model.model.layers:
        block.register_forward_pre_hook(
            lambda block, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        getattr(block, adds).register_forward_hook(
            lambda module, args, out: added.append(out[0] if isinstance(out, tuple) else out)
        )
    model(ids)
    pairs = [(x[0].double(), (x + y)[0].double()) for x, y in zip(entered, added)]
    return [float((1 - torch.cosine_similarity(x, y, -1)).mean()) for x, y in pairs]


class TestTheArtefact:
    def test_heads_choose_together_where_the_method_pools_a_layer(self, plan):
        plan, shown = dataclasses.replace(plan, method=KascadePaper(pool="layer")), []
        model = loading.load_model(plan.model, "float32", "cpu")
        with foveate.attached(model, "dense") as attachment, torch.no_grad():
            for prompt in prompts(plan):
                study = Study(model, attachment.policies, plan.keys, plan.tile, pools_layer=True)
                model(torch.tensor([prompt]))
                shown.append(study.result())
        importance = torch.stack([one for _, one in shown]).mean(0)
        choice = choose(lambda: (measured.captured for measured, _ in shown), importance, 2)
        artefact = run(plan)
        assert artefact.settings["pool"] == "layer"
        mean = torch.tensor(artefact.found["mean_similarity"])
        torch.testing.assert_close(mean, choice.mean_similarity, rtol=1e-4, atol=1e-6)

    def test_is_made_of_what_the_prompts_show(self, plan):
        artefact, shown = run(plan), studied(plan)
        choice = choose(
            lambda: (measured.captured for measured, _ in shown), torch.stack([one for _, one in shown]).mean(0), 2
        )
        assert artefact.anchors == tuple(choice.anchors)
        assert artefact.heads == {str(layer): heads for layer, heads in choice.heads.items()}
        assert artefact.heads.keys() | {str(anchor) for anchor in artefact.anchors} == set("0123")
        found = artefact.found

        def same(name, value):
            torch.testing.assert_close(torch.tensor(found[name]), value, rtol=1e-4, atol=1e-6)

        same("similarity", choice.similarity)
        same("importance", torch.stack([one for _, one in shown]).mean(0))
        same("coverage", torch.stack([measured.coverage for measured, _ in shown]).mean(0))
        assert [one["anchors"] for one in found["by_number"]] == [anchors for anchors, _ in choice.by_number]
        assert [one["objective"] for one in found["by_number"]] == pytest.approx(
            [value for _, value in choice.by_number], rel=1e-4
        )
        assert artefact.model["weights"]
        assert artefact.settings == {"pool": "kv_head", "pooling": "post_softmax"}
        assert found["run"]["tokens"] == [len(prompt) for prompt in prompts(plan)]
        assert found["layer_ms"] is None

    def test_goes_by_every_token_with_its_own_key(self, plan):
        """Equation 3 as written: of all tokens that see more than k keys; of the others it is 1."""
        plan = dataclasses.replace(plan, tile=1)
        artefact, shown = run(plan), studied(plan)
        assert [len(one.captured) for one, _ in shown] == [len(prompt) - plan.keys for prompt in prompts(plan)]
        choice = choose(
            lambda: (measured.captured for measured, _ in shown), torch.stack([one for _, one in shown]).mean(0), 2
        )
        assert artefact.anchors == tuple(choice.anchors)
        torch.testing.assert_close(torch.tensor(artefact.found["similarity"]), choice.similarity, rtol=1e-4, atol=1e-6)
        assert artefact.found["run"]["own_key"]
        assert "--tile 1 --by similarity --seed" in artefact.found["command"]

    def test_is_all_that_is_left(self, plan):
        said = []
        artefact = run(plan, say=said.append)
        assert load(plan.out) == artefact
        assert list(plan.out.parent.iterdir()) == [plan.out]
        assert said == []
        assert artefact.found["seconds"] > 0
        assert artefact.found["command"] == (
            "foveate calibrate --model tiny-llama --task niah:split=single,length=300,max_new_tokens=16 --data data "
            "--anchors 2 --limit 3 --keys 16 --tile 24 --by similarity --seed 0 --dtype float32 "
            "--device cpu --out tiny.json"
        )
        assert str(plan.model.parent) not in plan.out.read_text(encoding="utf-8")

    def test_is_for_the_model(self, plan, tmp_path):
        run(plan)
        method = foveate.methods.make("kascade_paper", calibration=str(plan.out))
        with foveate.attached(loading.load_model(plan.model, "bfloat16", "cpu"), method):
            pass
        other = tiny.build(tmp_path / "tiny-llama", seed=1, layers=LAYERS)
        with pytest.raises(ValueError, match="another model of the same shape"):
            foveate.attach(loading.load_model(other, "float32", "cpu"), method)

    def test_has_no_coverage_of_prompts_that_are_short(self, plan):
        artefact = run(dataclasses.replace(plan, task=tasks.parse("perplexity:continuation=1", length=60)))
        assert artefact.found["coverage"] == [[None] * 4] * LAYERS

    def test_is_of_prompts_with_their_continuations(self, plan):
        artefact = run(dataclasses.replace(plan, task=tasks.parse("perplexity:continuation=20", length=60)))
        assert artefact.found["run"]["tokens"] == [80] * 3

    def test_names_the_layers_of_a_model_that_has_others_between(self, plan, tmp_path):
        config = CONFIGS["gemma3"](vocab_size=600)
        torch.manual_seed(0)
        folder = tmp_path / "tiny-gemma"
        prepare(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
        tiny.make_tokenizer().save_pretrained(folder)
        plan = dataclasses.replace(plan, model=folder, anchors=1)
        artefact = run(plan)
        assert (artefact.anchors, list(artefact.heads), artefact.found["layers"]) == ((1,), ["3"], [1, 3])
        assert [one["anchors"] for one in artefact.found["by_number"]] == [[1], [1, 3]]
        with foveate.attached(
            loading.load_model(folder, "float32", "cpu"), f"kascade_paper:calibration={plan.out}"
        ) as one:
            assert one.policies[3].method.role.heads == tuple(artefact.heads["3"])
        with pytest.raises(UserError, match="anchors must be a number from 1 to 2"):
            run(dataclasses.replace(plan, out=plan.out.with_name("more.json"), anchors=3))


class TestImportance:
    @pytest.fixture(autouse=True)
    def _no_grad(self):
        with torch.no_grad():
            yield

    def seen(self, model, ids):
        with foveate.attached(model, "dense") as attachment:
            study = Study(model, attachment.policies, 8, 12)
            model(ids)
        return study.result()[1].tolist()

    def test_of_a_llama(self):
        ids = tokens(60)
        assert self.seen(tiny_model(), ids) == pytest.approx(importance(tiny_model(), ids), rel=1e-4)

    def test_of_a_gemma_which_norms_attention_before_it_is_added(self):
        model, ids = tiny_model("gemma3"), tokens(60)
        ours = self.seen(model, ids)
        assert ours == pytest.approx(importance(model, ids, adds="post_attention_layernorm")[1::2], rel=1e-4)

    def test_of_an_olmo_which_has_no_norm_before(self):
        config = transformers.Olmo2Config(**COMMON)
        torch.manual_seed(0)
        model, ids = prepare(transformers.AutoModelForCausalLM.from_config(config)), tokens(60)
        ours = self.seen(model, ids)
        assert ours == pytest.approx(importance(model, ids, adds="post_attention_layernorm"), rel=1e-4)

    def test_of_an_afmoe_whose_norms_have_other_names(self):
        more = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "num_dense_layers": 1}
        config = transformers.AfmoeConfig(
            **COMMON, **more, layer_types=["full_attention"] * COMMON["num_hidden_layers"]
        )
        torch.manual_seed(0)
        model, ids = prepare(transformers.AutoModelForCausalLM.from_config(config)), tokens(60)
        ours = self.seen(model, ids)
        assert ours == pytest.approx(importance(model, ids, adds="post_attention_layernorm"), rel=1e-4)

    def test_of_blocks_that_norm_and_drop_out_what_they_add(self):
        model, ids = tiny_model(), tokens(60)
        model.model.layers = torch.nn.ModuleList(_NormedAndDropped(model.config, n) for n in range(3))
        prepare(model)
        ours = self.seen(model, ids)
        assert ours == pytest.approx(importance(model, ids, adds="dropout"), rel=1e-4)

    def test_of_a_cohere_whose_mlp_does_not_see_the_attention(self):
        config = transformers.CohereConfig(**COMMON)
        torch.manual_seed(0)
        model, ids = transformers.AutoModelForCausalLM.from_config(config).eval(), tokens(60)
        ours = self.seen(model, ids)
        assert ours == pytest.approx(importance(model, ids), rel=1e-4)


class TestAnEndedRun:
    @pytest.fixture
    def whole(self, plan, tmp_path):
        return run(dataclasses.replace(plan, out=tmp_path / "whole" / "tiny.json"))

    @pytest.mark.parametrize("number", [0, 1, 2, 3])
    def test_goes_on_where_it_was(self, plan, whole, read, number):
        with pytest.raises(KeyboardInterrupt):
            run(plan, progress=stop_at(number))
        assert not plan.out.exists()
        assert len(list(calibrate.partial_folder(plan.out).glob("prompt-*.safetensors"))) == number
        assert len(read) == number
        said, reported = [], []
        artefact = run(plan, progress=lambda done, of: reported.append((done, of)), say=said.append)
        assert read == prompts(plan)
        assert said == ([f"resuming: {number} of 3 prompts are there"] if number else [])
        assert reported == [(0, 3), (1, 3), (2, 3), (3, 3)]
        assert without_time(artefact) == without_time(whole)
        assert list(plan.out.parent.iterdir()) == [plan.out]

    def test_in_the_middle_of_a_prompt_or_of_its_file_goes_on(self, plan, whole, read, monkeypatch):
        def interrupt(study):
            raise KeyboardInterrupt

        for owner, name, stopping in ((Study, "result", interrupt), (os, "replace", stop_at_rename(2))):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, stopping)
                with pytest.raises(KeyboardInterrupt):
                    run(plan)
        assert [len(prompt) for prompt in read] == [len(prompts(plan)[n]) for n in (0, 0, 1)]
        assert without_time(run(plan)) == without_time(whole)

    def test_counts_the_time_of_all_its_prompts(self, plan, monkeypatch):
        with pytest.raises(KeyboardInterrupt):
            run(plan, progress=stop_at(2))
        for path in calibrate.partial_folder(plan.out).glob("prompt-*.safetensors"):
            save_file({**load_file(path), "seconds": torch.tensor(10.0)}, path)
        assert 20 < run(plan).found["seconds"] < 40

    def test_is_one_process_at_a_time(self, plan):
        def another(done, of):
            with pytest.raises(UserError, match="another process is writing to it"):
                run(plan)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(plan, progress=another)
        assert run(plan).anchors

    def test_tidies_up_after_one_that_was_killed_at_its_end(self, plan):
        artefact = run(plan)
        calibrate.partial_folder(plan.out).mkdir()
        assert run(plan, say=lambda text: None) == artefact
        assert list(plan.out.parent.iterdir()) == [plan.out]

    def test_needs_whole_files(self, plan, whole, read):
        with pytest.raises(KeyboardInterrupt):
            run(plan, progress=stop_at(2))
        path = calibrate.partial_folder(plan.out) / "prompt-0001.safetensors"
        for content in (b"", b"nonsense", path.read_bytes()[:-9]):
            path.write_bytes(content)
            with pytest.raises(UserError, match=r"prompt-0001.safetensors: damaged .* remove it, and the same command"):
                run(plan)
        save_file({"captured": torch.zeros(1)}, path)
        with pytest.raises(UserError, match=r"prompt-0001.safetensors: damaged"):
            run(plan)
        path.unlink()
        assert without_time(run(plan)) == without_time(whole)
        assert [read.count(prompt) for prompt in prompts(plan)] == [1, 2, 1]


def stop_at_rename(number):
    """Ends the run as it is about to give a prompt's file its name."""
    left, replace = [number], os.replace

    def stopping(path, target):
        if Path(target).name.startswith("prompt-"):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
        return replace(path, target)

    return stopping


class TestWhatIsInTheWay:
    def test_a_finished_run_is_only_read(self, plan, monkeypatch):
        artefact, before = run(plan), plan.out.stat().st_mtime_ns
        monkeypatch.setattr(loading, "load_model", None)
        said = []
        assert run(plan, say=said.append) == artefact
        assert said == [f"{plan.out} is complete; nothing to run"]
        assert plan.out.stat().st_mtime_ns == before

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"anchors": 3}, "--anchors"),
            ({"keys": 17}, "keys"),
            ({"limit": 2}, "limit, items, tokens"),
            ({"seed": 1}, "seed, items(, tokens)?"),
            ({"anchors": None, "time_share": 0.5}, "--time-share"),
            ({"dtype": "bfloat16"}, "dtype"),
            ({"by": "divergence", "method": Kascade(top_k=5)}, "answers, --by, --method"),
            ({"by": "together", "method": Kascade(top_k=5)}, "answers, --by, --method, --rounds"),
        ],
    )
    def test_another_calibration_is_kept(self, plan, change, what, monkeypatch):
        run(plan)
        before = plan.out.read_bytes()
        monkeypatch.setattr(loading, "load_model", None)
        reported = rf"is another calibration \(it differs in {what}\); choose another --out, or move it away"
        with pytest.raises(UserError, match=reported):
            run(dataclasses.replace(plan, **change))
        assert plan.out.read_bytes() == before

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"kind": "foveate calibration", "schema": 9}'])
    def test_another_file_is_kept(self, plan, content, no_model):
        plan.out.parent.mkdir()
        plan.out.write_bytes(content)
        with pytest.raises(UserError, match="is another file; choose another --out, or move it away"):
            run(plan)
        assert plan.out.read_bytes() == content

    def test_a_folder_of_that_name_is_kept(self, plan, no_model):
        plan.out.mkdir(parents=True)
        with pytest.raises(UserError, match="is a folder, and --out must name a regular file"):
            run(plan)

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"keys": 17}, "keys"),
            ({"tile": 12}, "tile"),
            ({"seed": 1}, "seed, items"),
            ({"limit": 2}, "limit, items, tokens"),
            ({"dtype": "bfloat16"}, "dtype"),
            ({"task": tasks.parse("niah", length=400)}, "tasks, items, tokens"),
        ],
    )
    def test_results_of_another_run_are_kept(self, plan, change, what, monkeypatch):
        with pytest.raises(KeyboardInterrupt):
            run(plan, progress=stop_at(1))
        monkeypatch.setattr(loading, "load_model", None)
        with pytest.raises(UserError, match=rf"belongs to another calibration \(it differs in {what}.*choose another"):
            run(dataclasses.replace(plan, **change))
        assert len(list(calibrate.partial_folder(plan.out).iterdir())) == 2

    @pytest.mark.parametrize(
        ("before", "by"), [("similarity", "divergence"), ("divergence", "together"), ("together", "similarity")]
    )
    def test_what_prompts_show_serves_another_choice(self, plan, read, by, before):
        """Also where the task's own answers end at a text of theirs."""
        how = {"method": Kascade(top_k=5), "answer_tokens": 3}

        def of(by):
            return dataclasses.replace(plan, by=by, **(how if by != "similarity" else {}))

        with pytest.raises(KeyboardInterrupt):
            run(of(before), progress=stop_at(2))
        assert len(read) == 2
        said = []
        artefact = run(of(by), say=said.append)
        assert artefact.found["chosen_by"]["by"] == by
        assert len(read) == len(artefact.found["run"]["tokens"])
        assert said[0].startswith("resuming: 2 of ")

    @pytest.mark.parametrize(
        ("change", "older"),
        [({"anchors": None, "time_share": 0.9}, {"anchors": 9}), ({}, {"time_context": 256, "time_batch": 7})],
    )
    def test_older_ones_may_tell_of_settings_that_had_no_effect(self, plan, monkeypatch, change, older):
        monkeypatch.setattr(layer_costs, "measure", lambda method, **shape: STUBBED)
        plan = dataclasses.replace(plan, **change)
        anchors = run(plan).anchors
        artefact = json.loads(plan.out.read_text(encoding="utf-8"))
        artefact["found"]["chosen_by"] |= older
        plan.out.write_text(json.dumps(artefact), encoding="utf-8")
        assert run(plan).anchors == anchors

    def test_another_number_of_anchors_goes_on_from_the_same_results(self, plan, read):
        with pytest.raises(KeyboardInterrupt):
            run(plan, progress=stop_at(2))
        assert len(run(dataclasses.replace(plan, anchors=3)).anchors) == 3
        assert len(read) == 3

    @pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"3", b"\xff"])
    def test_a_damaged_folder_is_told(self, plan, content, no_model):
        folder = calibrate.partial_folder(plan.out)
        folder.mkdir(parents=True)
        (folder / "run.json").write_bytes(content)
        with pytest.raises(UserError, match=r"run.json: damaged; remove the folder to start anew"):
            run(plan)

    def test_a_folder_of_something_else_is_kept(self, plan, no_model):
        folder = calibrate.partial_folder(plan.out)
        folder.mkdir(parents=True)
        (folder / "photo.png").touch()
        with pytest.raises(UserError, match="not a folder of partial results; choose another --out"):
            run(plan)
        assert [path.name for path in folder.iterdir()] == ["photo.png"]

    def test_a_file_where_the_folder_should_be_is_told(self, plan, no_model):
        plan.out.parent.mkdir()
        calibrate.partial_folder(plan.out).touch()
        with pytest.raises(UserError, match=r"tiny.json.partial: cannot be written to"):
            run(plan)


class TestBadPlans:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"limit": 1}, "limit must be at least 2, got 1: one prompt shows too little"),
            ({"anchors": 0}, "anchors must be at least 1, got 0"),
            ({"keys": 0}, "keys must be at least 1"),
            ({"seed": -1}, "seed must be at least 0 and below 2.64, got -1"),
            ({"tile": 0}, "tile must be at least 1"),
            ({"time_context": 0}, "time-context must be at least 1"),
            ({"time_batch": 0}, "time-batch must be at least 1"),
            *(({"time_share": share}, r"time-share must be a share in \(0, 1\], got") for share in (0.0, 1.1, -0.5)),
            ({"time_share": float("nan")}, "time-share must be a share"),
            (
                {"time_share": 0.5},
                "anchors has no effect beside time-share, which says how many; leave one of them out",
            ),
            ({"time_context": 256}, "time-context has no effect without time-share"),
            ({"time_batch": 7}, "time-batch has no effect without time-share"),
            ({"rounds": -1}, "rounds must be at least 0, got -1"),
            ({"prompts": "long"}, "--prompts: unknown value 'long'. Allowed: dense, sparse"),
            ({"prompts": "sparse"}, "prompts has no effect when anchors are chosen by similarity"),
            ({"by": "divergence", "prompts": "sparse"}, "prompts has no effect when anchors are chosen by divergence"),
            (
                {"by": "together", "prompts": "sparse", "method": Kascade()},
                "method must be sparse in prompts, too, with prompts sparse: kascade",
            ),
            ({"rounds": 2}, "rounds has no effect when anchors are chosen by similarity"),
            ({"by": "divergence", "rounds": 2}, "rounds has no effect when anchors are chosen by divergence"),
            (
                {"by": "divergence", "method": KascadePages()},
                "method must score all keys exactly, as divergence does, such as kascade: kascade_pages",
            ),
            ({"by": "luck"}, "--by: unknown value 'luck'. Allowed: together, divergence, similarity"),
            ({"answer_tokens": 0}, "answer-tokens must be at least 1"),
            ({"by": "divergence", "answer_tokens": 1}, "answer-tokens must be at least 2, got 1: the first is"),
            ({"also": (tasks.parse("niah", length=310),), "limit": 0}, "limit must be at least 1, got 0"),
            *(
                (
                    {"by": "divergence", "method": Kascade(**idle)},
                    f"{next(iter(idle))} has no effect: what is measured is decoding after dense prompts",
                )
                for idle in ({"tile": 9}, {"dense_anchor_prefill": False, "decode_only": False})
            ),
            ({"by": "divergence", "method": Kascade(top_k=1.0)}, r"all keys of a prompt of 29\d tokens are read under"),
            ({"by": "divergence", "method": Kascade(min_k=299)}, r"all keys of a prompt .* under kascade:min_k=299"),
            ({"batch_size": 0}, "batch-size must be at least 1"),
            ({"answer_tokens": 9}, "answer-tokens has no effect when anchors are chosen by similarity"),
            ({"batch_size": 2}, "batch-size has no effect when"),
            ({"method": Kascade(top_k=9)}, "method has no effect when .* kascade_paper:pool=layer is possible"),
            ({"method": KascadePaper(top_k=9, pool="layer")}, "method has no effect when"),
            ({"by": "divergence", "method": H2O()}, "method must be kascade with its settings, not h2o"),
            *(
                (
                    {"by": "divergence", "method": Kascade(**chosen)},
                    "method must leave out anchors, heads and calibration",
                )
                for chosen in ({"anchors": 3}, {"anchors": [0, 2], "heads": {"1": [0, 0]}, "pool": "kv_head"})
            ),
            (
                {"by": "divergence", "task": tasks.parse("perplexity", length=100)},
                "task 'perplexity' has no questions to answer: choose its anchors by similarity",
            ),
            (
                {"by": "divergence", "task": tasks.parse("niah", length=2030), "answer_tokens": 30},
                "item .* needs 2,05. positions, the model has 2,048",
            ),
            ({"anchors": 5}, "anchors must be a number from 1 to 4, the layers that can be one, not 5$"),
            ({"keys": 290}, r"item 0: a prompt of 29\d tokens is too short .* at least 301 \(keys 290, tile 24\)"),
            ({"task": tasks.parse("perplexity", length=2040)}, "item .* needs 2,552 positions, the model has 2,048"),
            ({"device": "tpu"}, "unknown device"),
            ({"dtype": "int8"}, "unknown dtype"),
        ],
    )
    def test_end_before_the_model_is_loaded(self, plan, no_model, change, message):
        with pytest.raises(UserError, match=message):
            run(dataclasses.replace(plan, **change))
        assert not plan.out.parent.exists()

    def test_attention_that_is_not_finite_names_its_layer(self, plan, tmp_path):
        folder = tiny.build(tmp_path / "tiny-llama", layers=LAYERS)
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.2.self_attn.k_proj.weight"][0, 0] = float("nan")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match="layer 2: the attention logits of a prompt are not finite"):
            run(dataclasses.replace(plan, model=folder))


def brute_force(divergence, number):
    """The anchors that lose least in sum, of all subsets with the first layer."""
    worst = {}
    for more in itertools.combinations(range(1, LAYERS), number - 1):
        anchors = (0, *more)
        worst[anchors] = sum(divergence[max(a for a in anchors if a <= layer)][layer] for layer in range(LAYERS))
    return min(worst, key=worst.get)


class TestByDivergence:
    @pytest.fixture
    def plan(self, plan):
        other = tasks.parse("ruler:split=niah_multikey_1", length=360)
        method = Kascade(top_k=5)
        return dataclasses.replace(
            plan, also=(other,), limit=2, by="divergence", method=method, answer_tokens=5, batch_size=3
        )

    @pytest.fixture
    def measured(self, monkeypatch):
        """The batches that are compared."""
        batches, measure = [], divergence.measure

        def noting(model, tokenizer, items, *more):
            batches.append([item.id for item in items])
            return measure(model, tokenizer, items, *more)

        monkeypatch.setattr(divergence, "measure", noting)
        return batches

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_anchors_lose_least(self, plan, measured, number):
        artefact = run(dataclasses.replace(plan, anchors=number))
        found = artefact.found["divergence"]
        assert artefact.anchors == brute_force(found, number)
        assert [(a, b) for a in range(LAYERS) for b in range(LAYERS) if found[a][b] == 0.0] == [
            (a, b) for a in range(LAYERS) for b in range(LAYERS) if b == 0 or a > b
        ]
        assert artefact.found["by_number"][number - 1]["objective"] == pytest.approx(
            -sum(found[max(a for a in artefact.anchors if a <= layer)][layer] for layer in range(LAYERS)), rel=1e-3
        )
        assert [len(batch) for batch in measured] == [3, 1]
        assert artefact.heads.keys() | {str(anchor) for anchor in artefact.anchors} == set("0123")

    def test_heads_read_their_counterparts(self, plan, monkeypatch):
        maps, measure = [], divergence.measure
        monkeypatch.setattr(divergence, "measure", lambda *more: maps.append(more[5]) or measure(*more))
        plan = dataclasses.replace(plan, also=(), batch_size=2, method=Kascade(top_k=5))
        artefact = run(plan)
        expected = counterparts(measured.captured for measured, _ in studied(plan))
        assert torch.equal(*maps, expected)
        assert artefact.heads == {
            str(layer): expected[max(a for a in artefact.anchors if a < layer), layer].tolist()
            for layer in range(LAYERS)
            if layer not in artefact.anchors
        }

    def test_samples_of_a_question_are_one_greedy_answer(self, plan, monkeypatch, tmp_path):
        plan = dataclasses.replace(plan, also=())
        once, items = run(plan), type(plan.task).items
        sampling = Sampling(temperature=5.0, top_p=1.0, seed=3)

        def sampled(self, *more):
            return [dataclasses.replace(item, sampling=sampling) for item in items(self, *more) for _ in range(3)]

        monkeypatch.setattr(type(plan.task), "items", sampled)
        thrice = run(dataclasses.replace(plan, out=tmp_path / "thrice.json"))
        assert thrice.found["divergence"] == once.found["divergence"]
        assert len(thrice.found["run"]["tokens"]) == 2
        monkeypatch.setattr(type(plan.task), "items", lambda self, *more: sampled(self, *more)[:3])
        with pytest.raises(UserError, match="limit 2 gives one prompt, which shows too little"):
            run(dataclasses.replace(plan, out=tmp_path / "once.json"))

    def test_answers_of_one_token_are_told(self, plan, monkeypatch):
        monkeypatch.setattr(divergence, "measure", lambda *more: torch.zeros(LAYERS, LAYERS))
        with pytest.raises(UserError, match="no prediction moves, whichever layer reads another's choice"):
            run(plan)

    def test_is_the_mean_over_prompts(self, plan, tmp_path):
        together = run(plan)
        singly = run(dataclasses.replace(plan, batch_size=1, out=tmp_path / "singly.json"))
        torch.testing.assert_close(
            torch.tensor(together.found["divergence"]), torch.tensor(singly.found["divergence"]), rtol=1e-3, atol=1e-7
        )

    def test_tells_how_it_was_made(self, plan):
        found = run(plan).found
        assert found["command"] == (
            "foveate calibrate --model tiny-llama --task niah:split=single,length=300,max_new_tokens=16 "
            "--task ruler:split=niah_multikey_1,length=360,max_new_tokens=0 --data data --anchors 2 --limit 2 "
            '--keys 16 --tile 24 --by divergence --method "kascade:top_k=5" --answer-tokens 5 '
            "--batch-size 3 --seed 0 --dtype float32 --device cpu --out tiny.json"
        )
        assert [task["task"] for task in found["run"]["tasks"]] == ["niah", "ruler"]
        assert len(found["run"]["tokens"]) == 4

    @pytest.mark.parametrize("at", [1, 4, 9, 17])
    def test_goes_on_where_it_was(self, plan, measured, tmp_path, at):
        whole = run(dataclasses.replace(plan, out=tmp_path / plan.out.name))
        measured.clear()
        steps, said = [], []
        with pytest.raises(KeyboardInterrupt):
            run(plan, progress=stop_at(at))
        left = len(list(calibrate.partial_folder(plan.out).glob("*.safetensors")))
        assert left == min(at, 4) + (at > 13)
        assert without_time(run(plan, progress=lambda *step: steps.append(step), say=said.append)) == without_time(
            whole
        )
        assert steps[-1] == (22, 22)
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert said == [f"resuming: {left} of 6 files of prompts and answers are there"]
        assert len(measured) == (2 if at < 4 else 3), "a batch that was interrupted is compared again, and no other"


class TestTogether:
    @pytest.fixture
    def plan(self, plan):
        other = tasks.parse("ruler:split=niah_multikey_1", length=360)
        how = {"by": "together", "method": Kascade(top_k=5), "answer_tokens": 5, "batch_size": 3, "rounds": 1}
        return dataclasses.replace(plan, also=(other,), limit=2, **how)

    @pytest.mark.parametrize("number", [1, 2, 3])
    @pytest.mark.parametrize("pool", ["layer", "kv_head"])
    def test_anchors_are_added_and_moved(self, plan, monkeypatch, number, pool):
        lost, together = {}, divergence.together

        def noting(model, answered, methods, step):
            found = together(model, answered, methods, step)
            for method, one in zip(methods, found, strict=True):
                readers = sorted({"0", "1", "2", "3"} - {str(layer) for layer in method.anchors})
                assert sorted(method.heads or {}) == ([] if method.pools_layer else readers)
                share = len(answered.trace.tokens) / 4
                lost.setdefault(tuple(method.anchors), {})[share] = one * share
            return found

        monkeypatch.setattr(divergence, "together", noting)
        plan = dataclasses.replace(plan, anchors=number, rounds=4, method=Kascade(top_k=5, pool=pool))
        artefact = run(plan)
        lost = {anchors: float(sum(batches.values())) for anchors, batches in lost.items()}
        path, moved = artefact.found["by_number"], artefact.found["together"]
        assert [len(step["anchors"]) for step in path] == list(range(1, number + 1))
        for before, step in itertools.pairwise(path):
            more = {(*sorted({*before["anchors"], layer}),) for layer in range(LAYERS)} - {tuple(before["anchors"])}
            assert lost[tuple(step["anchors"])] == min(lost[anchors] for anchors in more)
        assert [step["objective"] for step in path] == pytest.approx(
            [-lost[tuple(step["anchors"])] for step in path], rel=1e-3
        )
        assert moved[0]["anchors"] == path[-1]["anchors"]
        assert artefact.anchors == tuple(moved[-1]["anchors"])
        assert moved[-1]["divergence"] == pytest.approx(lost[artefact.anchors], rel=1e-3)
        of_number = {anchors for anchors in lost if len(anchors) == number}
        assert moved[-1]["divergence"] <= min(lost[anchors] for anchors in of_number) / 0.98
        assert artefact.found["divergence"] is None

    def test_prompts_may_be_sparse(self, plan, monkeypatch):
        seen, together = [], divergence.together
        monkeypatch.setattr(divergence, "together", lambda *more: seen.extend(more[2]) or together(*more))
        method = Kascade(top_k=5, decode_only=False, tile=12)
        artefact = run(dataclasses.replace(plan, prompts="sparse", method=method))
        assert {(one.decode_only, one.tile) for one in seen} == {(False, 12)}
        assert artefact.found["run"]["answers"]["prompts"] == "sparse"
        assert "--rounds 1 --prompts sparse" in artefact.found["command"]

    def test_goes_on_where_it_was(self, plan, monkeypatch, tmp_path):
        whole = run(dataclasses.replace(plan, out=tmp_path / plan.out.name))
        tried, together = [], divergence.together
        monkeypatch.setattr(divergence, "together", lambda *more: tried.append(len(more[2])) or together(*more))
        with pytest.raises(KeyboardInterrupt):
            run(plan, progress=stop_at(9))
        assert tried == [1, 1, 3, 3]
        steps, said = [], []
        again = run(plan, progress=lambda *step: steps.append(step), say=said.append)
        assert without_time(again) == without_time(whole)
        assert said == ["resuming: 4 of 4 prompts and 3 files of anchors tried are there"]
        assert tried == [1, 1, 3, 3, 3, 3, 3], "the last of four again, and the second anchor in every other place"
        assert steps[-1] == (4 + 2 * (1 + 3 + 3),) * 2
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)

    def test_as_many_as_time_allows_and_no_more_than_help(self, plan, monkeypatch):
        monkeypatch.setattr(layer_costs, "measure", lambda method, **shape: STUBBED)
        losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0}
        monkeypatch.setattr(
            divergence,
            "together",
            lambda model, answered, methods, step: torch.tensor([losses[len(m.anchors)] for m in methods]),
        )
        assert run(dataclasses.replace(plan, anchors=None, time_share=1.0)).anchors == (0, 1)

    def test_tells_how_it_was_made(self, plan):
        assert (
            '--by together --method "kascade:top_k=5" --answer-tokens 5 --batch-size 3 --rounds 1 '
            in (run(plan).found["command"])
        )

    def test_predictions_that_are_not_finite_are_told(self, plan, monkeypatch):
        broken = torch.tensor([float("nan")])
        monkeypatch.setattr(generation._Questions, "divergence", lambda *more, **how: broken)
        with pytest.raises(UserError, match=r"not finite .* with kascade"):
            run(plan)

    def test_answers_of_one_token_are_told(self, plan, monkeypatch):
        monkeypatch.setattr(divergence, "together", lambda model, answered, methods, step: torch.zeros(len(methods)))
        with pytest.raises(UserError, match="no prediction moves, whichever layer reads another's choice"):
            run(plan)


class TestUsually:
    """What a plan is that says nothing."""

    def test_anchors_are_chosen_together_ten_of_28(self, folder, sample, tmp_path):
        plan = Plan(folder, tasks.parse("niah"), sample, tmp_path / "x.json")
        assert (plan.by, plan.rounds, plan.method) == ("together", 0, Kascade())
        assert plan.settings == {"pool": "layer", "pooling": "sqrt", "decode_only": True}
        assert [plan.with_anchors(layers).anchors for layers in (1, 2, 24, 28, 30, 32, 56)] == [1, 1, 9, 10, 11, 11, 20]
        assert dataclasses.replace(plan, anchors=3).with_anchors(28).anchors == 3

    def test_by_similarity_they_are_the_papers(self, folder, sample, tmp_path):
        plan = Plan(folder, tasks.parse("niah"), sample, tmp_path / "x.json", by="similarity")
        assert plan.method == plan.in_use == KascadePaper()
        assert plan.settings == {"pool": "kv_head", "pooling": "post_softmax"}
        assert [plan.with_anchors(layers).anchors for layers in (4, 28, 56)] == [4, 5, 5]

    def test_prompts_are_dense_in_use_as_they_were(self, folder, sample, tmp_path):
        how = {"method": Kascade(decode_only=False)}
        plan = Plan(folder, tasks.parse("niah"), sample, tmp_path / "x.json", **how)
        assert plan.in_use == Kascade()
        sparse = dataclasses.replace(plan, prompts="sparse")
        assert sparse.in_use == Kascade(decode_only=False)
        assert sparse.settings["decode_only"] is False


class TestTimeShare:
    @pytest.mark.parametrize(("share", "number"), [(0.53, 1), (0.67, 1), (0.68, 2), (0.83, 3), (1.0, 4)])
    def test_is_kept_by_as_many_anchors_as_fit(self, plan, monkeypatch, share, number):
        asked = []
        monkeypatch.setattr(layer_costs, "measure", lambda method, **shape: asked.append(shape) or STUBBED)
        artefact = run(dataclasses.replace(plan, time_share=share, time_context=99, time_batch=3, anchors=None))
        assert len(artefact.anchors) == number
        shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "context": 99, "batch": 3}
        assert asked == [{**shape, "dtype": torch.float32, "device": "cpu"}]
        assert artefact.found["layer_ms"] == STUBBED
        assert artefact.found["chosen_by"]["time_share"] == share
        assert f"--time-share {share} --time-context 99 --time-batch 3" in artefact.found["command"]

    def test_that_no_number_keeps_is_told_before_the_prompts_are_read(self, plan, monkeypatch, read):
        monkeypatch.setattr(layer_costs, "measure", lambda method, **shape: STUBBED)
        with pytest.raises(UserError, match=r"time-share 0\.5 cannot be kept: at 32,768 tokens .* takes 0\.53 of"):
            run(dataclasses.replace(plan, anchors=None, time_share=0.5))
        assert not read
        assert len(run(dataclasses.replace(plan, anchors=None, time_share=0.7)).anchors) == 2
        assert len(read) == 3

    def test_that_does_not_fit_into_memory_is_told(self, plan, monkeypatch):
        def measure(method, **shape):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(layer_costs, "measure", measure)
        with pytest.raises(
            UserError, match=r"the keys of 1 sequences of 32,768 tokens, .* smaller time-batch or time-"
        ):
            run(dataclasses.replace(plan, anchors=None, time_share=0.5))

    def test_knows_models_whose_layer_0_is_not_one_of_the_layers(self):
        share = 0.36  # 1.4 of 4, which the dense layer 0 would exceed
        assert layer_costs.affordable(STUBBED, share, [5, 11, 17, 23], 900) == 1
        with pytest.raises(UserError, match=r"time-share 0\.36 cannot be kept: at 900 tokens"):
            layer_costs.affordable(STUBBED, share, [0, 1, 2, 3], 900)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("method", [Kascade(), KascadePages(first_layer="pages")], ids=lambda one: one.spec)
    def test_is_of_costs_measured(self, dtype, method):
        shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "context": 200, "batch": 2}
        costs = layer_costs.measure(method, **shape, dtype=dtype, device="cpu")
        assert list(costs) == ["dense", "first", "anchor", "reuse"]
        assert all(0 < cost < 1000 for cost in costs.values())

    @pytest.mark.parametrize(("beyond", "caches"), [(1, 1), (100_000, 2), (1 << 30, 4)])
    def test_is_of_steps_of_each_kind_of_layer_over_all_caches(self, monkeypatch, beyond, caches):
        """As many caches of 51,200 bytes as no cache of the device holds, four at most; the time is that of one."""
        chose, stepped, timed = [], [], []
        hand_on, decode = runtime_decode.hand_on, layer_costs.decode

        def noting(method, cache, *more):
            chose.clear()
            decode(method, cache, *more)
            dense = method.role.reads_all
            stepped.append((id(cache), "dense" if dense else "sparse", "chooses" if chose else "does not"))

        def milliseconds(step, device):
            stepped.clear()
            step()
            timed.append(list(stepped))
            return float(len(timed))

        monkeypatch.setattr(runtime_decode, "hand_on", lambda *given: chose.append(given) or hand_on(*given))
        monkeypatch.setattr(layer_costs, "decode", noting)
        monkeypatch.setattr(layer_costs, "_BEYOND_CACHES", beyond)
        monkeypatch.setattr(timing, "milliseconds", milliseconds)
        shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "context": 200, "batch": 2}
        costs = layer_costs.measure(Kascade(), **shape, dtype=torch.float32, device="cpu")
        repeats = len(timed) // 4
        assert repeats > 2
        assert list(costs.values()) == [(repeats * (kind + 0.5) + 0.5) / caches for kind in range(4)]  # medians
        kinds = [("dense", "does not"), ("dense", "chooses"), ("sparse", "chooses"), ("sparse", "does not")]
        for number, steps in enumerate(timed):
            assert len(steps) == len({cache for cache, *_ in steps}) == caches
            assert {tuple(kind) for _, *kind in steps} == {kinds[number // repeats]}

    def test_is_of_costs_of_the_method(self, plan, monkeypatch):
        asked, method = [], Kascade(top_k=5, pool="layer")
        monkeypatch.setattr(layer_costs, "measure", lambda method, **shape: asked.append(method) or STUBBED)
        run(dataclasses.replace(plan, method=method, anchors=None, time_share=0.9))
        assert asked == [method]
        chosen = []
        monkeypatch.undo()
        monkeypatch.setattr(
            Kascade, "select", lambda self, *more, select=Kascade.select: chosen.append(self) or select(self, *more)
        )
        layer_costs.measure(
            method, heads=4, kv_heads=2, head_dim=8, context=200, batch=2, dtype=torch.float32, device="cpu"
        )
        assert {(one.top_k, one.pool) for one in chosen} == {(5, "layer")}

    def test_takes_fewer_anchors_where_more_lose_more(self, plan, monkeypatch):
        lost = torch.ones(LAYERS, LAYERS).triu()
        lost[2, 2:] = 0.1
        lost[3, 3] = 5.0
        monkeypatch.setattr(layer_costs, "measure", lambda method, **shape: STUBBED)
        monkeypatch.setattr(divergence, "measure", lambda *more: lost.index_fill(1, torch.tensor(0), 0.0))
        artefact = run(
            dataclasses.replace(plan, by="divergence", method=Kascade(top_k=5), anchors=None, time_share=1.0)
        )
        assert artefact.anchors == (0, 2)
        assert list(artefact.heads) == ["1", "3"]

    def test_adds_up_over_layers(self):
        assert layer_costs.total(STUBBED, 1, 4) == pytest.approx(1.5 + 3 * 0.2)
        assert layer_costs.total(STUBBED, 3, 4) == pytest.approx(1.5 + 2 * 0.8 + 0.2)
        assert layer_costs.total(STUBBED, 4, 4) == pytest.approx(1.5 + 3 * 0.8)


def test_the_run_on_record_is_json(plan):
    artefact = run(plan)
    assert json.loads(json.dumps(artefact.found["run"])) == artefact.found["run"]
