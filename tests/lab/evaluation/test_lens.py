"""The lens shows what a decoded token truly reads: beside what changes its output, and beside rules written out."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matrix import KV_HEADS, PROMPT, SCALING, VARIANTS, Driver, Tokens, influences
from typer.testing import CliRunner

import foveate
from foveate import methods, ops
from foveate.cli import app
from foveate.errors import DataError, UserError
from foveate.lab.evaluation import lens
from foveate.lab.results import lens as lens_file
from foveate.ops import Logits
from foveate.runtime import handover
from tests import tiny
from tests.families import family
from tests.helpers import cached, tiny_model, tokens

SMOLLM = Path(__file__).resolve().parents[3] / "models" / "smollm2-135m"
TEXT = tiny.SAMPLE / "books" / "moby_dick.txt"
EACH_VERB = (
    *(
        "dense",
        "streaming",
        "h2o",
        "kascade",
        "kascade_pages/first_layer",
        "kascade_pages/first_layer_layer",
        "kascade_pages/layer",
    ),
    *("quest", "pages", "pages/rank", "sparq/share", "h2o_as_published", "lte/learned", "adakv/share"),
    *("luka", "luka/layer", "luka/lowrank_levels", "luka/three_levels", "luka/none_refined", "luka/levels_share"),
)
"""Variants that reach each verb in each of its forms: by head and by layer, without and with holes, by level."""


class Watched(Driver):
    """A layer, of which a lens records a step."""

    def record(self, tokens):
        policies = {0: SimpleNamespace(method=self.layer.method, look=None)}
        attachment = SimpleNamespace(policies=policies, unchanged={}, cache=SimpleNamespace(layers=[self.layer]))
        with lens.recording(SimpleNamespace(foveate=attachment)) as recorder:
            handover.begin("driver", self.layer.phase)
            key, value = self.layer.update(tokens.k, tokens.v)
            recorder.look(0, tokens.q, tokens.k, Logits(SCALING))
            self.layer.attend(tokens.q, key, value, None, Logits(SCALING))
        assert policies[0].on_attention is None
        return recorder


@pytest.mark.parametrize("name", EACH_VERB)
def test_a_token_is_shown_as_read_where_it_changes_the_output(name):
    """Values are changed one by one; the newest token, which comes with the step, always reads itself."""
    tokens = Tokens.random(1, PROMPT + 6)
    driver = Watched(dict(VARIANTS)[name])
    driver.feed(tokens[:PROMPT])
    driver.feed_steps(tokens[PROMPT:-1])
    raw, summaries = influences(driver, tokens[-1:])
    positions = driver.store.positions[0].clone()
    ((heads,),) = driver.record(tokens[-1:]).steps()
    for head in range(KV_HEADS):
        letters = lens_file.letters(heads[head])
        assert len(letters) == PROMPT + 6
        held, past = positions[head] >= 0, letters[:-1]
        read = {position for position, letter in enumerate(past) if letter == "r"}
        assert read == set(positions[head][raw[head] & held].tolist())
        kept = {position for position, letter in enumerate(past) if letter != "e"}
        assert kept == set(positions[head][held].tolist())
        assert ("s" in past) == any(bool(level[head].any()) for level in summaries)
        assert not ("s" in past and "n" in past)


def test_tokens_under_a_summary_are_those_of_the_pages_that_are_not_refined():
    """Pages of four tokens after two sinks, of which none is refined: nine raw tokens, or up to three more."""
    method = methods.make("luka", page_size=4, sinks=2, tail=9, top_k=0)
    tokens, driver = Tokens.random(1, PROMPT + 1), Watched(method)
    driver.feed(tokens[:PROMPT])
    pages = (PROMPT - 2 - 9) // 4
    ((heads,),) = driver.record(tokens[PROMPT:]).steps()
    assert heads == [f"r2s{4 * pages}r{PROMPT + 1 - 2 - 4 * pages}"] * KV_HEADS


def test_a_prompt_is_not_recorded():
    recorder = Watched(methods.make("dense")).record(Tokens.random(1, PROMPT))
    for asked in (recorder.steps, recorder.recall):
        with pytest.raises(UserError, match="none was decoded"):
            asked()


def test_a_method_that_attends_by_itself_is_refused():
    class Own(methods.get("dense")):
        def choose(self, cache, q, scaling):
            return ops.Choice(attended=ops.Attended(q), read=cache.plan["lengths"][:, None])

    driver, other = Watched(Own()), Watched(methods.make("dense"))
    tokens = Tokens.random(1, PROMPT + 1)
    for one in (driver, other):
        one.feed(tokens[:PROMPT])
    recorder = other.record(tokens[PROMPT:])
    recorder._attachment.policies[1] = SimpleNamespace(method=Own())
    for asked in (recorder.steps, recorder.recall):
        with pytest.raises(UserError, match=r"layer 1 \(dense\) attends without foveate's verbs"):
            asked()


# Recall


def exact(model, ids, layer, length):
    """Attention of the last of some tokens in a layer, by Transformers alone: the mean of a group, ``[Hkv, L]``."""
    with torch.no_grad():
        eager = model(ids[:, :length], output_attentions=True, use_cache=False).attentions[layer][0, :, -1]
    return eager.unflatten(0, (model.config.num_key_value_heads, -1)).mean(1)


@pytest.mark.parametrize(
    "spec", ["dense", "streaming:sinks=2,window=9", "h2o:top_k=9,window=8", "oracle_topk:top_k=9,dense_layers=0"]
)
def test_recall_is_the_share_of_exact_attention_that_is_read(spec):
    """Of the first layer, whose queries and keys no method changes; of dense attention 1 in all layers."""
    model, ids = tiny_model(), tokens(60)
    with foveate.attached(model, spec, dense_below=0), lens.recording(model) as recorder:
        made = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    model.set_attn_implementation("eager")
    for number, (shares, letters) in enumerate(zip(recorder.recall(), recorder.steps(), strict=True)):
        mass = exact(model, made, 0, 60 + number + 1)
        for head, runs in enumerate(letters[0]):
            read = torch.tensor([letter == "r" for letter in lens_file.letters(runs)])
            assert shares[0][head] == pytest.approx(float(mass[head, read].sum()), abs=2e-4)
        assert all(0 < share <= 1 for layer in shares for share in layer)
        if spec == "dense":
            assert {share for layer in shares for share in layer} == {1.0}
    by_layer = lens.of_layers(recorder.recall())
    assert by_layer.keys() == {0, 1, 2}
    assert by_layer[0] == pytest.approx(sum(sum(step[0]) / 2 for step in recorder.recall()) / 4)


def test_recall_needs_the_keys_of_the_prompt():
    model, ids = tiny_model(), tokens(60)
    with foveate.attached(model, "dense"), torch.no_grad():
        cache = foveate.Cache(model)
        model(ids, **cached(cache))
        with lens.recording(model) as recorder:
            model(ids[:, :1], **cached(cache))
        assert recorder.steps()
        with pytest.raises(UserError, match=r"recording began after layer 0 had read the prompt"):
            recorder.recall()


# By `foveate generate`


def generate(model, out, method, *more):
    arguments = ["generate", "--model", model, "--method", method, "--max-new-tokens", 5, "--lens", out, *more]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "prompt.txt"
    file.write_text(TEXT.read_text(encoding="utf-8")[:600], encoding="utf-8")
    return file


def seen(path):
    """A lens with letters in the place of numbers of patterns."""
    value = lens_file.read(path)
    names = [lens_file.letters(one) for one in value["patterns"]]
    return value, [[[names[index] for index in heads] for heads in step] for step in value["steps"]]


@pytest.mark.parametrize("spec", ["dense", "streaming:sinks=3,window=20", "h2o:top_k=16,window=12"])
def test_reads_of_smollm_are_those_of_the_rule(spec, prompt, tmp_path):
    done = generate(SMOLLM, tmp_path / "lens.json", spec, "--prompt-file", prompt)
    assert done.exit_code == 0, done.output
    value, steps = seen(tmp_path / "lens.json")
    assert len(value["layers"]) == 30
    assert value["method"] == methods.parse(spec).spec
    assert value["model"] == "smollm2-135m"
    assert "".join(value["tokens"]).startswith(prompt.read_text(encoding="utf-8").strip()[:500])
    assert 1 <= len(steps) <= lens.STEPS
    for number, step in enumerate(steps):
        length = value["prompt_tokens"] + number + 1
        for heads in step:
            assert len(heads) == 3
            for letters in heads:
                if spec == "dense":
                    assert letters == "r" * length
                elif spec.startswith("streaming"):
                    assert letters == "rrr" + "e" * (length - 23) + "r" * 20
                else:  # heavy hitters and the window; a token leaves when the step has read
                    assert letters[-12:] == "r" * 12
                    assert letters.count("r") == 28 + 1
                    assert set(letters) == {"r", "e"}
    if spec.startswith("h2o"):
        for before, after in itertools.pairwise(steps):  # what is evicted does not come back
            for one, other in zip(itertools.chain(*before), itertools.chain(*after)):
                assert all(other[place] == "e" for place, letter in enumerate(one) if letter == "e")


@pytest.mark.full
@pytest.mark.parametrize(
    "spec", ["kascade_paper:top_k=24,anchors=5", "pages:top_k=64", "luka:page_size=8,top_k=2,tail=16"]
)
def test_reads_of_smollm_are_as_many_as_the_budget_allows(spec, prompt, tmp_path):
    assert generate(SMOLLM, tmp_path / "lens.json", spec, "--prompt-file", prompt).exit_code == 0
    value, steps = seen(tmp_path / "lens.json")
    for step in steps:
        for layer, heads in zip(value["layers"], step):
            anchor = layer["reads_choice_of"]
            for head, letters in enumerate(heads):
                if spec.startswith("luka"):
                    assert set(letters) == {"r", "s"}
                elif spec.startswith("pages"):
                    # a key counts towards the budget by its page; the newest page is not full
                    assert 64 - 8 < letters.count("r") <= 64
                    assert set(letters) == {"r", "n"}
                elif anchor is not None:
                    assert letters.count("u") == 24
                    assert letters.replace("u", "r") == step[anchor][head] or anchor == 0
                else:
                    assert letters.count("r") == (len(letters) if layer["layer"] == 0 else 24)
    anchors = [layer["reads_choice_of"] for layer in value["layers"]]
    assert (len(set(anchors)) > 3) == spec.startswith("kascade")


def test_a_lens_needs_a_decoded_token(tiny_folder, tmp_path):
    done = generate(tiny_folder, tmp_path / "lens.json", "dense", "--prompt", "abc", "--max-new-tokens", 1)
    assert done.exit_code == 2
    assert "max-new-tokens must be at least 2, got 1" in " ".join(done.output.split())


def test_a_prompt_that_is_too_long_is_refused(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(lens, "MOST_TOKENS", 4)
    done = generate(tiny_folder, tmp_path / "lens.json", "dense", "--prompt", "one two three four five six seven")
    assert done.exit_code == 2
    assert "the lens takes prompts of 4 tokens at most, this one has" in " ".join(done.output.split())


def test_layers_that_stay_as_they_are_are_not_recorded(tmp_path):
    """Gemma 2's sliding-window layers run foveate's verbs, too, for their cap."""
    model = family("Gemma 2")
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    with foveate.attached(model, "oracle_topk:top_k=2,min_k=1,dense_layers=0"), lens.recording(model) as recorder:
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    own = [place for place, layer in enumerate(recorder.layers()) if "unchanged" not in layer]
    assert 0 < len(own) < len(recorder.layers())
    for step in recorder.steps():
        assert all(lens_file.letters(head).count("r") == 2 for place in own for head in step[place])


def test_a_lens_without_a_page_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["report", str(written(tmp_path / "lens.json"))])
    assert done.exit_code == 2
    assert "a lens is shown by a page alone; add --out page.html" in " ".join(done.output.split())


def test_texts_of_a_tokenizer_that_begins_without_a_space():
    class Stripping:
        def decode(self, tokens):
            return "".join([" the", " cat", "s"][token] for token in tokens).removeprefix(" ")

    assert lens_file.texts(Stripping(), [0, 1, 2]) == ["the", " cat", "s"]


# The file


def written(path, **changes):
    layers = [{"layer": 0, "method": "dense", "reads_choice_of": None}, {"layer": 1, "unchanged": "sliding-window"}]
    facts = {"model": "m", "method": "dense", "dtype": "float32"}
    lens_file.write(
        path, ["a", "b", "c", "d"], 2, layers, [[["r3"], []], [["e1r3"], []]], [[[1.0], []], [[0.9], []]], **facts
    )
    value = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_a_file_is_read_as_it_was_written(tmp_path):
    value, steps = seen(written(tmp_path / "lens.json"))
    assert steps == [[["rrr"], []], [["errr"], []]]
    assert value["tokens"] == ["a", "b", "c", "d"]
    assert lens_file.letters(lens_file.pattern("rrreesn")) == "rrreesn"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "rows"}, "not a lens"),
        ({"schema": 1}, "schema 1, and this version reads 2"),
        ({"recall": [[[1.0], []], [[1.5], []]]}, "'recall' must be shares from 0 to 1"),
        ({"recall": [[[1.0], []], [[1.0, 1.0], []]]}, "'recall' must be shares from 0 to 1, one for each KV head"),
        ({"recall": [[[1.0], []]]}, "ValueError"),
        ({"tokens": ["a", 1, "c", "d"]}, "must be texts"),
        ({"patterns": ["r3", "x4"]}, "runs of the letters e, n, s, r, u"),
        ({"patterns": ["r3", "e1r2"]}, "a pattern of step 1 is not of its 4 tokens"),
        ({"steps": [[[0], []], [[7], []]]}, "IndexError"),
        ({"steps": [[[0], []], [[-1], []]]}, "a pattern of step 1"),
        ({"steps": [[[0], [0]]]}, "step 0 has patterns of other layers"),
        ({"steps": [[[0]]]}, "step 0 has patterns of other layers"),
        ({"steps": []}, "0 steps of 4 tokens"),
        ({"layers": [{"layer": 0}, {"layer": 1}]}, "'layers' must have a number"),
        ({"layers": 3}, "TypeError"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(changes, said, tmp_path):
    with pytest.raises(DataError, match=rf"lens\.json: .*{said}"):
        lens_file.read(written(tmp_path / "lens.json", **changes))


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        lens_file.read(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="malformed JSON"):
        lens_file.read(tmp_path / "bad.json")
