"""Random methods on random models: whatever a context is read in, it is the same context.

`python -m tests.differences --seconds 600 --seed 7` draws cases until the time is over, and prints the seed of each
that differs; `--seconds 0 --seed 7` repeats that one. `tests/test_random_differences.py` draws some for a few
seconds, others each time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import itertools
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import foveate
from foveate import methods
from tests.helpers import cached

MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
# logits at a cap differ by rounding alone, which then decides what is chosen: a cap that few logits reach avoids ties
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {},
    "Qwen3Config": {},
    "Gemma2Config": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0, **MIXED},
    "Gemma3TextConfig": {"query_pre_attn_scalar": 16, **MIXED},
    "Olmo3Config": MIXED,
}
HEADS = [(4, 2), (6, 2), (3, 1), (5, 1), (7, 1), (4, 4), (10, 2)]
SETTINGS: dict[str, list[Any]] = {
    "top_k": [5, 9, 14, 0.1, 0.3, 0.55],
    "min_k": [1, 3, 8],
    "window": [4, 9, 16],
    "sinks": [0, 1, 3],
    "page_size": [2, 3, 4, 7],
    "kernel_size": [1, 3, 5],
    "pool": ["layer", "kv_head"],
    "every": [2, 3],
    "evict_every": [0, 7, 11],
    "tile": [1, 4, 7],
}
VOCABULARY = 97
CLOSE = {torch.float32: 3e-3, torch.bfloat16: 0.25}


class DiffersError(AssertionError):
    """Two ways to read one context give different logits."""


@dataclasses.dataclass
class Case:
    """One draw: a model, a method with a full and a small budget, and tokens."""

    seed: int

    def __post_init__(self):
        self.draw = random.Random(self.seed)
        cls, self.dtype = self.draw.choice(list(FAMILIES)), self.draw.choice([torch.float32, torch.bfloat16])
        (heads, kv_heads), dim = self.draw.choice(HEADS), 16
        sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
        sizes |= {"hidden_size": heads * dim, "intermediate_size": 64, "num_hidden_layers": 3}
        ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        torch.manual_seed(self.seed)
        config = getattr(transformers, cls)(
            **sizes, **ids, **FAMILIES[cls], max_position_embeddings=2048, initializer_range=0.2
        )
        how = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
        self.model = transformers.AutoModelForCausalLM.from_config(config, **how).eval().to(self.dtype)
        for name, weight in self.model.named_parameters():
            if name.endswith("k_norm.weight"):  # with equal weights, all keys have one norm but for rounding
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        self.name = self.draw.choice(methods.names())
        self.length, self.new = self.draw.randint(20, 70), self.draw.randint(2, 6)
        self.ids = self.tokens(self.length + self.new, 0)

    def tokens(self, number: int, row: int) -> Tensor:
        """Tokens that are drawn without repeats: in a first layer, the keys of one token have one norm."""
        generator = torch.Generator().manual_seed(1000 * self.seed + row)
        return 3 + torch.randperm(VOCABULARY - 3, generator=generator)[None, :number]

    def small(self) -> methods.Method | None:
        """The method with settings drawn; None where they cannot be together."""
        cls = methods.get(self.name)
        settings = dict(cls.about.small_budget)
        for field in dataclasses.fields(cls):
            if field.name in SETTINGS and self.draw.random() < 0.5:
                settings[field.name] = self.draw.choice(SETTINGS[field.name])
        with contextlib.suppress(ValueError):
            return methods.make(self.name, **settings)
        return None

    def read(self, ids: Tensor, cache: foveate.Cache, mask: Tensor | None = None) -> Tensor:
        given = {} if mask is None else {"attention_mask": mask}
        return self.model(ids, **cached(cache), **given).logits.float()

    def decode(self, ids: Tensor, cache: foveate.Cache, mask: Tensor | None = None) -> Tensor:
        """Logits of tokens that are decoded one after the other."""
        found = []
        for one in ids.split(1, 1):
            mask = None if mask is None else torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            found.append(self.read(one, cache, mask)[:, -1])
        return torch.stack(found, 1)

    def whole(self, ids: Tensor, length: int) -> tuple[Tensor, foveate.Cache]:
        """Logits of the prompt's last token and of each decoded one, and the cache at the end of the prompt."""
        cache = foveate.Cache(self.model, length)
        last = self.read(ids[:, :length], cache)[:, -1:]
        kept = copy.deepcopy(cache)
        return torch.cat([last, self.decode(ids[:, length:], cache)], 1), kept

    def check(self, what: str, found: Tensor, expected: Tensor) -> None:
        far = float((found - expected).abs().max())
        if not far <= CLOSE[self.dtype] * max(1.0, float(expected.abs().max()) / 8):
            model = type(self.model).__name__
            raise DiffersError(f"seed {self.seed}: {what} of {model}, {self.dtype}, {self.spec}: {far:.3g} away")


