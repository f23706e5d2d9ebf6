import contextlib

import pytest
import torch

import foveate
from foveate.integrations.transformers import loading
from foveate.lab.evaluation import decoding, generation
from foveate.lab.evaluation.native_model import NativeModel, applied
from foveate.lab.evaluation.tasks.base import Item, Option
from tests.families import family
from tests.helpers import cached, returned_cache, tokens


@pytest.fixture(scope="module")
def model(tiny_folder):
    return loading.load_model(tiny_folder, "float32", "cpu")


def question(tokenizer, text, stop="", new=12):
    return Item(text, text, tuple(tokenizer.encode(text)), max_new_tokens=new, stop=stop)


def scored(ids, prompt, length):
    return Item("w", "", tuple(ids[:prompt]), target_ids=tuple(ids[prompt : prompt + length]))


TEXTS = ["Call me Ishmael.", "It was the whale, and", "Queequeg"]


def test_a_batch_answers_what_single_items_do(model, tokenizer):
    items = [question(tokenizer, text) for text in TEXTS]
    together = generation.run_batch(model, tokenizer, items)
    alone = [generation.run_batch(model, tokenizer, [item]) for item in items]
    assert [output.text for output in together.outputs] == [batch.outputs[0].text for batch in alone]
    assert len({output.text for output in together.outputs}) > 1
    for batch in [together, *alone]:
        assert batch.timing == "generate"
        assert batch.prefill_ms > 0
        assert batch.decode_ms_per_token > 0


def test_greedy_whatever_the_checkpoint_says(tiny_folder, tokenizer, model):
    item = Item("half", "", tuple(range(3, 600, 2)), max_new_tokens=12)  # a penalty on what was read would show
    with torch.inference_mode():
        ids = torch.tensor([item.prompt_ids])
        made = []
        for _ in range(12):
            made.append(int(model(torch.cat([ids, torch.tensor([made], dtype=torch.int64)], 1)).logits[0, -1].argmax()))
    assert model.generation_config.eos_token_id not in made
    assert set(made) & set(item.prompt_ids)
    (output,) = generation.run_batch(model, tokenizer, [item]).outputs
    assert output.text == tokenizer.decode(made).strip()


def test_an_answer_ends_at_the_stop_string_and_takes_no_more_steps(model, tokenizer):
    (full,) = generation.run_batch(model, tokenizer, [question(tokenizer, TEXTS[1], new=40)]).outputs
    stop = full.text[len(full.text) // 3]
    batch = generation.run_batch(model, tokenizer, [question(tokenizer, TEXTS[1], stop, new=40)])
    assert batch.outputs[0].text == full.text.split(stop, 1)[0].rstrip()
    assert batch.cache.get_seq_length() < len(question(tokenizer, TEXTS[1]).prompt_ids) + 39


@pytest.mark.parametrize("method", [None, "dense", "h2o:top_k=3,window=2", "streaming:window=5"])
@pytest.mark.parametrize("ends", [1, [1, 42, 77, 310]])
def test_answers_are_those_of_generate(model, tokenizer, monkeypatch, method, ends):
    """Step for step: rows that end early, at one of several tokens, are padded while the others go on."""
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    items = [question(tokenizer, text, new=30) for text in TEXTS]
    width = max(len(item.prompt_ids) for item in items)
    ids = torch.tensor([[0] * (width - len(item.prompt_ids)) + list(item.prompt_ids) for item in items])
    with foveate.attached(model, method) if method else contextlib.nullcontext():
        made = model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=30, do_sample=False, pad_token_id=0)
        steps = foveate.stats(model, reset=True).to_dict() if method else None
        prompt = generation.read_prompt(model, tokenizer, items)
        clock = decoding.Clock(model.device)
        with torch.inference_mode():
            greedy = decoding.Greedy(prompt._paused)
            assert torch.equal(decoding.decode(model, prompt._paused, greedy, clock), made)
        assert steps is None or foveate.stats(model).to_dict() == steps
    assert len(clock._ticks) == made.shape[1] - width


