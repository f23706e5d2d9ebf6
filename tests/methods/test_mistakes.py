"""What authors get wrong: one sentence names class, hook and remedy, once a prompt, and in no decode step."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import foveate
from foveate import methods, ops
from foveate.methods import base
from foveate.methods.base import Method, setting
from foveate.runtime import returned
from foveate.state import Channel, Evicts
from tests.helpers import cached, generate, left_padded, tiny_model, tokens
from tests.problems import Waits


@pytest.fixture(autouse=True)
def registry():
    before = dict(base.REGISTRY)
    yield
    base.REGISTRY.clear()
    base.REGISTRY.update(before)


class Reads(Method):
    """Attends to all."""

    def choose(self, cache, q, scaling):
        return None


def evicting(keep, **facts):
    """A method whose prompts end by a rule."""

    @dataclass(frozen=True)
    class Mine(Reads):
        name: ClassVar[str] = "mine"
        evicts: ClassVar[Evicts] = facts.get("evicts", Evicts.AT_PROMPT_END)
        needs_prompt_end: ClassVar[bool] = True

        def prompt_end(self, cache, scaling):
            return keep(cache)

        def evict(self, cache, scaling):
            pass

    return Mine()


def with_hooks(**hooks):
    @dataclass(frozen=True)
    class Mine(Reads):
        name: ClassVar[str] = "mine"

    for hook, function in hooks.items():
        setattr(Mine, hook, function)
    return Mine()


def short_head(cache):
    keep = torch.arange(30).expand(1, 2, 30).clone()
    keep[0, 1, 20:] = -1
    return keep


def run(method, ids=None, **options):
    model = tiny_model()
    with foveate.attached(model, method, dense_below=0):
        return generate(model, tokens(60) if ids is None else ids, 3, **options)


@pytest.mark.parametrize(
    ("keep", "facts", "message"),
    [
        (lambda cache: cache.positions[0, 0] % 2 == 0, {}, r"a bool mask; return int64 slots \[K\] or \[1, 2, K\]"),
        (lambda cache: torch.arange(9, dtype=torch.int32), {}, r"torch.int32; return int64 slots .* such as .long"),
        (lambda cache: [1, 2], {}, r"a list; return a tensor, int64 slots"),
        (lambda cache: torch.zeros(30, dtype=torch.int64), {}, "a slot more than once; .* once, such as .unique"),
        (lambda cache: torch.tensor([[[1, 2], [3, 3]]]), {}, "a slot more than once"),
        (lambda cache: torch.tensor([3, cache.used]), {}, "slots outside of 0 to 59; return slots below cache.used"),
        (lambda cache: torch.tensor([3, -2]), {}, "slots outside of 0 to 59"),
        (lambda cache: torch.arange(4).expand(2, 4), {}, r"slots \[2, 4\]; return int64 slots"),
        (lambda cache: torch.arange(4).expand(2, 2, 4), {}, r"slots \[2, 2, 4\]; return int64 slots"),
        (short_head, {}, r"-1, for no slot, .* or declare evicts: .* = Evicts.AT_PROMPT_END \| Evicts.UNEVENLY"),
        (short_head, {"evicts": Evicts.IN_DECODE}, r"-1, for no slot, .* = Evicts.IN_DECODE \| Evicts.UNEVENLY"),
        (lambda cache: torch.arange(9), {"evicts": Evicts.NEVER}, "slots to keep, .* declare evicts: .*AT_PROMPT_END"),
    ],
)
def test_slots_to_keep_are_checked(keep, facts, message):
    with pytest.raises(ValueError, match=rf"^Mine.prompt_end returned {message}"):
        run(evicting(keep, **facts))
    with pytest.raises(ValueError, match=rf"^Mine.prompt_end returned {message}"), Waits():
        run(evicting(keep, **facts))  # slots on a GPU are looked at when all layers have read the prompt
    batch = left_padded([60, 53])  # row by row, where lengths differ
    with pytest.raises(ValueError, match=r"^Mine.prompt_end returned"):
        run(evicting(keep, **facts), batch["input_ids"], attention_mask=batch["attention_mask"])


@torch.inference_mode()
def test_slots_that_a_branch_keeps_are_checked():
    mine, model = evicting(lambda cache: torch.zeros(30, dtype=torch.int64)), tiny_model()
    with foveate.attached(model, methods.SharedPrompt((mine,))):
        read = foveate.Cache(model, 60)
        model(tokens(60), **cached(read))
    with foveate.attached(model, mine), Waits(), pytest.raises(ValueError, match="a slot more than once"):
        read.branch(model)


def test_empty_slots_are_given_where_heads_may_differ():
    run(evicting(short_head, evicts=Evicts.AT_PROMPT_END | Evicts.UNEVENLY))


def slots(**parts):
    return ops.Choice(keys=torch.zeros(1, 2, 1, dtype=torch.int32), read=torch.ones(1, 1), **parts)


CHOICES = [
    (lambda cache: "all", "a str; return a bool mask, an ops.Choice, or None for all keys"),
    (lambda cache: cache.positions, r"torch.int32; return a bool mask \[1, 2, 61\], or ops.Choice\(keys=slots"),
    (lambda cache: cache.positions[0] >= 0, r"a mask \[2, 61\]; return one that broadcasts to \[1, 2, 61\]"),
    (lambda cache: cache.positions[..., :9] >= 0, r"a mask \[1, 2, 9\]; return one that broadcasts"),
    (lambda cache: ops.Choice(keys=cache.positions), "a Choice without read; say how many keys are read"),
    (
        lambda cache: slots(need_mass=True, scores=ops.Pooling("post_softmax", "group")),
        "a Choice of scores and of what",
    ),
    (lambda cache: ops.Choice(rest=ops.Rest(None, None)), "a Choice with rest without keys"),
    (
        lambda cache: ops.Choice(pages=slots().keys, page_size=4, read=slots().read, need_mass=True),
        "a Choice with need_mass without keys",
    ),
    (lambda cache: ops.Choice(attended=cache.keys), "a Tensor; return an ops.Attended"),
    (lambda cache: ops.Choice(attended=ops.Attended(cache.keys)), r"\[1, 2, 61, 16\]; return a tensor \[1, 6, 1, 16\]"),
]


@pytest.mark.parametrize(("choose", "message"), CHOICES)
def test_what_is_chosen_is_checked(choose, message):
    with pytest.raises(ValueError, match=rf"^Mine.choose returned {message}"):
        run(with_hooks(choose=lambda self, cache, q, scaling: choose(cache)))


def test_the_first_choice_is_checked_when_a_context_has_become_long():
    choose = lambda self, cache, q, scaling: "all"  # noqa: E731
    model = tiny_model()
    with foveate.attached(model, with_hooks(choose=choose, sparse_from_tokens=1), dense_below=64):
        generate(model, tokens(60), 3)
        with pytest.raises(ValueError, match=r"^Mine.choose returned a str"):
            generate(model, tokens(60), 8)


def sharing(choice):
    """A method whose first layer chooses for all others."""

    @dataclass(frozen=True)
    class Mine(Reads):
        name: ClassVar[str] = "mine"

        def for_layer(self, layer, num_layers, among=None):
            own = Mine()
            role = base.Role("reading", reads_choice_of=0, layer=layer, heads=(1, 0))
            own.__dict__["role"] = role if layer else base.Role("choosing", chooses=True, layer=0, has_readers=True)
            return own

        def choose(self, cache, q, scaling):
            return choice

    return Mine()


def test_layers_of_an_authors_method_share_a_choice():
    """Its number of keys may be one for all heads, which readers take in another order; no counter need be declared."""
    model = tiny_model()
    with foveate.attached(model, sharing(slots()), dense_below=0):
        generate(model, tokens(60), 3)
        assert {layer.keys_read_per_step for layer in foveate.stats(model).layers} == {1.0}
    chosen = slots()
    for wrong in (
        ops.Choice(pages=chosen.keys, page_size=4, read=chosen.read),
        chosen._replace(heads=torch.tensor([1, 0])),
        ops.Choice(readers=ops.Choice(keys=chosen.keys)),
    ):
        with pytest.raises(ValueError, match=r"layer 0 \(mine\) has readers.* must have keys and read, and no heads"):
            run(sharing(wrong))


def test_a_row_or_a_head_that_reads_nothing_is_told():
    """Also one that is shorter than the first, by whose length the keys of all are chosen."""

    def by_the_first(self, cache, q, scaling):
        return cache.positions >= cache.lengths[0] - 4

    def by_each(self, cache, q, scaling):
        return cache.positions >= cache.plan["lengths"][:, None, None] - 4

    def one_head(self, cache, q, scaling):
        return (cache.positions >= 0) & torch.tensor([[[True], [False]]])

    batch = left_padded([60, 41])
    inputs = {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    run(with_hooks(choose=by_the_first))
    with pytest.raises(ValueError, match=r"^Mine.choose chose no key for KV head 0 of row 1, which has 42 tokens"):
        run(with_hooks(choose=by_the_first), **inputs)
    run(with_hooks(choose=by_each), **inputs)
    with pytest.raises(ValueError, match=r"^Mine.choose chose no key for KV head 1 of row 0"):
        run(with_hooks(choose=one_head))


@pytest.mark.parametrize("hook", ["decode", "decode_dense"])
def test_hooks_of_other_days_are_refused(hook):
    with pytest.raises(ValueError, match=rf"Mine.{hook} is no hook any more: define (choose|note_newest), which"):
        type("Mine", (Method,), {hook: lambda self, cache, q, scaling: q})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (lambda self, cache, q, scaling: None, "nothing; return an ops.Attended"),
        (lambda self, cache, q, scaling: q, "a Tensor; return an ops.Attended"),
        (lambda self, cache, q, scaling: ops.Attended(q[:, :1]), r"\[1, 1, 60, 16\]; return a tensor \[1, 6, 60, 16\]"),
    ],
)
def test_what_a_prompt_returns_is_checked(prompt, message):
    with pytest.raises(ValueError, match=rf"^Mine.prompt returned {message}"):
        run(with_hooks(prompt=prompt))


def test_channels_have_names_of_their_own():
    with pytest.raises(ValueError, match=r"^Mine.channels names a channel 'keys', as the cache's own; rename it"):
        run(with_hooks(channels=lambda self, geometry: {"keys": Channel((3,))}))


def test_channels_that_observe_fills_are_not_recomputed():
    def observe(self, cache, q, attended, scaling):
        cache.channel("codes").fill_(1)

    mine = with_hooks(channels=lambda self, geometry: {"codes": Channel(recomputed=True)}, observe=observe)
    with pytest.raises(ValueError, match=r"^Mine.observe fills the channel 'codes', .* leave recomputed=True away, or"):
        run(methods.SharedPrompt((mine,)))


def test_checks_are_made_once_a_prompt_and_in_no_other_step(monkeypatch):
    checked = []
    for name in ("check_slots", "check_attended", "check_choice", "check_channels"):
        check = getattr(returned, name)
        monkeypatch.setattr(
            returned, name, lambda *given, name=name, check=check: checked.append(name) or check(*given)
        )
    model, layers = tiny_model(), tiny_model().config.num_hidden_layers
    with foveate.attached(model, evicting(lambda cache: torch.arange(9)), dense_below=0):
        generate(model, tokens(60), 8)
    names = ("check_slots", "check_attended", "check_channels", "check_choice")
    assert {name: checked.count(name) for name in set(checked)} == dict.fromkeys(names, layers)


def misspelt():
    @dataclass(frozen=True)
    class Mine(Reads):
        name: ClassVar[str] = "mine"

        def promptend(self, cache, scaling):
            return torch.arange(30)


def misspelt_fact():
    @dataclass(frozen=True)
    class Mine(Reads):
        name: ClassVar[str] = "mine"
        need_prompt_end: ClassVar[bool] = True


def part_of_about():
    @dataclass(frozen=True)
    class Mine(Reads):
        name: ClassVar[str] = "mine"
        small_budget: ClassVar[dict] = {"top_k": 9}


def no_about():
    @dataclass(frozen=True)
    class Mine(Reads):
        name: ClassVar[str] = "mine"
        about: ClassVar[dict] = {"source": "a paper"}


def only_unevenly():
    @dataclass(frozen=True)
    class Mine(Reads):
        name: ClassVar[str] = "mine"
        evicts: ClassVar[Evicts] = Evicts.UNEVENLY


def named(name):
    def make():
        return type("Mine", (Reads,), {"name": name, "__module__": __name__})

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (misspelt, r"Mine.promptend is no hook: did you mean prompt_end\? Begin the name of a helper with _"),
        (misspelt_fact, r"Mine.need_prompt_end is no hook: did you mean needs_prompt_end\?"),
        (part_of_about, r"Mine.small_budget is a part of about: write about = About\(small_budget=...\)"),
        (only_unevenly, r"Mine.evicts says how, and not when: write Evicts.AT_PROMPT_END \| Evicts.UNEVENLY"),
        (no_about, r"Mine.about must be About\(...\), not {'source': 'a paper'}"),
        (named("a:b,c"), r"Mine.name must be of letters, digits, _ and -, .*; it is 'a:b,c'"),
        (named(""), r"Mine.name must be .*; it is ''"),
        (named("own"), r"Mine.name must be .* not own"),
        (named(3), r"Mine.name must be .*; it is 3"),
    ],
)
def test_a_class_is_checked_when_it_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_settings_and_helpers_may_be_called_like_hooks():
    @dataclass(frozen=True)
    class Mine(Reads):
        name: ClassVar[str] = "mine"
        prompt_ends: int = setting(3, "ends")

        def _promptend(self):
            return 3

    run(Mine())


def nameless():
    @dataclass(frozen=True)
    class Mine(Reads):
        needs_prompt_end: ClassVar[bool] = True

    return Mine()


def nameless_child():
    @dataclass(frozen=True)
    class Mine(methods.get("h2o")):
        pass

    return Mine()


def undecorated():
    class Mine(Reads):
        name = "mine"
        k: int = setting(3, "x")

    return Mine()


def undecorated_spec():
    undecorated()
    return "mine:k=5"


def setting_as_name():
    @dataclass(frozen=True)
    class Mine(Reads):
        name: str = "mine"

    return Mine()


def without_policy():
    @dataclass(frozen=True)
    class Mine(Method):
        name: ClassVar[str] = "mine"

    return Mine()


def without_evict():
    @dataclass(frozen=True)
    class Mine(Reads):
        name: ClassVar[str] = "mine"
        evicts: ClassVar[Evicts] = Evicts.IN_DECODE

    return Mine()


def test_a_registered_class_has_a_name_of_its_own():
    with pytest.raises(ValueError, match=r"Mine of .* has no name: write name = '\.\.\.' in its body"):

        @methods.register
        class Mine(methods.get("h2o")):
            pass


def test_two_classes_of_one_file_do_not_share_a_name(monkeypatch):
    monkeypatch.setattr(base, "REGISTRY", dict(base.REGISTRY))

    @methods.register
    class One(Reads):
        name = "shared"

    with pytest.raises(ValueError, match=r"the name 'shared' belongs to .*One of "):

        @methods.register
        class Other(Reads):
            name = "shared"

    @methods.register(replaces=True)
    class Another(Reads):
        name = "shared"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nameless, r'Mine has no name: give it one of its own, such as name: ClassVar\[str\] = "mine"'),
        (nameless_child, "Mine has no name"),
        (undecorated, "Mine is no dataclass: write @register above it"),
        (undecorated_spec, "Mine is not registered as 'mine': write @register above it"),
        (setting_as_name, "Mine.name is declared as a setting: annotate it with ClassVar"),
        (without_policy, r"Mine neither chooses what is read nor evicts: define choose\(self, cache, q, scaling\)"),
        (without_evict, r"Mine.evicts says IN_DECODE: define evict\(self, cache, scaling\)"),
    ],
)
def test_a_method_is_checked_when_it_is_attached(make, message):
    model = tiny_model()
    with pytest.raises(ValueError, match=rf"^{message}"):
        foveate.attach(model, make())
    assert not hasattr(model, "foveate")
