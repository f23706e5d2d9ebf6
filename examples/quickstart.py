"""The answer of an attached model beside dense attention's, and what was read for each.

    python examples/quickstart.py --model models/smollm2-135m --file examples/data/books/moby_dick.txt --tokens 1500 \
        --method pages
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foveate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a model")
    parser.add_argument("--file", type=Path, required=True, help="a text, which is continued")
    parser.add_argument("--tokens", type=int, help="read only so many tokens of it")
    parser.add_argument("--method", default="pages")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    text = given.file.read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : given.tokens].to(model.device)
    for method in ("dense", given.method):
        with foveate.attached(model, method, dense_below=0):  # sparse however short the text is
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
            print(f"{method}: {tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)!r}")
            print(foveate.stats(model), end="\n\n")


if __name__ == "__main__":
    main()
