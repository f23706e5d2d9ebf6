"""The model `foveate` of lm-eval: the numbers of `hf` where nothing is sparse, and elsewhere what the method does."""

import functools
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foveate import methods
from tests.helpers import ONE_OF_EACH, cached, returned_cache
from tests.tiny import build

pytest.importorskip("lm_eval")
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from foveate.lab.lm_eval import main
from foveate.lab.lm_eval_model import FoveateLM

ROOT = Path(__file__).resolve().parents[2]
NOVEL = (ROOT / "examples" / "data" / "books" / "moby_dick.txt").read_text(encoding="utf-8")[20_000:30_000]
SPARSE_PROMPT = "kascade_paper:anchors=1,top_k=0.1,min_k=8,tile=8"
DECODING = ["kascade_paper:anchors=1,top_k=0.1,min_k=8,decode_only=true", "quest", "luka", "h2o", "snapkv"]
IN_PROMPT = "h2o:top_k=9,window=8,evict_every=32"
SETTINGS = {name: methods.get(name).about.small_budget for name in methods.names()}


def small(method: str) -> str:
    """The spec, or a method at its small budget."""
    return method if ":" in method else methods.make(method, **SETTINGS[method]).spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("lm_eval") / "model", positions=256)


def hf(folder, kind=HFLM, batch_size=4, **options):
    return kind(str(folder), device="cpu", dtype="float32", batch_size=batch_size, **options)


def attached_lm(folder, method, batch_size=4, **options):
    return hf(folder, FoveateLM, batch_size, method=method, **options)


def instances(pairs, kind="loglikelihood"):
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in pairs]


def pairs():
    """Contexts of different lengths with three answers each, of different lengths."""
    return [
        (NOVEL[start : start + length], NOVEL[other : other + 8 * (1 + number)])
        for start, length in ((0, 150), (300, 220), (700, 90))
        for number, other in enumerate((1000, 1100, start + length))
    ]


def likelihoods(lm, given=None):
    answers = lm.loglikelihood(instances(given or pairs()), disable_tqdm=True)
    return torch.tensor([answer for answer, _ in answers]), [greedy for _, greedy in answers]


def rolling(lm, texts):
    return torch.tensor(lm.loglikelihood_rolling(instances([(text,) for text in texts], "loglikelihood_rolling")))


def generated(lm):
    given = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False, "repetition_penalty": 1.0}
    asked = [(context, given) for context, _ in pairs()[::3]]
    return lm.generate_until(instances(asked, "generate_until"), disable_tqdm=True)


def test_dense_gives_the_numbers_of_hf(folder):
    plain, ours = hf(folder), attached_lm(folder, "dense")
    assert likelihoods(ours)[0].tolist() == likelihoods(plain)[0].tolist()
    texts = [NOVEL[:1500], NOVEL[2000:2300]]  # the first has several windows
    assert rolling(ours, texts).tolist() == rolling(plain, texts).tolist()
    assert generated(ours) == generated(plain)


@pytest.mark.parametrize("method", sorted({*methods.names()} & ONE_OF_EACH - {"dense"}))
def test_a_full_budget_gives_the_numbers_of_hf(folder, method):
    """Also where tokens on the left of a context are left out, and in which continuations are the likeliest."""
    plain = hf(folder)
    given = [*pairs(), (NOVEL[:1500], " the whale")]
    spec = methods.make(method, **methods.get(method).about.full_budget).spec.replace(",", ";")
    ours = attached_lm(folder, spec)
    found, expected = likelihoods(ours, given), likelihoods(plain, given)
    assert torch.allclose(found[0], expected[0], atol=2e-3)
    context = plain.tok_encode(NOVEL[:200])
    ids = plain.model.generate(torch.tensor([context]), max_new_tokens=4, do_sample=False, repetition_penalty=1.0)
    likely = ids[0, len(context) :].tolist()
    asked = [(("", ""), context, ending) for ending in (likely, [*likely[:-1], likely[-1] + 1])]
    for lm in (ours, plain):
        assert [greedy for _, greedy in lm._loglikelihood_tokens(asked, disable_tqdm=True)] == [True, False]


@pytest.mark.parametrize("method", [SPARSE_PROMPT, IN_PROMPT, *DECODING])
def test_a_row_of_a_batch_is_read_as_it_is_alone(folder, method):
    together, alone = attached_lm(folder, small(method)), attached_lm(folder, small(method), batch_size=1)
    found, dense = likelihoods(together)[0], likelihoods(hf(folder))[0]
    assert torch.allclose(found, likelihoods(alone)[0], atol=1e-3)
    assert float((found - dense).abs().max()) > 0.05
    assert generated(together) == generated(alone)


