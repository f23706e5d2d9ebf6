import json
import math

import pytest
import torch

from foveate.errors import DataError, UserError
from foveate.hybrids.models import HybridForCausalLM, make_config
from foveate.lab.evaluation import generation, runner, tasks
from foveate.lab.evaluation.metrics import columns, estimate
from foveate.lab.evaluation.tasks.base import Output, items_digest
from foveate.prompting import encode_continued
from tests import tiny

RECORDS = {
    "piqa": [{"query": "Question: boil an egg\n", "choices": ["in water", "in the sun"], "gold": 0}],
    "siqa": [
        {
            "query": "Context: Ann sang.\nQuestion: Why?\nChoices:\nA. she was glad\nB. she slept\nAnswer:",
            "choices": ["A", "B"],
            "gold": 0,
        }
    ],
    "boolq": [{"query": "Passage: Whales are mammals.\nQuestion: is it a fish?", "choices": ["no", "yes"], "gold": 0}],
    "arc_easy": [{"query": "Question: What is wet?", "choices": ["sand", "the sea", "fire"], "gold": 1}],
    "arc_challenge": [{"query": "Question: What is dry?", "choices": ["a lake of water", "sand"], "gold": 1}],
    "winogrande": [
        {"context_options": ["The cup broke the plate as the cup", "The cup broke the plate as the plate"]}
        | {"continuation": "was heavy.", "gold": 0}
    ],
    "hellaswag": [
        {"activity_label": "Sailing", "ctx_a": "[header] A man rows.  He", "ctx_b": "SINGS [title] loud", "label": 1}
        | {"endings": ["dives [sub] in.", "lands."]}
    ],
    "sciq": [
        {"support": " Whales breathe air.", "question": "What breathes?", "correct_answer": "whales"}
        | {"distractor1": "stones", "distractor2": "sand", "distractor3": "salt"}
    ],
}
PROMPTS = {
    "piqa": (["Question: boil an egg\nAnswer:"] * 2, [" in water", " in the sun"], "in water"),
    "siqa": (["Q: Ann sang. Why?\nA:"] * 2, [" she was glad", " she slept"], "she was glad"),
    "boolq": (["Whales are mammals.\nQuestion: is it a fish?\nAnswer:"] * 2, [" no", " yes"], "no"),
    "arc_easy": (["Question: What is wet?\nAnswer:"] * 3, [" sand", " the sea", " fire"], "the sea"),
    "arc_challenge": (["Question: What is dry?\nAnswer:"] * 2, [" a lake of water", " sand"], "sand"),
    "winogrande": (
        ["The cup broke the plate as the cup", "The cup broke the plate as the plate"],
        [" was heavy."] * 2,
        "The cup broke the plate as the cup",
    ),
    "hellaswag": (["Sailing: A man rows. He Sings. loud"] * 2, [" dives in.", " lands."], "lands."),
    "sciq": (
        ["Whales breathe air.\nQuestion: What breathes?\nAnswer:"] * 4,
        [" stones", " sand", " salt", " whales"],
        "whales",
    ),
}
FILES = {split: f"{split}.jsonl" for split in RECORDS} | {"hellaswag": "hellaswag_val_1000.jsonl"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    (root / "commonsense").mkdir()
    for split, records in RECORDS.items():
        write(root, split, records)
    return root


def write(root, split, records):
    (root / "commonsense" / FILES[split]).write_text("\n".join(map(json.dumps, records)), encoding="utf-8")


def test_splits():
    assert tasks.get("choice").splits == tuple(RECORDS)
    by_length = [split for split in RECORDS if tasks.parse("choice", split=split).main == "acc_norm"]
    assert by_length == ["arc_challenge", "hellaswag"]


@pytest.mark.parametrize("split", RECORDS)
def test_prompts_are_those_of_lm_eval_harness(folder, tokenizer, split):
    (item,) = tasks.parse("choice", split=split).items(folder, tokenizer, 1, 0)
    prompts, continuations, right = PROMPTS[split]
    assert [tokenizer.decode(option.prompt_ids) for option in item.options] == prompts
    assert [tokenizer.decode(option.target_ids) for option in item.options] == continuations
    assert (item.prompt, item.answers) == (prompts[0], (right,))
    assert item.prompt_ids == item.options[0].prompt_ids
    assert item.positions == max(len(one.prompt_ids) + len(one.target_ids) for one in item.options)


def test_grading_by_hand(folder, tokenizer):
    task = tasks.parse("choice:split=arc_challenge")  # "a lake of water" has 15 characters, "sand" 4; it is the gold
    (item,) = task.items(folder, tokenizer, 1, 0)
    cases = {(9.0, 8.0): (1, 0), (9.0, 2.0): (1, 1), (2.0, 9.0): (0, 0), (16.0, 4.0): (1, 1), (1.0, 1.0): (0, 0)}
    graded = [task.grade(item, Output(option_nlls=nlls)) for nlls in cases]
    assert [(grade["acc"], grade["acc_norm"]) for grade in graded] == list(cases.values())
    assert estimate(task.metrics["acc"], columns(graded)).value == pytest.approx(60.0)
    assert estimate(task.metrics["acc_norm"], columns(graded)).value == pytest.approx(40.0)
    assert task.said(item, Output(option_nlls=(9.0, 8.0))) == "sand"


def test_a_hybrid_weighs_answers(folder, tokenizer):
    """Against log-probabilities of whole texts, added up one by one."""
    torch.manual_seed(0)
    model = HybridForCausalLM(make_config("lalte", "tiny", vocab_size=600)).eval()
    task = tasks.parse("choice:split=arc_easy")
    (item,) = task.items(folder, tokenizer, 1, 0)
    (output,) = generation.run_batch(model, tokenizer, [item]).outputs
    expected = []
    for prompt, continuation in zip(*PROMPTS["arc_easy"][:2]):
        size, ids = len(tokenizer.encode(prompt)), tokenizer.encode(prompt + continuation)
        with torch.inference_mode():
            probabilities = model(torch.tensor([ids])).logits[0].double().softmax(-1)
        expected.append(-sum(math.log(probabilities[at - 1, ids[at]]) for at in range(size, len(ids))))
    assert output.option_nlls == pytest.approx(expected, rel=1e-4)


def test_options_are_part_of_what_is_asked(folder, tokenizer, tmp_path):
    task = tasks.parse("choice:split=piqa")
    (tmp_path / "commonsense").mkdir()
    write(tmp_path, "piqa", [RECORDS["piqa"][0] | {"choices": ["in water", "in oil"]}])
    digests = [items_digest(task.items(data, tokenizer, 1, 0)) for data in (folder, tmp_path)]
    assert digests[0] != digests[1]


def test_spaces_go_to_the_continuation(tokenizer):
    assert encode_continued(tokenizer, "the whale", " is white") == encode_continued(
        tokenizer, "the whale ", "is white"
    )
    prompt, target = encode_continued(tokenizer, "the whale ", "is white")
    assert tokenizer.decode(prompt) == "the whale"
    assert prompt + target == tokenizer.encode("the whale is white")
    for text, continuation, what in (("", " a", "text"), ("a", "", "continuation")):
        with pytest.raises(UserError, match=f"no token is left of the {what}"):
            encode_continued(tokenizer, text, continuation)


@pytest.mark.parametrize(
    ("split", "change", "message"),
    [
        ("piqa", {"gold": 2}, "'gold' must be from 0 to 1, not 2"),
        ("piqa", {"choices": ["one"]}, "expected 2 or more texts, none of them empty, in 'choices'"),
        ("piqa", {"choices": ["one", " "]}, "none of them empty, in 'choices'"),
        ("piqa", {"query": 3}, r"expected an object with 'query' \(text\)"),
        ("siqa", {"query": "Why?"}, "expected 'query' to hold a context, a question and the choices A and B"),
        ("winogrande", {"continuation": None}, r"expected an object with 'continuation' \(text\)"),
        ("hellaswag", {"label": -1}, "'label' must be from 0 to 1, not -1"),
    ],
)
def test_malformed_records(tmp_path, tokenizer, split, change, message):
    (tmp_path / "commonsense").mkdir()
    write(tmp_path, split, [RECORDS[split][0] | change])
    with pytest.raises(DataError, match=rf"{FILES[split]}:1: .*{message}"):
        tasks.parse("choice", split=split).items(tmp_path, tokenizer, 1, 0)


def test_missing_data(folder, tokenizer, tmp_path):
    task = tasks.parse("choice:split=hellaswag")
    with pytest.raises(DataError, match=r"hellaswag_val_1000\.jsonl: no such file .*'endings'.*rowanz/hellaswag"):
        task.items(tmp_path, tokenizer, 1, 0)
    assert len(task.items(folder, tokenizer, 2, 0)) == 1, "a limit is a maximum"
    with pytest.raises(UserError, match="unknown split 'arc'"):
        tasks.parse("choice:split=arc")


def test_items_depend_on_the_seed_and_not_on_the_limit(tmp_path, tokenizer):
    (tmp_path / "commonsense").mkdir()
    records = [RECORDS["piqa"][0] | {"query": f"Question: step {number}\n"} for number in range(90)]
    write(tmp_path, "piqa", records)
    task = tasks.parse("choice")
    some, all_, other = (
        [item.id for item in task.items(tmp_path, tokenizer, *how)] for how in ((4, 0), (90, 0), (90, 1))
    )
    assert sorted(all_) == sorted(other) == sorted(map(str, range(1, 91)))
    assert all_[:4] == some
    assert all_ != other


def test_the_sample_has_none(tokenizer):
    with pytest.raises(DataError, match=r"piqa\.jsonl: no such file"):
        tasks.parse("choice").files(tiny.SAMPLE)


@pytest.mark.parametrize(
    ("choices", "spec", "acts"),
    [
        (["no", "a"], "h2o", False),
        (["no", "a"], "pages", False),
        (["no", "a"], "dense", True),
        (["no", "a"], "streaming", True),  # whose prompts are sparse
        (["no", "a"], "kascade_paper:anchors=1,top_k=8,tile=8", True),
        (["no", "yes"], "h2o", True),  # "yes" is two tokens
    ],
)
def test_answers_of_one_token_say_nothing_about_methods_that_act_in_decoding(
    tiny_folder, tmp_path, choices, spec, acts
):
    (tmp_path / "commonsense").mkdir()
    write(tmp_path, "boolq", [RECORDS["boolq"][0] | {"choices": choices}])
    methods, _ = runner.parse_methods([spec])
    task, out = tasks.parse("choice:split=boolq"), tmp_path / "rows.jsonl"
    prepared = runner.prepare(runner.Comparison(tiny_folder, task, tmp_path, methods, limit=1, out=out))
    if acts:
        assert [row["n"] for row in runner.run(prepared)] == [1] * len(methods)
    else:
        with pytest.raises(UserError, match=f"method '{spec}' would not act on task 'choice': all of its answers are"):
            runner.run(prepared)
        assert not out.exists()
