"""`foveate check`: methods of foveate pass, and each mistake that an author may make is named."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import foveate
from foveate.cli import app
from foveate.lab import checks
from foveate.lab.checks import check
from foveate.methods import (
    REGISTRY,
    About,
    Channel,
    Evicts,
    KeepsByScore,
    Method,
    ReadsChosen,
    Replay,
    base,
    budget,
    get,
    make,
    parse,
    register,
    setting,
)
from foveate.ops import Choice

FEW = ["kascade", "snapkv", "luka"]
"""One that selects, one that evicts, one that keeps summaries; the others are tried by tests/matrix.py."""
MORE = ["h2o", "pages", "streaming", "twilight"]


@pytest.fixture
def mine():
    """Makes methods known, until the test ends."""
    before = dict(REGISTRY)
    yield register
    for name in set(REGISTRY) - set(before):
        del REGISTRY[name]


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_methods_of_foveate_pass(name):
    found = check(name)
    assert found.passed, str(found)
    without = set() if hasattr(get(name), "top_k") else {"other budget"}
    assert {line.name for line in found.lines} == {"hooks", *checks._CHECKS} - without


def chooses(**changes):
    class Chooses(ReadsChosen):
        """The newest eight keys, chosen rightly."""

        name = "chooses"
        about = About("nowhere", full_budget={"top_k": 1000})
        top_k: int = setting(8, "newest keys that are read")

        def choose(self, cache, q, scaling):
            return cache.positions >= cache.plan["lengths"][:, None, None] - self.top_k

    for name, value in changes.items():
        setattr(Chooses, name, value)
    return Chooses


def keeps(**changes):
    class Keeps(KeepsByScore):
        """The prompt's keys of the largest norm, kept rightly."""

        name = "keeps"
        about = About("nowhere", small_budget={"top_k": 12, "window": 8})
        min_k = 0

        def scores(self, cache, scaling):
            return cache.keys.float().norm(dim=-1)

    for name, value in changes.items():
        setattr(Keeps, name, value)
    return Keeps


def test_a_method_of_ones_own_passes(mine):
    found = check(mine(chooses()).name)
    assert found.passed, str(found)
    hooks = found.lines[0]
    assert "reads 11 % of the keys" in hooks.text


def of_the_first_row(self, cache, q, scaling):
    return cache.positions >= cache.lengths[0] - 8


def kept_in_the_method(self, cache, q, scaling):
    self.__dict__.setdefault("seen", []).append(1)
    newest = cache.positions >= cache.plan["lengths"][:, None, None] - 4
    return newest | (cache.positions % 3 == len(self.seen) // 3 % 3)


@pytest.mark.parametrize(
    ("hook", "line", "why"),
    [
        (
            lambda self, cache, q, s: torch.zeros(1, 1, cache.used, dtype=torch.bool),
            "hooks",
            "chose no key for KV head 0",
        ),
        (
            lambda self, cache, q, s: q.sum() * cache.keys.sum(-1),
            "hooks",
            "choose returned torch.float32; return a bool",
        ),
        (
            lambda self, cache, q, s: torch.ones(len(q), q.shape[1], cache.used, dtype=torch.bool),
            "hooks",
            r"a mask \[1, 6, 62\]; return one that broadcasts to \[1, 2, 62\]",
        ),
        (lambda self, cache, q, s: torch.tensor([0, 1, 2]), "hooks", "torch.int64; return a bool mask"),
        (lambda self, cache, q, s: [0, 1], "hooks", "returned a list"),
        (lambda self, cache, q, s: Choice(keys=torch.zeros(1, 2, 3).int()), "hooks", "a Choice without read"),
        (of_the_first_row, "padded batch", "rows have numbers of their own|chose no key for KV head 0 of row"),
        (kept_in_the_method, "copied cache", "keeps state in the method"),
    ],
    ids=["nothing", "floats", "query heads", "indices", "list", "no count", "first row", "in the method"],
)
def test_what_a_choice_gets_wrong_is_named(mine, hook, line, why):
    found = {one.name: one for one in check(mine(chooses(choose=hook)).name).lines}
    assert found[line].outcome == "failed"
    assert re.search(why, found[line].text), found[line].text


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (lambda self, cache, s: cache.keys.float().norm(dim=-1).mean(1), "scores"),
        (lambda self, cache, s: cache.keys.float().norm(dim=-1) * float("nan"), "scores"),
    ],
    ids=["no heads", "NaN"],
)
def test_what_scores_get_wrong_is_named(mine, scores, why):
    found = check(mine(keeps(scores=scores)).name)
    assert found.lines[0].outcome == "failed"
    assert why in found.lines[0].text
    assert len(found.lines) == 1, "what follows would fail alike"


