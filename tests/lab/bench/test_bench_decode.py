"""What a decode step's attention costs: which layers are timed, what they read, what is refused."""

import dataclasses
import functools
import json
import os
import shlex
import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from benchmarks import cold_cache_timing as cold
from benchmarks import decode, decode_layer, dense_peers, layer, layer_kinds
from benchmarks.layer_tables import decode_table
from foveate import ops
from foveate.errors import UserError
from foveate.lab.bench import breakdown, decode_model, models
from foveate.lab.results import measurements, timing
from foveate.methods import parse
from foveate.methods.luka.pages import PageLevels
from foveate.ops import KV, Logits
from foveate.state import SlotCache

KEYS = 411  # that a step reads densely: its token fills no page
SMALL = {"batches": (2,), "heads": 8, "kv_heads": 2, "head_dim": 16, "layers": 12, "level": "kernel"}
SMALL |= {"dtype": "float32", "seed": 0, "device": "cpu"}
MODEL = {"contexts": (60,), "batches": (1,), "steps": 3, "rounds": 1, "liger": False, "dense_below": 0}
MODEL |= {"dtype": "float32", "seed": 0, "device": "cpu"}
METHODS = ("dense", "kascade_paper:min_k=16,decode_only=true", "luka:page_size=16,top_k=2", "quest", "omnikv")
PAGED = "kascade_pages:min_k=16,pool=kv_head,pooling=post_softmax"
FIRST = f"{PAGED},first_layer=pages"
OTHER_PAGES = f"{PAGED},page_size=16"
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold, "_SECONDS", 0.0)
        return {
            row["case"]["method"]: row
            for row in decode.run(
                decode.Plan((*METHODS, PAGED, FIRST, OTHER_PAGES), (KEYS + 1,), **SMALL), say=lambda _: None
            )
        }


def test_every_layer_is_counted_in_the_kind_it_is_of(found):
    assert {name: kind["layers"] for name, kind in found[METHODS[1]]["layers"].items()} == {
        "dense, choosing": 1,
        "choosing": 4,
        "reading": 7,
    }
    assert {name: kind["layers"] for name, kind in found["quest"]["layers"].items()} == {"dense": 2, "quest": 10}
    for name, row in found.items():
        if name != "sdpa":
            kinds = row["layers"].values()
            assert sum(kind["layers"] for kind in kinds) == 12
            assert row["ms"] == pytest.approx(sum(kind["layers"] * kind["ms"] for kind in kinds) / 12)


def test_bytes_are_those_that_a_kind_reads(found):
    a_key = 2 * 2 * 16 * 4  # of two KV heads, key and value
    everything, tenth = 2 * KEYS * a_key, KEYS // 10
    kinds = found[METHODS[1]]["layers"]
    assert kinds["dense, choosing"]["bytes"] == found["dense"]["layers"]["dense"]["bytes"] == everything
    assert kinds["reading"]["bytes"] == 2 * tenth * a_key
    assert kinds["choosing"]["bytes"] == 2 * (tenth + KEYS / 2) * a_key
    best = 17 * 8 + 3  # keys of the best third of the pages, the open one among them, as many of either size
    for name, size in ((PAGED, 8), (OTHER_PAGES, 16)):
        records = KEYS / size * ops.PageRecord(16, size).bytes * 2
        assert found[name]["layers"]["choosing"]["bytes"] == 2 * ((tenth + best / 2) * a_key + records)
    records = KEYS / 8 * ops.PageRecord(16, 8).bytes * 2
    assert found[PAGED]["layers"]["dense, choosing"]["bytes"] == everything
    untimed = {"ms": 0.0, "upkeep_ms": 0.0, "shared_upkeep_ms": 0.0}
    assert found[FIRST]["layers"]["choosing"] | untimed == found[PAGED]["layers"]["choosing"] | untimed
    # keys are scored, and then read with their values
    assert found[FIRST]["layers"]["pages, choosing"]["bytes"] == 2 * (best * (0.5 + 1) * a_key + records)
    assert found[FIRST]["layers"]["pages, choosing"]["layers"] == 1
    assert found["dense"]["floor_ms"] == pytest.approx(everything / found["dense"]["memory_gb_per_s"] / 1e6)
    assert found["luka:page_size=16,top_k=2"]["layers"]["luka"]["bytes"] <= everything / 2


