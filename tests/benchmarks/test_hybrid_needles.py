"""What scores keep of a needle: the needle's place, the shares, and which models are asked."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import hybrid_needles
from benchmarks.table_kinds import hybrid_needles as hybrid_needles_table
from foveate.errors import UserError
from foveate.hybrids.layers.lte import THRESHOLD
from foveate.hybrids.models import HybridForCausalLM, make_config


class Words:
    """A tokenizer of one token a word, which a space before the text does not change."""

    def __init__(self):
        self.known = []

    def ids(self, text):
        for word in text.split():
            if word not in self.known:
                self.known.append(word)
        return [self.known.index(word) for word in text.split()]

    def __call__(self, text, add_special_tokens):
        return {"input_ids": self.ids(text)}

    def decode(self, ids):
        return " ".join(self.known[index] for index in ids)


@pytest.fixture
def words():
    return Words()


@pytest.fixture
def item(words):
    return SimpleNamespace(id="0", prompt_ids=words.ids("the number is four two said she"), answers=["four two"])


def test_the_needle_is_found(item, words):
    assert hybrid_needles.place(item, words) == slice(3, 5)
    item.answers = ["four she"]
    with pytest.raises(UserError, match="0: its answer, four she, is not in its prompt"):
        hybrid_needles.place(item, words)


def test_a_needle_is_kept_if_one_head_keeps_all_of_it(item, words):
    low, high = THRESHOLD - 0.1, THRESHOLD + 0.1
    scores = torch.full((2, 1, 2, 7), low)  # two layers, one row, two KV heads, seven tokens
    scores[0, 0, 1, 3:5] = high
    scores[1, 0, 0, 3] = high  # the other token is not retained
    said = [*item.prompt_ids, *words.ids("four two")]

    class Model:
        device = torch.device("cpu")

        def __call__(self, ids, use_cache, output_retention):
            assert output_retention
            return SimpleNamespace(retention=tuple(scores))

        def generate(self, ids, **options):
            return torch.tensor([said])

    found = hybrid_needles.measure(Model(), words, [item])
    assert found == pytest.approx({"answered": 100, "kept": 100, "heads": 25, "tokens": 100 * 3 / 28})
    said[-1] = words.ids("she")[0]
    scores[0, 0, 1, 4] = low
    found = hybrid_needles.measure(Model(), words, [item])
    assert (found["answered"], found["kept"], found["heads"]) == (0, 0, 0)


def test_a_model_gives_scores_for_each_token_and_head(item, words):
    torch.manual_seed(0)
    model = HybridForCausalLM(make_config("lalte", "tiny")).eval()
    words.known += [f"word{index}" for index in range(model.config.vocab_size)]
    found = hybrid_needles.measure(model, words, [item, item])
    scores = torch.stack(model(torch.tensor([item.prompt_ids]), use_cache=False, output_retention=True).retention)
    assert found["tokens"] == pytest.approx(100 * (scores > THRESHOLD).float().mean().item())


def test_all_tokens_may_be_kept(tmp_path):
    """With a place for each, and no score that is too low."""
    config = make_config("lalte", "tiny")
    HybridForCausalLM(config).save_pretrained(tmp_path)
    model = hybrid_needles.all_kept(tmp_path).eval()
    ids = torch.randint(config.vocab_size, (1, 100), generator=torch.Generator().manual_seed(0))
    cache = model(ids, use_cache=True).past_key_values
    kept = [layer.memory.tensors["kept"] for layer in cache.layers if "kept" in layer.memory.tensors]
    assert kept
    for number in kept:
        assert 100 - config.lte_window - 1 <= number.min() <= number.max() <= 100


def test_a_model_without_scores_is_refused(tmp_path):
    HybridForCausalLM(make_config("gdn", "tiny")).save_pretrained(tmp_path / "gdn")
    with pytest.raises(UserError, match=r"gdn: no layer of it has LTE scores \(gdn\)"):
        hybrid_needles.main(tmp_path / "gdn", tmp_path, tmp_path / "rows.jsonl")


def test_lengths_and_wordings_are_asked():
    cases = [case for case, _ in hybrid_needles.cases()]
    assert len(cases) == 9
    assert [case.get("wording") for case in cases[-3:]] == ["ruler", "taught", "untaught"]
    row = {"model": "lalte-27M-0", "answered": 1, "kept": 2, "heads": 3, "tokens": 4, "device": "cpu"}
    row |= {"commit": "abc", "versions": {"torch": "2", "transformers": "5"}}
    rows = [row | {"case": case | {"n": 5}} for case in cases]
    lines = [line for line in hybrid_needles_table(rows).splitlines() if "lalte" in line]
    assert len({line.split(" | ")[1] for line in lines}) == len(lines) == 9
    assert "| in novels, 1,024 tokens, untaught wordings |" in lines[-1]


def test_rows_of_a_model_replace_its_earlier_ones(ruler_data, untemplated, tmp_path):
    """Other rows of the file stay."""
    folder, out = tmp_path / "lalte-27M-0", tmp_path / "rows.jsonl"
    HybridForCausalLM(make_config("lalte", "tiny", vocab_size=len(untemplated))).save_pretrained(folder)
    untemplated.save_pretrained(folder)
    other = {"model": "lalte-27M-1", "case": {}}
    out.write_text(f"{json.dumps(other)}\n")
    for _ in range(2):
        hybrid_needles.main(folder, ruler_data, out, limit=1, wordings=True)
        found = [json.loads(line) for line in out.read_text().splitlines()]
        assert found[0] == other
        assert [row["case"]["wording"] for row in found[1:]] == ["ruler", "taught", "untaught"]
        assert all(row["answered_all_kept"] in (0, 100) for row in found[1:])
