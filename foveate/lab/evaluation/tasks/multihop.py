"""Questions that need several passages: HotpotQA, MuSiQue and 2WikiMultihopQA, asked as LongBench asks them.

Prompt, answer length and score (SQuAD's token F1, the best over the answers) equal LongBench's (Bai et al. 2023). The
passages are the data sets' own paragraphs. LongBench took whole articles, so its published scores are for longer
prompts. With a `length`, a prompt also has other records' passages, or leaves some of its own passages out, but never a
passage on which the answer rests.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from foveate.errors import UserError
from foveate.io import reading
from foveate.io.multihop import Record, read_records
from foveate.lab.evaluation.metrics import normalize
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, drawn, some
from foveate.lab.evaluation.tasks.wikisalad import ContextQuestions
from foveate.lab.evaluation.tasks.wikisalad_long import FULLNESS, SHORTEST
from foveate.prompting import Message, question_of

TEMPLATE = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {question}\nAnswer:"
)
"""LongBench's, one for the three data sets; each passage in the context is headed by its number."""
_MIGRES = "https://github.com/AdelWang/MIGRES"
_HIPPORAG = "https://github.com/OSU-NLP-Group/HippoRAG/tree/3d95d255a8db0c1699b853cfb4fbe5056708162d"


@dataclasses.dataclass(frozen=True)
class MultiHop(ContextQuestions):
    """Questions that need several passages. Score: token F1 (`f1`), the best over the answers.

    `dev` is the data set's published development set, on which results are reported; `train` is for calibrating and
    for choosing settings: a question that `dev` asks, too, is left out of it.
    """

    splits = ("dev", "train")
    main = "f1"
    sources: ClassVar[Mapping[str, tuple[str, str]]]  # the file of each split, and where it is to be had
    title: ClassVar[str]

    length: int = 0  # tokens of the whole prompt; 0: its own passages

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length:
            self.at_least("length", SHORTEST)

    def files(self, data: Path) -> list[Path]:
        folder, found = reading.subfolder(data, "multihop"), []
        for split in dict.fromkeys((self.split, "dev")):
            name, source = self.sources[split]
            form = "an object a line" if name.endswith(".jsonl") else "a list of objects"
            content = f"{self.title}, {split}: its records as JSON, {form}"
            found.append(reading.find_data_file(folder, name, content, source))
        return found

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        path, *others = self.files(data)
        asked = {record.question for other in others for record in read_records(other)}
        records = read_records(path)
        some(records, "records", path)
        fresh = [record for record in records if record.question not in asked]
        usable = [record for record in fresh if record.passages]
        if not usable:
            raise UserError(
                f"{path}: no record can be asked; of {len(records)}, {len(records) - len(fresh)} are of dev, too, and "
                f"{len(fresh) - len(usable)} have nothing to read"
            )
        sizes = _sizes(tokenizer, usable) if self.length else {}
        chosen = drawn(usable, limit, f"{self.name}/{self.split}/{seed}")
        return [self._item(tokenizer, record, sizes, seed) for record in chosen]

    def _item(self, tokenizer: Any, record: Record, sizes: Mapping[str, int], seed: int) -> Item:
        texts = [passage.text for passage in record.passages]
        if self.length:
            texts = self._fitted(tokenizer, record, sizes, seed)
        given = f" {normalize(' '.join([*texts, record.question]))} "
        evidence = any(gold in ("yes", "no") or f" {gold} " in given for gold in map(normalize, record.answers))
        meta = {"evidence": evidence, "question": record.question, "passages": len(texts)}
        prompt, asked = messages(texts, record.question), question_of(TEMPLATE, question=record.question)
        return self.posed(tokenizer, record.id, prompt, asked, answers=record.answers, meta=meta)

    def _fitted(self, tokenizer: Any, record: Record, sizes: Mapping[str, int], seed: int) -> list[str]:
        """The record's gold passages and, while they fit, its other passages and other records' passages, shuffled."""
        rng = random.Random(f"{self.name}/{self.split}/{seed}/{record.id}")
        gold = [passage.text for passage in record.passages if passage.gold]
        own = [passage.text for passage in record.passages if not passage.gold]
        rest = dict.fromkeys([*rng.sample(own, len(own)), *rng.sample(sorted(sizes), len(sizes))])
        more = [text for text in rest if text not in gold]

        def tokens(texts: Sequence[str]) -> int:
            prompt, asked = messages(texts, record.question), question_of(TEMPLATE, question=record.question)
            return len(self.encoded(tokenizer, prompt, asked)[0])

        least = tokens(gold)
        if least > self.length:
            raise UserError(
                f"a length of {self.length:,} tokens is too short: question and gold passages of record {record.id} "
                f"alone take {least:,}"
            )
        room = self.length - least
        while (taken := tokens(texts := [*gold, *_that_fit(more, sizes, room)])) > self.length:
            room -= taken - self.length  # the sizes of passages do not quite add up
        if taken < FULLNESS * self.length:
            raise UserError(
                f"the passages of task '{self.name}', split {self.split}, fill a prompt to {taken:,} tokens; "
                f"a length of {self.length:,} needs more of them, or shorter ones"
            )
        return rng.sample(texts, len(texts))


@register
class HotpotQA(MultiHop):
    """HotpotQA (Yang et al. 2018), ten passages a question, two of them gold. Score: token F1."""

    name = "hotpotqa"
    title = "HotpotQA (distractor setting)"
    sources = {
        "dev": ("migres_hotpot.jsonl", f"{_MIGRES}, data/hotpot.json"),
        "train": ("hipporag_hotpotqa_train.json", f"{_HIPPORAG}, data/hotpotqa_train.json"),
    }


@register
class MuSiQue(MultiHop):
    """MuSiQue (Trivedi et al. 2022), twenty passages a question, two to four of them gold. Score: token F1."""

    name = "musique"
    title = "MuSiQue (answerable)"
    sources = {
        "dev": ("migres_musique.jsonl", f"{_MIGRES}, data/musique.json"),
        "train": ("hipporag_musique_train.json", f"{_HIPPORAG}, data/musique_train.json"),
    }


@register
class TwoWiki(MultiHop):
    """2WikiMultihopQA (Ho et al. 2020), ten passages a question, two to four of them gold. Score: token F1."""

    name = "2wiki"
    title = "2WikiMultihopQA"
    sources = {
        "dev": ("migres_wikihop.jsonl", f"{_MIGRES}, data/wikihop.json"),
        "train": ("migres_2wiki_train_preprocess.json", f"{_MIGRES}, data/wikihop_train_preprocess.json"),
    }


def messages(texts: Sequence[str], question: str) -> tuple[Message, ...]:
    """LongBench's prompt with these passages."""
    context = "\n".join(f"Passage {number}:\n{text}" for number, text in enumerate(texts, start=1))
    return ({"role": "user", "content": TEMPLATE.format(context=context, question=question)},)


def _sizes(tokenizer: Any, records: Sequence[Record]) -> dict[str, int]:
    """Every passage of the records, and about how many tokens it adds to a prompt."""
    texts = list(dict.fromkeys(passage.text for record in records for passage in record.passages))
    ids = tokenizer([f"\nPassage 1:\n{text}" for text in texts], add_special_tokens=False)["input_ids"]
    return {text: len(tokens) for text, tokens in zip(texts, ids)}


def _that_fit(texts: Sequence[str], sizes: Mapping[str, int], room: int) -> list[str]:
    """Of the texts in turn, each that has room left for it."""
    fitting = []
    for text in texts:
        if sizes[text] <= room:
            fitting.append(text)
            room -= sizes[text]
    return fitting
