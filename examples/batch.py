"""Prompts of unequal length in one batch: padded on the left, each row is answered as it would be alone.

python examples/batch.py --model models/smollm2-135m --prompt "Call me" --prompt "It was the best of times, it was"
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foveate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a model")
    parser.add_argument("--prompt", action="append", required=True, help="repeatable")
    parser.add_argument("--method", default="snapkv:top_k=64")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    foveate.attach(model, given.method)
    how = {"return_tensors": "pt", "return_token_type_ids": False}
    inputs = tokenizer(given.prompt, padding=True, **how).to(model.device)
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    for prompt, row in zip(given.prompt, out[:, inputs.input_ids.shape[1] :], strict=True):
        print(f"{prompt} {tokenizer.decode(row, skip_special_tokens=True).strip()}")
    print(foveate.stats(model))


if __name__ == "__main__":
    main()
