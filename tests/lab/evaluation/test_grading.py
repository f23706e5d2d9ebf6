"""When a text gives an answer."""

import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foveate.lab.evaluation import grading

GIVEN = [
    ("It is red, I think.", "Red"),
    ("答案是北京。", "北京"),
    ("กรุงเทพมหานครคือเมืองหลวง", "กรุงเทพมหานคร"),
    ("수도는 서울입니다.", "서울"),
    ("राजधानी दिल्ली है।", "दिल्ली"),
    ("القاهرة.", "القاهرة"),
    ("It weighs 35个 in all", "35"),
    ("Zu\u0308rich", "Zürich"),
    ("the ﬁle", "File"),
    ("« oui »", "oui"),
    ("“yes”", "yes"),
    ("O’Brien's", "O'Brien"),
    ("2024–05–01", "2024-05-01"),
    ("at −5 °C", "-5"),
    ("1,234,567 people", "1234567"),
    ("3,5", "3.5"),
    ("1.234,5", "1234.5"),
    ("3.50 m", "3.5"),
    (".5", "0.5"),
    ("5km", "5 km"),
    ("50 %", "50 percent"),
    ("the 3.", "3"),
    ("😀!", "😀"),
    ("**New** York", "New York"),
    ("a member of the United Nations", "member of United Nations"),
    ("The", "the"),
    ("c++ and rust", "C++"),
    ("call `os.path.join` here.", "os.path.join"),
    ("use --no-cache, then", "--no-cache"),
    ("mail x@example.com.", "x@example.com"),
    ("It is foo_bar.", "foo_bar"),
    ("a", "A"),
    ("(A)", "A"),
    ("**A**", "A"),
    ("The answer is A because of it", "A"),
    ("A) Paris", "A"),
    ("D is right", "D"),
    ("it is B.", "b"),
]

NOT_GIVEN = [
    ("", "A"),
    ("", "+"),
    ("...", "..."),
    ("Incredible", "red"),
    ("The answer is B.", "A"),
    ("A dog barks", "A"),
    ("Then I think so", "I"),
    ("It is a dog", "A"),
    ("A- at best", "A"),
    ("35", "3.5"),
    ("13.5", "3.5"),
    ("5", "-5"),
    ("-5", "5"),
    ("15", "5"),
    ("10:30", "30"),
    ("3/4", "3"),
    ("1.2.3", "1.2"),
    ("10²", "102"),
    ("1.5e-3", "1.5"),
    ("7", "007"),
    ("C", "C++"),
    ("I use C++", "C+"),
    ("C+", "C++"),
    ("Visual C++", "C"),
    ("C#", "C"),
    ("foo bar", "foo_bar"),
    ("foo_bar_baz", "foo_bar"),
    ("Foo_bar", "foo_bar"),
    ("os.pathlib", "os.path"),
    ("foo_bar", "foo"),
    ("vitamin C", "Vitamin A"),
    ("दल", "दिल्ली"),
    ("东京", "北京"),
]


@pytest.mark.parametrize(("text", "answer"), GIVEN)
def test_answers_are_found(text, answer):
    assert grading.gives(text, [answer])
    assert grading.gives(text, ["nothing of the kind", answer])


@pytest.mark.parametrize(("text", "answer"), NOT_GIVEN)
def test_other_answers_are_not(text, answer):
    assert not grading.gives(text, [answer])


ANSWERS = sorted({answer for _, answer in GIVEN + NOT_GIVEN if grading.tokens(answer)})


@pytest.mark.parametrize("answer", ANSWERS)
def test_every_answer_gives_itself_and_nothing_gives_none(answer):
    for text in (answer, f"  {answer}\n", f"“{answer}”.", f"({answer})", f"The answer is: {answer}."):
        assert grading.gives(text, [answer]), text
    for empty in ("", " ", "\n", "...", "**"):
        assert not grading.gives(empty, [answer])
        assert grading.overlap(empty, [answer]) == 0
    assert grading.overlap(answer, [answer]) == 1


@given(st.text(max_size=30), st.text(max_size=12))
@example("a an the", "the")
@example("-", "--0")
def test_any_texts_can_be_compared(text, answer):
    assert 0 <= grading.overlap(text, [answer]) <= 1
    assert not grading.gives("", [answer])
    if grading.gives(text, [answer]):
        assert grading.tokens(text)


@given(st.decimals(-(10**9), 10**9, places=2), st.decimals(-(10**9), 10**9, places=2))
def test_numbers_are_equal_as_values(one, other):
    one, other = one + 0, other + 0  # no -0
    for written in (f"{one}", f"{one:,}", f"{one:,}".translate(str.maketrans(",.", ".,"))):
        assert grading.gives(f"it is {written} m", [str(other)]) == (one == other)


@pytest.mark.parametrize(("answer", "reason"), [("A", "a word, too"), ("日", "part of many"), ("1,234", "thousands")])
def test_what_no_rule_decides_is_said(answer, reason):
    assert reason in grading.undecided(answer)


@pytest.mark.parametrize("answer", ["B", "Paris", "日本", "1234", "1,234,567", "C++", "-3.5"])
def test_nothing_is_said_of_the_rest(answer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grading.undecided(answer) == ""
