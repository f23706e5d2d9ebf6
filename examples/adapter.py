"""A model with a LoRA adapter of PEFT: attach to it as to any other.

python examples/adapter.py --model models/smollm2-135m --adapter FOLDER --prompt "Call me"
"""

import argparse
from contextlib import nullcontext

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import foveate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a model")
    parser.add_argument("--adapter", required=True, help="folder or hub name of its adapter")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--method", default="tova")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto")
    model = PeftModel.from_pretrained(model, given.adapter).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    inputs = tokenizer(given.prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    with foveate.attached(model, given.method):
        for name, context in (("with the adapter", nullcontext()), ("without it", model.disable_adapter())):
            with context:
                out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
            print(f"{name}: {tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
