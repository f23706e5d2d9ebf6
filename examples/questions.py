"""Several questions about one document, which is read once; the reading is kept on disk for later processes.

    python examples/questions.py --model models/smollm2-135m --file examples/data/books/moby_dick.txt --tokens 2000 \
        --question "The narrator's name is" --question "He went to sea because"
"""

import argparse
import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foveate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a model")
    parser.add_argument("--file", type=Path, required=True, help="a text")
    parser.add_argument("--tokens", type=int, help="read only so many tokens of it")
    parser.add_argument("--question", action="append", required=True, help="how an answer begins; repeatable")
    parser.add_argument("--method", default="luka")
    parser.add_argument("--kept", type=Path, help="file for the reading; read instead of the text if it is there")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    foveate.attach(model, given.method)
    document = tokenizer(given.file.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : given.tokens]

    with torch.inference_mode():
        if given.kept and given.kept.exists():
            cache = foveate.load_cache(model, given.kept)
        else:
            cache = foveate.Cache(model)
            model(document, past_key_values=cache, logits_to_keep=1)
            if given.kept:
                foveate.save_cache(model, cache, given.kept)
        for question in given.question:
            asked = tokenizer(f"\n\n{question}", return_tensors="pt", add_special_tokens=False).input_ids
            ids = torch.cat([document, asked], 1)
            out = model.generate(ids, past_key_values=copy.deepcopy(cache), max_new_tokens=24, do_sample=False)
            print(question, tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    print(foveate.stats(model))


if __name__ == "__main__":
    main()
