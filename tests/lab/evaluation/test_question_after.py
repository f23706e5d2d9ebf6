"""Questions asked after the context: where prompts are cut, and what methods know when they evict."""

import dataclasses

import pytest
import torch

import foveate
from benchmarks.summary_table import heading
from foveate.errors import UserError
from foveate.integrations.transformers import loading
from foveate.lab.evaluation import generation, runner, tasks
from foveate.lab.evaluation.tasks import Item
from foveate.lab.report.tables import general as markdown
from foveate.prompting import encode, encode_turns, question_of

TASKS = {
    "niah:max_new_tokens=3,length=600": "What is the special magic number for",
    "niah:split=multi,max_new_tokens=3,length=700": "What is the special magic number for",
    "ruler:split=niah_multikey_1,length=700": "What is the special magic number for",
    "ruler:split=niah_multiquery,length=700": "What are all the special magic numbers for",
    "ruler:split=niah_single_3,length=700": "What is the special magic uuid for",
    "ruler:split=vt,length=1500": "Question: Find all variables that are assigned the value",
    "ruler:split=cwe,length=1500": "Question: What are the 10 most common words in the above list?",
    "ruler:split=fwe,length=900": "Question: Do not provide any explanation.",
    "ruler:split=qa_1,length=900": "Answer the question based on the given documents.",
    "wikisalad": "Question: ",
    "wikisalad_long:length=1500,questions=2": "Question: According to the article",
}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return loading.load_model(tiny_folder, "float32", "cpu")


@pytest.mark.parametrize("spec", TASKS)
def test_prompts_are_cut_where_the_question_begins(spec, sample, tokenizer):
    task = tasks.parse(spec, question="after")
    for item in task.items(sample, tokenizer, 2, 0):
        context, question = (
            tokenizer.decode(part)
            for part in (item.prompt_ids[: item.context_tokens], item.prompt_ids[item.context_tokens :])
        )
        assert question.startswith(TASKS[spec])
        assert question.endswith("<|assistant|>" + item.answer_prefix)
        assert context + question == tokenizer.decode(encode(tokenizer, item.prompt, item.answer_prefix))
        assert len(context) > len(question)
        if "length" in task.settings():
            assert 0.9 * task.length <= len(item.prompt_ids) <= task.length


@pytest.mark.parametrize("spec", TASKS)
def test_prompts_in_one_turn_stay_what_they_were(spec, sample, tokenizer):
    task = tasks.parse(spec)
    assert "question" not in task.settings()
    assert "question=" not in task.arguments()[0]
    assert "question=after" in tasks.parse(spec, question="after").arguments()[0]
    item = task.items(sample, tokenizer, 1, 0)[0]
    assert item.context_tokens == 0
    assert list(item.prompt_ids) == encode(tokenizer, item.prompt, item.answer_prefix)


def test_plain_text_is_cut_alike(tokenizer):
    tokenizer.chat_template, kept = None, tokenizer.chat_template
    try:
        prompt = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "A text. Who? Who?"})
        ids, before = encode_turns(tokenizer, prompt, "Who?", "It is")
        assert tokenizer.decode(ids[:before]) == "Be short.\n\nA text. Who? "
        assert tokenizer.decode(ids[before:]) == "Who? It is"
        with pytest.raises(ValueError, match="no context before the question 'Why"):
            encode_turns(tokenizer, prompt, "Why?")
        with pytest.raises(ValueError, match="no context"):
            encode_turns(tokenizer, "Who?", "Who?")
    finally:
        tokenizer.chat_template = kept


def test_what_is_written_as_a_special_token_stays_text_in_both_parts(tokenizer):
    prompt = ({"role": "user", "content": "A <|end|> text. Who is <|end|>?"},)
    with pytest.warns(UserWarning, match="read as text"):
        ids, before = encode_turns(tokenizer, prompt, "Who is <|end|>?", "It is")
    with pytest.warns(UserWarning, match="read as text"):
        whole = encode(tokenizer, prompt, "It is")
    special = tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.decode(ids) == tokenizer.decode(whole)
    assert tokenizer.decode(ids[before:]).startswith("Who is <|end|>?")
    assert ids.count(special) == whole.count(special)


def test_the_question_of_a_template():
    assert question_of("Read {kind}s.\n{context}\nWhich {kind}?\n", kind="line") == "Which line?"
    assert question_of("{context}\n\nQuestion: {question}", question="Is {this} so?") == "Question: Is {this} so?"


@pytest.mark.parametrize("task", ["perplexity", "math"])
def test_tasks_without_a_context_refuse(task):
    with pytest.raises(UserError, match="unknown setting 'question'"):
        tasks.parse(task, question="after")