def test_rows_are_beside_the_fastest_dense_and_complete(found):
    fastest = min(("sdpa", "dense"), key=lambda name: found[name]["ms"])
    assert found[fastest]["speedup"] == 1.0
    for row in found.values():
        assert row["baseline"] == fastest
        assert row["speedup"] == pytest.approx(found[fastest]["ms"] / row["ms"])
        assert set(measurements.FIELDS) <= set(row)
    assert found["omnikv"]["case"]["share"] == 0.1
    assert found["sdpa"]["case"]["share"] is None
    for name in (PAGED, FIRST, OTHER_PAGES):
        assert 0.5 < found[name]["recall"] < 1, "keys are drawn, and none of them stands out"
    assert {row["recall"] for name, row in found.items() if name not in (PAGED, FIRST, OTHER_PAGES)} == {None}


def _quick(*methods, context=100, say=lambda _: None, **changed):
    plan = decode.Plan(methods, (context,), **SMALL | changed)
    return {row["case"]["method"]: row for row in decode.run(plan, say=say)}


@pytest.fixture
def times(monkeypatch):
    """Times in place of measured ones: of each step, its number."""
    taken = []

    def measured(work, device):
        work()
        taken.append(float(len(taken)))
        return taken[-1]

    monkeypatch.setattr(timing, "milliseconds", measured)
    monkeypatch.setattr(cold, "_SECONDS", 0.0)
    monkeypatch.setattr(cold, "memory_rate", lambda device: 1e6)
    return taken


@pytest.mark.parametrize(
    ("milliseconds", "baseline"),
    [({"library": 2.0, "dense": 1.0}, "dense"), ({"library": 1.0, "dense": 2.0}, "library")],
)
def test_dense_of_our_own_competes_for_the_baseline(monkeypatch, milliseconds, baseline):
    def attend(q, k, v, scaling):
        return ops.attend(q, KV(k, v), logits=Logits(scaling)).out

    monkeypatch.setattr(dense_peers, "available", lambda *args: {"library": attend})
    monkeypatch.setattr(decode, "_peer", lambda *args, **more: decode._Found(milliseconds["library"], 1.0, False, None))
    method = decode._method

    def measured(plan, kinds, caches, queries):
        one = method(plan, kinds, caches, queries)
        return one._replace(ms=milliseconds["dense"] if kinds[-1].policy.name == "dense" else 0.5)

    monkeypatch.setattr(decode, "_method", measured)
    monkeypatch.setattr(cold, "_SECONDS", 0.0)
    found = _quick("quest")  # which did not ask for dense
    assert {row["baseline"] for row in found.values()} == {baseline}
    assert [found[name]["speedup"] for name in (baseline, "quest")] == [1.0, 2.0]


def test_without_any_library_the_baseline_is_our_own(monkeypatch, times):
    def refused(*args):
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(dense_peers, "available", lambda *args: {"sdpa-flash": refused})
    said = []
    found = _quick("quest", say=said.append)
    assert {row["baseline"] for row in found.values()} == {"dense"}
    assert "sdpa-flash: left out at 100 tokens, No available kernel" in said
    assert any(line.startswith("no library attends densely to 100 tokens in float32 here") for line in said)


@pytest.mark.parametrize("level", decode.LEVELS)
def test_the_cache_is_flushed_before_each_timed_step_and_nothing_comes_between(monkeypatch, times, level):
    events, measured, look = [], timing.milliseconds, decode_layer.TimedLayer.look

    def timed(work, device):
        events.append("begin")
        ms = measured(work, device)
        events.append("end")
        return ms

    monkeypatch.setattr(cold, "flush", lambda device: events.append("flush"))
    monkeypatch.setattr(timing, "milliseconds", timed)
    monkeypatch.setattr(decode_layer.TimedLayer, "look", lambda layer: (events.append("look"), look(layer)))
    _quick(METHODS[1], level=level)
    begins = [place for place, event in enumerate(events) if event == "begin"]
    kinds = 5  # of Kascade three, dense, and the library
    assert len(begins) == kinds * (7 if level == "kernel" else 40)
    assert all(events[place - 1 : place + 3] == ["flush", "begin", "look", "end"] for place in begins)


