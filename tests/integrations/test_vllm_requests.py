"""What single requests ask of an engine: dense reading here, and vLLM's own features with a method at full budget."""

from __future__ import annotations

import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import transformers

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.exceptions import VLLMValidationError

from foveate.integrations.vllm import requests
from tests.integrations.test_in_vllm import (
    BY_PAGES,
    CHUNKS,
    FULL,
    LAYERS,
    NEW,
    PAGES,
    PROMPTS,
    SMALL,
    VOCAB,
    attached,
    folder,  # noqa: F401
    run,
)

DENSE = {"extra_args": {"foveate": "dense"}}
ASKED = [n in (0, 3, 4) for n in range(len(PROMPTS))]
"""Requests that ask for dense reading, among them ones that begin like others."""


@pytest.mark.parametrize(("spec", "second"), [(SMALL, False), (BY_PAGES, False), (BY_PAGES, True)])
def test_a_request_may_ask_for_dense_reading_beside_others(folder, spec, second):  # noqa: F811
    """It gets the tokens of dense attention, and its neighbours get the method's tokens, also the second time."""
    job = {"sampling": [DENSE if asked else {} for asked in ASKED]}
    job["refused"] = [{"extra_args": {"foveate": given}} for given in ("sparse", None, 1)]
    found = run(folder, spec, times=2, second=second, job=job, **CHUNKS)
    dense, sparse = attached(folder, None, PROMPTS), attached(folder, spec, PROMPTS)
    assert all(a != b for a, b in zip(dense, sparse)), "the budget must be small enough to be seen"
    assert found["tokens"] == [[a if asked else b for asked, a, b in zip(ASKED, dense, sparse)]] * 2
    assert found["read"]["dense_rows"] == 2 * sum(ASKED) * (NEW - 1)
    assert [text.rpartition("must be ")[2] for text in found["refused"]] == [
        f'"dense", not {given!r}' for given in ("sparse", None, 1)
    ]


@pytest.mark.parametrize("second", [False, True])
def test_a_dense_request_that_is_preempted_stays_dense(folder, second):  # noqa: F811
    """Though its generated tokens are computed anew as a prompt."""
    prompts, new = [PROMPTS[0], PROMPTS[5]], 60  # 39 blocks in the end, of which there are 35
    how = {"num_gpu_blocks_override": 36, "block_size": 16, "max_num_batched_tokens": 512}
    found = run(folder, SMALL, prompts, new, second=second, job={"sampling": [DENSE, DENSE]}, **how)
    assert found["counts"]["vllm:num_preemptions"] > 0
    assert found["tokens"] == [attached(folder, None, prompts, new)]


@pytest.mark.parametrize("spec", [PAGES, SMALL])
def test_an_engine_that_has_slept_goes_on(folder, spec):  # noqa: F811
    """What vLLM drops, summaries of pages among it, is made anew, and its counters go on."""
    found, counts = run(folder, spec, times=2, job={"sleep": True}, **CHUNKS), {}
    tokens = attached(folder, spec, PROMPTS, counts=counts)
    assert sum(found["cached"]) < len(PROMPTS) * 96, "no prefix is there from before"
    assert found["tokens"] == [tokens, tokens]
    assert {name: found["read"][name] for name in counts} == pytest.approx({name: 2 * x for name, x in counts.items()})


# Features of vLLM's own

SCHEMA = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^[a-z]{12}$"}, "good": {"type": "boolean"}},
    "required": ["code", "good"],
    "additionalProperties": False,
}
FEATURES = {
    "plain": {},
    "json": {"json_schema": SCHEMA, "ignore_eos": False, "max_tokens": 50},
    "several": {"n": 2, "temperature": 1.0, "seed": 7},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 3},
}
"""Sampling parameters by what a request asks for, all in one batch."""


@pytest.fixture(scope="module")
def with_bytes(folder, tmp_path_factory):  # noqa: F811
    """The model with a tokenizer of bytes, which can write JSON, and the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("bytes")
    shutil.copytree(folder, path, dirs_exist_ok=True)
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<{n}>" for n in range(len(names), VOCAB)]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}"
    fast.save_pretrained(path)
    return path, fast


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A LoRA adapter of queries and values that changes answers."""
    generator, path = torch.Generator().manual_seed(1), tmp_path_factory.mktemp("lora")
    weights = {}
    for n, (name, out) in itertools.product(range(LAYERS), (("q_proj", 128), ("v_proj", 64))):
        prefix = f"base_model.model.model.layers.{n}.self_attn.{name}"
        weights[f"{prefix}.lora_A.weight"] = torch.randn(4, 128, generator=generator) * 0.2
        weights[f"{prefix}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.2
    safetensors.torch.save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["v1", "v2"])
def features(request, with_bytes):
    """By feature, what vLLM itself answers and what it answers with a method that reads all keys."""
    job = {"sampling": list(FEATURES.values()), "cancelled": [0]}
    structured = {"backend": "xgrammar", "disable_any_whitespace": True}
    how = {"skip_tokenizer_init": False, "structured_outputs_config": structured}
    how["max_num_batched_tokens"] = 1024  # on a CPU vLLM has no seeds for prompts in chunks
    own, full = both(with_bytes[0], request.param, job, **how)
    return {name: pair for name, *pair in zip((*FEATURES, "cancelled"), own, full, strict=True)}


