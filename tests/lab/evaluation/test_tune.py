"""Searching for the cheapest setting that keeps answers."""

import json

import pytest
from typer.testing import CliRunner

import foveate
from foveate import methods
from foveate.cli import app
from foveate.errors import UserError
from foveate.integrations.transformers import loading
from foveate.lab.evaluation import tasks, tune
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.chapter(tmp_path_factory.mktemp("data") / "books")


@pytest.fixture
def plan(folder, data, tmp_path):
    def made(**settings):
        task = tasks.parse("documents", split="tune", length=120, max_new_tokens=4)
        how = {"max_loss": 80.0, "limit": 3, "objective": "memory", "device": "cpu"} | settings
        return tune.Plan(folder, task, data, tmp_path / "foveate.json", **how)

    return made


def test_the_setting_found_keeps_what_it_may_lose(plan, tmp_path):
    said = []
    found = tune.search(plan(), said.append)
    written = json.loads((tmp_path / "foveate.json").read_text(encoding="utf-8"))
    assert written["method"] == found.spec
    assert written["measured"]["split"] == "test"
    assert found.loss <= 80.0
    rows = {
        split: [json.loads(line) for line in plan().rows(split).read_text(encoding="utf-8").splitlines()]
        for split in ("tune", "test")
    }
    dense = next(row for row in rows["test"] if row["method"] == "dense")
    assert found.cost < dense["resident_bytes"]
    tried = [one for one in rows["tune"] if one["method"] != "dense"]
    assert {row["method"] for row in tried} >= set(tune.EVICTING)
    fitting = [one["resident_bytes"] for one in tried if -one["diff_to_dense"] <= 80.0]
    chosen = next(one for one in tried if one["spec"] == methods.parse(found.spec).spec)
    assert chosen["resident_bytes"] in sorted(fitting)[:3]
    assert methods.make(str(tmp_path / "foveate.json")) == methods.parse(found.spec)


def test_an_interrupted_search_goes_on_where_it_was(plan, monkeypatch):
    loads, load, left = [], loading.load_model, [2]

    def counted(*given):
        loads.append(given)
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return load(*given)

    monkeypatch.setattr(loading, "load_model", counted)
    with pytest.raises(KeyboardInterrupt):
        tune.search(plan())
    done = plan().rows("tune").read_text(encoding="utf-8").splitlines()
    assert len(done) >= 1 + len(tune.EVICTING) + 1, "the first of each method are measured together"
    left[0] = 1000
    again = tune.search(plan())
    rows = plan().rows("tune").read_text(encoding="utf-8").splitlines()
    assert rows[: len(done)] == done, "what was tried before is not tried again"
    left[0] = 0
    assert tune.search(plan()) == again, "a search that was finished loads no model"


ROW = {"score": 90.0, "dense_score": 90.0, "diff_to_dense": 0.0, "diff_low": 0.0, "diff_high": 0.0, "n": 3}
ROW |= dict.fromkeys(("task", "split", "keys_read_share", "decode_ms_per_token", "kv_bytes_per_step", "device"))
ROW |= {"item_values": {}, "resident_bytes": 7, "dtype": "float32", "versions": {}, "seed": 0, "architecture": {}}


def losing(monkeypatch, loss, fixed=0.0, runs=False):
    """Each method loses ``loss(name, share)`` and costs its share, and ``fixed``; specs measured on `tune`. The model
    is asked where it ``runs`` alone."""
    measured, asked = tune._measure, []
    if not runs:
        monkeypatch.setattr(
            tune, "_rows", lambda plan, split, specs, *more: {methods.parse(s).spec: ROW for s in specs}
        )

    def found(plan, split, spec):
        if split == "tune" and spec not in asked:
            asked.append(spec)
        name, share = spec.split(":top_k=") if spec != "dense" else ("dense", 1)
        lost = 0.0 if name == "dense" else loss(name, float(share))
        return tune.dataclasses.replace(measured(plan, split, spec), loss=lost, most=lost, cost=fixed + float(share))

    monkeypatch.setattr(tune, "_measure", found)
    monkeypatch.setattr(tune, "_check_number", lambda *given: None)
    return asked