@torch.no_grad()
def by_hand(model, context, continuation):
    """The continuation's log-likelihood, decoded one token a call."""
    out = model(torch.tensor([context]), use_cache=True)
    total = 0.0
    for number, token in enumerate(continuation):
        total += float(out.logits[0, -1].log_softmax(-1)[token])
        if number + 1 < len(continuation):
            out = model(torch.tensor([[token]]), use_cache=True, **cached(returned_cache(out)))
    return total


@pytest.mark.parametrize("method", [*DECODING, IN_PROMPT])
def test_methods_of_decoding_decode_continuations(folder, method):
    lm = attached_lm(folder, small(method))
    found = likelihoods(lm)[0]
    expected = [by_hand(lm.model, *lm._encode_pair(*pair)) for pair in pairs()]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-3)


@torch.no_grad()
def test_methods_of_prompts_read_one_pass(folder):
    lm = attached_lm(folder, SPARSE_PROMPT)
    found = likelihoods(lm)[0]
    for pair, likelihood in zip(pairs(), found.tolist()):
        context, continuation = lm._encode_pair(*pair)
        ids = torch.tensor([context + continuation])
        log_probs = lm.model(ids[:, :-1], use_cache=False).logits[0, len(context) - 1 :].log_softmax(-1)
        expected = float(log_probs.gather(-1, torch.tensor(continuation)[:, None]).sum())
        assert likelihood == pytest.approx(expected, abs=1e-3)
    info = lm.get_model_info()["foveate"]
    assert (info["decode_steps"], info["keys_read_share"]) == (0, None)


def test_a_text_is_asked_once_for_continuations_that_differ_in_their_last_token(folder, monkeypatch):
    """But a continuation that begins elsewhere in the same text is decoded from there."""
    lm = attached_lm(folder, small("h2o"))
    context, (one, two, *_, other) = lm.tok_encode(NOVEL[:200]), lm.tok_encode(NOVEL[1000:1100])
    requests = [(("", ""), context, [one, two]), (("", ""), context, [one, other])]
    requests.append((("", ""), context[:-20], [*context[-20:], one, two]))
    rows = []
    read = lm._logits
    monkeypatch.setattr(lm, "_logits", lambda batch: rows.extend(batch) or read(batch))
    found = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    assert len(rows) == 2
    expected = [by_hand(lm.model, text, continuation) for _, text, continuation in requests]
    assert [likelihood for likelihood, _ in found] == pytest.approx(expected, abs=1e-3)
    assert abs(expected[0] - expected[2]) > 0.1


def test_whole_texts(folder):
    """Decoded from their first token, or read as prompts; a method that evicts has no prompt to go by."""
    texts = [NOVEL[:350], NOVEL[700:850]]
    lm = attached_lm(folder, small("quest"))
    expected = [by_hand(lm.model, [lm.prefix_token_id], lm.tok_encode(text)) for text in texts]
    assert torch.allclose(rolling(lm, texts), torch.tensor(expected), atol=2e-3)
    dense = rolling(hf(folder), texts)
    for method in (SPARSE_PROMPT, "streaming:window=16,sinks=2"):
        found = rolling(attached_lm(folder, method), texts)
        assert torch.allclose(found, rolling(attached_lm(folder, method, batch_size=1), texts), atol=1e-3)
        assert float((found - dense).abs().min()) > 0.1
    with pytest.raises(ValueError, match=r"h2o.* evicts, and what it keeps depends on where a prompt ends"):
        rolling(attached_lm(folder, small("h2o")), texts)
    with pytest.raises(ValueError, match=r"evict_every=32.* evicts, and what it keeps depends on where a prompt ends"):
        rolling(attached_lm(folder, IN_PROMPT), texts)


def test_what_measures_nothing_is_refused_or_told(folder, caplog):
    one = [(NOVEL[:150], " a"), (NOVEL[:150], " I")]
    lm = attached_lm(folder, small("quest"))
    assert all(len(lm._encode_pair(*pair)[1]) == 1 for pair in one)
    with pytest.raises(ValueError, match=r"quest.* would change no log-likelihood: all continuations are one token"):
        likelihoods(lm, one)
    logging.getLogger("lm_eval").addHandler(caplog.handler)
    try:
        likelihoods(lm, [*one, *pairs()])
    finally:
        logging.getLogger("lm_eval").removeHandler(caplog.handler)
    assert "2 continuations of 11 that are one token" in caplog.text
    sparse, dense = likelihoods(attached_lm(folder, SPARSE_PROMPT), one)[0], likelihoods(hf(folder), one)[0]
    assert float((sparse - dense).abs().min()) > 0.01


def test_a_context_is_cut_on_its_left_where_positions_end():
    """The last token of a continuation is not read, so that it needs none."""
    lm, fed = SimpleNamespace(max_length=10), (1, 2)
    for length in (7, 8, 9, 11):
        context = tuple(range(10, 10 + length))
        assert FoveateLM._cut(lm, context, fed) == (context[-8:], fed)
    assert FoveateLM._cut(lm, (9,), tuple(range(9))) == ((9,), tuple(range(9)))
    with pytest.raises(ValueError, match="a continuation of 11 tokens is longer than max_length=10"):
        FoveateLM._cut(lm, (9,), tuple(range(10)))