@pytest.mark.parametrize(("once", "number"), [(0.01, 8), (0.3, 4), (7.0, 1)])
def test_of_a_graph_counts_what_a_step_adds_to_it(monkeypatch, once, number):
    recorded = []

    def replayed(turns, start, times):
        mine = sum(turn.step is step for turn in turns)
        recorded.append((mine, times))
        return lambda: times * (0.2 * len(turns) + once * mine)

    def step():
        pass

    monkeypatch.setattr(cold, "_SECONDS", 0.0)
    monkeypatch.setattr(cold, "_measured", lambda work, device: 5.0)
    monkeypatch.setattr(cold, "_recorded", replayed)
    assert cold.repeated(step, "cuda") == (pytest.approx(once), True)
    assert recorded == [(1, 1), (1, number), (0, number)]
    assert cold.added([cold.Turn(step)] * 3) == pytest.approx(3 * once)
    monkeypatch.setattr(cold, "_recorded", lambda *args: None)
    assert cold.repeated(step, "cuda") == (5.0, False)


class Recorder:
    """In place of what records CUDA graphs: notes what is done, and when time is taken."""

    def __init__(self, monkeypatch, refuses=None):
        self.events, self._refuses = [], refuses
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda **how: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.events.append("waited"))
        monkeypatch.setattr(cold, "flush", lambda device: self.events.append("flush"))

    def __enter__(self):
        self.events.clear()

    def __exit__(self, *raised):
        if self._refuses is not None:
            raise self._refuses

    def record(self):
        self.events.append("time")


def test_neither_a_step_nor_what_is_before_it_finds_its_keys_in_the_cache(monkeypatch):
    recorder = Recorder(monkeypatch)
    note = {name: functools.partial(recorder.events.append, name) for name in ("start", "before", "step", "alone")}
    assert cold._recorded([cold.Turn(note["step"], note["before"]), cold.Turn(note["alone"])], note["start"], 2)
    turns = ["flush", "before", "flush", "step", "flush", "alone"]
    assert recorder.events == ["start", "time", *turns, *turns, "time"]


