"""What `wheel.py` runs in the environment of the wheel: a tiny model generates, and no file of the checkout is opened.

python -I wheel_inside.py CHECKOUT
"""

import os
import sys
import tempfile
from pathlib import Path

CHECKOUT = os.path.realpath(sys.argv[1])
opened: set[str] = set()


def watch(event: str, arguments: tuple) -> None:
    if event == "open" and isinstance(arguments[0], str):
        path = os.path.realpath(arguments[0])
        if path.startswith(CHECKOUT + os.sep) and f"{os.sep}site-packages{os.sep}" not in path:  # of .venv: borrowed
            opened.add(path)


sys.addaudithook(watch)

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

import foveate  # noqa: E402


def main() -> None:
    home = Path(foveate.__file__).parent
    assert home.is_relative_to(sys.prefix), f"foveate is not the wheel's but that of {home}"
    assert (home / "py.typed").is_file(), "the wheel has no py.typed"
    assert list((home / "calibrations").glob("*.json")), "the wheel has no calibrations"
    logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=100, num_attention_heads=4, num_key_value_heads=2, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(3, 100, (1, 48))
    settings = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(ids, **settings)
    foveate.attach(model, "h2o:top_k=16,window=8")
    sparse = model.generate(ids, **settings)
    stats = foveate.stats(model).summary()
    foveate.detach(model)
    assert sparse.shape == alone.shape == (1, 64), f"tokens {tuple(sparse.shape)}"
    assert stats["tokens_evicted"] > 0, f"h2o evicted nothing: {stats}"
    assert torch.equal(model.generate(ids, **settings), alone), "detach left something behind"
    assert not opened, f"files of the checkout were opened: {', '.join(sorted(opened))}"
    print(f"foveate {foveate.__version__} from its wheel: h2o read {100 * stats['keys_read_share']:.0f} % of the keys")


main()