def test_a_full_budget_that_is_none_and_notes_of_one_piece_are_told(mine):
    def observe(self, cache, q, attended, scaling):
        cache.channel("votes").copy_(cache.keys.float().norm(dim=-1) * q.shape[2] * attended.out.float().mean())

    assert check(mine(keeps()).name).passed
    wrong = keeps(
        name="votes",
        about=About("nowhere", small_budget={"top_k": 12, "window": 8}, full_budget={"top_k": 9, "window": 2}),
        channels=lambda self, geometry: {"votes": Channel()},
        observe=observe,
        scores=lambda self, cache, scaling: cache.channel("votes"),
    )
    found = {one.name: one for one in check(mine(wrong).name).lines}
    assert "with its full budget (votes:" in found["full budget"].text
    assert found["prompt in pieces"].outcome == "failed"


def test_a_model_of_ones_own_is_checked_and_left_as_it_was(mine):
    model = checks.tiny(1)
    before, state = [one.clone() for one in model.parameters()], torch.random.get_rng_state()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    assert check(mine(chooses()).name, model).passed
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before))
    assert bool((model.lm_head.weight.grad == 1).all())
    checks.tiny(2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert getattr(model, "foveate", None) is None
    foveate.attach(model, "dense")
    with pytest.raises(ValueError, match="the model has a method already"):
        check("dense", model)


def test_what_no_layer_of_vllm_serves_and_logits_that_are_no_numbers_are_told(mine):
    (served,) = [line for line in check("quest:page_size=8,top_k=16").lines if line.name == "vLLM"]
    assert "keeps state beside the keys" in served.text

    def broken_alone(self, cache, q, scaling):
        if cache.batch_size == 1 and cache.lengths[0] > 70 and cache.lengths[0] < 75:
            cache.values.fill_(float("nan"))
        return cache.positions >= 0

    found = {line.name: line for line in check(mine(chooses(choose=broken_alone)).name).lines}
    assert found["hooks"].outcome == "failed"
    assert "no numbers" in found["hooks"].text


def test_the_command_tells_each_line_and_ends_with_one_where_a_check_failed(tmp_path, mine):
    file = tmp_path / "mine.py"
    file.write_text(
        "from foveate.methods import About, ReadsChosen, register\n"
        "@register\n"
        "class Recent(ReadsChosen):\n"
        '    """The newest eight."""\n'
        '    name = "recent8"\n'
        '    about = About("nowhere")\n'
        "    def choose(self, cache, q, scaling):\n"
        "        return cache.positions >= cache.lengths[0] - 8\n",
        encoding="utf-8",
    )
    found = CliRunner().invoke(app, ["check", "--import", str(file), "--method", "recent8", "--json"])
    lines = {line["name"]: line for line in json.loads(found.output)}
    assert (found.exit_code, lines["padded batch"]["outcome"]) == (1, "failed")
    assert lines["copied cache"]["outcome"] == "passed"
    found = CliRunner().invoke(app, ["check", "--method", "streaming"])
    assert found.exit_code == 0
    assert found.output.startswith("streaming")
    assert "passed  padded batch" in found.output


def test_an_error_of_a_hook_has_file_and_line(mine):
    class Misspelt(ReadsChosen):
        """Asks for what it does not have."""

        name = "misspelt"
        about = About("nowhere")

        def choose(self, cache, q, scaling):
            return cache.positions >= self.wieght

    line = check(mine(Misspelt).name).lines[0]
    at = Misspelt.choose.__code__.co_firstlineno + 1
    assert re.fullmatch(rf"test_check\.py:{at}: AttributeError: .* has no attribute 'wieght'", line.text), line.text


def test_a_budget_that_is_ignored_and_choosing_that_is_not_counted_are_told(mine):
    everything = check(mine(chooses(name="everything", choose=lambda self, cache, q, s: cache.positions >= 0)).name)
    assert everything.lines[0].outcome == "told"
    assert re.search("reads everything of .* does it ignore its budget", everything.lines[0].text)

    class Free(Method):
        """The newest eight keys, at no cost that is declared."""

        name = "free"
        about = About("nowhere", full_budget={"top_k": 1000})
        needs_prompt_end, stateful, replay = False, False, Replay()
        top_k: int = setting(8, "newest keys that are read")

        def choose(self, cache, q, scaling):
            return cache.positions >= cache.plan["lengths"][:, None, None] - self.top_k

    found = check(mine(Free).name)
    assert found.passed, str(found)
    assert found.lines[0].text.endswith("what it reads in order to choose is not counted (`scored`)")
    assert "scored" not in check(mine(chooses()).name).lines[0].text


@pytest.mark.parametrize(
    ("spec", "other"),
    [
        ("snapkv:top_k=12,window=8", "snapkv:top_k=0.25,window=8"),
        ("tova:top_k=0.2,min_k=8", "tova:top_k=12,min_k=8"),
        ("snapkv:top_k=12,window=8+quest:top_k=9", "snapkv:top_k=0.25,window=8+quest:top_k=0.25"),
        ("streaming:window=7+twilight", None),
        ("uniform:top_k=14+twilight:p=0.4", "uniform:top_k=0.25+twilight:p=0.4"),
        ("rocketkv:top_k=9", "rocketkv:top_k=0.25"),
        ("streaming", None),
        ("per_layer:layers={'rest': 'h2o'}".replace("'", '"'), None),
    ],
)
def test_the_other_budget_is_a_share_beside_a_number_and_a_number_beside_a_share(spec, other):
    found = checks.with_other_budgets(parse(spec))
    assert (None if found is None else found.spec) == other


def shares_of(rows):
    class Shares(ReadsChosen):
        """The newest keys, as a share of the tokens of each row, or of the first row."""

        name = f"shares_of_{rows}"
        about = About("nowhere", small_budget={"top_k": 8})
        top_k: int | float = setting(0.25, "newest keys: a number, or a share")

        def choose(self, cache, q, scaling):
            counts = cache.plan.per_row(self.count)
            counts = counts if rows == "each" else counts[:1]
            return cache.positions >= (cache.plan["lengths"] - counts)[:, None, None]

        def count(self, length):
            return budget(self.top_k, length, 1)

    return Shares


@pytest.mark.parametrize("rows", ["each", "first"])
def test_a_share_that_is_counted_by_one_row_is_found_without_being_asked_for(mine, rows):
    found = {line.name: line for line in check(mine(shares_of(rows)).name).lines}
    assert found["padded batch"].outcome == "passed", "a number is the same in all rows"
    line = found["other budget"]
    assert line.outcome == ("passed" if rows == "each" else "failed")
    assert (
        "with shares_of_each:top_k=0.25" if rows == "each" else "in a padded batch is not what it is alone"
    ) in line.text


def test_a_decoded_token_that_sees_a_later_one_is_found_under_tiles():
    class Sees(checks._OfModel):
        tile = 12

        def whole(self, tokens, prompt=checks.PROMPT):
            run, out = super().whole(tokens, prompt)
            out[:, prompt + 1] += tokens.ids[:, prompt + 3, None]
            return run, out

    seeing = Sees(checks.tiny(), make("dense"))
    with seeing.attached(), torch.no_grad(), pytest.raises(checks.MissedError, match="token 64 changes outputs"):
        checks.invariants.later_tokens(seeing)


def test_a_share_that_is_counted_by_the_last_piece_is_found(mine):
    def observe(self, cache, q, attended, scaling):
        pieces = q.shape[2] if isinstance(self.top_k, float) else 1
        cache.channel("votes").copy_(cache.keys.float().norm(dim=-1) + pieces * cache.keys.float()[..., 0])

    wrong = keeps(
        channels=lambda self, geometry: {"votes": Channel()},
        observe=observe,
        scores=lambda self, cache, scaling: cache.channel("votes"),
    )
    found = {line.name: line for line in check(mine(wrong).name).lines}
    assert found["prompt in pieces"].outcome == "passed"
    assert found["other budget"].outcome == "failed"
    assert found["other budget"].text.startswith("a prompt in pieces gives something else than in one")


def test_a_share_that_is_counted_on_the_host_is_found_in_captured_steps(mine):
    class Counted(ReadsChosen):
        """The newest keys, a share of them counted by numbers of the host."""

        name = "counted_on_the_host"
        about = About("nowhere", small_budget={"top_k": 8})
        replay = Replay()
        top_k: int | float = setting(8, "newest keys: a number, or a share")

        def choose(self, cache, q, scaling):
            counts = self.top_k
            if counts < 1:
                counts = torch.tensor([[[budget(counts, length, 1)]] for length in cache.lengths], device=q.device)
            return cache.positions >= cache.plan["lengths"][:, None, None] - counts

    found = {line.name: line for line in check(mine(Counted).name).lines}
    assert found["captured steps"].outcome == "passed", found["captured steps"].text
    assert "a decode step asked for row numbers on the host during CUDA graph capture" in found["other budget"].text


def test_an_error_in_the_second_method_of_a_composition_has_its_line(mine):
    def choose(self, cache, q, scaling):
        raise RuntimeError("on purpose")

    mine(chooses(choose=choose, allows_eviction=Evicts.AT_PROMPT_END))
    (line,) = check("snapkv:top_k=12,window=8+chooses").lines
    assert re.fullmatch(r"test_check\.py:\d+: RuntimeError: on purpose", line.text)


def test_a_budget_that_is_not_taken_is_told(mine):
    class Picky(KeepsByScore):
        """Takes numbers alone, and says so late."""

        name = "picky"
        about = About("nowhere", small_budget={"top_k": 12, "window": 8})

        def __post_init__(self):
            super().__post_init__()
            self._check("top_k", isinstance(self.top_k, int) or self.top_k == 1.0, "a number, or 1.0")

        def scores(self, cache, scaling):
            return cache.keys.float().norm(dim=-1)

    mine(Picky)
    with pytest.raises(ValueError, match="picky: top_k must be a number"):
        make("picky", top_k=0.25)
    (line,) = [line for line in check("picky:top_k=12,window=8").lines if line.name == "other budget"]
    assert (line.outcome, line.text) == ("told", "picky: top_k must be a number, or 1.0, not 0.25")


def test_a_second_prompt_is_a_prompt(mine):
    """Its tokens are observed, and its end evicts."""
    observed = []

    def observe(self, cache, q, attended, scaling):
        observed.append((cache.lengths[0], q.shape[2]))

    assert check(mine(keeps(observe=observe)).name).passed
    assert {(31 + 7 + 12, 12), (18 + 7 + 29, 29)} <= {*observed}


def test_every_method_of_foveate_declares_what_it_scores():
    """So that the check does not say of one of them that this is not counted."""
    ours = [kind for kind in base.REGISTRY.values() if kind.__module__.startswith("foveate.")]
    choosing = [kind for kind in ours if kind.choose is not base.Method.choose]
    assert len(choosing) > 10
    assert not [kind.name for kind in choosing if kind.scored is base.Method.scored]


@pytest.mark.parametrize("spec", ["{}", 'per_layer:layers={{"0":"dense","rest":"{}"}}'])
def test_a_method_that_evicts_while_a_prompt_is_read_passes_and_is_not_trained(spec):
    found = checks.check(spec.format("snapkv:top_k=12,window=8,evict_every=20"))
    assert found.passed, str(found)
    (line,) = (line for line in found.lines if line.name == "training")
    assert line.outcome == "told"
    assert "no gradients flow" in line.text
