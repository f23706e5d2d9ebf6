"""A method of your own: is it right, and is it any good? Checked, and compared on questions about a novel.

python examples/new_method.py --model models/smollm2-135m
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foveate import lab
from foveate.methods import About, KeepsByScore, register


@register
class LongValues(KeepsByScore):
    """Keeps the prompt tokens with the longest values, the first ones and the newest."""

    name = "long_values"
    about = About("this example", small_budget={"top_k": 12, "window": 8})

    def scores(self, cache, scaling):
        return cache.values.float().norm(dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a model")
    parser.add_argument("--tokens", type=int, default=600, help="of a prompt")
    parser.add_argument("--items", type=int, default=4, help="questions")
    given = parser.parse_args()

    report = lab.check("long_values")
    print(report)
    if not report.passed:
        raise SystemExit("a method that is wrong is not compared")

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    probes = lab.task("probes", length=given.tokens)  # look-ups in a novel that comes with foveate
    methods = ["long_values:top_k=0.25", "snapkv:top_k=0.25"]
    run = lab.compare(model, tokenizer, probes, methods, limit=given.items, recall=1)
    print(run)

    better = run.difference("long_values", "snapkv")
    print(f"long_values over snapkv: {better.value:+.1f} points [{better.low:+.1f}, {better.high:+.1f}]")
    layers = run.recall("long_values")
    worst = min(layers, key=layers.get)
    print(f"it reads {sum(layers.values()) / len(layers):.0%} of the attention", end=", ")
    print(f"least in layer {worst}, {layers[worst]:.0%}")
    for line in run.items()[-2:]:
        print(f"{line['method']} on {line['item']}: {line['answer']!r}")


if __name__ == "__main__":
    main()