def both(folder, second, job, **engine):  # noqa: F811
    """What vLLM itself answers to the first prompts, and what it answers with a method that reads all keys."""
    prompts, engine = PROMPTS[: len(job["sampling"])], CHUNKS | engine | {"enable_prefix_caching": False}
    own, full = (run(folder, spec, prompts, second=second, job=job, **engine) for spec in (None, FULL))
    assert full["read"]["rows"] > full["read"]["dense_rows"] == 0
    return own["answers"], full["answers"]


def check_logprobs(ours, its, number):
    """Log-probabilities are the same to rounding, as are the tokens that have them, but for ties."""
    assert len(ours) == len(its)
    for a, b in zip(ours, its):
        assert sorted(a.values()) == pytest.approx(sorted(b.values()), abs=1e-3)
        assert len(a.keys() & b.keys()) >= number - 1
        assert {token: a[token] for token in a.keys() & b.keys()} == pytest.approx(
            {token: b[token] for token in a.keys() & b.keys()}, abs=1e-3
        )


def test_json_by_a_schema_is_that_of_vllm_itself(features, with_bytes):
    own, full = features["json"]
    text = with_bytes[1].decode(full["pieces"][0][0], skip_special_tokens=True)
    assert full == own
    assert set(json.loads(text)) == {"code", "good"}


def test_several_answers_to_a_prompt_are_those_of_vllm_itself(features):
    own, full = features["several"]
    assert full == own
    assert full["pieces"][0] != full["pieces"][1]


def test_logprobs_are_those_of_vllm_itself(features):
    (own, its), (full, mine) = (one["pieces"][0] for one in features["logprobs"])
    assert full == own
    assert len(mine) == NEW
    check_logprobs(mine, its, 5)


def test_logprobs_of_a_prompt_are_those_of_vllm_itself(features):
    own, full = features["prompt_logprobs"]
    assert full["pieces"] == own["pieces"]
    assert len(full["prompt"]) == len(PROMPTS[list(FEATURES).index("prompt_logprobs")])
    assert full["prompt"][0] is own["prompt"][0] is None
    check_logprobs(full["prompt"][1:], own["prompt"][1:], 3)


@pytest.mark.parametrize("second", [False, True])
def test_tokens_by_a_lora_adapter_are_those_of_vllm_itself(folder, adapter, second):  # noqa: F811
    job = {"sampling": [{}] * 4, "adapters": [str(adapter)] * 4}
    own, full = both(folder, second, job, enable_lora=True, max_lora_rank=8)
    assert full == own
    assert all(one["pieces"][0][0] != its for one, its in zip(full, attached(folder, None, PROMPTS[:4])))


def test_tokens_beside_cancelled_requests_are_those_of_vllm_itself(features):
    own, full = features["cancelled"]
    assert full == own
    assert len(full) == len(FEATURES) - 1
    assert len(full[-1]) == NEW


class Runner:
    """What model runner V2 does with requests."""

    def __init__(self):
        self.told = []

    def add_requests(self, output):
        return "added"

    def prepare_attn(self, batch):
        self.told.append(requests.dense_rows())
        return "prepared"

    def prepare_dummy_attn(self, batch, valid=False):
        self.told.append(requests.dense_rows())


@pytest.fixture
def runner(monkeypatch):
    from vllm.v1.worker.gpu import model_runner

    monkeypatch.setattr(requests, "_rows", None)
    own = type("Own", (Runner,), dict(vars(Runner)))
    monkeypatch.setattr(model_runner, "GPUModelRunner", own)
    requests.install(second=True)
    requests.install(second=True)  # as for another group of layers
    return own()


def scheduled(new=None, finished=()):
    new = [
        SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=extra))
        for name, extra in (new or {}).items()
    ]
    return SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=set(finished))


def test_rows_follow_their_requests_until_these_end(runner):
    def step(rows, **output):
        assert runner.add_requests(scheduled(**output)) == "added"
        assert runner.prepare_attn(SimpleNamespace(req_ids=rows)) == "prepared"
        return runner.told[-1]

    dense = DENSE["extra_args"]
    assert step(["a", "b"], new={"a": None, "b": {"other": 1}}) is None
    assert step(["b", "c", "a"], new={"c": dense}) == [False, True, False]
    assert step(["c", "a"]) == [True, False]
    runner.prepare_dummy_attn(SimpleNamespace(req_ids=["c"]), valid=True)
    assert runner.told[-1] is None, "a batch without requests"
    assert step(["a"]) is None, "c waits"
    assert step(["c", "d", "a"], new={"d": dense}) == [True, True, False]
    assert step(["c", "d"], finished=["c"], new={"c": None}) == [False, True], "a new request of the same name"
    assert step(["d"], new={"d": {}}) is None, "a request that is streamed goes on without it"
    assert runner.foveate_dense == set()


@pytest.mark.parametrize(
    ("extra", "ubatching", "why"),
    [
        ({"foveate": "sparse"}, False, r"""extra_args\["foveate"\] \(vllm_xargs\) must be "dense", not 'sparse'"""),
        ({"foveate": "dense"}, True, "is not supported with microbatches"),
        ({"foveate": "dense"}, False, None),
        ({"other": 1}, True, None),
        (None, True, None),
    ],
)
def test_what_a_request_may_not_ask_is_named(extra, ubatching, why):
    given = SimpleNamespace(extra_args=extra), SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=ubatching))
    if why is None:
        requests.check_request(*given)
    else:
        with pytest.raises(VLLMValidationError, match=why):
            requests.check_request(*given)
