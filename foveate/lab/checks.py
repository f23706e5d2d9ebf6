"""Does a method hold what every method promises? An author's own method, on a tiny model or on the author's.

Each check computes the same outputs in different ways: a row alone and in a padded batch, a prompt whole and in pieces,
a cache that is copied, saved, cropped or reordered. If they differ, a hook has missed something, and the line of the
check names the usual cause.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import foveate
from foveate.integrations.transformers import releases
from foveate.lab import invariants
from foveate.lab.invariants import PROMPT, STEPS, MissedError
from foveate.lab.recorded import record
from foveate.methods import Method, get, make, parse, replay_obstacle
from foveate.methods.spec import names_file, split

SHARE = 0.25
"""The budget that is tried beside a number of keys."""
_LOOSE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""By number format, how far logits may be apart, over the largest logit."""


class Line(NamedTuple):
    """What one check has found."""

    name: str
    outcome: str
    """passed, failed, or told: nothing to pass or to fail."""
    text: str = ""
    """Why, and what to change."""


class Report(NamedTuple):
    """What :func:`check` has found."""

    spec: str
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        """Whether no check has failed."""
        return all(line.outcome != "failed" for line in self.lines)

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.lines)
        return "\n".join(f"{line.outcome:6}  {line.name:{width}}  {line.text}".rstrip() for line in self.lines)


def check(method: str | Method, model: transformers.PreTrainedModel | None = None) -> Report:
    """Check a method.

    Args:
        method: a spec, or a method. By its name alone it gets the small budget that its class declares, ``about``.
        model: a decoder that a method can be attached to, and is not yet; None: a tiny one with random weights.

    Raises:
        ValueError: for a method that does not exist, and where one is attached to the model already.
    """
    chosen = small(method) if isinstance(method, str) else method
    if model is not None and getattr(model, "foveate", None) is not None:
        raise ValueError("the model has a method already: call foveate.detach(model) first")
    given = _OfModel(tiny() if model is None else model, chosen)
    with given.attached():
        first = _line("hooks", _hooks, given)
    lines = [first]
    for name, one in _CHECKS.items() if first.outcome != "failed" else ():
        with given.attached(), contextlib.suppress(_NothingToTryError):
            lines.append(_line(name, one, given))
    return Report(chosen.spec, tuple(lines))


def tiny(seed: int = 0) -> transformers.PreTrainedModel:
    """A Llama of three layers, with six query heads and two KV heads, whose random attention is far from uniform."""
    sizes = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 300}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=512, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).eval()


def small(spec: str) -> Method:
    """The method of a spec; by a name alone, also in a composition, with the small budget that its class declares."""

    def with_budget(one: str) -> str:
        return one if ":" in one or names_file(one) else make(one, **(get(one).about.small_budget or {})).spec

    return parse("+".join(map(with_budget, split(spec))))


class _NothingToTryError(Exception):
    """A check that a method has no line of."""


class _Told(str):
    """What there is to say where there is nothing to pass or to fail."""


class _Ids(NamedTuple):
    """Token ids ``[B, n]``."""

    ids: Tensor

    def __len__(self) -> int:
        return self.ids.shape[1]

    def __getitem__(self, tokens: slice) -> _Ids:
        return _Ids(self.ids[:, tokens])

    def rows(self, index: Tensor) -> _Ids:
        return _Ids(self.ids[index.to(self.ids.device)])

    def cat(self, other: _Ids) -> _Ids:
        return _Ids(torch.cat([self.ids, other.ids], 1))