def test_the_least_share_that_keeps_the_answers_is_found(plan, monkeypatch):
    asked, said = (
        losing(monkeypatch, lambda name, share: (5 if name == "tova" else 25) / (10 * share) ** 0.7, runs=True),
        [],
    )
    found = tune.search(plan(max_loss=4.0), said.append)
    name, share = found.spec.split(":top_k=")
    assert name == "tova"
    assert 0.137 <= float(share) <= 0.137 * 1.25, "5 / (10 * share) ** 0.7 is 4 at 0.1375"
    assert asked[: 1 + len(tune.EVICTING)] == ["dense", *(f"{name}:top_k=0.12" for name in tune.EVICTING)]
    assert "together: dense, snapkv:top_k=0.12, adakv:top_k=0.12, h2o:top_k=0.12, tova:top_k=0.12" in said
    assert said.count("1 items") == said.count("3 items") > 1, "each run reads each prompt once"


def test_what_a_token_costs_besides_attention_ends_no_search(plan, monkeypatch):
    losing(monkeypatch, lambda name, share: 0.0 if name == "tova" and share > 0.4 else 2.0, fixed=4.0)
    assert tune.search(plan(max_loss=1.0)).spec.startswith("tova")


def test_settings_that_lose_more_on_held_back_data_are_passed_over(plan, monkeypatch):
    losing(monkeypatch, lambda name, share: 0.0)
    measured = tune._measure

    def unlucky(plan, split, spec):
        found = measured(plan, split, spec)
        return (
            tune.dataclasses.replace(found, loss=9.0, most=9.0) if split == "test" and spec.endswith("0.02") else found
        )

    monkeypatch.setattr(tune, "_measure", unlucky)
    assert tune.search(plan(max_loss=1.0)).spec.endswith("top_k=0.04")


def test_methods_that_cannot_become_the_cheapest_are_left(plan, monkeypatch):
    asked = losing(monkeypatch, lambda name, share: 0.0 if name == "tova" or share > 0.5 else 9.0)
    assert tune.search(plan(max_loss=1.0)).spec == "tova:top_k=0.02"
    assert {spec.split(":")[0] for spec in asked[1 + len(tune.EVICTING) :]} == {"tova"}


def test_nothing_is_recommended_where_nothing_keeps_the_answers(plan, monkeypatch):
    asked = losing(monkeypatch, lambda name, share: 50.0)
    with pytest.raises(UserError, match=r"nothing is gained: .* 95% of dense .*foveate\.json is not written"):
        tune.search(plan(max_loss=1.0))
    assert len(asked) <= 1 + 3 * len(tune.EVICTING)
    assert not plan().out.exists()


def test_nothing_is_recommended_that_costs_as_much_as_dense_attention(plan, monkeypatch):
    losing(monkeypatch, lambda name, share: 0.0, fixed=30.0)
    with pytest.raises(UserError, match="nothing is gained"):
        tune.search(plan(max_loss=1.0))
    losing(monkeypatch, lambda name, share: 0.0, fixed=3.0)
    assert tune.search(plan(max_loss=1.0)).cost == 3.02


def test_what_gains_on_one_half_alone_is_not_recommended(plan, monkeypatch):
    losing(monkeypatch, lambda name, share: 0.0)
    measured = tune._measure

    def even(plan, split, spec):
        found = measured(plan, split, spec)
        return tune.dataclasses.replace(found, cost=1.0) if split == "test" else found

    monkeypatch.setattr(tune, "_measure", even)
    with pytest.raises(UserError, match="nothing is gained"):
        tune.search(plan(max_loss=1.0))


def test_nothing_is_recommended_that_held_back_data_do_not_show(plan, monkeypatch):
    losing(monkeypatch, lambda name, share: 0.0)
    measured = tune._measure

    def unsure(plan, split, spec):
        found = measured(plan, split, spec)
        row = found.row | {"diff_to_dense": -0.5, "diff_low": -3.0, "diff_high": 2.0, "n": 100}
        return tune.dataclasses.replace(found, loss=0.5, most=3.0, row=row) if split == "test" else found

    monkeypatch.setattr(tune, "_measure", unsure)
    said = r"nothing is shown: .* is nearest, and loses 0\.5 points or up to 3\.0 \(n = 100\): give about 2,500 items"
    with pytest.raises(UserError, match=said + r" to each split, or --max-loss 3; .*foveate\.json is not written"):
        tune.search(plan(max_loss=1.0))
    assert not plan().out.exists()


