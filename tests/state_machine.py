"""Any sequence of what can be done to a cache: it equals the same history on a fresh cache, or it is refused.

`python -m tests.state_machine --steps 20000 h2o quest` runs at least so many steps for each method (without a name: for
all of them), in sequences of up to thirty, drawn anew each time; `tests/test_state_machine.py` runs a few, always the
same.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import pickle
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import foveate
from foveate import methods
from foveate.integrations.transformers import saved
from foveate.integrations.transformers.token_ids import TokenIds
from foveate.runtime import Phase, handover
from foveate.runtime.layer import Layer
from foveate.state import SlotCache
from tests.helpers import cached, prepare

VOCAB, MOST_COLUMNS, MOST_ROWS, MOST_CACHES, STEPS = 41, 90, 4, 3, 30
REFUSED = "was interrupted"
FIRST_LAYER_BY_PAGES = (
    "kascade_pages:anchors=[0],first_layer=pages,page_size=4,top_k=9,pool=kv_head,pooling=post_softmax"
)
VARIANTS = {
    "evict_every": "h2o:top_k=9,window=4,evict_every=11",
    "adakv_every": "adakv:top_k=9,window=4,kernel_size=3,evict_every=11",
    "kascade_first_layer": f"{FIRST_LAYER_BY_PAGES},decode_only=false,dense_anchor_prefill=false,tile=1",
    "luka_levels": "luka:page_size=[3, 6, 12],sinks=2,tail=9,top_k=2,expand=1",
    "pages_offloaded": "pages:top_k=32,page_size=4",
    "pages_every_offloaded": "pages:top_k=32,page_size=4,every=2",
    "kascade_offloaded": f"{FIRST_LAYER_BY_PAGES},decode_only=false,dense_anchor_prefill=false,tile=1",
    "luka_offloaded": "luka:page_size=4,sinks=2,tail=9,top_k=2",
}
NAMES = [*sorted({*methods.names()} - {"lte"}), *VARIANTS]
"""All methods but that which needs a file of learned scores."""


def spec_of(name: str) -> str:
    """Settings under which a method is sparse here."""
    return VARIANTS[name] if name in VARIANTS else methods.make(name, **methods.get(name).about.small_budget).spec


def options_of(name: str) -> dict[str, Any]:
    """How it is attached."""
    return {"offload": True, "gpu_budget": 1.0} if name.endswith("_offloaded") else {}


@functools.cache
def built() -> transformers.PreTrainedModel:
    """A random model of two small layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return prepare(transformers.AutoModelForCausalLM.from_config(config))


def error_of(act: Any) -> str:
    """What the ValueError of an act says; empty without one."""
    try:
        act()
    except ValueError as error:
        return str(error) or "ValueError"
    return ""


class History:
    """What a cache has read: ids and mask ``[B, columns]``, and which columns are prompts, each by its end."""

    def __init__(self, rows: int, planned: int):
        self.ids, self.mask = (torch.zeros(rows, 0, dtype=torch.long) for _ in range(2))
        self.prompts: list[tuple[int, int]] = []
        """First column and end of each prompt that was read to its end."""
        self.planned = planned
        """Where the prompt that is being read is to end; not beyond the columns where none is."""
        self.begun = 0
        """Where that prompt begins."""

    @property
    def columns(self) -> int:
        return self.ids.shape[1]

    @property
    def unfinished(self) -> bool:
        return self.columns < self.planned

    def add(self, ids: Tensor, mask: Tensor) -> None:
        """More columns: of the prompt that is being read, then decoded ones."""
        open_prompt = self.unfinished
        self.ids, self.mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)
        if open_prompt and not self.unfinished:
            self.prompts.append((self.begun, self.planned))

    def plan(self, end: int) -> None:
        """A prompt is to end there, of which what is unfinished is a part."""
        if not self.unfinished:
            self.begun = self.columns
        self.planned = end

    def cut(self, columns: int) -> None:
        """The first columns alone. A prompt that was complete ends with them; one being read is still to be."""
        unfinished = self.unfinished
        self.ids, self.mask = self.ids[:, :columns], self.mask[:, :columns]
        self.prompts = [(first, min(end, columns)) for first, end in self.prompts if first < columns]
        if not unfinished:
            self.planned = min(self.planned, columns)
        elif self.begun >= columns:
            self.begun = columns

    def take(self, rows: Tensor) -> None:
        self.ids, self.mask = self.ids[rows], self.mask[rows]

    def replay(self, model: transformers.PreTrainedModel) -> foveate.Cache:
        """A fresh cache that reads each prompt in one piece, and then token by token."""
        cache, at = foveate.Cache(model), 0
        spans = [*self.prompts, (self.begun, self.planned)] if self.unfinished else self.prompts
        for first, end in [*spans, (self.columns, self.columns)]:
            while at < first:
                self.feed(model, cache, at, at + 1)
                at += 1
            if end > first:
                cache.begin(end, assistant=False)
                if first < self.columns:
                    self.feed(model, cache, first, min(end, self.columns))
                at = min(end, self.columns)
        return cache

    def feed(self, model: transformers.PreTrainedModel, cache: foveate.Cache, first: int, end: int) -> Tensor:
        given = {"attention_mask": self.mask[:, :end]} if not bool(self.mask.all()) else {}
        return model(self.ids[:, first:end], **given, **cached(cache)).logits[:, -1]


