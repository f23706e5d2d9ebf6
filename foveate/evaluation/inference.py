"""Asking a model a batch of items, greedily or teacher-forced, with the time of prefill and decode."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from foveate.evaluation.accounting import read_config
from foveate.evaluation.errors import UserError, unknown
from foveate.evaluation.tasks.base import Item, Output

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
_TARGET_BLOCK = 64  # teacher-forced tokens a call: bounds the logits, [B, 64, vocabulary]


@dataclasses.dataclass
class Batch:
    """A batch's outputs, one per item, and its times (ms). `cache` keeps the model's cache alive for its statistics."""

    outputs: list[Output]
    prefill_ms: float
    decode_ms_per_token: float | None
    timing: str
    cache: Any


def choose_device(device: str) -> str:
    """ "cpu" or "cuda" from the user's choice; "auto" is the GPU if there is one. Raises `UserError`."""
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; use --device cpu or auto")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def choose_dtype(dtype: str, folder: Path, device: str) -> str:
    """A torch dtype's name; "auto" is the checkpoint's own on a GPU and float32 on a CPU. Raises `UserError`."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    config = read_config(folder)
    config = config.get("text_config", config)
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Raises `UserError` if there is none."""
    read_config(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no usable tokenizer in the model folder ({_first_line(error)})") from None


def load_model(folder: Path, dtype: str, device: str) -> PreTrainedModel:
    """The causal language model of a folder, in eval mode, its generation defaults cleared to plain greedy decoding.

    Raises `UserError` if Transformers cannot load it as such.
    """
    read_config(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: not loadable as a causal language model ({_first_line(error)})") from None
    ends = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=ends, do_sample=False)
    return model.to(device).eval()


@torch.inference_mode()
def run_batch(model: PreTrainedModel, tokenizer: Any, items: Sequence[Item]) -> Batch:
    """Puts items to a model: answers greedily, or scores the targets if the items have them (then of equal lengths)."""
    return _score(model, items) if items[0].target_ids else _answer(model, tokenizer, items)


def pad_token(model: PreTrainedModel, tokenizer: Any) -> int:
    """The id to pad with: the tokenizer's, else an end token, else 0."""
    ends = _as_list(model.generation_config.eos_token_id)
    return next(token for token in (tokenizer.pad_token_id, *ends, 0) if token is not None)


def batches(items: Sequence[Item], size: int) -> list[list[Item]]:
    """The items in batches of at most `size`, in order, each of items that can run together."""
    groups: list[list[Item]] = []
    for item in items:
        if groups and len(groups[-1]) < size and _kind(groups[-1][0]) == _kind(item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _kind(item: Item) -> tuple[Any, ...]:
    lengths = (len(item.prompt_ids), len(item.target_ids)) if item.target_ids else ()
    return (item.max_new_tokens, item.stop, *lengths)


def _answer(model: PreTrainedModel, tokenizer: Any, items: Sequence[Item]) -> Batch:
    ends = _as_list(model.generation_config.eos_token_id)
    pad = pad_token(model, tokenizer)
    width = max(len(item.prompt_ids) for item in items)
    rows = [[pad] * (width - len(item.prompt_ids)) + list(item.prompt_ids) for item in items]
    mask = [[0] * (width - len(item.prompt_ids)) + [1] * len(item.prompt_ids) for item in items]
    clock = _Clock(model.device)
    stop = _StopAt(tokenizer, items[0].stop, width)
    ids = torch.tensor(rows, device=model.device)
    attention_mask = torch.tensor(mask, device=model.device)
    begin = clock.now()
    made = model.generate(
        ids,
        attention_mask=attention_mask,
        max_new_tokens=items[0].max_new_tokens,
        do_sample=False,
        pad_token_id=pad,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([clock]),
        stopping_criteria=StoppingCriteriaList([stop] if items[0].stop else []),
    )
    ticks = clock.ticks
    return Batch(
        outputs=[Output(text=_text(tokenizer, row, ends, items[0].stop)) for row in made.sequences[:, width:].tolist()],
        prefill_ms=1e3 * (ticks[0] - begin),
        decode_ms_per_token=1e3 * (ticks[-1] - ticks[0]) / (len(ticks) - 1) if len(ticks) > 1 else None,
        timing="generate",
        cache=made.past_key_values,
    )


def _score(model: PreTrainedModel, items: Sequence[Item]) -> Batch:
    prompt = torch.tensor([item.prompt_ids for item in items], device=model.device)
    target = torch.tensor([item.target_ids for item in items], device=model.device)
    clock = _Clock(model.device)
    begin = clock.now()
    out = model(prompt, use_cache=True, logits_to_keep=1)
    middle = clock.now()
    nll = _nll(out.logits[:, -1:], target[:, :1])
    for start in range(0, target.shape[1] - 1, _TARGET_BLOCK):
        block = target[:, start : min(start + _TARGET_BLOCK, target.shape[1] - 1)]
        out = model(block, past_key_values=out.past_key_values, use_cache=True)
        nll += _nll(out.logits, target[:, start + 1 : start + 1 + block.shape[1]])
    end = clock.now()
    steps = target.shape[1] - 1
    return Batch(
        outputs=[Output(nll=value) for value in nll.tolist()],
        prefill_ms=1e3 * (middle - begin),
        decode_ms_per_token=1e3 * (end - middle) / steps if steps else None,
        timing="teacher-forced",
        cache=out.past_key_values,
    )


def _nll(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Summed negative log-likelihood in nats, [B] float64, of `target` [B, T] under `logits` [B, T, V]."""
    chosen = logits.gather(-1, target[..., None])[..., 0].float()
    return (torch.logsumexp(logits.float(), dim=-1) - chosen).double().sum(dim=-1)


class _Clock(LogitsProcessor):
    """Notes the time at which the logits of each step are ready."""

    def __init__(self, device: torch.device):
        self._device = device
        self.ticks: list[float] = []

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.ticks.append(self.now())
        return scores


class _StopAt(StoppingCriteria):
    """Ends a sequence once its text, leading white space apart, contains `stop`."""

    def __init__(self, tokenizer: Any, stop: str, prompt_width: int):
        self._tokenizer, self._stop, self._width = tokenizer, stop, prompt_width

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._width :], skip_special_tokens=True)
        return torch.tensor([self._stop in text.lstrip() for text in texts], device=input_ids.device)


def _text(tokenizer: Any, ids: list[int], ends: Sequence[int], stop: str) -> str:
    """The answer: what comes before the first end token and the stop string, without surrounding white space."""
    length = next((n for n, token in enumerate(ids) if token in ends), len(ids))
    text = tokenizer.decode(ids[:length], skip_special_tokens=True).strip()
    return text.split(stop, 1)[0].rstrip() if stop else text


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