def test_as_many_items_are_held_back_as_can_show_the_loss(plan, tmp_path, monkeypatch):
    task = tasks.parse("documents", split="tune", length=64, max_new_tokens=3)
    asked = plan(max_loss=10.0, limit=None)
    asked = tune.dataclasses.replace(asked, task=task, data=questions(tmp_path / "many.jsonl", 60))
    assert (asked.items("tune"), asked.items("test")) == (10, 36)
    with pytest.raises(UserError, match=r"\d+ items of split 'test' do not show a loss of at most 10 points.* 36 do"):
        tune.search(asked)


def test_no_search_goes_on_after_its_time(plan, monkeypatch):
    asked, said = losing(monkeypatch, lambda name, share: 9.0), []
    with pytest.raises(UserError, match="nothing is gained"):
        tune.search(plan(minutes=1e-6, max_loss=8.0), said.append)
    assert len(asked) == 1 + len(tune.EVICTING), "but the first of each method"
    assert "1e-06 minutes are over" in said


@pytest.mark.parametrize(
    ("losses", "most", "expected"),
    [
        ({0.12: 4.5}, 3.0, 0.12 * 1.8 ** (1 / 0.7)),
        ({0.12: 4.5, 0.28: 2.4}, 3.0, (0.12 * 0.28) ** 0.5),
        ({0.12: 4.5, 0.2: 2.9, 0.18: 3.1}, 3.0, None),
        ({0.12: 2.0}, 3.0, 0.04),
        ({0.04: 1.0, 0.12: 2.0}, 3.0, 0.02),
        ({0.02: 1.0}, 3.0, None),
        ({0.12: 3.1}, 3.0, 0.18),
        ({0.8: 3.1}, 3.0, None),
        ({0.12: 0.5, 0.3: 0.0}, 0.0, (0.12 * 0.3) ** 0.5),
    ],
)
def test_next_share(losses, most, expected):
    assert tune.next_share(losses, most) == pytest.approx(expected)


def test_a_share_that_is_not_expected_to_do_is_more_than_the_largest():
    assert tune.next_share({0.12: 40.0}, 1.0) > 0.8


def test_a_setting_that_fails_ends_no_search(plan, monkeypatch):
    measured, said = tune._measure, []

    def failing(plan, split, spec):
        if spec.startswith("snapkv"):
            raise UserError("out of luck\nmore")
        return measured(plan, split, spec)

    monkeypatch.setattr(tune, "_measure", failing)
    assert not tune.search(plan(), said.append).spec.startswith("snapkv")
    assert any(line.endswith(": out of luck") for line in said)


def test_the_cost_is_what_was_asked_for():
    row = {"resident_bytes": 7, "decode_ms_per_token": 6.0, "batch_size": 2, "kv_bytes_per_step": 11}
    assert tune.cost_of(row, "memory") == 7
    assert tune.cost_of(row, "latency") == 3.0
    assert tune.cost_of(row | {"decode_ms_per_token": None}, "latency") == 11


def questions(path, number):
    """So many questions with answers."""
    records = [
        {"context": f"Gate {n} is green.", "question": f"What is gate {n}?", "answer": "green"} for n in range(number)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def test_too_few_questions_for_the_loss_are_refused_before_a_model_is_loaded(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_model", None)
    data = questions(tmp_path / "few.jsonl", 40)
    task = tasks.parse("documents", split="tune", length=64, max_new_tokens=3)
    few = tune.dataclasses.replace(plan(max_loss=1.0, limit=None), task=task, data=data)
    with pytest.raises(UserError, match=r"\d+ items of split 'tune' do not tell a loss of 1 points: each is worth"):
        tune.search(few)
    with pytest.raises(UserError, match=r"8 items .* is worth 12\.5; at least 25 do: .* --max-loss 12\.5"):
        tune.search(tune.dataclasses.replace(few, max_loss=4.0, limit=8))


def test_too_few_tokens_for_the_loss_are_refused(plan):
    with pytest.raises(UserError, match=r"tokens of answers of split 'tune' do not tell a loss of 0\.5 points"):
        tune.search(plan(max_loss=0.5))


def test_where_dense_attention_answers_nothing_there_is_nothing_to_lose(plan, tmp_path):
    task = tasks.parse("documents", split="tune", length=64, max_new_tokens=3)
    data = questions(tmp_path / "many.jsonl", 60)
    asked = tune.dataclasses.replace(plan(max_loss=20.0, limit=20), task=task, data=data)
    with pytest.raises(UserError, match=r"split 'tune': dense attention answers none of 20 items, so they compare"):
        tune.search(asked)


def test_the_latency_of_documents_without_answers_is_time(plan):
    given = plan(objective="latency", limit=4)
    trial = tune._measure(given, "tune", "pages:top_k=0.5")
    (row,) = (row for row in rows_of(given.rows("tune-times")) if row["method"] == "pages")
    assert trial.cost == row["decode_ms_per_token"] > 0
    assert (row["task"], row["n"]) == ("documents", 3), "a few items"
    (agreed,) = (row for row in rows_of(given.rows("tune")) if row["method"] == "pages")
    assert (agreed["task"], agreed["n"]) == ("fidelity", 4)
    assert tune._words(given, trial).startswith(f"{trial.cost:.1f} ms a token")


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "speed"}, "objective"),
        ({"max_loss": -1.0}, "max-loss"),
        ({"max_loss": 0.0}, "max-loss"),
        ({"minutes": 0.0}, "minutes"),
        ({"task": tasks.parse("perplexity")}, "no splits tune and test"),
    ],
)
def test_refusals(folder, tmp_path, settings, message):
    given = {"task": tasks.parse("documents"), "data": tmp_path, "out": tmp_path / "x.json"} | settings
    with pytest.raises(UserError, match=message):
        tune.Plan(folder, **given)