class _Run(invariants.Run):
    """A model with a cache. Outputs are logits ``[B, n, V]``."""

    def __init__(self, model: transformers.PreTrainedModel, cache: Any):
        self.model, self.cache, self.real = model, cache, None

    def feed(self, tokens: _Ids, real: Tensor | None = None) -> Tensor:
        ids, seen = tokens.ids, self.cache.get_seq_length()
        given = {"input_ids": ids, releases.CACHE: self.cache, "use_cache": True}
        if real is not None or self.real is not None:
            old = ids.new_ones(len(ids), seen).bool() if self.real is None else self.real
            new = ids.new_ones(ids.shape).bool() if real is None else real
            self.real = torch.cat([old, new], 1)
            places = (self.real.long().cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            given |= {"attention_mask": self.real.long(), "position_ids": places}
        return self.model(**given).logits.float()

    def steps(self, tokens: _Ids) -> Tensor:
        return torch.cat([self.feed(tokens[n : n + 1]) for n in range(len(tokens))], 1)

    def turn(self, columns: int) -> None:
        self.cache.begin(self.cache.get_seq_length() + columns, assistant=False)

    def record(self) -> None:
        self.cache.activate_past_recording()

    def settle(self) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "stop_recording_past"):
                layer.stop_recording_past()

    def crop(self, tokens: int) -> None:
        self.cache.crop(-tokens)

    def reorder(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows.to(self.model.device))

    def repeat(self, times: int) -> None:
        self.cache.batch_repeat_interleave(times)

    def select(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows.to(self.model.device))

    def copy(self) -> _Run:
        return _Run(self.model, copy.deepcopy(self.cache))