@torch.no_grad()
def run(seed: int) -> list[str]:
    """Check one case; what was compared.

    Raises:
        DiffersError: with the seed.
    """
    case, done = Case(seed), []
    model, length, ids = case.model, case.length, case.ids
    dense = model(ids).logits.float()
    full = methods.make(case.name, **methods.get(case.name).about.full_budget)
    case.spec = full.spec
    with _attached(model, full) as can:
        if can:
            case.check("a full budget", case.whole(ids, length)[0], dense[:, length - 1 :])
            done.append("full")
    small = case.small()
    if small is None or case.dtype != torch.float32:  # elsewhere rounding decides which keys are chosen
        return done
    case.spec = small.spec
    with _attached(model, small) as can:
        if not can:
            return done
        expected, kept = case.whole(ids, length)
        for what, found in _ways(case, kept):
            case.check(what, found, expected[:, expected.shape[1] - found.shape[1] :])
            done.append(what)
        _check_batch(case)
        done.append("batch")
    with _attached(model, small, offload=True) as can:
        if can:
            case.check("offload", case.whole(ids, length)[0], expected)
            done.append("offload")
    case.check("detached", model(ids).logits.float(), dense)
    return done


@contextlib.contextmanager
def _attached(model: torch.nn.Module, method: methods.Method, **options: Any) -> Iterator[bool]:
    """Whether a model takes a method, which is attached within the block."""
    try:
        foveate.attach(model, method, cuda_graph=False, **options)
    except ValueError:
        yield False
        return
    try:
        yield True
    finally:
        foveate.detach(model)


def _ways(case: Case, kept: foveate.Cache) -> Iterator[tuple[str, Tensor]]:
    """Other ways to the last logits of :meth:`Case.whole`."""
    model, length, ids = case.model, case.length, case.ids
    tile = model.foveate.prompt_tile
    if not model.foveate.whole_prompt:
        cuts = {cut // tile * tile for cut in case.draw.sample(range(1, length), 3)} - {0}
        cache = foveate.Cache(model, length)
        for first, last in itertools.pairwise([0, *sorted(cuts), length]):
            end = case.read(ids[:, first:last], cache)[:, -1:]
        yield "chunks", torch.cat([end, case.decode(ids[:, length:], cache)], 1)
    yield "a copy", case.decode(ids[:, length:], copy.deepcopy(kept))
    with tempfile.TemporaryDirectory() as folder:
        foveate.save_cache(model, kept, Path(folder, "cache"))
        yield "a file", case.decode(ids[:, length:], foveate.load_cache(model, Path(folder, "cache")))
    cache, undone = copy.deepcopy(kept), case.tokens(case.draw.randint(1, 4), 99)
    cache.activate_past_recording()
    case.decode(undone, cache)
    cache.crop(-undone.shape[1])
    yield "a crop", case.decode(ids[:, length:], cache)


def _check_batch(case: Case) -> None:
    """Rows of a padded batch give what they give alone."""
    lengths = [case.length, *(case.draw.randint(3, case.length) for _ in range(case.draw.choice([1, 2])))]
    width = max(lengths) + case.draw.choice([0, 3])
    rows = [case.tokens(length + case.new, 1 + place) for place, length in enumerate(lengths)]
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
    for place, (length, row) in enumerate(zip(lengths, rows)):
        ids[place, width - length :], mask[place, width - length :] = row[0, :length], 1
    cache = foveate.Cache(case.model, width)
    last = case.read(ids, cache, mask)[:, -1:]
    later = torch.cat([row[:, length:] for length, row in zip(lengths, rows)])
    found = torch.cat([last, case.decode(later, cache, mask)], 1)
    for place, (length, row) in enumerate(zip(lengths, rows)):
        case.check(f"row {place} of {lengths}", found[place : place + 1], case.whole(row, length)[0])


def search(seconds: float, seed: int, say: Callable[[str], None] = print, least: int = 1) -> tuple[int, list[str]]:
    """Run cases from a seed on, ``least`` of them, until the time is over; how many, and what differed."""
    end, number, wrong = time.monotonic() + seconds, 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while number < least or time.monotonic() < end:
            try:
                run(seed + number)
            except Exception as error:
                own = isinstance(error, DiffersError)
                wrong.append(str(error) if own else f"seed {seed + number}: {type(error).__name__}: {error}")
                say(wrong[-1])
            number += 1
    return number, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    cases, differing = search(given.seconds, given.seed)
    print(f"{cases} cases, {len(differing)} differ")
    raise SystemExit(bool(differing))
