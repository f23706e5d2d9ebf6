import pytest

from foveate.errors import UserError
from foveate.prompting import encode, leading_ids
from tests import tiny

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Who?"}


def text(tokenizer, ids):
    return tokenizer.decode(ids)


def test_messages_go_through_the_template_and_the_prefix_follows_it(tokenizer):
    ids = encode(tokenizer, [SYSTEM, USER], "It was")
    assert text(tokenizer, ids) == "<|system|>Be brief.<|end|><|user|>Who?<|end|><|assistant|>It was"


def test_without_a_template_contents_are_joined():
    plain = tiny.make_tokenizer(chat_template=None)
    assert text(plain, encode(plain, [SYSTEM, USER], "It was")) == "Be brief.\n\nWho? It was"


def test_a_template_without_system_role_gets_it_in_the_users_message():
    strict = tiny.make_tokenizer(tiny.NO_SYSTEM_TEMPLATE)
    assert text(strict, encode(strict, [SYSTEM, USER])) == "<|user|>Be brief.\n\nWho?<|end|><|assistant|>"
    refusing = tiny.make_tokenizer("{{ raise_exception('no chats') }}")
    with pytest.raises(UserError, match="chat template refuses the prompt: no chats"):
        encode(refusing, [USER])


def test_raw_text_gets_the_leading_token_that_the_tokenizer_uses(tokenizer):
    assert leading_ids(tokenizer) == []
    with_bos = tiny.make_tokenizer()
    with_bos.add_special_tokens({"bos_token": "<|bos|>"})
    assert leading_ids(with_bos) == []  # it has one, but puts none before a text
    from tokenizers.processors import TemplateProcessing

    bos = with_bos.bos_token_id
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A <|end|>", special_tokens=[("<|bos|>", bos), ("<|end|>", with_bos.eos_token_id)]
    )
    ids = encode(with_bos, "Call me Ishmael.")
    assert ids[0] == bos
    assert with_bos.eos_token_id not in ids
    assert text(with_bos, ids[1:]) == "Call me Ishmael."
    assert bos not in encode(with_bos, [USER])  # the template alone decides


@pytest.mark.parametrize("prompt", ["a \U000f0000 b", [{"role": "user", "content": "a \U000f0007"}]])
def test_characters_that_stand_for_special_tokens_are_no_text(tokenizer, prompt):
    with pytest.raises(UserError, match=r"a character of private use from U\+F0000 on: remove it"):
        encode(tokenizer, prompt)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 2000000 }}", "makes 2,000,000 characters of the prompt"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "the tokenizer's chat template"),
        ("{{ 1 / 0 }}", "the tokenizer's chat template fails: ZeroDivisionError"),
        ("{{ messages[0]['content'] + 3 }}", "the tokenizer's chat template fails: TypeError"),
        ("{{ (" * 3000, "the tokenizer's chat template"),
    ],
)
def test_templates_that_fail_are_told_in_a_sentence(template, message):
    with pytest.raises(UserError, match=message):
        encode(tiny.make_tokenizer(chat_template=template), [USER])