class _OfModel(invariants.Subject):
    """A method in all layers of a model, within :meth:`attached`."""

    def __init__(self, model: transformers.PreTrainedModel, method: Method):
        text = model.config.get_text_config()
        heads = text.num_attention_heads
        super().__init__(method, heads // (getattr(text, "num_key_value_heads", None) or heads))
        self.model, self.vocabulary = model, text.vocab_size

    @contextmanager
    def attached(self, method: Method | None = None, cuda_graph: bool | str = False) -> Iterator[Any]:
        """Within it another method, or the same anew, is attached."""
        with foveate.attached(self.model, method or self.method, dense_below=0, cuda_graph=cuda_graph) as attachment:
            yield attachment

    def under(self, method: Method) -> _OfModel:
        """The same model with another method."""
        return _OfModel(self.model, method)

    def tokens(self, rows: int, length: int, seed: int = 0) -> _Ids:
        generator = torch.Generator().manual_seed(seed)
        return _Ids(torch.randint(3, self.vocabulary, (rows, length), generator=generator).to(self.model.device))

    def stacked(self, rows: Sequence[_Ids]) -> _Ids:
        return _Ids(torch.cat([one.ids for one in rows]))

    def padded(self, rows: Sequence[_Ids], columns: int) -> tuple[_Ids, Tensor]:
        ids = torch.full((len(rows), columns), 3, device=self.model.device)
        real = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        for row, tokens in enumerate(rows):
            ids[row, columns - len(tokens) :], real[row, columns - len(tokens) :] = tokens.ids[0], True
        return _Ids(ids), real

    def start(self, prompt: int = PROMPT) -> _Run:
        return _Run(self.model, foveate.Cache(self.model, prompt))

    def dense(self, tokens: _Ids) -> Tensor:
        with self.attached(make("dense")):
            return self.whole(tokens)[1]

    def same(self, found: Tensor, expected: Tensor, what: str, exact: bool = False) -> None:
        """Raise unless logits are equal up to rounding, and finite."""
        if not bool(found.isfinite().all() and expected.isfinite().all()):
            raise MissedError(f"{what}: there are logits that are no numbers")
        apart = float((found - expected).abs().max() / expected.abs().max())
        if apart > _LOOSE.get(self.model.dtype, 2e-3):
            step = int(((found - expected).abs().amax((0, 2)) > apart * float(expected.abs().max()) / 2).nonzero()[0])
            raise MissedError(f"{what} (logits differ by {100 * apart:.1f} % of the largest, first about token {step})")

    def same_state(self, one: invariants.Run, other: invariants.Run, what: str) -> None:
        """The states of layers show in what follows, which is compared."""

    def same_rows(self, batch: invariants.Run, alone: Sequence[invariants.Run], what: str) -> None:
        """As :meth:`same_state`."""


def _line(name: str, one: Callable[[_OfModel], str | None], given: _OfModel) -> Line:
    try:
        with torch.no_grad() if name != "training" else torch.enable_grad():
            text = one(given)
        return Line(name, "told" if isinstance(text, _Told) else "passed", text or "")
    except _NothingToTryError:
        raise
    except MissedError as error:
        return Line(name, "failed", str(error))
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        return Line(name, "failed", f"{_place(error, given.method)}{kind}{error}")


def _place(error: Exception, of: Method) -> str:
    """File and line of a method where an error was raised, or passed through; empty if it did not."""
    files = set()
    for part in of.parts:
        with contextlib.suppress(OSError, TypeError):  # of a class that is written in a console
            files.add(inspect.getfile(type(part)))
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{Path(places[-1].filename).name}:{places[-1].lineno}: " if places else ""


def _read(given: _OfModel) -> tuple[float, int]:
    """The share of the keys that steps after a prompt read, and the bytes that the cache holds then; raises MissedError
    for logits that are no numbers."""
    run, out = given.whole(given.tokens(1, PROMPT + STEPS))
    if not bool(out.isfinite().all()):
        raise MissedError(
            "there are logits that are no numbers: does a hook divide by zero, or read a slot that is free?"
        )
    return foveate.stats(given.model).keys_read_share, run.cache.resident_bytes


def _hooks(given: _OfModel) -> str:
    """What hooks return is checked by the runtime, whose errors name the hook, the shape and what to return."""
    share, held = _read(given)
    if share >= 1.0 and not any(hasattr(one, "top_k") for one in given.method.parts):
        return "reads everything"
    if share >= 1.0:
        return _Told(
            f"reads everything of {PROMPT} tokens under {given.method.spec}: does it ignore its budget? Else choose a "
            "smaller one (about.small_budget)"
        )
    text = f"reads {100 * share:.0f} % of the keys of {PROMPT} to {PROMPT + STEPS} tokens, and keeps {held:,} bytes"
    kind = type(given.method.parts[-1])
    free = kind.choose is not Method.choose and kind.scored is Method.scored
    return text + "; what it reads in order to choose is not counted (`scored`)" if free else text


def _full_budget(given: _OfModel) -> str | None:
    whole = given.method.with_full_budget()
    if whole is None:
        return _Told("no full budget is declared: with about=About(..., full_budget={...}) it is compared with dense")
    with given.attached(whole):
        invariants.full_budget(given.under(whole))
    return None


def _crop(given: _OfModel) -> str | None:
    with given.attached():
        invariants.crop_of_final_tokens(given)
    with given.attached():
        invariants.crop(given)
    return None


def _rows(given: _OfModel) -> None:
    invariants.reordered_rows(given)
    invariants.repeated_rows(given)


def _other_budget(given: _OfModel) -> str | None:
    """A number of keys is the same in all rows of a batch, and a share is not."""
    try:
        other = with_other_budgets(given.method)
    except ValueError as error:
        return _Told(str(error))
    if other is None:
        raise _NothingToTryError
    under = given.under(other)
    with under.attached():
        share, _ = _read(under)
        text = f"reads {100 * share:.0f} % of the keys with {_budgets(other)}"
        found = invariants.padded_batch(under)
    with under.attached():
        found = invariants.prompt_in_pieces(under) or found
    if not replay_obstacle(other):
        _captured(under)
    if share >= 1.0:
        return _Told(f"{text}, which shows little of the share: is there a least number of keys?")
    return text if found is None else f"{text}; {found}"


def with_other_budgets(method: Method) -> Method | None:
    """A method with a share as `top_k` instead of a number, or a number instead of a share.

    A share becomes the number that it is of ``PROMPT`` tokens. A composition has the other budgets of its methods.

    Returns:
        None where there is no `top_k` that may be a number or a share (``top_k: int | float``).

    Raises:
        ValueError: where the method does not take the other budget.
    """
    if len(method.parts) > 1 and not _has_top_k(method):
        others = [with_other_budgets(one) for one in method.parts]
        if not any(others):
            return None
        return parse("+".join((other or one).spec for other, one in zip(others, method.parts)))
    if not _has_top_k(method):
        return None
    number = max(1, round(method.top_k * PROMPT)) if isinstance(method.top_k, float) else SHARE
    return make(method, top_k=number)


def _budgets(method: Method) -> str:
    """The budgets of a method, or of the parts of a composition that have one."""
    having = [method] if _has_top_k(method) else filter(_has_top_k, method.parts)
    return " and ".join(f"{one.name}:top_k={one.top_k}" for one in having)


def _has_top_k(method: Method) -> bool:
    """Whether a method has the setting, as a number or a share."""
    return any(field.name == "top_k" and "float" in str(field.type) for field in dataclasses.fields(method))


def _saved(given: _OfModel) -> None:
    run, _ = given.whole(given.tokens(1, PROMPT + 6))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        foveate.save_cache(given.model, run.cache, path)
        loaded = _Run(given.model, foveate.load_cache(given.model, path))
    steps = given.tokens(1, 8, seed=3)
    given.same(loaded.steps(steps), run.steps(steps), "a cache that was saved and loaded goes on otherwise")


def _captured(given: _OfModel) -> str | None:
    if reason := replay_obstacle(given.method):
        return _Told(f"decode steps are not captured in CUDA graphs: {reason}")
    how = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    ids, outs = given.tokens(2, PROMPT).ids, []
    for cuda_graph in (False, "auto"):
        with given.attached(cuda_graph=cuda_graph) as attachment:
            graphs = attachment.graphs
            if given.model.device.type != "cuda":
                graphs.recorder = record
            outs.append(given.model.generate(ids, attention_mask=torch.ones_like(ids), **how))
    if not graphs.use.replayed:
        raise MissedError(f"no step was replayed: {graphs.use.reason}")
    one, two = (torch.stack(out.logits, 1).float() for out in outs)
    given.same(
        two,
        one,
        "steps that are replayed from a graph give something else: in a captured step a hook reads numbers of rows on "
        "the device, cache.plan, and nothing that changes on the host",
    )
    return None


def _without_cache(given: _OfModel) -> None:
    prompt = given.tokens(2, PROMPT)
    ids, expected = prompt.ids, given.start().feed(prompt)
    found = given.model(input_ids=ids, use_cache=False).logits.float()
    given.same(found, expected, "without a cache, as in training, a prompt is read otherwise")


def _training(given: _OfModel) -> str | None:
    if given.model.foveate.evicts_in_prompt:
        return _Told("it evicts while a prompt is read, and no gradients flow through what it evicts")
    ids, training = given.tokens(2, PROMPT).ids, given.model.training
    weights = [one for one in given.model.parameters() if one.requires_grad]
    given.model.train()
    try:
        loss = given.model(input_ids=ids, use_cache=False, labels=ids).loss
        grads = [one for one in torch.autograd.grad(loss, weights, allow_unused=True) if one is not None]
    finally:
        given.model.train(training)
    if not grads or not all(bool(grad.isfinite().all()) for grad in grads):
        raise MissedError("gradients are missing or no numbers")
    return None


def _served(given: _OfModel) -> str:
    from foveate.integrations.transformers.facts import geometry_of, model_shape
    from foveate.runtime.steps import obstacle

    text = given.model.config.get_text_config()
    layers, geometry = range(text.num_hidden_layers), geometry_of(model_shape(text))
    methods = (given.method.for_layer(layer, len(layers), layers) for layer in layers)
    reason = next(filter(None, (obstacle(method, geometry) for method in methods)), "")
    return _Told(f"vLLM does not serve it: {reason}" if reason else "vLLM serves it")


_CHECKS: dict[str, Callable[[_OfModel], str | None]] = {
    "full budget": _full_budget,
    "later tokens": invariants.later_tokens,
    "prompt in pieces": invariants.prompt_in_pieces,
    "padded batch": invariants.padded_batch,
    "other budget": _other_budget,
    "second turn": invariants.second_turn,
    "crop": _crop,
    "reordered rows": _rows,
    "copied cache": invariants.copied_cache,
    "saved cache": _saved,
    "captured steps": _captured,
    "without a cache": _without_cache,
    "training": _training,
    "spec": lambda given: invariants.spec(given.method),
    "vLLM": _served,
}
"""By the name of their line, in order, after the hooks."""