def test_a_step_that_cannot_be_recorded_and_one_for_which_there_is_no_memory(monkeypatch):
    turns = [cold.Turn(cold._nothing)]
    recorder = Recorder(monkeypatch, RuntimeError("operation not permitted when stream is capturing"))
    assert cold._recorded(turns, cold._nothing, 1) is None
    assert recorder.events[-1] == "waited"
    Recorder(monkeypatch, torch.cuda.OutOfMemoryError("out of memory"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        cold._recorded(turns, cold._nothing, 1)


@pytest.mark.parametrize(
    ("cuda", "set_to", "expected"), [("13.0", None, "1"), ("12.4", None, None), ("13.0", "0", "0")]
)
def test_the_profiler_leaves_the_process(cuda, set_to, expected, monkeypatch):
    monkeypatch.setenv("TEARDOWN_CUPTI", set_to or "")
    if set_to is None:
        monkeypatch.delenv("TEARDOWN_CUPTI")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(breakdown, "profile", lambda activities: nullcontext())
    breakdown.start()
    assert os.environ.get("TEARDOWN_CUPTI") == expected


def test_flushing_reads_more_than_any_cache_holds(monkeypatch):
    class Filler:
        read = 0

        def sum(self):
            Filler.read += 1

    monkeypatch.setattr(cold, "_filler", Filler)
    cold.flush("cuda")
    assert Filler.read == 1
    assert cold._BEYOND_CACHES >= 256 << 20


def test_libraries_and_methods_decode_the_same_tokens(monkeypatch, times):
    written, lengths = [], []
    write = decode.SlotCache.write_step
    monkeypatch.setattr(
        decode.SlotCache, "write_step", lambda cache, k, v: (written.append(cache.used), write(cache, k, v))
    )

    def attend(q, k, v, scaling):
        lengths.append(k.shape[2])
        return ops.attend(q, KV(k, v), logits=Logits(scaling)).out

    monkeypatch.setattr(dense_peers, "available", lambda *args: {"library": attend})
    found = _quick("dense", level="layer")
    assert written == 2 * list(range(100, 140))
    assert lengths == list(range(101, 141))
    assert found["library"]["floor_ms"] == pytest.approx(found["dense"]["floor_ms"])
    assert [found[name]["ms"] for name in ("library", "dense")] == [23.5, 63.5]  # medians of the last 32 of 40 each


@pytest.mark.parametrize("level", decode.LEVELS)
def test_a_reading_layer_reads_what_another_with_its_own_keys_chose(monkeypatch, level):
    chosen, attend = [], ops.attend_indices
    monkeypatch.setattr(
        ops, "attend_indices", lambda *args, **more: chosen.append((args[1].k, args[2])) or attend(*args, **more)
    )
    (reading,) = (kind for kind in layer_kinds.kinds(parse(METHODS[1]), 12) if kind.name == "reading")
    plan = decode.Plan(METHODS[1:2], (400,), **SMALL | {"level": level})
    generator = torch.Generator().manual_seed(0)
    caches = [decode._drawn(plan, 2, 400, generator) for _ in range(2)]
    layer, chooser = decode._layers(plan, reading, caches, torch.randn(2, 8, 64, 16))
    for one in (chooser, layer):
        one.look()
    (keys, by_chooser), (others, by_reader) = chosen
    assert torch.equal(by_chooser, by_reader)
    assert keys.data_ptr() != others.data_ptr()
    assert not torch.equal(keys, others)
    assert layer.cache.counters.decode_steps == 1
    chosen.clear()
    if level == "kernel":
        cold.repeated(layer.look, "cpu")
    else:
        decode_layer.one_by_one(layer, chooser, 0)
    caches = [keys.data_ptr() for keys, _ in chosen]
    alone = [others.data_ptr()] * len(caches)
    assert caches == (alone if level == "kernel" else [keys.data_ptr(), others.data_ptr()] * 40)
    for (_, by_chooser), (_, by_reader) in zip(chosen[::2], chosen[1::2]):
        assert torch.equal(by_chooser, by_reader)


def test_a_time_that_memory_cannot_give_is_told(monkeypatch, times):
    said = []
    monkeypatch.setattr(cold, "memory_rate", lambda device: 1e-9)
    found = _quick("quest", say=said.append)
    assert all(row["below_floor"] for row in found.values())
    assert sum("BELOW THE FLOOR" in line for line in said) == len(found) == 3
    assert decode_table(list(found.values())).count("(below its floor)") == 5  # and the two kinds of Quest
    monkeypatch.setattr(cold, "memory_rate", lambda device: 1e9)
    found = _quick("quest")
    assert not any(row["below_floor"] for row in found.values())
    assert "below its floor" not in decode_table(list(found.values()))


def test_one_kind_below_its_floor_is_not_hidden_by_the_others():
    kinds = {"dense": {"layers": 1, "ms": 9.0, "bytes": 1e6}, "reading": {"layers": 1, "ms": 0.5, "bytes": 1e6}}
    one = decode._Found(ms=4.75, bytes=1e6, graph=False, layers=kinds)
    plan, said = decode.Plan((), (100,), **SMALL), []
    found = {"dense": one, "sdpa": one._replace(layers=None)}
    below, library = decode._rows(plan, 2, 100, found, 1.0, said.append)  # floors of 1 ms
    assert (below["below_floor"], library["below_floor"]) == (True, False)
    assert said[0].endswith("; BELOW THE FLOOR, so not read from memory: reading layers")
    assert "1 dense 9.000; 1 reading 0.500 (below its floor) |" in decode_table([below])
    assert not any(row["below_floor"] for row in decode._rows(plan, 2, 100, found, 2.1, said.append))


@pytest.mark.parametrize(("full", "upkeep"), [(7.0, 0.625), (1.0, 0.0)])
def test_a_profile_tells_what_compressing_takes(monkeypatch, full, upkeep):
    """Of a page of 8 keys: 5 ms more of what is neither scored nor selected nor attended to; and never less than 0."""

    def parts(step, device):
        step()
        fills = step.__self__.cache.used % 8 == 0
        return {"score": 9.0 - fills, "select": 1.0, "attend": 3.0 + fills, "other": full if fills else 2.0}

    monkeypatch.setattr(decode.breakdown, "parts", parts)
    plan = decode.Plan(("pages",), (400,), **SMALL | {"layers": 1, "batches": (2,)})
    rows = {row["case"]["method"]: row for row in decode.run(plan, say=lambda _: None)}
    (kind,) = rows["pages"]["layers"].values()
    assert (kind["upkeep_ms"], kind["parts_ms"]["other"]) == (upkeep, 2.0)


def test_a_context_of_one_token_has_no_newest_page_to_leave_open():
    plan = decode.Plan(("pages",), (1,), **SMALL)
    with pytest.raises(UserError, match="context must be at least 2 at level kernel, not 1"):
        plan.check()
    dataclasses.replace(plan, level="layer").check()


def test_summarising_a_page_is_the_upkeep_of_a_token_of_it(monkeypatch):
    """Timed is a token that fills no page of 8, 9 ms, wherever the context ends; one that does takes 13. Dense layers
    have no pages."""

    def repeated(step, device):
        step()
        return cold.Timed(13.0 if step.__self__.cache.used % 8 == 0 else 9.0, False)

    monkeypatch.setattr(cold, "repeated", repeated)
    for context, method, upkeep in (
        *((context, "pages", 0.5) for context in (400, 401, 403)),
        (408, "quest:dense_layers=0", 0.25),  # pages of 16
    ):
        plan = decode.Plan((method,), (context,), **SMALL | {"layers": 1, "batches": (2,)})
        rows = {row["case"]["method"]: row for row in decode.run(plan, say=lambda _: None)}
        (kind,) = rows[method]["layers"].values()
        assert (kind["ms"], kind["upkeep_ms"]) == (9.0, upkeep)
        (dense,) = rows["dense"]["layers"].values()
        assert dense["upkeep_ms"] == 0


def test_what_is_done_every_so_often_has_its_share(monkeypatch):
    """Steps that make pages take 9 ms and others 1: of 16 steps one, so that a step takes half a millisecond more."""
    pages, real = [], SlotCache.write_step

    def noted(cache, *token):
        if (cache.plan.decoded + 1) % 16 == 0:
            pages.append(cache)
        return real(cache, *token)

    def once(step, device):
        before = len(pages)
        step()
        return 9.0 if len(pages) > before else 1.0

    monkeypatch.setattr(SlotCache, "write_step", noted)
    monkeypatch.setattr(cold, "once", once)
    monkeypatch.setattr(cold, "_SECONDS", 0.0)
    how = SMALL | {"layers": 1, "batches": (1,)}
    found = []
    for level in ("kernel", "layer"):
        plan = decode.Plan(("luka", "quest"), (400,), **how | {"level": level})
        found.append({row["case"]["method"]: row for row in decode.run(plan, say=lambda _: None)})
    kernel, layer = found
    assert kernel["luka"]["layers"]["luka"]["upkeep_ms"] == 0.5
    assert kernel["luka"]["layers"]["luka"]["shared_upkeep_ms"] is None, "a step's time tells nothing apart"
    assert kernel["quest"]["layers"]["dense"]["upkeep_ms"] == 0
    assert layer["luka"]["ms"] == 1.5
    assert layer["quest"]["ms"] == 1


def test_kernels_are_told_apart_by_what_they_are_for(found):
    pytest.importorskip("triton")
    kernels = ("_keep_logits", "_settle", "_attend_decode", "attend_nodes", "aten")
    parts = breakdown.by_part({kernel: ms + 1.0 for ms, kernel in enumerate(kernels)})
    assert parts == {"score": 1, "select": 2, "attend": 7, "other": 5}
    own = {"upkeep_ms": 0.5, "ms": 1.0, "floor_ms": 0.1}
    kinds = {
        "a": {"layers": 1, "parts_ms": parts, **own},
        "b": {"layers": 3, "parts_ms": dict.fromkeys(parts, 1.0), **own},
    }
    row = found["quest"] | {"layers": kinds}
    assert f"| `quest` | {KEYS + 1} | 2 | 1.000 | 1.250 | 2.500 | 2.000 | 0.500 |" in decode_table(
        [row, found["dense"]]
    )
    assert "upkeep" not in decode_table([found["dense"]])


def test_libraries_of_each_dtype(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # importing it fails as if it were not there
    said = []
    assert set(dense_peers.available("cuda", "float32", said.append)) == {"sdpa-efficient", "sdpa-math"}
    assert said == []  # FlashAttention-3 would not help
    assert set(dense_peers.available("cuda", "float16", said.append)) == {"sdpa-efficient", "sdpa-cudnn", "sdpa-flash"}
    assert said[0].startswith("FlashAttention-3 is not here")


def test_a_library_that_cannot_be_loaded(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    said = []
    assert "flash-attention-3" not in dense_peers.available("cuda", "float16", said.append)
    assert said == ["FlashAttention-3 is here and cannot be loaded: libcudart.so.13: no such file"]


def test_libraries_give_dense_attention(monkeypatch):
    module = ModuleType("flash_attn_interface")

    def flash_attn_with_kvcache(q, k, v, softmax_scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale, enable_gqa=True)
        return attended.transpose(1, 2)

    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    q, k, v = torch.randn(2, 8, 1, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    expected = ops.attend(q, KV(k, v), logits=Logits(0.3)).out
    libraries = dense_peers.available("cpu", "float32"), dense_peers.available("cuda", "float32")
    for attend in (dense_peers._flash_attention_3(), libraries[0]["sdpa"], libraries[1]["sdpa-math"]):
        torch.testing.assert_close(attend(q, k, v, 0.3), expected)


def test_layers_decode_token_after_token():
    methods = ("dense", "h2o:top_k=16,window=16", METHODS[1])
    plan = decode.Plan(methods, (100,), **SMALL | {"level": "layer"})
    found = {row["case"]["method"]: row for row in decode.run(plan, say=lambda _: None)}
    a_key, tokens = 2 * 2 * 16 * 4, [100 + step for step in range(1, 41)]
    assert found["dense"]["layers"]["dense"]["bytes"] == pytest.approx(2 * sum(tokens) / len(tokens) * a_key)
    assert found[methods[1]]["layers"]["h2o"]["bytes"] == 2 * 33 * a_key  # and the token that has just come
    kinds = found[METHODS[1]]["layers"]
    assert kinds["reading"]["bytes"] < kinds["choosing"]["bytes"] < kinds["dense, choosing"]["bytes"]
    assert not found["dense"]["cuda_graph"]
    text = decode_table(list(found.values()))
    assert text.startswith("8 query and 2 KV heads of 16, float32, layer (")
    assert "; 7 reading " in text


def test_what_the_steps_of_a_model_go_to(monkeypatch):
    """Of those after the timed ones, which the watching does not slow down."""
    events, look = [], decode_model.Clock.__call__

    def start():
        events.append("start")
        return lambda: events.append("stop") or {"_attend_decode": 32.0, "gemv": 1e-3}

    monkeypatch.setitem(models.SHAPES, "tiny", LlamaConfig(**TINY))
    monkeypatch.setattr(decode_model.breakdown, "start", start)
    monkeypatch.setattr(decode_model.Plan, "watched", 4)
    monkeypatch.setattr(
        decode_model.Clock, "__call__", lambda *args, **how: (events.append("token"), look(*args, **how))[1]
    )
    how = MODEL | {"rounds": 2}
    found = decode_model.run(decode_model.Plan("tiny", ("dense",), **how), say=lambda _: None)
    timed = decode_model._WARM_UP + 3 + 1
    watched = ["token"] * timed + ["start"] + ["token"] * 4 + ["stop"]
    assert events == (["token"] * (timed + 4)) * len(found) + watched * len(found)  # of the last round alone
    for row in found:
        idle = max(0.0, row["ms"] - 8.00025)
        assert row["parts_ms"] == {"score": 0, "select": 0, "attend": 8, "other": 2.5e-4, "idle": pytest.approx(idle)}
        assert row["command"].count("--steps 3 --rounds 2") == 1
    text = decode_table([row | {"parts_ms": dict.fromkeys(row["parts_ms"], 0.5)} for row in found])
    assert "| `dense` | 60 | 1 | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 |" in text


def test_methods_take_turns(monkeypatch):
    """So that what slows the host for a while falls on all of them."""
    attached, clocks = [], []
    attach, clock = decode_model.foveate.attach, decode_model.Clock

    class Clock(clock):
        """By which a step of the n-th time that a model generates takes n milliseconds."""

        def __call__(self, *args, **how):
            found = super().__call__(*args, **how)
            self.ticks[-1] = (clocks.index(self) + 1) * len(self.ticks) / 1e3
            return found

    monkeypatch.setitem(models.SHAPES, "tiny", LlamaConfig(**TINY))
    monkeypatch.setattr(decode_model, "Clock", lambda *args: clocks.append(Clock(*args)) or clocks[-1])
    monkeypatch.setattr(
        decode_model.foveate, "attach", lambda model, spec, **how: attached.append(spec) or attach(model, spec, **how)
    )
    how = MODEL | {"rounds": 3}
    dense, own = decode_model.run(decode_model.Plan("tiny", (), **how), say=lambda _: None)
    assert attached == ["dense"] * 3
    assert dense["ms_rounds"] == pytest.approx([1, 3, 5])
    assert own["ms_rounds"] == pytest.approx([2, 4, 6])
    assert (dense["ms"], own["ms"]) == (pytest.approx(3), pytest.approx(4))
    assert own["ms_quartiles"] == pytest.approx([2, 4, 6])
    assert own["case"]["rounds"] == 3


def test_tokens_of_a_model(monkeypatch):
    monkeypatch.setitem(models.SHAPES, "tiny", LlamaConfig(**TINY))
    method = "kascade_paper:anchors=2,decode_only=true,min_k=16"
    how = MODEL | {"batches": (2,)}
    found = decode_model.run(decode_model.Plan("tiny", (method,), **how), say=lambda _: None)
    assert [row["case"]["method"] for row in found] == ["dense", parse(method).spec, "transformers-sdpa"]
    for row in found:
        assert set(measurements.FIELDS) <= set(row)
        assert row["command"].startswith("foveate bench decode-model --model tiny --method kascade_paper:")
        assert row["speedup"] == pytest.approx(found[0]["ms"] / row["ms"])
        assert row["tokens_per_s"] == pytest.approx(2000 / row["ms"])
    assert found[0]["stats"]["decode_steps"] == 3 + decode_model._WARM_UP
    assert 0.2 < found[1]["stats"]["keys_read_share"] < 0.9
    assert found[2]["stats"] is None
    assert found[2]["floor_ms"] is None
    read = found[0]["floor_ms"] * found[0]["memory_gb_per_s"] * 1e6
    assert read / found[0]["ms"] / 1e6 == pytest.approx(found[0]["gb_per_s"])
    assert not found[0]["below_floor"]
    assert found[0]["parts_ms"] is None  # on a CPU
    assert decode_table(found).startswith("tiny (random weights), float32, model (")
    said = []
    monkeypatch.setattr(timing, "memory_rate", lambda device: 1e-9)
    dense, transformers = decode_model.run(decode_model.Plan("tiny", (), **how), say=said.append)
    assert dense["below_floor"]
    assert not transformers["below_floor"]  # which tells nothing of what it reads
    assert [line.split(":")[0] for line in said if "BELOW THE FLOOR" in line] == ["dense"]
    with pytest.raises(UserError, match="tiny: kascade: anchors must be at most 4"):
        decode_model.run(decode_model.Plan("tiny", ("kascade:anchors=5",), **how), say=lambda _: None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "lama-3.1-8b"}, "unknown model 'lama-3.1-8b'. Did you mean 'llama-3.1-8b'"),
        ({"dense_below": "soon"}, "dense_below must be a number of tokens, at least 0, or 'auto', not 'soon'"),
        ({"dense_below": -1}, "dense_below must be a number of tokens, at least 0, or 'auto', not -1"),
        ({"methods": ("h3o",)}, "did you mean 'h2o'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'. .*Allowed: bfloat16, float16, float32"),
        ({"liger": True}, "--liger needs Liger's kernels: pip install liger-kernel"),
    ],
)
def test_models_that_cannot_be_measured(changed, message):
    plan = decode_model.Plan(**{"model": "qwen3-8b", "methods": (), **MODEL, **changed})
    with pytest.raises(UserError, match=message):
        decode_model.run(plan, say=lambda _: None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": ("kascada",)}, "did you mean 'kascade'"),
        ({"methods": ("h2o",)}, "h2o evicts tokens"),
        ({"heads": 9}, "heads must be a multiple of kv-heads, 2, not 9"),
        ({"dtype": "float8"}, "unknown dtype 'float8'. .*Allowed: bfloat16, float16, float32"),
        ({"device": "tpu"}, "unknown device 'tpu'. Did you mean 'cpu'"),
        ({"level": "model"}, "unknown level 'model'. .*Allowed: kernel, layer"),
    ],
)
def test_plans_that_cannot_be(changed, message):
    with pytest.raises(UserError, match=message):
        decode.run(decode.Plan(**{"methods": METHODS, "contexts": (64,), **SMALL, **changed}), say=lambda _: None)


def test_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(cold, "_SECONDS", 0.0)
    out = tmp_path / "decode.jsonl"
    shape = "--context 64 --batch 1 --heads 4 --kv-heads 2 --head-dim 16 --layers 4"
    how = ["--level", "kernel", "--dtype", "float32", "--device", "cpu", "--method", "dense", "--out", str(out)]
    done = CliRunner().invoke(layer.app, ["decode", *shape.split(), *how])
    assert done.exit_code == 0, done.output
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"]["method"] for row in written] == ["sdpa", "dense"]
    assert {"ms", "floor_ms", "below_floor", "command", "commit"} <= set(written[0])


def test_a_file_keeps_rows_of_other_cases_and_has_them_as_they_come(tmp_path, monkeypatch):
    monkeypatch.setattr(cold, "_SECONDS", 0.0)
    out, found = tmp_path / "decode.jsonl", []

    def ran(*sizes):
        size = "--batch 1 --heads 4 --kv-heads 2 --head-dim 16 --layers 4 --dtype float32 --device cpu --method dense"
        contexts = [part for one in sizes for part in ("--context", str(one))]
        done = CliRunner().invoke(layer.app, ["decode", *contexts, *size.split(), "--out", str(out)])
        found[:] = [json.loads(line) for line in out.read_text().splitlines()]
        return done

    assert ran(64, 70).exit_code == 0
    assert ran(80).exit_code == 0
    times = [row["ms"] for row in found]
    assert ran(70).exit_code == 0
    assert [row["case"]["context"] for row in found] == [64, 64, 80, 80, 70, 70]
    assert [row["ms"] for row in found[:4]] == [*times[:2], *times[4:]]
    real = decode._rows

    def interrupted(plan, batch, context, *args):
        if context == 80:
            raise KeyboardInterrupt
        return real(plan, batch, context, *args)

    monkeypatch.setattr(decode, "_rows", interrupted)
    out.unlink()
    assert ran(64, 80).exit_code != 0
    assert [row["case"]["context"] for row in found] == [64, 64]


def test_the_command_of_a_row_makes_its_case_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cold, "_SECONDS", 0.0)
    row = _quick("luka:page_size=16,top_k=2", context=70, level="layer", layers=4)["dense"]
    out = tmp_path / "again.jsonl"
    done = CliRunner().invoke(layer.app, [*shlex.split(row["command"])[3:], "--out", str(out)])
    assert done.exit_code == 0, done.output
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["case"] in [one["case"] for one in again]
    assert {one["command"] for one in again} == {row["command"]}


