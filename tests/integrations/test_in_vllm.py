"""foveate within vLLM on a CPU, which `make test-vllm` installs: tokens are vLLM's own, or those of `attach`."""

from __future__ import annotations

import functools
import inspect
import json
import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import foveate

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.integrations import vllm_engine  # noqa: E402
from tests.integrations.vllm_engine import ENVIRONMENT  # noqa: E402

ROOT = Path(__file__).parents[2]
NEW, VOCAB, LAYERS = 24, 512, 6
FULL = "kascade_paper:top_k=1.0,anchors=[0,3],decode_only=true"
SMALL = "kascade_paper:top_k=0.1,min_k=16,anchors=[0,3],decode_only=true"
FULL_PAGES = "pages:top_k=1.0,weighted=false"
PAGES = "pages:top_k=64,weighted=false"
BY_PAGES = (
    "kascade_pages:top_k=0.1,min_k=16,pool=kv_head,pooling=post_softmax,anchors=[0,3],first_layer=pages,weighted=false"
)
OF_OTHER_HEADS = f'{SMALL},heads={{"1": [1, 0, 3, 2], "4": [3, 3, 0, 1]}}'
CHUNKS = {"block_size": 32, "max_num_batched_tokens": 64}
"""Prompts in chunks of at most 64 tokens, shared with the rows that decode."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama whose attention is far from uniform, with a tokenizer of words."""
    return written(tmp_path_factory.mktemp("llama"), num_attention_heads=4, num_key_value_heads=2)


def written(path, **shape):
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS, "head_dim": 32}
    heads = {"max_position_embeddings": 512, **shape}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCAB}
    config = transformers.LlamaConfig(**sizes, **heads, **ids, tie_word_embeddings=False, initializer_range=0.15)
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(2.0)
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    tokenizer.save_pretrained(path)
    return path