class Stop:
    """What raises once, in its call of some number, before or after what it stands in for has run."""

    def __init__(self, original: Any, kind: type[BaseException], call: int, after: bool):
        self.original, self.kind, self.call, self.after, self.raised = original, kind, call, after, False
        self.calls = itertools.count()

    def __get__(self, owner: Any, of: type) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = next(self.calls) == self.call
        if here and not self.after:
            self.raised = True
            raise self.kind
        out = self.original(*args, **kwargs)
        if here:
            self.raised = True
            raise self.kind
        return out


STORE = ("append", "write_step", "reserve", "retain", "evict", "save", "restore", "take_rows", "truncate")
HOOKS = ("prompt", "observe", "prompt_end", "prompt_packed", "note_newest", "choose", "learn", "evict")
LAYER = ("attend", "_split", "_prompt_rows", "_step", "remove_last", "take_rows", "announce")
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
PLACES = [
    *(("store", name) for name in (*STORE, "compact", "row", "_view_of_row", "_keep_memory")),
    *(("hooks", name) for name in HOOKS),
    *(("layer", name) for name in LAYER),
    *(("modules", name) for name in MODULES),
    *(("model", name) for name in ("norm", "embed_tokens", "lm_head")),
    *(("phase", name) for name in ("rows", "begin_change", "end_change")),
    *(("ids", name) for name in ("write", "take_rows")),
    *(("handover", name) for name in ("begin", "end", "post", "take")),
]
ROW = st.integers(0, MOST_ROWS - 1)
CHOICE = st.integers(0, MOST_CACHES - 1)


