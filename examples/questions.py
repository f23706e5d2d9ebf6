"""Several questions about one document, which is read once; the reading is kept on disk for later processes.

    python examples/questions.py --model models/smollm2-135m --file examples/data/books/moby_dick.txt \
        --characters 6000 --question "What is the narrator's name?" --question "Why did he go to sea?"
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foveate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a model")
    parser.add_argument("--file", type=Path, required=True, help="a text")
    parser.add_argument("--characters", type=int, help="read only so many characters of it")
    parser.add_argument("--question", action="append", required=True, help="repeatable")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--kept", type=Path, help="file for the reading; read instead of the text if it is there")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    foveate.attach(model, given.method)
    document = given.file.read_text(encoding="utf-8")[: given.characters]
    answers = foveate.ask(model, tokenizer, document, given.question, max_new_tokens=24, kept=given.kept)
    for question, answer in zip(given.question, answers, strict=True):
        print(question, answer)
    print(foveate.stats(model))


if __name__ == "__main__":
    main()