def drawn(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [drawn(96, 0) + drawn(n, n) for n in (150, 40, 104, 201)] + [drawn(n, n) for n in (33, 260, 7, 65)]
"""Four begin alike. A prompt of 65 tokens ends with a chunk of one token."""


def attached(folder, spec, prompts, new=NEW, counts=None):
    """What Transformers generates, by a method of `attach`; None: without one.

    ``counts`` gets the number of decode steps, and that of the keys that all layers have read in them.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if spec is not None:
        foveate.attach(model, spec)
    how = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for ids in prompts:
        given = torch.tensor([ids])
        found.append(model.generate(given, attention_mask=torch.ones_like(given), **how)[0, len(ids) :].tolist())
    if counts is not None:
        layers = foveate.stats(model).layers
        counts["rows"] = layers[0].decode_steps
        counts["keys_read"] = sum(layer.keys_read_per_step * layer.decode_steps for layer in layers)
        counts["keys_available"] = sum(layer.keys_available_per_step * layer.decode_steps for layer in layers)
    return found


def run(
    folder, spec, prompts=PROMPTS, new=NEW, times=1, environment=None, replaying=False, second=False, job=None, **engine
):
    """``second``: by model runner V2, interpreted; ``job``: see vllm_engine.py."""
    job = {"model": str(folder), "spec": spec, "prompts": prompts, "new": new, "times": times} | (job or {})
    job |= {"engine": engine, "replaying": replaying, "second": second}
    script = Path(__file__).with_name("vllm_engine.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(job),
        env=os.environ | ENVIRONMENT | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("second") == second
    return found


@pytest.fixture(scope="module")
def own(folder):
    """vLLM's own tokens."""
    found = run(folder, None, **CHUNKS)
    assert found["tokens"][0] == attached(folder, None, PROMPTS)
    return found["tokens"][0]


@pytest.fixture(scope="module")
def small(folder, own):
    """The tokens of a small budget of a method, and what `attach` counts."""

    @functools.cache
    def of_method(spec):
        counts = {}
        found = attached(folder, spec, PROMPTS, counts=counts)
        differing = sum(a != b for one, other in zip(found, own) for a, b in zip(one, other))
        assert differing > NEW, "the budget must be small enough to be seen"
        return found, counts

    return of_method


@pytest.mark.parametrize("spec", ["dense", FULL, FULL_PAGES])
def test_all_keys_give_the_tokens_of_vllm_itself(folder, own, spec):
    assert run(folder, spec, **CHUNKS)["tokens"] == [own]


@pytest.mark.parametrize(
    ("spec", "block_size", "choosing", "second"),
    [
        (SMALL, 16, 2, False),
        (SMALL, 32, 2, False),
        (PAGES, 32, LAYERS, False),
        (BY_PAGES, 16, 2, False),
        (BY_PAGES, 16, 2, True),
    ],
)
def test_few_keys_give_the_tokens_of_attach(folder, small, spec, block_size, choosing, second):
    """In mixed batches, with prompts in chunks and, the second time, from cached blocks; and its counts."""
    found = run(folder, spec, times=2, second=second, **CHUNKS | {"block_size": block_size})
    tokens, counts = small(spec)
    assert sum(found["cached"]) > len(PROMPTS) * block_size
    assert found["tokens"] == [tokens, tokens]
    assert {name: found["read"][name] for name in counts} == pytest.approx({name: 2 * x for name, x in counts.items()})
    assert found["read"]["selections"] == 2 * counts["rows"] * choosing
    assert found["read"]["dense_rows"] == 0


def test_keys_in_eight_bits_are_read_in_place(folder, own):
    """With all keys as dense attention to the same; few keys give other tokens."""
    dense, full, small = (run(folder, spec, kv_cache_dtype="fp8", **CHUNKS) for spec in ("dense", FULL, SMALL))
    assert full["tokens"] == dense["tokens"] != [own]
    assert small["tokens"] != dense["tokens"]
    assert small["read"]["keys_read"] < full["read"]["keys_read"]
    assert run(folder, "lessismore:top_k=1.0", kv_cache_dtype="fp8", **CHUNKS)["tokens"] == dense["tokens"]


def test_rows_beside_prompts_are_dense_and_counted(folder, small, own):
    """Where vLLM replays other steps as graphs; dense_below=0 leaves no row dense."""
    tokens, counts = small(SMALL)
    found = run(folder, {"method": SMALL, "dense_below": 1}, replaying=True, **CHUNKS)
    assert found["tokens"] not in ([tokens], [own])
    assert 0 < found["read"]["dense_rows"] < counts["rows"]
    assert found["read"]["rows"] == counts["rows"]
    sparse = run(folder, {"method": SMALL, "dense_below": 0}, replaying=True, **CHUNKS)
    assert sparse["tokens"] == [tokens]
    assert sparse["read"]["dense_rows"] == 0


@pytest.mark.parametrize("spec", [SMALL, FULL])
def test_an_audit_changes_no_token_and_tells_what_a_step_loses(folder, own, small, spec):
    """By both model runners, which observe the same."""
    found, by_second = (
        run(folder, {"method": spec, "audit": 1.0}, second=second, **CHUNKS) for second in (False, True)
    )
    assert all(by_second[name] == found[name] for name in ("tokens", "read"))
    for name, numbers in found["audits"].items():
        assert by_second["audits"][name] == pytest.approx(numbers)
    assert found["tokens"] == [own if spec == FULL else small(spec)[0]]
    if spec != FULL:
        assert {name: found["read"][name] for name in small(spec)[1]} == pytest.approx(small(spec)[1])
    audits = {name: (sum(numbers[:-1]), numbers[-1]) for name, numbers in found["audits"].items()}
    (rows, agreeing), (_, kl), (_, mass) = (audits[name] for name in ("agreement", "kl", "mass_read"))
    assert 20 < rows < found["read"]["rows"], "steps in which every row decodes"
    assert audits["kl"][0] == audits["mass_read"][0] == rows
    if spec == FULL:
        assert (agreeing, kl / rows, mass / rows) == pytest.approx((rows, 0, 1), abs=1e-4)
    else:
        assert 0 < agreeing < rows
        assert kl / rows > 0.01
        assert 0.05 < mass / rows < 0.95


def test_a_method_that_chooses_nothing_has_no_audits(folder, own):
    found = run(folder, {"method": "dense", "audit": 1.0}, **CHUNKS)
    assert found["tokens"] == [own]
    assert not any(sum(numbers) for numbers in found["audits"].values())


@pytest.mark.parametrize("program", ["serving", "serving_accuracy"])
def test_programs_that_measure_run_in_vllm(folder, tmp_path, program, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import serving, serving_accuracy

    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    if program == "serving":
        out = tmp_path / "rows.jsonl"
        how = [
            "--tiny",
            "--out",
            out,
            "--case",
            "96x2",
            "--method",
            SMALL,
            "--steps",
            4,
            "--repeats",
            1,
            "--memory",
            0.5,
        ]
        serving.main([str(one) for one in how])
        (found,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
        assert min(found["ms"], found["baseline_ms"]) > 0
    else:
        job = {"method": SMALL, "memory": 0.5, "model": str(folder), "dummy": False, "rows": 4, "ends": [2]}
        job |= {"questions": {"some": [(ids, 5) for ids in PROMPTS]}}
        found = serving.run(job, serving_accuracy.PROGRAM)["some"]
        assert len(found["answers"]) == len(PROMPTS)
        assert all(1 <= len(answer) <= 5 for answer in found["answers"])
    assert found["device"].startswith("cpu")
    assert found["keys_read_share"] > 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of four KV heads."""
    return written(tmp_path_factory.mktemp("wide"), num_attention_heads=8, num_key_value_heads=4)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("spec", [f"{SMALL},pool=layer,pooling=sqrt", OF_OTHER_HEADS, PAGES])
def test_ranks_give_the_tokens_of_one(wide, spec, ranks):
    """Heads choose together with those of other ranks, or read their choices."""
    (found,) = run(wide, spec, environment=vllm_engine.ranks(ranks), tensor_parallel_size=ranks, **CHUNKS)["tokens"]
    expected = attached(wide, spec, PROMPTS)
    differing = sum(map(operator.ne, found, expected))
    # the sum over four ranks rounds otherwise, and a summary's codes are rounded to four and eight bits
    assert differing <= (spec == PAGES and ranks == 4)


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_beside_a_drafter_tokens_are_vllms_own(folder, own, tmp_path, drafter):
    """Its own attention verifies the drafts and reads all keys; each row is counted. A model accepts its own drafts."""
    speculation = {"method": drafter, "num_speculative_tokens": 3}
    if drafter == "draft_model":
        speculation["model"] = str(written(tmp_path, num_attention_heads=4, num_key_value_heads=2))
    else:
        speculation |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    found = run(folder, {"method": SMALL, "dense_below": 0}, speculative_config=speculation, **CHUNKS)
    assert found["tokens"] == [own]
    counts, read = found["counts"], found["read"]
    assert counts["vllm:spec_decode_num_draft_tokens"] > 0
    assert 0 < read["dense_rows"] == read["rows"] <= len(PROMPTS) * (NEW - 1)
    if drafter == "draft_model":  # of random tokens few come again, which ngram looks for
        assert counts["vllm:spec_decode_num_accepted_tokens"] > NEW
        assert read["rows"] < len(PROMPTS) * NEW / 2, "rows bring several tokens"
    assert read["keys_read"] == read["keys_available"] > 0


def test_one_engine_reads_prompts_and_another_decodes(folder, small, tmp_path):
    """Its keys come by a KV connector of vLLM's, which is handed blocks as the plugin lays them out."""
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    connector["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    how = {"kv_transfer_config": connector, "block_size": 16, "enable_prefix_caching": False}
    run(folder, SMALL, new=1, **how)
    stored = sum(1 for path in tmp_path.rglob("*.safetensors"))
    assert stored >= LAYERS * (len(PROMPTS) - 1), "all prompts but the one that is shorter than a block"
    found = run(folder, SMALL, **how)
    assert sum(found["cached"]) > 0.8 * sum(map(len, PROMPTS))
    assert found["tokens"] == [small(SMALL)[0]]


def test_requests_that_are_preempted_go_on_with_all_keys(folder):
    """With a small budget they need not: a request that comes back computes its generated tokens densely."""
    prompts, new = [PROMPTS[0], PROMPTS[5]], 60  # 39 blocks in the end, of which there are 35
    found = run(folder, FULL, prompts, new, num_gpu_blocks_override=36, block_size=16, max_num_batched_tokens=512)
    assert found["counts"]["vllm:num_preemptions"] > 0
    assert found["tokens"] == [attached(folder, None, prompts, new)]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("h2o", "h2o evicts tokens"),
        (f"{PAGES},page_size=12", "pages of 12 tokens do not divide the engine's blocks of 32"),
    ],
)
def test_what_cannot_be_served_is_an_error_at_start(folder, spec, why):
    with pytest.raises(AssertionError, match=why):
        run(folder, spec, [[5, 6, 7]], 1, **CHUNKS)


def test_without_the_option_nothing_is_ours(folder):
    """A method alone changes nothing: the backend must be chosen."""
    found = run(folder, None, PROMPTS[:1], environment={"FOVEATE_METHOD": "no such method"}, **CHUNKS)
    assert found["tokens"] == run(folder, None, PROMPTS[:1], **CHUNKS)["tokens"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["--method", SMALL, "--kv-cache-dtype", "fp8_e5m2"],
            "foveate does not support --kv-cache-dtype fp8_e5m2 for a model in float32: give auto, fp8 or fp8_e4m3",
        ),
        (["--method", f"{PAGES},page_size=12", "--block-size", "32"], "pages of 12 tokens do not divide"),
        (
            ["--method", SMALL, "--max-model-len", "9999"],  # which vLLM refuses
            "User-specified max_model_len (9999) is greater than the derived max_model_len",
        ),
    ],
)
def test_serve_tells_what_an_engine_would_refuse(folder, options, why):
    """Without one, in one line, and with exit code 2."""
    command = [sys.executable, "-m", "foveate", "serve", str(folder), "--check", "--dtype=float32"]
    found = subprocess.run([*command, *options], env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert found.stderr.splitlines()[-1].startswith(f"error: {why}")
    assert found.returncode == 2


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_the_contract_of_vllm(name):
    """Nothing abstract is missing, and methods take what vLLM's take."""
    from vllm.v1.attention import backend as base

    from foveate.integrations.vllm import cpu, gpu

    ours = gpu.FoveateOnGPU if name == "gpu" else cpu.FoveateOnCPU
    pairs = [(ours, base.AttentionBackend), (ours.get_impl_cls(), base.AttentionImpl)]
    pairs.append((ours.get_builder_cls(), base.AttentionMetadataBuilder))
    for mine, its in pairs:
        assert issubclass(mine, its)
        assert not mine.__abstractmethods__
    for method in ("forward", "do_kv_cache_update"):
        mine, its = (getattr(one.get_impl_cls(), method) for one in (ours, gpu.FlashAttentionBackend))
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(its).parameters)
    for method in ("build", "build_for_cudagraph_capture", "get_cudagraph_support"):
        mine, its = (getattr(one, method) for one in pairs[2])
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(its).parameters)
    assert not ours.supports_kv_cache_dtype("fp8_e5m2")
    assert ours.get_name() in base_names()


@functools.cache
def base_names():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.__members__
