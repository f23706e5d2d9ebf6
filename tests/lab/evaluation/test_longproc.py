import json

import pytest

from foveate.errors import DataError, UserError
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.tasks.base import Output

TRACE = """Ann's belief on the pin:
- Step 0: (initial state) {Ann location: hall; pin location: hall's box}
- Step 1: (Ann location changed) {Ann location: attic; pin location: hall's box}
- Step 2: (Ann location unchanged) {Ann location: attic; pin location: hall's shelf}
Final Answer: the hall's box"""
SEARCH = """<Search Procedure>
Initial number set: [3, 4, 5, 6], target: {target}.
 |- Pick two numbers (3, 4).
  |- Try 4 + 3 = 7. Add 7 to the number set.
   |- Try 7 * 5 = 35. Evaluate.
</Search Procedure>

<Solution>
{solution}
</Solution>
"""
SOLUTION = "4 + 3 = 7\n7 * 5 = 35\n35 - 6 = 29"


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "longproc"
    folder.mkdir()
    story = [{"story": f"Story {n}.", "question": "Where is the pin?", "solution": TRACE} for n in range(3)]
    numbers = [
        {"nums": [3, 4, 5, 6], "target": 29 + n, "demonstration": SEARCH.format(target=29 + n, solution=SOLUTION)}
        for n in range(5)
    ]
    for kind, records, prompt in (
        ("tom_tracking", story, "Example {{a}}\n{story}\n{question}"),
        ("countdown", numbers, "{demonstration}\nNumbers: {nums}\nTarget: {target}"),
    ):
        (folder / f"{kind}_0.5k.json").write_text(json.dumps(records))
        (folder / f"{kind}_2k.json").write_text(json.dumps(records))
        lines = "\n".join(f"  {line}" for line in prompt.splitlines())
        (folder / f"{kind}.prompts.yaml").write_text(f"USER_PROMPT: |-\n{lines}\n")
    return tmp_path


def test_stories_are_asked_one_by_one(data, tokenizer):
    task = tasks.parse("longproc")
    items = task.items(data, tokenizer, 2, 0)
    assert [item.id for item in items] == ["0", "1"]
    assert (
        tokenizer.decode(items[1].prompt_ids) == "<|user|>Example {a}\nStory 1.\nWhere is the pin?<|end|><|assistant|>"
    )
    assert {item.max_new_tokens for item in items} == {1024}
    assert tasks.parse("longproc", split="tom_tracking_2k").max_new_tokens == 3072
    assert tasks.parse("longproc", split="countdown_8k", max_new_tokens=7).max_new_tokens == 7


def test_the_last_records_of_countdown_are_the_examples(data, tokenizer):
    items = tasks.parse("longproc", split="countdown_0.5k").items(data, tokenizer, 9, 0)
    assert [item.meta["problem"][1] for item in items] == [29, 30, 31]
    prompt = items[0].prompt[0]["content"]
    assert prompt.count("# Example\nNumbers: [3, 4, 5, 6]") == 2
    assert "Target: 32\n\n# Search Procedure\nInitial number set" in prompt
    assert "<Search Procedure>" not in prompt
    assert prompt.endswith("Numbers: [3, 4, 5, 6]\nTarget: 29")


def graded(data, tokenizer, split, text):
    task = tasks.parse("longproc", split=split)
    values = task.grade(task.items(data, tokenizer, 1, 0)[0], Output(text=text, tokens=5))
    return values["exact"], pytest.approx(values["partial"]), values["answer_tokens"]


def test_a_trace_is_right_as_a_whole_or_up_to_its_first_wrong_step(data, tokenizer):
    for text, expected in (
        (TRACE, (1, 1, 5)),
        (f"Sure.\n{TRACE.upper().replace('; PIN', ', the pin')}", (1, 1, 5)),  # case, articles and commas are none
        (TRACE.replace("attic; pin location: hall's box", "hall; pin location: hall's box"), (0, 1 / 3, 5)),
        (TRACE[: TRACE.index("- Step 2")], (0, 2 / 3, 5)),
        (TRACE.replace("Final", "- Step 3: (more)\nFinal"), (0, 1, 5)),
        ("", (0, 0, 5)),
    ):
        assert graded(data, tokenizer, "tom_tracking_0.5k", text) == expected


