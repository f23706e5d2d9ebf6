"""Several documents on one device: each is read once and kept on disk, and one at a time is in memory.

    python examples/documents.py --model models/smollm2-135m --folder runs/read --characters 6000 \
        --ask examples/data/books/moby_dick.txt "What is the narrator's name?" --ask README.md "What does foveate do?"
"""

import argparse
import hashlib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foveate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a model")
    parser.add_argument("--folder", type=Path, required=True, help="for the caches, one file a document")
    parser.add_argument("--characters", type=int, help="read only so many characters of each document")
    parser.add_argument("--ask", action="append", nargs=2, metavar=("FILE", "QUESTION"), required=True)
    parser.add_argument("--method", default="auto")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    foveate.attach(model, given.method)
    for file, question in given.ask:
        document = Path(file).read_text(encoding="utf-8")[: given.characters]
        name = hashlib.sha256(repr((given.model, given.method, document)).encode()).hexdigest()[:16]
        kept = given.folder / f"{Path(file).stem}-{name}.safetensors"
        (answer,) = foveate.ask(model, tokenizer, document, [question], max_new_tokens=24, kept=kept)
        print(f"{file}: {question} {answer}")


if __name__ == "__main__":
    main()
