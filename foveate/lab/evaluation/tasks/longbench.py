"""LongBench (Bai et al. 2023, arXiv:2308.14508): its 21 tasks, asked and scored as its published code does.

A split is a task. Prompts and the lengths of answers are in the published files `dataset2prompt.json` and
`dataset2maxlen.json`. A prompt of more than `max_length` tokens loses its middle. Few-shot and code tasks are raw text,
the others go through the chat template. An item scores the best of its answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foveate.errors import DataError
from foveate.io import reading
from foveate.lab.evaluation import longbench_metrics as by
from foveate.lab.evaluation.metrics import Mean
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item, Output, Task, drawn, some

METRICS: dict[str, by.Metric] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en"), by.qa_f1),
    "multifieldqa_zh": by.qa_f1_zh,
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), by.qa_f1),
    "dureader": by.rouge_zh,
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), by.rouge),
    "vcsum": by.rouge_zh,
    "trec": by.classification,
    "triviaqa": by.qa_f1,
    "samsum": by.rouge,
    "lsht": by.classification,
    "passage_count": by.count,
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), by.retrieval),
    **dict.fromkeys(("lcc", "repobench-p"), by.code_sim),
}
"""The metric of each task, in the published order."""
_RAW = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # whose answers count up to the end of their first line
_PUBLISHED = "https://github.com/THUDM/LongBench"


@register
class LongBench(Task):
    """LongBench's tasks. Score: the task's own metric, percent."""

    name = "longbench"
    splits = tuple(METRICS)
    metrics = {"score": Mean("score")}
    main = "score"
    least = {"max_length": 2, "max_new_tokens": 0}

    max_length: int = 31500  # tokens of a prompt before the chat template; of a longer one the middle is left out
    max_new_tokens: int = 0  # longest answer; 0: as published

    def files(self, data: Path) -> list[Path]:
        folder = reading.subfolder(data, "longbench")
        found = [
            reading.find_data_file(folder, name, f"the {what} of each task", f"{_PUBLISHED}, LongBench/config/{name}")
            for name, what in (("dataset2prompt.json", "prompt"), ("dataset2maxlen.json", "longest answer"))
        ]
        content = "an object a line, with 'context', 'input' (texts) and 'answers' (texts)"
        source = "https://huggingface.co/datasets/THUDM/LongBench, data.zip, unpacked"
        return [*found, reading.find_data_file(folder, f"{self.split}.jsonl", content, source)]

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        by.check(METRICS[self.split])
        prompts, lengths, path = self.files(data)
        template = reading.field(reading.read_json(prompts), self.split, str, f"{prompts}")
        longest = self.max_new_tokens or reading.field(reading.read_json(lengths), self.split, int, f"{lengths}")
        records = list(reading.read_jsonl(path))
        some(records, "questions", path)
        chosen = drawn(records, limit, f"longbench/{self.split}/{seed}")
        return [self._item(tokenizer, template, longest, one, line, f"{path}:{line}") for line, one in chosen]

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        text, metric = output.text, METRICS[self.split]
        if self.split in _FIRST_LINE:
            text = text.lstrip("\n").split("\n")[0]
        return {"score": max(metric(text, answer, item.meta["classes"]) for answer in item.answers)}

    def _item(self, tokenizer: Any, template: str, longest: int, record: Any, line: int, where: str) -> Item:
        texts = {name: reading.field(record, name, str, where) for name in ("context", "input")}
        answers, classes = reading.field(record, "answers", list, where), record.get("all_classes") or []
        if not answers or not all(isinstance(one, str) for one in [*answers, *classes]):
            raise DataError(f"{where}: expected texts in 'answers', at least one, and in 'all_classes'")
        text = _without_middle(tokenizer, template.format(**texts), self.max_length)
        prompt = text if self.split in _RAW else ({"role": "user", "content": text},)
        more = {"max_new_tokens": longest, "stop": "\n" if self.split == "samsum" else ""}
        return self.posed(
            tokenizer, f"{line}", prompt, answers=tuple(answers), meta={"classes": tuple(classes)}, **more
        )


def _without_middle(tokenizer: Any, text: str, most: int) -> str:
    ids, half = tokenizer.encode(text), most // 2
    if len(ids) <= most:
        return text
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