@pytest.mark.parametrize(
    ("solution", "right"),
    [
        (SOLUTION, True),
        ("5 * 4 = 20\n20 + 6 = 26\n26 + 3 = 29", True),  # another way
        ("4 + 3 = 8\n8 * 5 = 40\n40 - 6 = 34", False),
        ("4 + 3 = 7\n7 * 4 = 28\n28 + 6 = 34", False),  # a number twice
        ("4 + 3 = 7\n7 * 5 = 35", False),
        (f"{SOLUTION}\n29 - 0 = 29", False),
        ("4 + 3 = 7\n7 * 5 = 35\n35 + 6 = 41", False),  # not the target
        ("4 / 3 = 1\n5 * 6 = 30\n30 - 1 = 29", False),
        ("4 / 0 = 0\n5 * 6 = 30\n30 - 1 = 29", False),
        ("__import__('os')\n7 * 5 = 35\n35 - 6 = 29", False),
    ],
)
def test_a_solution_is_checked_by_arithmetic(data, tokenizer, solution, right):
    text = SEARCH.format(target=29, solution=solution)
    assert graded(data, tokenizer, "countdown_0.5k", text) == (right, 1, 5)
    assert graded(data, tokenizer, "countdown_0.5k", text.replace("</Solution>", "")) == (0, 1, 5)


def test_the_search_is_compared_line_by_line(data, tokenizer):
    text = SEARCH.format(target=29, solution=SOLUTION).replace("7 * 5 = 35. Evaluate", "7 * 5 = 36. Evaluate")
    assert graded(data, tokenizer, "countdown_0.5k", text) == (1, 2 / 3, 5)


def test_what_is_refused(data, tokenizer):
    with pytest.raises(UserError, match="pseudo_to_code"):
        tasks.parse("longproc", split="pseudo_to_code_2k")
    with pytest.raises(DataError, match=r"tom_tracking_8k.json: no such file .*princeton-pli/LongProc"):
        tasks.parse("longproc", split="tom_tracking_8k").items(data, tokenizer, 1, 0)
    prompts = data / "longproc" / "tom_tracking.prompts.yaml"
    for text, message in (
        ("USER: 1", "has no USER_PROMPT"),
        ("USER_PROMPT: [", "malformed YAML"),
        ("USER_PROMPT: '{story} {other}'", r"must have the places \{story\} and \{question\}, and no other"),
    ):
        prompts.write_text(text)
        with pytest.raises(DataError, match=message):
            tasks.parse("longproc").items(data, tokenizer, 1, 0)
    records = data / "longproc" / "tom_tracking_0.5k.json"
    records.write_text(json.dumps([{"story": "a", "question": 3, "solution": "- b"}]))
    with pytest.raises(DataError, match=r"record 0: expected an object with 'question' \(text\)"):
        tasks.parse("longproc").items(data, tokenizer, 1, 0)
    records.write_text(json.dumps([{"story": "a", "question": "b", "solution": "Final Answer: c"}]))
    with pytest.raises(DataError, match="record 0: 'solution' has no step, a line that begins with a hyphen"):
        tasks.parse("longproc").items(data, tokenizer, 1, 0)
    numbers = data / "longproc" / "countdown_0.5k.json"
    numbers.write_text(json.dumps([{"nums": ["3"], "target": 3, "demonstration": "- a"}]))
    with pytest.raises(DataError, match="record 0: 'nums' must be whole numbers"):
        tasks.parse("longproc", split="countdown_0.5k").items(data, tokenizer, 1, 0)
    numbers.write_text("[]")
    with pytest.raises(UserError, match="holds no records to ask"):
        tasks.parse("longproc", split="countdown_0.5k").items(data, tokenizer, 1, 0)


@pytest.mark.parametrize("split", ["tom_tracking_0.5k", "countdown_0.5k"])
def test_a_length_puts_a_passage_of_a_novel_before_what_is_asked(data, tokenizer, split):
    (data / "books").mkdir()
    (data / "books" / "novel.txt").write_text(" ".join(f"It was a long road, {n} miles." for n in range(400)))
    short = tasks.parse("longproc", split=split).items(data, tokenizer, 2, 0)
    long = tasks.parse("longproc", split=split, length=600).items(data, tokenizer, 2, 0)
    for one, other in zip(short, long):
        assert 582 <= len(other.prompt_ids) <= 600
        (asked,), (whole,) = one.prompt, other.prompt
        passage, _, rest = whole["content"].partition("\n\n---\n\n")
        assert rest == asked["content"]
        assert "It was a long road, " in passage
        assert (other.answers, other.meta, other.max_new_tokens) == (one.answers, one.meta, one.max_new_tokens)
    assert len({item.prompt[0]["content"].partition("---")[0] for item in long}) == 2, "passages of their own"
    assert "length" not in tasks.parse("longproc", split=split).settings()


def test_a_length_needs_novels_that_fill_it(data, tokenizer):
    task = tasks.parse("longproc", length=600)
    with pytest.raises(DataError, match="no novels found"):
        task.items(data, tokenizer, 1, 0)
    (data / "books").mkdir()
    (data / "books" / "novel.txt").write_text("It was a short road.")
    with pytest.raises(UserError, match="a length of 600 needs more text"):
        task.items(data, tokenizer, 1, 0)
    with pytest.raises(UserError, match="length must be at least 0, got -1"):
        tasks.parse("longproc", length=-1)