@pytest.mark.parametrize("spec", ["luka", "luka:page_size=16,top_k=2,prior=0.0,score=summary"])
def test_what_is_done_between_replays_is_timed_and_leaves_no_trace(spec, monkeypatch):
    """A GPU's time of making pages is that of what is recorded, a layer's apart from what layers share."""
    ran, real = [], PageLevels.extend_in_step

    def noted(pages, cache):
        ran.append(cache.plan.captured)
        real(pages, cache)

    monkeypatch.setattr(PageLevels, "extend_in_step", noted)
    monkeypatch.setattr(decode.breakdown, "total", lambda work: work() or 4.0 - 0.5 * len(ran))
    plan = decode.Plan((spec,), (400,), **SMALL)
    generator = torch.Generator().manual_seed(0)
    drawn = decode._drawn(plan, 2, 400, generator)
    kind = layer_kinds.kinds(parse(spec), 12)[0]
    layer, _ = decode._layers(plan, kind, [drawn], torch.randn(2, 8, 64, 16, generator=generator))
    numbers, expected = {name: list(of) for name, of in layer.cache.rows.items()}, layer.decode(layer.cache)
    object.__setattr__(plan, "device", "cuda")
    assert decode._upkeep(plan, kind.policy, layer) == (2.0 / 16, 0.5 / 16)
    assert ran == [True] * 4
    assert layer.cache.device_state is None
    assert layer.cache.rows == numbers
    torch.testing.assert_close(layer.decode(layer.cache), expected, rtol=1e-3, atol=1e-3)
