"""SmolLM2-135M on real text: what tiny random models cannot show. `make test` fetches the model."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foveate
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.runner import Comparison, prepare, run
from tests.helpers import cached, returned_cache

ROOT = Path(__file__).resolve().parents[1]
MODEL, DATA = ROOT / "models" / "smollm2-135m", ROOT / "examples" / "data"


@pytest.fixture(scope="module")
def smollm():
    if not (MODEL / "config.json").exists():
        pytest.fail("models/smollm2-135m is missing: `foveate fetch smollm2-135m --out models/smollm2-135m`")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def text(smollm):
    novel = (DATA / "books" / "moby_dick.txt").read_text(encoding="utf-8")
    return smollm[1](novel[:3000], return_tensors="pt")["input_ids"][:, :440]


def greedy(model, ids, **options):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **options)


def greedy_with_logits(model, ids):
    """What the model writes, and the logits of every step."""
    out = greedy(model, ids, output_logits=True, return_dict_in_generate=True)
    return out.sequences, torch.cat(out.logits)


@pytest.fixture(scope="module")
def short(text):
    return text[:, :160]


@pytest.fixture(scope="module")
def plain(smollm, short):
    """What the unattached model writes after that, and its logits."""
    return greedy_with_logits(smollm[0], short)


def test_dense_writes_what_the_unattached_model_writes(smollm, short, plain):
    model, _ = smollm
    with foveate.attached(model, "dense"):
        assert torch.equal(greedy(model, short, prefill_chunk_size=71), plain[0])
        assert torch.equal(greedy(model, short, prompt_lookup_num_tokens=5), plain[0])
    assert torch.equal(greedy(model, short), plain[0])


@pytest.mark.full
@pytest.mark.parametrize("name", foveate.methods.names())
def test_a_full_budget_writes_what_dense_writes(smollm, short, plain, name):
    model, _ = smollm
    with foveate.attached(model, name, **foveate.methods.get(name).about.full_budget):
        sequences, logits = greedy_with_logits(model, short)
    assert torch.equal(sequences, plain[0])
    torch.testing.assert_close(logits, plain[1], rtol=0, atol=1e-3)  # of logits up to 35


PROMPT = 400


@pytest.fixture(scope="module")
def expected(smollm, text):
    """Dense attention's logarithms of what comes next, after the prompt."""
    with torch.inference_mode():
        return smollm[0](text, logits_to_keep=text.shape[1] - PROMPT).logits[0].log_softmax(-1)


def divergence(model, text, expected, method):
    """Mean KL divergence of dense attention's next-token distribution from the method's in decode, and keys read."""
    with foveate.attached(model, method), torch.inference_mode():
        out = model(text[:, :PROMPT], logits_to_keep=1)
        logits = model(text[:, PROMPT:], **cached(returned_cache(out))).logits[0].log_softmax(-1)
        share = foveate.stats(model).summary()["keys_read_share"]
    return float((expected.exp() * (expected - logits)).sum(-1).mean()), share


@pytest.mark.full
def test_sparse_methods_change_little_and_a_bare_window_much(smollm, text, expected):
    model, _ = smollm
    bare, _ = divergence(model, text, expected, "streaming:sinks=0,window=64")
    for spec in ("h2o:top_k=0.25,window=128", "luka:top_k=0.25", "streaming:window=250"):
        changed, share = divergence(model, text, expected, spec)
        assert share < 0.65
        assert 0 < changed < 0.5
        assert changed < bare / 3


@pytest.mark.full
def test_the_shipped_calibration_is_closer_to_dense_than_evenly_spaced_anchors(smollm, text, expected):
    model, _ = smollm
    settings = "pool=layer,pooling=sqrt,decode_only=true,min_k=32"
    chosen, share = divergence(model, text, expected, f"kascade:{settings}")
    spaced, same_share = divergence(model, text, expected, f"kascade:anchors=8,{settings}")
    assert share == pytest.approx(same_share)
    assert 0 < chosen < spaced


@pytest.mark.full
def test_a_needle_is_found_by_summaries_and_lost_by_a_window(tmp_path):
    methods = tuple(foveate.methods.parse(spec) for spec in ("dense", "luka:top_k=0.1", "streaming:window=96"))
    task = tasks.parse("niah", length=768)
    out = tmp_path / "rows.jsonl"
    plan = Comparison(MODEL, task, DATA, methods, 2, out, 2, 0, "float32", "cpu")
    run(prepare(plan))
    rows = {row["method"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert rows["dense"]["score"] == rows["luka"]["score"] == 100
    assert rows["streaming"]["score"] == 0
    assert rows["luka"]["keys_read_share"] < 0.4
    assert rows["streaming"]["resident_bytes"] < 0.3 * rows["dense"]["resident_bytes"]