SETTING = {"kind": "foveate_setting", "schema": 2, "method": "pages:top_k=0.5", "architecture": {"layers": 2}}
SETTING |= {"objective": "memory", "max_loss": 1.0, "measured": {}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a setting of foveate tune"),
        ('{"kind": "other"}', "not a setting of foveate tune"),
        (SETTING | {"schema": 9}, "schema 9"),
        (SETTING | {"schema": True}, "schema True"),
        (SETTING | {"method": "x.json"}, "names another file"),
        (SETTING | {"method": 3}, "'method' must not be 3"),
        (SETTING | {"architecture": "x"}, "'architecture' must not be 'x'"),
        (SETTING | {"evil": 1}, "'evil' is unknown; a setting of foveate tune has kind, schema, method"),
        ({name: value for name, value in SETTING.items() if name != "architecture"}, "'architecture' is missing"),
        (json.dumps(SETTING | {"max_loss": float("nan")}), "NaN is no number"),
        (json.dumps(SETTING)[:-1] + ', "method": "h2o"}', "method is given twice"),
    ],
)
def test_files_that_are_no_setting(tmp_path, content, message):
    path = tmp_path / "foveate.json"
    with pytest.raises(ValueError, match="no such file"):
        methods.make(str(path))
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        methods.make(str(path))


@pytest.mark.parametrize("architecture", [{"layers": 99}, {"layers": 2, "head_dim": 64}])
def test_a_setting_of_another_model_is_refused(folder, data, tmp_path, architecture):
    path = tmp_path / "foveate.json"
    path.write_text(json.dumps(SETTING | {"architecture": architecture}), encoding="utf-8")
    network = loading.load_model(folder, "float32", "cpu")
    name, number = list(architecture.items())[-1]
    with pytest.raises(ValueError, match=f"found by foveate tune for a model of {name} {number}, and this one has"):
        foveate.attach(network, str(path))
    command = ["compare", "--model", folder, "--data", data, "--task", "documents:length=64"]
    done = CliRunner().invoke(app, [str(one) for one in [*command, "--method", path, "--out", tmp_path / "rows.jsonl"]])
    assert done.exit_code == 2
    assert "found by foveate tune for a model of" in " ".join(done.output.split())
    path.write_text(json.dumps(SETTING), encoding="utf-8")
    assert foveate.attach(network, str(path)).method.spec == "pages:top_k=0.5"


def test_the_command(folder, data, tmp_path):
    out = tmp_path / "foveate.json"
    arguments = ["tune", "--model", folder, "--data", data, "--out", out, "--limit", 3, "--max-loss", 80]
    arguments += ["--task", "documents:length=120,max_new_tokens=3", "--objective", "memory"]
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    assert "on held-back data" in done.output
    method = ["generate", "--model", folder, "--method", out, "--prompt", "Call me", "--max-new-tokens", 2]
    assert CliRunner().invoke(app, [str(one) for one in method]).exit_code == 0
