"""Does a method hold what every method promises? An author's own method, on a tiny model or on the author's.

The same answers are asked for in different ways: a row alone and in a padded batch, a prompt whole and in pieces, a
cache that is copied, saved, cropped or reordered. Where they differ, a hook has missed something, and the line of
the check says what that usually is.
"""

from __future__ import annotations

import contextlib
import copy
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
from foveate.lab.recorded import record
from foveate.methods import Method, get, make, parse, replay_obstacle
from foveate.methods.spec import split

PROMPT, STEPS, PIECE = 61, 20, 20
"""Tokens of a prompt, of an answer, and of a piece of a prompt."""
SHORTER = (61, 44, 23)
"""Tokens of the prompts of a padded batch."""
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
    given = _Given(tiny() if model is None else model, chosen)
    with given.attached():
        first = _line("hooks", _hooks, given)
    lines = [first]
    for name, one in _CHECKS.items() if first.outcome != "failed" else ():
        with given.attached():
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
    named = [one if ":" in one else make(one, **(get(one).about.small_budget or {})).spec for one in split(spec)]
    return parse("+".join(named))


class _MissedError(Exception):
    """What a check has found wrong, in words."""


class _Told(str):
    """What there is to say where there is nothing to pass or to fail."""


class _Given:
    """The model, the method, and prompts with the tokens that follow them."""

    def __init__(self, model: transformers.PreTrainedModel, method: Method):
        self.model, self.method = model, method
        generator, vocabulary = torch.Generator().manual_seed(0), model.config.get_text_config().vocab_size
        draw = torch.randint(3, vocabulary, (len(SHORTER), PROMPT + 2 * STEPS), generator=generator)
        self.ids = draw.to(model.device)
        """int64 ``[B, n]``: prompts of ``PROMPT`` tokens, and what follows."""

    @contextmanager
    def attached(self, method: Method | None = None, cuda_graph: bool | str = False) -> Iterator[Any]:
        """Within it another method, or the same anew, is attached."""
        with foveate.attached(self.model, method or self.method, dense_below=0, cuda_graph=cuda_graph) as attachment:
            yield attachment

    def cache(self, tokens: int = PROMPT) -> Any:
        return foveate.Cache(self.model, tokens)

    def feed(self, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits ``[B, n, V]`` of tokens that follow what the cache holds.

        Args:
            mask: bool ``[B, N]`` of all tokens so far, where rows are padded.
        """
        given = {"input_ids": ids, releases.CACHE: cache, "use_cache": True}
        if mask is not None:
            places = (mask.long().cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            given |= {"attention_mask": mask.long(), "position_ids": places}
        return self.model(**given).logits.float()

    def steps(self, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """The same, one token after the other."""
        outs = []
        for n in range(ids.shape[1]):
            grown = None if mask is None else torch.nn.functional.pad(mask, (0, n + 1), value=True)
            outs.append(self.feed(cache, ids[:, n : n + 1], grown))
        return torch.cat(outs, 1)

    def run(self, rows: Sequence[int] = (0,), more: int = STEPS) -> tuple[Any, Tensor]:
        """A cache that holds the prompts of some rows and ``more`` tokens each, and the logits of these tokens after
        the logits of the prompt's last one."""
        ids, cache = self.ids[list(rows)], self.cache()
        outs = [self.feed(cache, ids[:, :PROMPT])[:, -1:]]
        outs += [self.steps(cache, ids[:, PROMPT : PROMPT + more])] if more else []
        return cache, torch.cat(outs, 1)

    def compare(self, found: Tensor, expected: Tensor, what: str) -> None:
        """Fail unless logits are equal up to rounding, and finite."""
        if not bool(found.isfinite().all() and expected.isfinite().all()):
            raise _MissedError(f"{what}: there are logits that are no numbers")
        apart = float((found - expected).abs().max() / expected.abs().max())
        if apart > _LOOSE.get(self.model.dtype, 2e-3):
            step = int(((found - expected).abs().amax((0, 2)) > apart * float(expected.abs().max()) / 2).nonzero()[0])
            raise _MissedError(
                f"{what} (logits differ by {100 * apart:.1f} % of the largest, first about token {step})"
            )


def _line(name: str, one: Callable[[_Given], str | None], given: _Given) -> Line:
    try:
        with torch.no_grad() if name != "training" else torch.enable_grad():
            text = one(given)
        return Line(name, "told" if isinstance(text, _Told) else "passed", text or "")
    except _MissedError as error:
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


def _hooks(given: _Given) -> str:
    """What hooks return is checked by the runtime, whose errors name the hook, the shape and what to return."""
    cache, out = given.run()
    if not bool(out.isfinite().all()):
        raise _MissedError(
            "there are logits that are no numbers: does a hook divide by zero, or read a slot that is free?"
        )
    share = foveate.stats(given.model).keys_read_share
    held = cache.resident_bytes
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


def _full_budget(given: _Given) -> str | None:
    whole = given.method.with_full_budget()
    if whole is None:
        return _Told("no full budget is declared: with about=About(..., full_budget={...}) it is compared with dense")
    with given.attached(make("dense")):
        expected = given.run()[1]
    with given.attached(whole):
        found = given.run()[1]
    given.compare(found, expected, f"with its full budget ({whole.spec}) it is not dense attention")
    return None


def _later_tokens(given: _Given) -> str | None:
    tile = given.method.prompt_tile(_group(given.model))
    if tile is None or tile > 1:
        return _Told("prompts are read in tiles, within which later tokens may count")
    ids = given.ids[:1, :PROMPT]
    other = ids.clone()
    other[:, -1] = 3 + (other[:, -1] - 2) % (given.model.config.get_text_config().vocab_size - 3)
    one, two = (given.feed(given.cache(), some)[:, :-1] for some in (ids, other))
    given.compare(two, one, "a prompt's last token changes what is said of earlier ones: mask later tokens in `prompt`")
    return None


def _pieces(given: _Given) -> str | None:
    tile = given.method.prompt_tile(_group(given.model))
    pieces = range(0, PROMPT, PIECE)
    if tile is None:
        try:
            cache = given.cache()
            for first in pieces:
                given.feed(cache, given.ids[:1, first : min(first + PIECE, PROMPT)])
        except ValueError:
            return "prompts come in one piece, as prompt_tile declares"
        raise _MissedError(
            "prompt_tile declares that prompts come in one piece, and pieces are taken: return 1, or a tile"
        )
    size = PIECE // max(tile, 1) * max(tile, 1) or tile
    cache, outs = given.cache(), []
    for first in range(0, PROMPT, size):
        outs.append(given.feed(cache, given.ids[:1, first : min(first + size, PROMPT)]))
    outs.append(given.steps(cache, given.ids[:1, PROMPT : PROMPT + STEPS]))
    whole = given.cache()
    expected = [given.feed(whole, given.ids[:1, :PROMPT]), given.steps(whole, given.ids[:1, PROMPT : PROMPT + STEPS])]
    given.compare(
        torch.cat(outs, 1),
        torch.cat(expected, 1),
        f"a prompt in pieces of {size} tokens gives something else than in one: what a hook notes of a piece belongs "
        "into a channel, and `prompt_end` comes once",
    )
    return None


def _padding(given: _Given) -> None:
    longest = max(SHORTER)
    ids = torch.full((len(SHORTER), longest), 3, device=given.model.device)
    mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    for row, tokens in enumerate(SHORTER):
        ids[row, longest - tokens :], mask[row, longest - tokens :] = given.ids[row, :tokens], True
    following = given.ids[:, PROMPT : PROMPT + STEPS]
    cache = given.cache(longest)
    last = given.feed(cache, ids, mask)[:, -1:]
    found = torch.cat([last, given.steps(cache, following, mask)], 1)
    for row, tokens in enumerate(SHORTER):
        alone = given.cache(tokens)
        last = given.feed(alone, given.ids[row : row + 1, :tokens])[:, -1:]
        expected = torch.cat([last, given.steps(alone, following[row : row + 1])], 1)
        given.compare(
            found[row : row + 1],
            expected,
            f"a row of {tokens} tokens in a padded batch is not what it is alone: rows have numbers of their own, "
            "cache.lengths[row] and cache.positions[row], and cache.plan['lengths'] has all on the device",
        )


def _second_turn(given: _Given) -> str | None:
    if given.method.prompt_tile(_group(given.model)) is None:
        return "a second prompt is refused, as prompt_tile declares"
    ids = given.ids[:, PROMPT : PROMPT + STEPS]
    (one, _), (two, _) = given.run([0], 4), given.run([0, 1], 4)
    found, both = (given.feed(cache, ids[: cache.batch_size, 4:12]) for cache in (one, two))
    given.compare(both[:1], found, "a second prompt in a batch is not what it is alone")
    after = [given.steps(cache, ids[: cache.batch_size, 12:]) for cache in (one, two)]
    given.compare(after[1][:1], after[0], "what follows a second prompt in a batch is not what it is alone")
    return None


def _crop(given: _Given) -> str | None:
    cache, _ = given.run(more=0)
    cache.activate_past_recording()  # of methods that evict, which cannot bring tokens back otherwise
    given.steps(cache, given.ids[:1, PROMPT : PROMPT + 8])
    try:
        cache.crop(-4)
    except ValueError as error:
        return f"refused: {error}"
    ids = given.ids[:1, PROMPT + STEPS : PROMPT + STEPS + 8]
    fresh, _ = given.run(more=4)
    given.compare(
        given.steps(cache, ids),
        given.steps(fresh, ids),
        "after crop(-4) a cache is not what it was four tokens before: state belongs into a channel, which is cropped; "
        "a method whose decoded tokens change entries of older ones is `stateful`; and means and sums must leave out "
        "empty slots",
    )
    return None


def _reordered(given: _Given) -> None:
    rows = [1, 1, 0]
    cache, _ = given.run([0, 1], 6)
    cache.reorder_cache(torch.tensor(rows, device=given.model.device))
    fresh, _ = given.run(rows, 6)
    ids = given.ids[:3, PROMPT + STEPS : PROMPT + STEPS + 8]
    given.compare(
        given.steps(cache, ids),
        given.steps(fresh, ids),
        "rows that beam search has reordered go on otherwise: state belongs into a channel, whose rows are reordered",
    )


def _copied(given: _Given) -> None:
    cache, _ = given.run(more=6)
    twin = copy.deepcopy(cache)
    ids = given.ids[:1, PROMPT + STEPS : PROMPT + STEPS + 8]
    expected = given.steps(cache, ids)
    given.compare(
        given.steps(twin, ids),
        expected,
        "a copy of a cache goes on otherwise than the cache: a hook keeps state in the method, which all rows share; "
        "use a channel",
    )


def _saved(given: _Given) -> str | None:
    cache, _ = given.run(more=6)
    ids = given.ids[:1, PROMPT + STEPS : PROMPT + STEPS + 8]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        foveate.save_cache(given.model, cache, path)
        loaded = foveate.load_cache(given.model, path)
    given.compare(
        given.steps(loaded, ids), given.steps(cache, ids), "a cache that was saved and loaded goes on otherwise"
    )
    return None


def _captured(given: _Given) -> str | None:
    if reason := replay_obstacle(given.method):
        return _Told(f"decode steps are not captured in CUDA graphs: {reason}")
    how = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    ids, outs = given.ids[:2, :PROMPT], []
    for cuda_graph in (False, "auto"):
        with given.attached(cuda_graph=cuda_graph) as attachment:
            graphs = attachment.graphs
            if given.model.device.type != "cuda":
                graphs.recorder = record
            outs.append(given.model.generate(ids, attention_mask=torch.ones_like(ids), **how))
    if not graphs.use.replayed:
        raise _MissedError(f"no step was replayed: {graphs.use.reason}")
    one, two = (torch.stack(out.logits, 1).float() for out in outs)
    given.compare(
        two,
        one,
        "steps that are replayed from a graph give something else: in a captured step a hook reads numbers of rows on "
        "the device, cache.plan, and nothing that changes on the host",
    )
    return None


def _without_cache(given: _Given) -> None:
    ids = given.ids[:2, :PROMPT]
    expected = given.feed(given.cache(), ids)
    found = given.model(input_ids=ids, use_cache=False).logits.float()
    given.compare(found, expected, "without a cache, as in training, a prompt is read otherwise")


def _training(given: _Given) -> None:
    ids, training = given.ids[:2, :PROMPT], given.model.training
    weights = [one for one in given.model.parameters() if one.requires_grad]
    given.model.train()
    try:
        loss = given.model(input_ids=ids, use_cache=False, labels=ids).loss
        grads = [one for one in torch.autograd.grad(loss, weights, allow_unused=True) if one is not None]
    finally:
        given.model.train(training)
    if not grads or not all(bool(grad.isfinite().all()) for grad in grads):
        raise _MissedError("gradients are missing or no numbers")


def _spec(given: _Given) -> None:
    if parse(given.method.spec) != given.method:
        raise _MissedError(
            f"{given.method.spec} is not read back as the same method: settings are numbers, texts or lists"
        )


def _served(given: _Given) -> str:
    from foveate.integrations.transformers.facts import geometry_of, model_shape
    from foveate.runtime.steps import obstacle

    text = given.model.config.get_text_config()
    layers, geometry = range(text.num_hidden_layers), geometry_of(model_shape(text))
    methods = (given.method.for_layer(layer, len(layers), layers) for layer in layers)
    reason = next(filter(None, (obstacle(method, geometry) for method in methods)), "")
    return _Told(f"vLLM does not serve it: {reason}" if reason else "vLLM serves it")


def _group(model: transformers.PreTrainedModel) -> int:
    """Query heads of a KV head."""
    text = model.config.get_text_config()
    return text.num_attention_heads // (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


_CHECKS: dict[str, Callable[[_Given], str | None]] = {
    "full budget": _full_budget,
    "later tokens": _later_tokens,
    "prompt in pieces": _pieces,
    "padded batch": _padding,
    "second turn": _second_turn,
    "crop": _crop,
    "reordered rows": _reordered,
    "copied cache": _copied,
    "saved cache": _saved,
    "captured steps": _captured,
    "without a cache": _without_cache,
    "training": _training,
    "spec": _spec,
    "vLLM": _served,
}
"""By the name of their line, in order, after the hooks."""