def test_bad_methods_are_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"unknown method 'kascad' \(did you mean 'kascade'\?\)"):
        FoveateLM(str(tmp_path / "nothing"), method="kascad")
    with pytest.raises(ValueError, match="did you mean 'top_k'"):
        FoveateLM(str(tmp_path / "nothing"), method="kascade:top_q=3")
    with pytest.raises(ValueError, match=r"at commas: write the spec with semicolons, method=kascade:anchors=8;pool="):
        FoveateLM(str(tmp_path / "nothing"), method="kascade:anchors=8", pool="layer")


def test_pickled_weights_are_not_read(folder, tmp_path):
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(hf(folder).model.state_dict(), tmp_path / "pytorch_model.bin")
    assert hf(tmp_path).model is not None
    with pytest.raises(OSError, match="safetensors"):
        attached_lm(tmp_path, "dense")


def test_without_lm_eval_a_line_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "foveate.lab.lm_eval_model")
    with pytest.raises(SystemExit, match=r"needs lm_eval, which is not installed: pip install 'foveate\[eval\]'"):
        main()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with a task of choices and one of generation, both of local files."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = [NOVEL[start : start + 400] for start in range(0, 4000, 1000)]
    rows = [{"text": text[:360], "choices": [text[360:], texts[n - 1][360:]]} for n, text in enumerate(texts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}, cache_dir: {folder}}}\n"
    )
    source += "test_split: test\ndoc_to_text: '{{text}}'\nmetadata: {version: 1}\n"
    choice = "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: 0\ntarget_delimiter: ''\n"
    answer = "output_type: generate_until\ndoc_to_target: '{{choices[0]}}'\n"
    answer += 'generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}\n'
    (folder / "local_choice.yaml").write_text(f"task: local_choice\n{source}{choice}", encoding="utf-8")
    (folder / "local_answer.yaml").write_text(f"task: local_answer\n{source}{answer}", encoding="utf-8")
    return folder


def evaluated(folder, task, model, names=("local_choice", "local_answer"), **options):
    return simple_evaluate(
        model,
        {"pretrained": str(folder), "dtype": "float32", **options},
        tasks=list(names),
        task_manager=TaskManager(include_path=str(task)),
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
    )


def answers(results):
    return {name: [sample["resps"] for sample in samples] for name, samples in results["samples"].items()}


@pytest.fixture
def quick(monkeypatch):
    """lm-eval asks pip for versions, and reads thousands of tasks of its own, slowly."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setattr(TaskManager, "__init__", functools.partialmethod(TaskManager.__init__, include_defaults=False))


def test_a_task(folder, task, quick):
    """Dense gives the samples of `hf`; a method that decodes gives others, and says how it read them."""
    plain = evaluated(folder, task, "hf")
    assert answers(evaluated(folder, task, "foveate", method="dense")) == answers(plain)
    sparse = evaluated(folder, task, "foveate", ["local_choice"], method="h2o:top_k=8;window=4")
    moved = [
        abs(one[0][0] - other[0][0])
        for ours, theirs in zip(answers(sparse)["local_choice"], answers(plain)["local_choice"])
        for one, other in zip(ours, theirs)
    ]
    assert max(moved) > 0.5
    found = sparse["config"]["foveate"]
    assert found["method"] == "h2o:top_k=8,window=4"
    assert found["loglikelihood"] == "the context as a prompt, then the continuation token by token"
    assert 0 < found["keys_read_share"] < 0.5


def test_the_command_line(folder, task, tmp_path, quick, monkeypatch, caplog):
    """It makes the model known to lm-eval, too."""
    monkeypatch.delitem(sys.modules, "foveate.lab.lm_eval_model")
    monkeypatch.setattr(model_registry, "_objs", {**model_registry._objs})
    model_registry._objs.pop("foveate")
    command = ["lm_eval", "--model", "foveate", "--tasks", "local_choice,local_answer"]
    command += ["--model_args", f"pretrained={folder},dtype=float32,method={SPARSE_PROMPT.replace(',', ';')}"]
    command += ["--include_path", str(task), "--device", "cpu", "--batch_size", "4", "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr("lm_eval.utils._LOGGING_CONFIGURED", True)  # nothing is logged to the error output of one test
    monkeypatch.setattr(logging.getLogger("lm_eval"), "handlers", [caplog.handler])
    main()
    spec = methods.parse(SPARSE_PROMPT).spec
    assert f"{spec}: log-likelihoods: context and continuation in one forward pass" in caplog.text
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results["config"]["foveate"]["method"] == spec
    assert results["config"]["foveate"]["decode_steps"] > 0  # of the answers
    assert set(results["results"]) == {"local_choice", "local_answer"}