def test_another_time_is_refused():
    with pytest.raises(UserError, match=r"task 'niah': unknown question 'later'.*Allowed: with, after"):
        tasks.parse("niah", question="later")


def drawn(context, question, seed=0, new=12):
    ids = torch.randint(3, 600, (context + question,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Item(str(seed), "", tuple(ids), max_new_tokens=new, context_tokens=context)


def test_dense_attention_answers_as_if_asked_at_once(model, tokenizer):
    items = [drawn(70, 9), drawn(41, 22, 1)]
    at_once = [dataclasses.replace(item, context_tokens=0) for item in items]
    for method in (None, "dense"):
        foveate.attach(model, method) if method else foveate.detach(model)
        found, expected = (generation.run_batch(model, tokenizer, some).outputs for some in (items, at_once))
        assert found == expected
    foveate.detach(model)


EVICTING = ["h2o:top_k=8,window=8", "snapkv:top_k=8,window=6", "tova:top_k=16,min_k=1", "streaming:window=14,sinks=2"]
EVICTING += ["lte:score=key_norm,top_k=16,window=8", "uniform:top_k=8,window=8"]


@pytest.mark.parametrize("method", EVICTING)
def test_what_is_kept_of_a_context_does_not_depend_on_the_question(model, tokenizer, method):
    one, other = drawn(70, 9), drawn(70, 9, 1)
    other = dataclasses.replace(other, prompt_ids=(*one.prompt_ids[:70], *other.prompt_ids[70:]))
    kept = []
    for item in (one, other):
        with foveate.attached(model, method):
            prompt = generation.read_prompt(model, tokenizer, [item])
            store = prompt.cache.layers[1].cache
            kept.append(store.positions[0, :, : store.used].sort(-1).values.clone())
            assert store.lengths == [70]
            assert store.used <= 16
            batch = prompt.decode(model)
            assert batch.cache.layers[1].cache.lengths[0] == 79 + batch.outputs[0].tokens - 1
    assert torch.equal(*kept)


KEEPING = ["luka:page_size=4,tail=8", "quest:top_k=16,page_size=4"]
ASKED = [drawn(70, 9), drawn(41, 22, 1), drawn(55, 13, 2)]


@pytest.mark.parametrize("method", [*EVICTING, *KEEPING])
def test_batches_change_no_answer(model, tokenizer, method):
    with foveate.attached(model, method):
        alone = [generation.run_batch(model, tokenizer, [item]).outputs[0] for item in ASKED]
        assert generation.run_batch(model, tokenizer, ASKED).outputs == alone


@pytest.mark.parametrize("method", [*(one for one in EVICTING if not one.startswith("streaming")), *KEEPING])
def test_contexts_that_methods_share_change_no_answer(model, tokenizer, method):
    with foveate.attached(model, method):
        alone = generation.run_batch(model, tokenizer, ASKED).outputs
    others = tuple(map(foveate.methods.parse, ("dense", "h2o:top_k=9,window=9", method)))
    with foveate.attached(model, foveate.methods.SharedPrompt(others)):
        prompt = generation.read_prompt(model, tokenizer, ASKED)
    for one in (others[1], others[2], others[1], others[2]):
        with foveate.attached(model, one):
            shared = prompt.decode(model, shared=True).outputs
            if one == others[2]:
                assert shared == alone


def test_rows_name_it(tiny_folder, sample, tmp_path):
    methods, _ = runner.parse_methods(["snapkv:top_k=20,window=8"])
    rows = []
    for question in (None, "after"):
        task = tasks.parse("niah:max_new_tokens=3", length=400, question=question)
        plan = runner.Comparison(tiny_folder, task, sample, methods, 2, tmp_path / f"{question}.jsonl", batch_size=2)
        rows += runner.run(runner.prepare(plan))
        single = dataclasses.replace(plan, share_prompt=False, out=tmp_path / f"{question}-single.jsonl")
        alone = runner.run(runner.prepare(single))
        assert [row["examples"] for row in alone] == [row["examples"] for row in rows[-2:]]
    assert [row["task_settings"].get("question") for row in rows] == [None, None, "after", "after"]
    assert rows[0]["run"]["items"] != rows[2]["run"]["items"]
    assert "question=after" in rows[2]["command"]
    assert heading(rows[2]) == "niah single, question after 0K"
    text = markdown.tables(rows)
    assert text.count("niah (single)") == text.count("niah (single, question after)") == 1


def test_a_method_that_takes_one_prompt_is_refused(tiny_folder, sample, tmp_path):
    methods, _ = runner.parse_methods(["h2o_as_published"])
    task = tasks.parse("niah:max_new_tokens=3", length=400, question="after")
    plan = runner.Comparison(tiny_folder, task, sample, methods, 1, tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match=r"cannot be applied to .*in one piece"):
        runner.run(runner.prepare(plan))
