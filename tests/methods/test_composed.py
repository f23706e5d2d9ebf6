"""Compositions: one method evicts, and another selects among the kept tokens. tests/matrix.py runs them, too."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import foveate
from foveate import methods
from foveate.cli import app
from foveate.lab import checks, sweep
from foveate.methods import About, Channel, Evicts, KeepsByScore, Observation, ReadsChosen, Replay, register, setting
from foveate.methods.composed import Composed, OfLayer, obstacle
from foveate.ops import Attended
from foveate.ops.choice import ALL
from tests import tiny
from tests.helpers import assert_close
from tests.matrix import GEOMETRY, HEADS, KV_HEADS, PROMPT, SCALING, Driver, Tokens, close, dense

SNAPKV = "snapkv:top_k=17,window=8,kernel_size=3"
QUEST = "quest:top_k=9,page_size=3,dense_layers=0"


def outputs(method, tokens):
    driver = Driver(methods.make(method).for_layer(0, 3))
    return driver, torch.cat([driver.feed(tokens[:PROMPT]), driver.feed_steps(tokens[PROMPT:])], 2)


def tuned(file, spec):
    """A file of `foveate tune` for a model of two layers."""
    setting = {"kind": "foveate_setting", "schema": 2, "method": spec, "architecture": {"layers": 2}}
    file.write_text(json.dumps(setting | {"objective": "memory", "max_loss": 1.0, "measured": {}}), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("spec", "written"),
    [
        ("snapkv+quest", "snapkv+quest"),
        (" snapkv : top_k=0.5 + quest:top_k=9,page_size=3 ", "snapkv:top_k=0.5+quest:top_k=9,page_size=3"),
        ("composed", "snapkv+quest"),
        ("snapkv:pooling=max+pages:weighted=false", "snapkv:pooling=max+pages:weighted=false"),
        ("streaming:window=1e3+twilight", None),
        ("lte:score=key_norm+twilight:p=0.5", "lte:score=key_norm+twilight:p=0.5"),
    ],
)
def test_a_spec_is_read_and_written_and_so_are_the_settings_of_a_row(spec, written):
    if written is None:  # 1e3 is a share of 1000.0: the composition says what its part says
        with pytest.raises(ValueError, match="streaming: window must be"):
            methods.parse(spec)
        return
    method = methods.parse(spec)
    assert (method.spec, methods.spelled(spec), methods.parse(written)) == (written, written, method)
    row = json.loads(json.dumps({"method": method.name, "settings": methods.settings_of(method)}))
    assert methods.make(row["method"], **row["settings"]) == method
    for one, part in zip(row["settings"].values(), method.parts):
        assert one == {"method": part.name, **methods.settings_of(part)}


def test_a_sign_within_a_value_joins_nothing(tmp_path):
    file = tmp_path / "a+b+quest"
    with pytest.raises(ValueError, match=r"a\+b\+quest: no such LTE file"):
        methods.parse(f"lte:file={json.dumps(str(file))}")
    with pytest.raises(ValueError, match=r"a\+b.safetensors: no such LTE file"):
        methods.parse("lte:file=a+b.safetensors+twilight")


def test_a_composition_stands_wherever_a_spec_does():
    inner = f"{SNAPKV}+{QUEST}"
    method = methods.make("per_layer", layers={"0": "dense", "rest": inner})
    assert methods.parse(method.spec) == method
    assert method.for_layer(1, 3) == methods.parse(inner)
    assert methods.make("per_layer", **json.loads(json.dumps(methods.settings_of(method)))) == method


def test_specs_are_swept_compared_and_reported(tmp_path):
    """By the commands: rows hold both methods complete, and reports write them as one spec."""
    model, out = tiny.build(tmp_path / "tiny-llama"), tmp_path / "rows.jsonl"
    specs = sweep("composed", keeps=["snapkv:top_k=0.5,window=8"], reads=["quest:top_k=0.2,dense_layers=0", "twilight"])
    assert specs == [f"snapkv:top_k=0.5,window=8+{one}" for one in ("quest:top_k=0.2,dense_layers=0", "twilight")]
    given = ["--model", model, "--data", tiny.SAMPLE, "--out", out, "--task", "niah:max_new_tokens=3"]
    given += ["--length", 300, "--limit", 2, *(word for spec in specs for word in ("--method", spec))]
    done = CliRunner().invoke(app, ["compare", *map(str, given)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["method"] for row in rows] == ["dense", "composed", "composed"]
    assert rows[1]["settings"]["keeps"] == {"method": "snapkv", **methods.settings_of(methods.parse(specs[0]).evicting)}
    assert 0 < rows[1]["keys_read_share"] < 1
    report = CliRunner().invoke(app, ["report", str(out)]).output
    assert all(f"`{spec}`" in report for spec in specs)


def test_a_layer_in_which_one_method_does_nothing_has_the_other_alone():
    method = methods.parse(f"{SNAPKV}+quest:top_k=9,page_size=3")
    assert [type(method.for_layer(layer, 4)).__name__ for layer in range(4)] == ["SnapKV", "SnapKV", *["Composed"] * 2]


@pytest.mark.parametrize(
    ("spec", "alone"),
    [
        ("snapkv:top_k=1.0+quest:top_k=1.0,dense_layers=0", None),
        (f"{SNAPKV}+quest:top_k=1.0,dense_layers=0", SNAPKV),
        (f"snapkv:top_k=1.0+{QUEST}", QUEST),
        (f"{SNAPKV}+pages:top_k=1.0", SNAPKV),
        ("snapkv:top_k=1.0+pages:top_k=32,page_size=4", "pages:top_k=32,page_size=4"),
        ("streaming:sinks=2,window=13+twilight:p=1.0", "streaming:sinks=2,window=13"),
        ("streaming:window=1.0+twilight:p=0.3,min_k=6", "twilight:p=0.3,min_k=6"),
        ("adakv:top_k=12,window=8,kernel_size=3+twilight:p=1.0", "adakv:top_k=12,window=8,kernel_size=3"),
    ],
)
def test_with_one_full_budget_it_is_the_other_method_and_with_both_dense(spec, alone):
    tokens = Tokens.random(2, PROMPT + 20)
    driver, found = outputs(spec, tokens)
    if alone is None:
        close(found, dense(tokens))
        return
    expected_driver, expected = outputs(alone, tokens)
    close(found, expected)
    counted, wanted = driver.layer.counters, expected_driver.layer.counters
    assert float(counted.tokens_evicted) == float(wanted.tokens_evicted)
    if "=1.0+" in spec:  # nothing is evicted: the step reads, and scores, what the other method does
        assert float(counted.keys_read) == float(wanted.keys_read)


def pages_read(tokens, row, query, token, held, size, number):
    """The positions that one query head reads of those that its KV head holds, by the boxes around pages, in fp64."""
    q, k = tokens.q[row, query, token].double(), tokens.k[row, query // (HEADS // KV_HEADS)].double()
    pages = [held[first : first + size] for first in range(0, len(held), size)]
    bounds = [float(torch.maximum(q * k[page].amin(0), q * k[page].amax(0)).sum()) for page in pages]
    best = sorted(range(len(pages)), key=lambda page: (-bounds[page], page))[:number]
    return {position for page in best for position in pages[page]}


def test_steps_read_the_best_pages_of_the_tokens_that_are_kept():
    """Two turns, of which the second evicts again, against loops: SnapKV alone says what is kept."""
    tokens, (driver, alone) = (
        Tokens.random(1, 95),
        (Driver(methods.parse(one)) for one in (f"{SNAPKV}+{QUEST}", SNAPKV)),
    )
    first, group, read = 0, HEADS // KV_HEADS, 0.0
    for prompt, end in ((41, 58), (75, 95)):
        for one in (driver, alone):
            one.layer.phase.prompt_end = prompt
            one.feed(tokens[first:prompt])
        held = driver.store.positions[0].tolist()
        assert held == alone.store.positions[0].tolist()
        assert len(held[0]) == 25
        for token in range(prompt, end):
            out, held = driver.feed(tokens[token : token + 1]), [[*own, token] for own in held]
            for kv in range(KV_HEADS):
                heads = range(kv * group, (kv + 1) * group)
                chosen = set().union(*(pages_read(tokens, 0, head, token, held[kv], 3, 3) for head in heads))
                places = sorted(chosen)
                read += len(places) / KV_HEADS
                for head in heads:
                    own = sorted(pages_read(tokens, 0, head, token, held[kv], 3, 3))
                    weights = (tokens.k[0, kv, own].double() @ tokens.q[0, head, token].double() * SCALING).softmax(0)
                    assert_close(out[0, head, 0].double(), weights @ tokens.v[0, kv, own].double())
            read += 0.5 * (2 * (len(held[0]) // 3) + len(held[0]) % 3)  # the boxes, and the keys of the newest
            alone.feed(tokens[token : token + 1])
        first = end
    assert float(driver.layer.counters.keys_read) == pytest.approx(read)
    assert float(driver.layer.counters.tokens_evicted) == 95 - len(held[0])


@pytest.mark.parametrize(
    ("spec", "why", "hint"),
    [
        ("quest+snapkv", "quest evicts nothing, and the method before the + decides", "write snapkv+quest"),
        ("quest+twilight", "quest evicts nothing", "before +twilight adakv or .* can stand"),
        (
            "h2o+twilight",
            "h2o learns from the attention to all keys that it keeps",
            "or streaming or uniform can stand",
        ),
        ("snapkv+snapkv", "snapkv selects nothing", "after snapkv+ locks or pages or quest or twilight can follow"),
        ("snapkv+rocketkv", "rocketkv evicts, too", "after snapkv+"),
        ("rocketkv+quest", "rocketkv selects what a step reads itself", "expected_attention or snapkv can stand"),
        ("snapkv+kascade", "kascade hands slots on to other layers", "after snapkv+"),
        ("snapkv+sparq", "sparq does not declare that another method may evict (allows_eviction)", "after snapkv+"),
        ("snapkv+pages:every=4", "pages:every=4 does not declare that another method may evict", "after snapkv+"),
        (
            "streaming+quest",
            "streaming evicts in decode steps, and quest allows eviction when a prompt ends",
            "twilight",
        ),
        ("adakv+quest", "KV heads may keep different numbers of tokens under adakv", "after adakv+ twilight"),
        ("snapkv+auto", "auto selects nothing", "after snapkv+"),
        ('per_layer:layers={"rest": "snapkv"}+quest', "per_layer evicts nothing", "before +quest"),
        ("snapkv+quest+quest", "a composition has two methods", "A+B"),
        ("snapkv+qest", "unknown method 'qest'", "did you mean 'quest'"),
        ("composed:top_k=3", "composed has no setting 'top_k'", "stand beside their names"),
        ("snapkv:topk=3+quest", "snapkv has no setting 'topk'", "did you mean 'top_k'"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_reason_and_what_is_allowed(spec, why, hint):
    with pytest.raises(ValueError, match=re.escape(why)) as error:
        methods.parse(spec)
    assert all(part in str(error.value) for part in hint.split(".*"))


def test_the_mass_of_some_keys_is_not_handed_to_the_method_that_evicts(authors):
    handed = []

    def learn(self, cache, choice, attended):
        handed.append((self.name, attended.mass))

    @register
    class Keeps(KeepsByScore):
        """Would add up the mass of all keys."""

        name = "keeps_by_mass"
        about = About("nowhere")

    @register
    class Reads(ReadsChosen):
        """Learns from the mass of the keys that it reads."""

        name = "reads_with_mass"
        about = About("nowhere")
        allows_eviction = Evicts.AT_PROMPT_END

        def choose(self, cache, q, scaling):
            return None

    Keeps.learn = Reads.learn = learn
    mass = torch.ones(1, 2, 3)
    methods.parse("keeps_by_mass+reads_with_mass").learn(None, ALL, Attended(torch.zeros(1, 4, 1, 8), mass=mass))
    assert handed == [("reads_with_mass", mass), ("keeps_by_mass", None)]


@pytest.fixture
def authors():
    before = dict(methods.REGISTRY)
    yield
    for name in methods.REGISTRY.keys() - before.keys():
        del methods.REGISTRY[name]


def test_what_authors_declare_decides(authors):
    @register
    class Newest(ReadsChosen):
        """The newest keys."""

        name = "newest_keys"
        about = About("nowhere")
        allows_eviction = Evicts.IN_DECODE
        top_k: int = setting(8, "keys")

        def channels(self, geometry):
            return super().channels(geometry) | {"score": Channel()}

        def choose(self, cache, q, scaling):
            return cache.positions >= (cache.plan["lengths"] - self.top_k)[:, None, None]

    @register
    class Works(KeepsByScore):
        """Has work between steps."""

        name = "works_between"
        about = About("nowhere")

        class _Works(Replay):
            maintains = True

        replay = _Works()

    for name in ("snapkv", "uniform", "streaming"):
        assert obstacle(methods.make(name), methods.make("newest_keys")) == ""
    with pytest.raises(ValueError, match="adakv, and newest_keys needs equal numbers"):
        methods.parse("adakv+newest_keys")
    with pytest.raises(ValueError, match=r"works_between does work between steps \(Replay.maintain\)"):
        methods.parse("works_between+newest_keys")
    both = methods.parse("lte:score=key_norm+newest_keys")
    with pytest.raises(ValueError, match="lte and newest_keys both keep a channel called 'score'"):
        both.channels(GEOMETRY)
    with pytest.raises(ValueError, match=r"before \+newest_keys .*snapkv.* can stand"):
        methods.parse("quest+newest_keys")


BY_EITHER = [
    ("needs_rotary", False, True),
    ("needs_prompt_end", False, True),
    ("stateful", False, True),
    ("pools_layer", False, True),
    ("counters", (), ("pages_refined",)),
    ("observation", Observation("notes"), Observation("notes of another kind", needs_lse=True)),
    ("replay", Replay(), Replay("reads numbers on the host")),
    ("replay", Replay(), Replay(copies_keys=True)),
    ("replay", Replay(), None),
    ("_artefact", None, "made for one model"),
]


@pytest.mark.parametrize(
    ("by", "name", "usual", "declared"),
    [
        *((by, *one) for by in ("evicting", "selecting") for one in BY_EITHER),
        ("evicting", "prompt_evicts_every", 0, 17),
        ("selecting", "needs_mass", False, True),
        ("selecting", "scored_at", "", "at"),
    ],
)
def test_what_one_method_declares_the_composition_declares(authors, by, name, usual, declared):
    def of(part, base, **facts):
        facts |= {name: declared if part == by else usual}
        return register(type(part.title(), (base,), {"name": f"{part}_one", "about": About("nowhere"), **facts}))()

    reads = {"choose": lambda self, cache, q, scaling: None, "allows_eviction": Evicts.AT_PROMPT_END}
    method = OfLayer(of("evicting", KeepsByScore), of("selecting", ReadsChosen, **reads))

    def plain(value):
        return vars(value) if isinstance(value, Replay) else getattr(value, "needs_lse", value)

    assert plain(getattr(method, name)) == plain(declared)
    if declared is None:
        assert methods.replay_obstacle(method).startswith(f"a decode step of {by}_one reads numbers on the host")


def test_both_methods_are_asked_for_the_model_the_layer_and_a_full_budget(authors):
    asked = []

    class Asked:
        def for_model(self, facts):
            asked.append((self.name, facts()))
            return self

        def for_layer(self, layer, num_layers, among=None):
            asked.append((self.name, layer, num_layers, among))
            return self

        def with_full_budget(self):
            return None if self.name == "asked_second" and self.top_k == 8 else methods.make(self, top_k=1.0)

    @register
    class First(Asked, KeepsByScore):
        """Evicts."""

        name = "asked_first"
        about = About("nowhere")

    @register
    class Second(Asked, ReadsChosen):
        """Selects."""

        name = "asked_second"
        about = About("nowhere")
        allows_eviction = Evicts.AT_PROMPT_END
        top_k: int | float = setting(8, "keys")

        def choose(self, cache, q, scaling):
            return None

    method = methods.parse("asked_first+asked_second")
    assert method.for_model(lambda: {"layers": 3}) == method
    assert method.for_layer(1, 3, [1, 2]) == method
    both = "asked_first", "asked_second"
    assert asked == [*((name, {"layers": 3}) for name in both), *((name, 1, 3, [1, 2]) for name in both)]
    assert method.with_full_budget() is None
    whole = methods.parse("asked_first+asked_second:top_k=9").with_full_budget()
    assert whole.spec == "asked_first:top_k=1.0+asked_second:top_k=1.0"


def test_a_layer_in_which_nothing_is_evicted_has_the_second_method_alone(authors):
    @register
    class Later(KeepsByScore):
        """Evicts in all layers but the first."""

        name = "later_layers"
        about = About("nowhere")

        def for_layer(self, layer, num_layers, among=None):
            return self if layer else methods.make("dense")

    method = methods.parse(f"later_layers+{QUEST}")
    assert [method.for_layer(layer, 4).spec for layer in range(2)] == [QUEST, method.spec]


def test_summaries_are_weighed_by_the_queries_of_the_last_prompt():
    tokens, specs = Tokens.random(1, 95), (f"{SNAPKV}+pages:top_k=24,page_size=3", "pages:top_k=24,page_size=3")
    tokens.q[:, :, 30:41, :4] *= 8.0
    tokens.q[:, :, 60:75, 8:12] *= 8.0
    weights = []
    for spec in specs:
        driver = Driver(methods.parse(spec))
        for first, prompt, end in ((0, 41, 58), (58, 75, 95)):
            driver.layer.phase.prompt_end = prompt
            driver.feed(tokens[first:prompt])
            weights.append(driver.store.channel("channel_weights").clone())
            driver.feed_steps(tokens[prompt:end])
    assert all(map(torch.equal, weights[:2], weights[2:]))
    assert not torch.equal(*weights[:2])


def test_a_file_of_tune_may_name_a_composition(tmp_path):
    file = tuned(tmp_path / "foveate.json", f"{SNAPKV}+{QUEST}")
    for read in (methods.parse, checks.small):
        assert read(str(file)).spec == f"{SNAPKV}+{QUEST}"
    with pytest.raises(ValueError, match="found by foveate tune for a model of layers 2, and this one has 3"):
        methods.spec.check_made_for(methods.parse(str(file)), {"layers": 3})
    with pytest.raises(ValueError, match=r"nowhere\.json: no such file"):
        checks.small("nowhere.json")


@pytest.mark.parametrize(
    "spec", ["{file}+quest", 'per_layer:layers={{"rest":"{file}"}}', 'mixed:lined="{file}"', "{file}+twilight"]
)
def test_a_file_of_tune_within_another_method_is_for_its_own_architecture_too(spec, tmp_path):
    file = tuned(tmp_path / "foveate.json", "snapkv:top_k=0.5")
    method = methods.parse(spec.format(file=file))
    assert methods.parse(method.spec) == method
    methods.check_made_for(method, {"layers": 2})
    for one in (method, methods.make(methods.parse(str(file)), top_k=9)):
        with pytest.raises(ValueError, match=r"^snapkv:top_k=0.5 was found by foveate tune for a model of layers 2"):
            methods.check_made_for(one, {"layers": 3})
    with pytest.raises(ValueError, match="for a model of layers 2, and this one has 3"):
        foveate.attach(checks.tiny(), spec.format(file=file))


def test_a_file_of_tune_names_no_file_in_a_composition(tmp_path):
    file = tmp_path / "foveate.json"
    with pytest.raises(ValueError, match="names another file"):
        methods.parse(str(tuned(file, f"{file}+quest")))  # itself


def test_channels_of_one_name_are_kept_apart():
    method = methods.parse("snapkv:window=8+pages")
    kept = {name: spec.shape[1] for name, spec in method.channels(GEOMETRY).items() if "queries" in name}
    assert kept == {"kept.queries": 8, "queries": 16}


def test_a_model_generates_by_it_and_the_check_holds():
    model, spec = checks.tiny(), f"{SNAPKV}+{QUEST}"
    ids = torch.randint(3, 300, (2, 61), generator=torch.Generator().manual_seed(0))
    with foveate.attached(model, spec):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        stats = foveate.stats(model)
    assert stats.keys_read_share < 0.7
    found = checks.check("snapkv+quest", model)
    assert found.passed, str(found)
    assert found.spec == f"snapkv:top_k=12,window=8,kernel_size=3+{QUEST}"


def test_a_layer_of_it_is_written_as_a_composition():
    method = OfLayer(*Composed().parts)
    assert (method.spec, method.name) == ("snapkv+quest", "composed")


PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "choose.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("### Two methods in one\n")[2].partition("\nA method with dense prompts")[0]


def test_the_example_of_the_guide_runs_and_the_guide_names_the_pairs_that_fit():
    (spec,) = re.findall(r'foveate\.attach\(model, "(.*?)"\)', SECTION)
    model = checks.tiny()
    ids = torch.randint(3, 300, (1, 400), generator=torch.Generator().manual_seed(0))
    with foveate.attached(model, spec):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
        stats = foveate.stats(model)
    assert stats.layers[2].tokens_evicted == 400 - 200 - 32
    small = [methods.make(name, **methods.get(name).about.small_budget) for name in methods.names()]
    ours = [one for one in small if type(one).__module__.startswith("foveate.") and not isinstance(one, Composed)]
    fits = {(one.name, other.name) for one in ours for other in ours if not obstacle(one, other)}
    named = {
        title: re.findall(r"`(\w+)`", text)
        for title, text in re.findall(r"- \*\*(.*?)\*\*(.*?)(?=\n- |\Z)", SECTION, re.S)
    }
    firsts, seconds = set(named["The first method"]) - {"h2o", "tova"}, {"quest", "pages", "locks", "twilight"}
    assert seconds <= set(named["The second method"])
    of_pages = {(one, other) for one in ("snapkv", "expected_attention") for other in seconds - {"twilight"}}
    assert fits == of_pages | {(one, "twilight") for one in firsts}