@pytest.mark.parametrize(
    "method",
    [None, "dense", "h2o:top_k=3,window=2", "luka:page_size=2,tail=3", "streaming:window=5", "h2o_as_published"],
)
def test_long_prompts_are_read_in_chunks(model, tokenizer, monkeypatch, method):
    items = [question(tokenizer, text) for text in TEXTS]
    width, widths = max(len(item.prompt_ids) for item in items), []
    forward = type(model).forward

    def noted(self, input_ids, **kwargs):
        widths.append(input_ids.shape[1])
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", noted)
    with foveate.attached(model, method) if method else contextlib.nullcontext():
        whole = generation.run_batch(model, tokenizer, items)
        assert widths[0] == width
        monkeypatch.setattr(generation, "_FORWARD_TOKENS", 2 * len(items))
        monkeypatch.setattr(generation, "_SHORTEST_CHUNK", 1)
        widths.clear()
        chunked = generation.run_batch(model, tokenizer, items)
    prompt = [width] if method == "h2o_as_published" else [2] * (width // 2) + [1] * (width % 2)
    assert widths[: len(prompt)] == prompt
    assert set(widths[len(prompt) :]) == {1}
    assert chunked.outputs == whole.outputs


@pytest.mark.parametrize(
    ("method", "piece"),
    [
        ("kascade_paper:anchors=[0],top_k=3,tile=10", 15),  # of two heads a group: five tokens a tile
        ("kascade_paper:anchors=[0],top_k=3,tile=60", 30),
        ('per_layer:layers={"0": "oracle_topk:top_k=3,tile=6,dense_layers=0", "1": "oracle_topk:top_k=3,tile=10"}', 15),
        ("kascade_paper:anchors=[0],top_k=3,tile=10,decode_only=true", 17),
    ],
)
def test_long_prompts_are_cut_between_tiles(model, tokenizer, monkeypatch, method, piece):
    ids = torch.randint(3, 600, (2, 70), generator=torch.Generator().manual_seed(0))
    items = [Item(str(n), "", tuple(row), max_new_tokens=2) for n, row in enumerate(ids.tolist())]
    widths, forward = [], type(model).forward

    def noted(self, input_ids, **kwargs):
        widths.append(input_ids.shape[1])
        return forward(self, input_ids, **kwargs)

    with foveate.attached(model, method):
        whole = generation.read_prompt(model, tokenizer, items)._paused.logits[:, -1]
        monkeypatch.setattr(type(model), "forward", noted)
        monkeypatch.setattr(generation, "_FORWARD_TOKENS", 17 * len(items))
        monkeypatch.setattr(generation, "_SHORTEST_CHUNK", 1)
        chunked = generation.read_prompt(model, tokenizer, items)._paused.logits[:, -1]
    assert widths == [piece] * (70 // piece) + [70 % piece]
    torch.testing.assert_close(chunked, whole, atol=1e-4, rtol=1e-4)


METHODS = ["dense", "h2o:top_k=8,window=4", "luka:page_size=2,tail=3,compressor=attention", "snapkv:top_k=3,window=2"]


@pytest.mark.parametrize("stop", [False, True])
def test_methods_go_on_from_one_prompt(model, tokenizer, stop):
    items = [question(tokenizer, text, new=20) for text in TEXTS]
    with foveate.attached(model, "dense"):
        full = generation.run_batch(model, tokenizer, items).outputs[1].text
    items = [question(tokenizer, text, full[len(full) // 2] if stop else "", new=20) for text in TEXTS]
    with foveate.attached(model, foveate.methods.SharedPrompt(tuple(map(foveate.methods.parse, METHODS)))):
        prompt = generation.read_prompt(model, tokenizer, items)
    for method in METHODS[::-1]:
        with foveate.attached(model, method):
            batch = prompt.decode(model, shared=True)
            stats = foveate.stats(model).to_dict()
        with foveate.attached(model, method):
            alone = generation.run_batch(model, tokenizer, items)
            assert stats == foveate.stats(model).to_dict()
        assert batch.outputs == alone.outputs
        assert batch.prefill_ms is None
        assert (batch.timing, alone.timing) == ("generate, shared prompt", "generate")
        assert batch.decode_ms_per_token > 0


@pytest.mark.parametrize("shared", [False, True])
def test_the_time_of_a_request_is_of_its_prompt_and_its_answer(model, tokenizer, shared):
    items, own = [question(tokenizer, TEXTS[0])], foveate.methods.parse("dense")
    with foveate.attached(model, foveate.methods.SharedPrompt((own,)) if shared else own):
        prompt = generation.read_prompt(model, tokenizer, items)
        prompt.prefill_ms = 1e6
        batch = None if shared else prompt.decode(model)
    if shared:
        with foveate.attached(model, own):
            batch = prompt.decode(model, shared=True)
    answer = batch.request_ms - 1e6
    assert answer > 0.5 * batch.decode_ms_per_token * batch.decode_steps > 0


def test_a_step_takes_the_median_between_ticks_or_the_mean():
    clock = decoding.Clock(torch.device("cpu"))
    clock._ticks = [0.0, 0.001, 0.003, 0.103]  # the last step records a graph
    assert clock.step_ms(3) == pytest.approx(2.0)
    clock._ticks = [0.0, 0.103]
    assert clock.step_ms(4) == pytest.approx(25.75)


@pytest.mark.parametrize("method", ["dense", METHODS[1], "luka:page_size=2,tail=3,top_k=0,bias=none", METHODS[3]])
def test_predictions_along_the_answers_of_dense(model, tokenizer, monkeypatch, method):
    """Row by row and by hand: what dense answers, and then what the method makes of each of these tokens."""
    items = [question(tokenizer, text, new=20) for text in TEXTS]
    with foveate.attached(model, "dense"):
        longest = generation.read_prompt(model, tokenizer, items).trace(model).tokens.tolist()
    ends = [1, longest[0][9], longest[1][14]]
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    together = foveate.methods.SharedPrompt(tuple(map(foveate.methods.parse, dict.fromkeys(["dense", method]))))
    with foveate.attached(model, together):
        prompt = generation.read_prompt(model, tokenizer, items)
    with foveate.attached(model, "dense"):
        trace = prompt.trace(model, shared=True)
        answers = prompt.decode(model, shared=True)
    with foveate.attached(model, method):
        batch = prompt.decode(model, shared=True, along=trace)
        alone = generation.read_prompt(model, tokenizer, items).decode(model, along=trace)
    assert [output.text for output in batch.outputs] == [output.text for output in answers.outputs]
    assert batch.outputs == alone.outputs
    assert (batch.timing, alone.timing) == (
        "tokens given, decode not timed, shared prompt",
        "tokens given, decode not timed",
    )
    assert len({output.tokens for output in batch.outputs}) > 1  # some end early
    for item, output, row in zip(items, batch.outputs, trace.tokens.tolist()):
        row = row[: output.tokens]
        assert len(row) == 20 or row[-1] in ends
        assert not set(row[:-1]) & set(ends)
        found = {}
        for name in ("dense", method):
            with foveate.attached(model, name), torch.inference_mode():
                out = model(torch.tensor([item.prompt_ids]), use_cache=True)
                logits = [out.logits[:, -1]]
                for token in row[:-1]:
                    out = model(torch.tensor([[token]]), **cached(returned_cache(out)), use_cache=True)
                    logits.append(out.logits[:, -1])
            found[name] = torch.cat(logits).log_softmax(-1)
        theirs, ours = found["dense"], found[method]
        assert theirs.argmax(-1).tolist() == row
        assert output.agreed == (ours.argmax(-1) == theirs.argmax(-1)).sum()
        divergence = torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="sum")
        assert output.divergence == pytest.approx(float(divergence), rel=1e-3, abs=1e-5)
    assert method == "dense" or sum(output.divergence for output in batch.outputs) > 0.001


def test_given_texts_have_no_answers_to_trace(model, tokenizer):
    prompt = generation.read_prompt(model, tokenizer, [Item("a", "", (5, 6, 7), target_ids=(8, 9))])
    with pytest.raises(TypeError, match="no answers to trace"):
        prompt.trace(model)


def test_likelihood_is_that_of_one_full_forward(model, tokenizer):
    ids = tokenizer.encode(
        "Call me Ishmael. Some years ago - never mind how long precisely - having little money. " * 9
    )
    items = [scored(ids, 30, 150), scored(ids[5:], 30, 150)]
    batch = generation.run_batch(model, tokenizer, items)
    assert batch.timing == "teacher-forced"
    for item, output in zip(items, batch.outputs):
        with torch.inference_mode():
            logits = model(torch.tensor([item.prompt_ids + item.target_ids])).logits[0, 29:-1].double()
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(item.target_ids), reduction="sum")
        assert output.nll == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    "method", ["own", "dense", "tova:top_k=12,min_k=1", "luka:page_size=4,tail=8", "kascade_paper:anchors=1"]
)
def test_texts_of_any_lengths_share_a_batch(model, tokenizer, method):
    """Each has the likelihood that it has alone, and the hits of its greedy choices."""
    ids = tokenizer.encode("Call me Ishmael. Some years ago - never mind how long precisely - having little. " * 3)
    options = tuple(Option(tuple(ids[:size]), tuple(ids[size : size + count])) for size, count in ((9, 2), (31, 5)))
    items = [scored(ids, 30, 70), scored(ids[5:], 11, 1), scored(ids[7:], 44, 9)]
    weighed = [Item("a", "", options[0].prompt_ids, options=options), Item("b", "", (5,), options=options[:1])]
    with applied(model, NativeModel() if method == "own" else foveate.methods.parse(method)):
        together, alone = generation.run_batch(model, tokenizer, items), []
        for item in items:
            alone += generation.run_batch(model, tokenizer, [item]).outputs
        by_option = [
            generation.run_batch(model, tokenizer, [Item("o", "", one.prompt_ids, target_ids=one.target_ids)]).outputs[
                0
            ]
            for one in options
        ]
        chosen = generation.run_batch(model, tokenizer, weighed).outputs
    assert together.decode_steps == 69
    for item, output, expected in zip(items, together.outputs, alone):
        assert output.nll == pytest.approx(expected.nll, rel=1e-4)
        assert output.hits == expected.hits
        assert len(output.hits) == len(item.target_ids)
    assert chosen[0].option_nlls == pytest.approx([output.nll for output in by_option], rel=1e-4)
    assert chosen[1].option_nlls == pytest.approx([by_option[0].nll], rel=1e-4)


def test_hits_are_greedy_choices(model, tokenizer):
    ids = tokenizer.encode("Call me Ishmael. Some years ago")
    with torch.inference_mode():
        first = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        second = int(model(torch.tensor([[*ids, first]])).logits[0, -1].argmax())
    wrong = (second + 1) % 600
    items = [Item("a", "", tuple(ids), target_ids=target) for target in ((first, second), (first, wrong))]
    assert [output.hits for output in generation.run_batch(model, tokenizer, items).outputs] == [
        (True, True),
        (True, False),
    ]


def test_a_single_target_needs_no_decode_step(model, tokenizer):
    ids = tokenizer.encode("Call me Ishmael. Some years ago")
    batch = generation.run_batch(model, tokenizer, [scored(ids, 5, 1)])
    assert batch.decode_ms_per_token is None
    assert batch.outputs[0].nll > 0


def test_only_items_of_one_kind_share_a_batch(tokenizer):
    ids = tokenizer.encode("Call me Ishmael. Some years ago")
    ask = question(tokenizer, "a")
    texts, weighed = [scored(ids, 4, 3), scored(ids, 5, 2)], Item("w", "", (), options=(Option((5,), (6,)),))
    items = [ask, ask, ask, question(tokenizer, "a", new=3), *texts, scored(ids, 5, 3), weighed]
    assert [len(group) for group in generation.batches(items, 2)] == [2, 1, 1, 2, 1, 1]
    assert [item for group in generation.batches(items, 3) for item in group] == items


@pytest.mark.parametrize("method", [None, "dense"])
def test_prompts_of_recurrent_models_are_not_cut(tokenizer, monkeypatch, method):
    jamba = family("Jamba")
    items = [Item("0", "", tuple(tokens(40)[0].tolist()), max_new_tokens=2)]
    with foveate.attached(jamba, method) if method else contextlib.nullcontext():
        whole = generation.read_prompt(jamba, tokenizer, items)._paused.logits[:, -1]
        monkeypatch.setattr(generation, "_FORWARD_TOKENS", 8)
        monkeypatch.setattr(generation, "_SHORTEST_CHUNK", 1)
        assert torch.equal(generation.read_prompt(jamba, tokenizer, items)._paused.logits[:, -1], whole)
