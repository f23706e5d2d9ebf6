"""LongBench's metrics (Bai et al. 2023, arXiv:2308.14508), each of a prediction and one answer, 0..1."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Callable, Sequence

from foveate.errors import of_extra
from foveate.lab.evaluation.metrics import normalize, token_f1

Metric = Callable[[str, str, Sequence[str]], float]
"""Takes a prediction, an answer and the classes of a task that has some."""
_EXTRA = ("longbench", "task 'longbench' needs")
_CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"
    "–—‘’‛“”„‟…‧﹏."
)
_MARKS = str.maketrans("", "", string.punctuation + _CHINESE_MARKS)


def qa_f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """SQuAD's token F1; 0 where the two share no word, also where neither has one."""
    return _f1(normalize(prediction).split(), normalize(answer).split())


def qa_f1_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Token F1 of Chinese words, without punctuation."""
    given, gold = (
        [word for one in _words(text) if (word := "".join(one.lower().translate(_MARKS).split()))]
        for text in (prediction, answer)
    )
    return _f1(given, gold)


def rouge(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L's F by the package `rouge`; 0 if the package cannot compute it, such as for an empty prediction."""
    library = of_extra("rouge", *_EXTRA)
    try:
        return library.Rouge(metrics=["rouge-l"]).get_scores(prediction, answer)[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


def rouge_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """:func:`rouge` of Chinese words."""
    return rouge(" ".join(_words(prediction)), " ".join(_words(answer)))


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes that the prediction names, if the answer is among them.

    A class whose name is part of the answer's does not count. As published, the one after such a class stays unchecked.
    """
    named = [one for one in classes if one in prediction]
    for one in named:
        if one in answer and one != answer:
            named.remove(one)
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The share of the numbers in the prediction that are the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """:func:`count` of the number in the answer, such as "Paragraph 3" or "段落3"."""
    return count(prediction, re.sub(r"\D", "", answer))


def code_sim(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the answer and the prediction's first line that is neither a comment nor a mark of code.

    In whole percent, of longest matching blocks.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def check(metric: Metric) -> None:
    """Raises `UserError` for a metric whose package is not installed."""
    for name in {rouge: ["rouge"], rouge_zh: ["rouge", "jieba"], qa_f1_zh: ["jieba"]}.get(metric, []):
        of_extra(name, *_EXTRA)


def _f1(given: Sequence[str], gold: Sequence[str]) -> float:
    return token_f1(given, gold) if gold else 0.0


def _words(text: str) -> list[str]:
    return list(of_extra("jieba", *_EXTRA).cut(text, cut_all=False))