class Machine(RuleBasedStateMachine):
    """Caches of one attached model, each with its history."""

    name: str
    steps = 0
    """Taken so far, of all sequences."""

    def __init__(self):
        super().__init__()
        self.model = copy.deepcopy(built())
        self.folder = tempfile.TemporaryDirectory()
        self.files = itertools.count()
        self.held: list[tuple[foveate.Cache, History]] = []
        self.seed = itertools.count()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.attachment = foveate.attach(self.model, spec_of(self.name), cuda_graph=False, **options_of(self.name))

    def teardown(self):
        for cache, history in self.held:
            self.equal(cache, history)
        self.folder.cleanup()

    def check_invariants(self, *given: Any) -> None:  # called after each step
        type(self).steps += 1
        super().check_invariants(*given)

    # Beginnings

    @initialize(rows=st.integers(1, 3), planned=st.integers(1, 24))
    def start(self, rows: int, planned: int):
        self.held.append((foveate.Cache(self.model, planned), History(rows, planned)))

    @precondition(lambda self: len(self.held) < MOST_CACHES)
    @rule(rows=st.integers(1, 3), planned=st.integers(1, 24))
    def start_another(self, rows: int, planned: int):
        self.start(rows, planned)

    @precondition(lambda self: len(self.held) > 1)
    @rule(which=CHOICE)
    def drop(self, which: int):
        cache, history = self.held.pop(which % len(self.held))
        self.equal(cache, history)

    # Tokens

    @precondition(lambda self: self.held)
    @rule(which=CHOICE, n=st.integers(1, 12), padded=st.lists(st.integers(0, 5), min_size=4, max_size=4))
    def read(self, which: int, n: int, padded: list[int]):
        """A piece of a prompt, with padding, or decoded tokens, several at once."""
        self.does(which, lambda cache, history: self.fed(cache, history, n, padded))

    @precondition(lambda self: self.held)
    @rule(which=CHOICE)
    def decode(self, which: int):
        self.does(which, lambda cache, history: self.fed(cache, history, 1, [0]))

    @precondition(lambda self: self.held)
    @rule(
        which=CHOICE,
        n=st.integers(1, 9),
        new=st.integers(1, 4),
        padded=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    )
    def turn(self, which: int, n: int, new: int, padded: list[int]):
        """A call of `generate` with the whole conversation."""
        self.does(which, lambda cache, history: self.generated(cache, history, n, new, padded))

    # Changes

    @precondition(lambda self: self.held)
    @rule(which=CHOICE, tokens=st.integers(1, 9))
    def crop(self, which: int, tokens: int):
        self.does(which, lambda cache, history: self.cropped(cache, history, tokens))

    @precondition(lambda self: self.held)
    @rule(which=CHOICE)
    def record(self, which: int):
        self.does(which, lambda cache, history: cache.activate_past_recording())

    @precondition(lambda self: self.held)
    @rule(which=CHOICE, rows=st.lists(ROW, min_size=1, max_size=MOST_ROWS))
    def reorder(self, which: int, rows: list[int]):
        self.does(which, lambda cache, history: self.taken(cache, history, "reorder_cache", rows))

    @precondition(lambda self: self.held)
    @rule(which=CHOICE, rows=st.lists(ROW, min_size=1, max_size=MOST_ROWS))
    def select(self, which: int, rows: list[int]):
        self.does(which, lambda cache, history: self.taken(cache, history, "batch_select_indices", rows))

    @precondition(lambda self: self.held)
    @rule(which=CHOICE)
    def repeat(self, which: int):
        def repeated(cache: foveate.Cache, history: History) -> None:
            if 0 < len(history.ids) <= MOST_ROWS // 2 and history.columns:
                cache.batch_repeat_interleave(2)
                history.take(torch.arange(len(history.ids)).repeat_interleave(2))

        self.does(which, repeated)

    # Copies

    @precondition(lambda self: self.held and len(self.held) < MOST_CACHES)
    @rule(which=CHOICE, pickled=st.booleans())
    def copies(self, which: int, pickled: bool):
        cache, history = self.held[which % len(self.held)]
        twin = pickle.loads(pickle.dumps(cache)) if pickled else copy.deepcopy(cache)
        self.held.append((twin, copy.deepcopy(history)))

    @precondition(lambda self: self.held)
    @rule(which=CHOICE)
    def save_and_load(self, which: int):
        self.held[which % len(self.held)] = self.saved(*self.held[which % len(self.held)])

    @precondition(lambda self: self.held)
    @rule()
    def attach_again(self):
        """Caches of before are refused then, and files of them are not."""
        kept = [self.saved(*one) for one in self.held]
        paths = [self.path() for _ in kept]
        written = []
        for (cache, history), path in zip(kept, paths):
            with contextlib.suppress(ValueError):
                foveate.save_cache(self.model, cache, path)
                written.append((path, history))
        foveate.detach(self.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.attachment = foveate.attach(self.model, spec_of(self.name), cuda_graph=False, **options_of(self.name))
        for cache, history in kept:
            self.refuses(cache, history, "was made for another model or another attached method")
        self.held = [(foveate.load_cache(self.model, path), history) for path, history in written]

    # Interruptions

    @precondition(lambda self: self.held)
    @rule(
        place=st.sampled_from(PLACES),
        call=st.integers(0, 5),
        after=st.booleans(),
        memory=st.booleans(),
        what=st.sampled_from(["fed", "generated", "cropped", "taken", "record"]),
        which=CHOICE,
        n=st.integers(1, 6),
        rows=st.lists(ROW, min_size=1, max_size=3),
    )
    def interrupt(
        self,
        place: tuple[str, str],
        call: int,
        after: bool,
        memory: bool,
        what: str,
        which: int,
        n: int,
        rows: list[int],
    ):
        """Anything is stopped anywhere."""
        cache, history = self.held[which % len(self.held)]
        before = copy.deepcopy(history)
        act = {
            "fed": lambda: self.fed(cache, history, n, rows),
            "generated": lambda: self.generated(cache, history, n, 3, rows),
            "cropped": lambda: self.cropped(cache, history, n),
            "taken": lambda: self.taken(cache, history, "reorder_cache", rows),
            "record": cache.activate_past_recording,
        }[what]
        kind = torch.OutOfMemoryError if memory else KeyboardInterrupt
        with self.stopping(place, kind, call, after) as stops, torch.no_grad():
            try:
                act()
            except kind:
                assert any(stop.raised for stop in stops)
            except ValueError:  # refused, by a method perhaps in the middle of a pass
                assert not any(stop.raised for stop in stops)
            else:
                return
        with contextlib.suppress(ValueError):  # the next call ends a pass that Ctrl-C has left before it wrote anything
            self.model(torch.zeros(1, 0, dtype=torch.long), **cached(cache))
        if self.whole(cache):
            history = self.known(cache, before, history)
            if (what, place, after) == ("taken", ("phase", "end_change"), True) and history.columns:
                history.take(torch.tensor([row % len(history.ids) for row in rows]))  # all was done
            self.held[which % len(self.held)] = (cache, history)
        else:
            self.refuses(cache, before, REFUSED)
            self.held.pop(which % len(self.held))

    # How

    def does(self, which: int, act: Any) -> None:
        """Act on a cache; what is refused leaves it as it was, or refused for good."""
        cache, history = self.held[which % len(self.held)]
        before, said = copy.deepcopy(history), ""
        with torch.no_grad():
            said = error_of(lambda: act(cache, history))
        if not said:
            return
        assert REFUSED not in said
        if self.whole(cache):
            assert cache.get_seq_length() == before.columns, said
            self.held[which % len(self.held)] = (cache, before)
        else:  # by the method, in the middle of a pass
            self.refuses(cache, before, REFUSED)
            self.held.pop(which % len(self.held))

    def drawn(self, history: History, n: int, padded: list[int]) -> tuple[Tensor, Tensor]:
        """New ids ``[B, n]``, and their mask, with padding before the first."""
        generator = torch.Generator().manual_seed(next(self.seed))
        ids = torch.randint(3, VOCAB, (len(history.ids), n), generator=generator)
        mask = torch.ones_like(ids)
        for row, width in enumerate(padded[: len(ids)]):
            mask[row, : min(width, n - 1)] = 0
        return ids.masked_fill(mask == 0, 0), mask

    def fed(self, cache: foveate.Cache, history: History, n: int, padded: list[int]) -> None:
        room = history.planned - history.columns
        n = min(n, room) if room > 0 else n
        if history.columns + n > MOST_COLUMNS:
            return
        real = not history.unfinished or (history.columns > history.begun)  # padding stands first
        ids, mask = self.drawn(history, n, [0] if real else padded)
        first = history.columns
        history.add(ids, mask)
        history.feed(self.model, cache, first, first + n)

    def generated(self, cache: foveate.Cache, history: History, n: int, new: int, padded: list[int]) -> None:
        if history.columns + n + new > MOST_COLUMNS:
            return
        ids, mask = self.drawn(history, n, padded)
        before, end = history.columns, history.columns + n
        whole, all_mask = torch.cat([history.ids, ids], 1), torch.cat([history.mask, mask], 1)
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **cached(cache)}
        out = self.model.generate(whole, attention_mask=all_mask, **how)
        history.plan(end)
        history.add(ids, mask)
        decoded = out[:, end:-1]
        history.add(decoded, torch.ones_like(decoded))
        assert cache.get_seq_length() == before + n + new - 1

    def cropped(self, cache: foveate.Cache, history: History, tokens: int) -> None:
        end = history.prompts[-1][1] if history.prompts else 0
        if any(getattr(one.method, "weighted", False) for one in self.attachment.policies.values()) and (
            history.columns - tokens < end
        ):
            return  # channels stay weighted by the queries of the prompt that would be removed
        if tokens <= history.columns:
            cache.crop(-tokens)
            history.cut(history.columns - tokens)

    def taken(self, cache: foveate.Cache, history: History, how: str, rows: list[int]) -> None:
        index = torch.tensor([row % len(history.ids) for row in rows])
        if history.columns:
            getattr(cache, how)(index)
            history.take(index)

    def path(self) -> Path:
        return Path(self.folder.name) / f"{next(self.files)}"

    def saved(self, cache: foveate.Cache, history: History) -> tuple[foveate.Cache, History]:
        path = self.path()
        said = error_of(lambda: foveate.save_cache(self.model, cache, path))
        if said:
            assert not history.columns or "activate_past_recording" in said, said
            return cache, history
        again = foveate.load_cache(self.model, path)
        path.unlink()
        return again, history

    def known(self, cache: foveate.Cache, before: History, after: History) -> History:
        """The history of a cache that is accepted after an exception: as far as it went."""
        seen = cache.get_seq_length()
        if seen <= before.columns:
            history = copy.deepcopy(before)
            history.cut(seen)
            return history
        if after.columns > before.columns:
            assert after.columns == seen
            return after
        ids = cache.ids.read(seen)[:, before.columns :].clone()  # of a call of `generate`
        history, end = copy.deepcopy(before), cache.phase.prompt_end
        mask = torch.ones_like(ids)
        history.plan(end)
        mask[:, : end - before.columns] = (ids != 0)[:, : end - before.columns].long()
        history.add(ids[:, : end - before.columns], mask[:, : end - before.columns])
        history.add(ids[:, end - before.columns :], mask[:, end - before.columns :])
        return history

    def whole(self, cache: foveate.Cache) -> bool:
        try:
            cache.phase.check_whole()
        except ValueError:
            return False
        return True

    def refuses(self, cache: foveate.Cache, history: History, says: str) -> None:
        """Check that nothing goes on with a cache."""
        ids = torch.full((max(len(history.ids), 1), 1), 5)
        uses = [
            lambda one: self.model(ids, **cached(one)),
            lambda one: foveate.save_cache(self.model, one, self.path()),
        ]
        for one in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            for number, use in enumerate(uses):
                said = error_of(lambda use=use, one=one: use(one))
                assert said, "a cache that must be refused was accepted"
                assert says in said or number, said

    @torch.no_grad()
    def equal(self, cache: foveate.Cache, history: History) -> None:
        """Check that a cache gives what a fresh one does that has read the same."""
        assert cache.get_seq_length() == history.columns
        if not history.columns or (self.attachment.whole_prompt and history.unfinished):
            return
        fresh = history.replay(self.model)
        cache, history = copy.deepcopy(cache), copy.deepcopy(history)
        if history.unfinished:
            n = history.planned - history.columns
            ids, mask = self.drawn(history, n, [0])
            history.add(ids, mask)
            self.alike(history.feed(self.model, cache, history.columns - n, history.columns), history, fresh, n)
        for _ in range(3):
            history.add(*self.drawn(history, 1, [0]))
            self.alike(history.feed(self.model, cache, history.columns - 1, history.columns), history, fresh, 1)

    def alike(self, out: Tensor, history: History, fresh: foveate.Cache, n: int) -> None:
        expected = history.feed(self.model, fresh, history.columns - n, history.columns)
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)

    @contextlib.contextmanager
    def stopping(self, place: tuple[str, str], kind: type[BaseException], call: int, after: bool):
        """One place raises within the block."""
        where, name = place
        layers = self.model.model.layers
        owners = {
            "store": [SlotCache],
            "hooks": list({type(policy.method) for policy in self.attachment.policies.values()}),
            "layer": [Layer],
            "phase": [Phase],
            "ids": [TokenIds],
            "handover": [handover],
        }
        if where == "modules":
            owners = [layer.get_submodule(name) for layer in layers]
            name, call, chosen = "forward", call // len(owners), [owners[call % len(owners)]]
        elif where == "model":
            name, chosen = "forward", [self.model.lm_head if name == "lm_head" else getattr(self.model.model, name)]
        else:
            chosen = owners[where]
        before = [(owner, owner.__dict__.get(name), getattr(owner, name)) for owner in chosen]
        stops = [Stop(original, kind, call, after) for *_, original in before]
        for (owner, _, _), stop in zip(before, stops):
            setattr(owner, name, stop)
        try:
            yield stops
        finally:
            for owner, own, _ in before:
                if own is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)


def run(name: str, examples: int, **how: Any) -> int:
    """Run sequences of steps with a method; returns how many steps.

    Raises what hypothesis does for a sequence that ends in a disagreement.
    """
    machine = type(f"Machine_{name}", (Machine,), {"name": name})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    how = {"deadline": None, "suppress_health_check": checks, "database": None, "print_blob": False} | how
    with mock.patch.object(saved, "weights_digest", return_value="of weights that no step changes"):
        run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=STEPS, **how))
    return machine.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="METHOD", help=", ".join(NAMES))
    parser.add_argument("--steps", type=int, default=20_000, help="of each method, at least (20000)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.names:
        steps, start = 0, time.perf_counter()
        while steps < given.steps:
            steps += run(name, 20, derandomize=False)
        print(f"{name}: {steps:,} steps in {time.perf_counter() - start:.0f} s without a disagreement", flush=True)


if __name__ == "__main__":
    main()
