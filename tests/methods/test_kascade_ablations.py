"""`benchmarks/methods/kascade_ablated.py`: equal to `oracle_topk` and `kascade_paper` where these have the settings."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import foveate
from foveate import methods
from foveate.cli import app, imports
from tests import tiny
from tests.helpers import tiny_model, tokens
from tests.matrix import HEADS, KV_HEADS, SCALING, Driver, Tokens, close

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "methods" / "kascade_ablated.py"
GROUP = HEADS // KV_HEADS


@pytest.fixture(autouse=True)
def ablations(imported_methods):
    imports.run(FILE)


@pytest.fixture
def calibration(tmp_path):
    path = tmp_path / "two.json"
    anchors = {"anchors": [0, 1], "heads": {"2": [1, 0]}, "model": {"layers": 3}}
    path.write_text(json.dumps(anchors), encoding="utf-8")
    return path


def written(model, method, ids, mask=None):
    """Logits of a prompt in chunks and of decoded tokens."""
    with foveate.attached(model, method, dense_below=0):
        how = {"do_sample": False, "max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
        out = model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **how)
        return out.sequences, torch.stack(out.logits), foveate.stats(model)


@pytest.mark.parametrize("tile", [1, 12, 50])
def test_without_a_calibration_it_is_the_oracle(tile):
    found = []
    for name in ("kascade_ablated", "oracle_topk"):
        driver = Driver(methods.make(name, top_k=9, tile=tile).for_layer(1, 3), 61)
        rows = Tokens.random(2, 70)
        prompt = driver.feed(rows[:61])
        found.append((prompt, driver.feed_steps(rows[61:]), float(driver.layer.counters.keys_read)))
    for ours, theirs in zip(*found):
        close(torch.as_tensor(ours), torch.as_tensor(theirs))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("remap", [True, False])
def test_with_a_calibration_it_is_kascade_as_in_the_paper(calibration, remap, padded):
    model, ids = tiny_model("llama"), tokens(60, 2)
    mask = torch.ones_like(ids)
    mask[1, : 13 * padded] = 0
    ours = f'kascade_ablated:top_k=0.3,min_k=4,tile=6,calibration="{calibration}",remap={str(remap).lower()}'
    heads = ',heads={"2": [1, 0]}' if remap else ""
    theirs = f"kascade_paper:top_k=0.3,min_k=4,tile=6,anchors=[0, 1]{heads}"
    (one, logits, stats), (other, expected, their_stats) = (written(model, m, ids, mask) for m in (ours, theirs))
    assert torch.equal(one, other)
    close(logits, expected, 2e-4)
    assert [one.keys_read_per_step for one in stats.layers] == pytest.approx(
        [one.keys_read_per_step for one in their_stats.layers]
    )
    assert [one.indices_reused for one in stats.layers] == [one.indices_reused for one in their_stats.layers]


def test_maps_of_heads_matter(calibration):
    model, ids = tiny_model("llama"), tokens(60, 2)
    spec = f'kascade_ablated:top_k=5,tile=6,calibration="{calibration}"'
    mapped, own = (written(model, f"{spec},remap={remap}", ids)[1] for remap in ("true", "false"))
    assert (mapped[0] - own[0]).abs().max() > 1e-3


def test_mean_queries_choose_the_keys_of_their_largest_logits():
    """Section 3.4, "Pre-Softmax": of the second tile and of a decoded token, written out."""
    method = methods.make("kascade_ablated", top_k=5, tile=6 * GROUP, pooling="pre_softmax").for_layer(1, 3)
    driver, rows = Driver(method, 12), Tokens.random(1, 13)
    prompt, decoded = driver.feed(rows[:12]), driver.feed(rows[12:])
    for head in range(KV_HEADS):
        q = rows.q[0, head * GROUP : (head + 1) * GROUP]
        k, v = rows.k[0, head], rows.v[0, head]
        chosen = (k[:6] @ q[:, 6:12].mean((0, 1))).topk(5).indices.tolist()
        seen = [*chosen, 6, 7, 8]
        expected = (q[:, 8] @ k[seen].T * SCALING).softmax(-1) @ v[seen]
        close(prompt[0, head * GROUP : (head + 1) * GROUP, 8], expected)
        seen = (k @ q[:, 12].mean(0)).topk(5).indices
        expected = (q[:, 12] @ k[seen].T * SCALING).softmax(-1) @ v[seen]
        close(decoded[0, head * GROUP : (head + 1) * GROUP, 0], expected)


def test_a_calibration_of_another_model_is_refused(calibration):
    with pytest.raises(ValueError, match="is of 3 layers, the model has 4"):
        methods.make("kascade_ablated", calibration=str(calibration)).for_layer(0, 4)


def test_the_command_makes_rows(tmp_path):
    """Both ways to pool, beside the oracle of the package."""
    folder = tiny.build(tmp_path / "tiny-llama")
    specs = ["kascade_ablated:min_k=16,tile=64", "kascade_ablated:min_k=16,tile=64,pooling=pre_softmax"]
    specs += ["oracle_topk:min_k=16,tile=64"]
    words = ["compare", "--model", folder, "--data", tiny.SAMPLE, "--task", "niah:max_new_tokens=3", "--length", 300]
    words += ["--limit", 2, "--import", FILE, "--out", tmp_path / "rows.jsonl"]
    done = CliRunner().invoke(app, [*map(str, words), *(word for spec in specs for word in ("--method", spec))])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    ours, _, theirs = [row for row in rows if row["method"] != "dense"]
    assert ours["keys_read_share"] == pytest.approx(theirs["keys_read_share"])
    assert ours["score"] == theirs["score"]
