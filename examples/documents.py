"""Several documents on one device: each is read once and kept on disk, and one at a time is in memory.

    python examples/documents.py --model models/smollm2-135m --folder runs/read --tokens 1500 \
        --ask examples/data/books/moby_dick.txt "The narrator's name is" --ask README.md "foveate makes"
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
    parser.add_argument("--tokens", type=int, help="read only so many tokens of each document")
    parser.add_argument("--ask", action="append", nargs=2, metavar=("FILE", "QUESTION"), required=True)
    parser.add_argument("--method", default="luka")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    foveate.attach(model, given.method)
    given.folder.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        for file, question in given.ask:
            text = Path(file).read_text(encoding="utf-8")
            document = tokenizer(text, return_tensors="pt").input_ids[:, : given.tokens].to(model.device)
            read = repr((given.model, given.method, document.tolist())).encode()
            kept = given.folder / f"{Path(file).stem}-{hashlib.sha256(read).hexdigest()[:16]}.safetensors"
            if not kept.exists():
                cache = foveate.Cache(model)
                model(document, past_key_values=cache, logits_to_keep=1)
                foveate.save_cache(model, cache, kept)
                del cache  # one cache at a time is in memory
            asked = tokenizer(f"\n\n{question}", return_tensors="pt", add_special_tokens=False).input_ids
            ids = torch.cat([document, asked.to(model.device)], 1)
            cache = foveate.load_cache(model, kept)  # of the document alone, so that no copy is needed
            out = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
            print(f"{file}: {question} {tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()}")
            del cache


if __name__ == "__main__":
    main()
