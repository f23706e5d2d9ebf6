"""Decode steps over blocks that an engine owns give what the runtime's own layers give over their own memory."""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foveate import methods
from foveate.methods import base
from foveate.ops import KV, BlockTable, Choice, Logits, Rest, attend, dispatch
from foveate.runtime import EngineSteps, Layer, Phase, drafts
from foveate.runtime.steps import obstacle
from foveate.state import Counters, Geometry
from tests.served import LAYERS, SPECS, of_layers

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4
PROMPTS, STEPS = (37, 5, 21), 9
SCALING = DIM**-0.5
GEOMETRY = Geometry(HEADS, KV_HEADS, DIM, DIM)
OF_PAGES = SPECS[-4:]
OBSTACLES = {spec: next(filter(None, map(drafts.obstacle, of_layers(spec).values())), "") for spec in SPECS}
"""Why a method does not draft."""


class Engine:
    """Blocks in random order, one table for all layers, rows of padding between and after the real ones."""

    def __init__(self, padding=(1, 4), width=40, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = len(PROMPTS) + len(padding)
        self.real = [b for b in range(self.rows) if b not in padding]
        self.table = torch.zeros(self.rows, width, dtype=torch.int32)
        order = torch.randperm(len(PROMPTS) * width, generator=self.generator).int() + 1  # 0 is nobody's
        self.table[self.real] = order.view(len(PROMPTS), width)
        shape = (LAYERS, len(order) + 1, KV_HEADS, BLOCK, 2 * DIM)
        self.memory = torch.full(shape, 1e4)  # finite, and seen if it is read
        self.lengths = torch.zeros(self.rows, dtype=torch.int32)

    def draw(self, tokens):
        sizes = (HEADS, KV_HEADS, KV_HEADS)
        return [torch.randn(LAYERS, len(PROMPTS), h, tokens, DIM, generator=self.generator) for h in sizes]

    def write(self, row, k, v, first, steps=None):
        """Keys ``[layers, Hkv, n, D]`` of one request, and between their slots those of padding."""
        places = first + torch.arange(k.shape[2])
        block, slot = self.table[self.real[row]].long()[places // BLOCK], places % BLOCK
        self.memory[:, block, :, slot] = torch.cat([k, v], -1).permute(2, 0, 1, 3)
        self.lengths[self.real[row]] = first + k.shape[2]
        slots = torch.cat([torch.tensor([-1]), block * BLOCK + slot, torch.tensor([-1])])
        for n in range(LAYERS if steps else 0):
            steps.written(n, HEADS, self.memory[n, ..., :DIM], self.memory[n, ..., DIM:], slots)


def run(spec, bound=None, dense_below=0, softcap=None, sinks=None, padding=(1, 4), dense=None, draft=None):
    """Outputs of both, ``[steps, layers, requests, Hq, D]``, and the steps with the layers that read the same.

    ``draft``: steps are those of drafts of so many tokens.
    """
    engine, logits = Engine(padding), Logits(SCALING, sinks, softcap)
    steps = EngineSteps(of_layers(spec), torch.device("cpu"), dense_below)
    phases = [Phase(prompt_end=length) for length in PROMPTS]
    own = [[Layer(m, Counters(), phase, dense_below) for m in of_layers(spec).values()] for phase in phases]
    for row, length in enumerate(PROMPTS):
        q, k, v = (x[:, row] for x in engine.draw(length))
        for first, end in ((0, length // 3), (length // 3, length)):  # chunks
            engine.write(row, k[:, :, first:end], v[:, :, first:end], first, steps)
        for n, layer in enumerate(own[row]):
            layer.announce(length)
            layer.attend(q[n][None], k[n][None], v[n][None], None, logits)
    assert spec not in OF_PAGES or any(store.specs for store in steps._caches.values())
    expected, found = [], []
    for step in range(STEPS):
        q, k, v = engine.draw(1)
        for row, length in enumerate(PROMPTS):
            engine.write(row, k[:, row], v[:, row], length + step, steps)
        now = []
        for row, phase in enumerate(phases):
            phase.forward.clear()
            phase.draft = step % draft if draft else None
            outs = []
            for n, layer in enumerate(own[row]):
                layer.announce(1)
                outs.append(layer.attend(q[n, row, None], k[n, row, None], v[n, row, None], None, logits))
            now.append(torch.stack(outs))
        expected.append(torch.stack(now, 1)[:, :, 0, :, 0])
        tokens = engine.lengths[engine.real].tolist()
        how = {"dense": dense, "draft": step % draft if draft else None}
        steps.begin(engine.lengths, engine.table, bound or max(tokens), tokens, len(PROMPTS), **how)
        queries = torch.full((LAYERS, engine.rows, HEADS, 1, DIM), 3.0)
        queries[:, engine.real] = q
        outs = []
        for n in range(LAYERS):
            blocks, out = engine.memory[n], torch.full_like(queries[n], torch.nan) if step % 2 else None
            outs.append(steps.attend(n, queries[n], blocks[..., :DIM], blocks[..., DIM:], logits, out))
            assert out is None or outs[-1].data_ptr() == out.data_ptr()
        assert all(store.out is None for store in steps._caches.values()), "the engine may reuse its memory"
        outs = torch.stack(outs)[..., 0, :]
        padding = [b for b in range(engine.rows) if b not in engine.real]
        assert outs[:, padding].abs().max() == 0
        found.append(outs[:, engine.real])
    return torch.stack(expected), torch.stack(found), steps, own


@pytest.mark.parametrize("spec", SPECS)
def test_outputs_are_those_of_layers_over_their_own_memory(spec):
    expected, found, steps, own = run(spec)
    torch.testing.assert_close(found, expected)
    counted = sum(float(layer.counters.keys_read) for row in own for layer in row)
    assert float(steps.keys_read()) == pytest.approx(counted)
    assert steps.totals.keys_available == sum(layer.counters.keys_available for row in own for layer in row)
    assert (steps.totals.steps, steps.totals.rows, steps.totals.dense_rows) == (STEPS, 3 * STEPS, 0)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "dense" and not OBSTACLES[spec]])
def test_drafts_read_again_what_their_first_token_chose(spec):
    expected, found, steps, _ = run(spec, draft=4)
    torch.testing.assert_close(found, expected)
    assert (float(steps.keys_read()), steps.totals.rows) == (0, 0), "drafts are not counted"
    anew = run(spec)[1]
    assert torch.equal(found[::4], anew[::4])
    assert not torch.equal(found[1::4], anew[1::4])


def test_a_draft_stays_dense_or_sparse_as_it_began():
    """A bound between the lengths of its tokens would let readers begin to ask for a choice that was not made."""
    longest = PROMPTS[0] + 2
    found = run(SPECS[1], dense_below=3 * longest, draft=4)[1]
    dense, sparse = run("dense")[1], run(SPECS[1], draft=4)[1]
    torch.testing.assert_close(found[:4], dense[:4])
    torch.testing.assert_close(found[4, :, 0], sparse[4, :, 0])  # the longest row, which is not short
    assert not torch.equal(found[4, :, 0], dense[4, :, 0])


@pytest.mark.parametrize("spec", SPECS)
def test_attention_writes_its_output_where_the_engine_wants_it(spec):
    """Not elsewhere, to be copied."""
    given = []
    with dispatch.watched(lambda verb, arguments: given.append(arguments.get("out"))):
        run(spec)
    assert sum(out is not None for out in given) == LAYERS * (STEPS // 2)


def test_the_output_of_a_method_that_knows_no_such_place_is_copied(monkeypatch):
    expected = run(SPECS[0])[1]

    def attends_itself(self, cache, q, scaling):
        lengths = cache.plan["counts"]
        found = attend(q, cache.view(lengths), logits=cache.logits(scaling))
        return Choice(attended=found, read=lengths[:, None])

    monkeypatch.setattr(methods.get(SPECS[0]), "choose", attends_itself)
    assert torch.equal(run(SPECS[0])[1], expected)


@pytest.mark.parametrize("spec", SPECS)
def test_a_bound_far_above_the_lengths_changes_nothing(spec):
    near, far = run(spec)[1], run(spec, bound=160)[1]
    torch.testing.assert_close(far, near)


def test_caps_and_sinks_of_the_layer_count():
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    expected, found, *_ = run(SPECS[1], softcap=1.5, sinks=sinks)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, run(SPECS[1])[1], atol=1e-3)


@pytest.mark.parametrize(
    "spec", ["kascade_paper:top_k=1.0,anchors=[0,3],decode_only=true", "omnikv:top_k=1.0,filters=[0]"]
)
def test_the_full_budget_is_dense(spec):
    torch.testing.assert_close(run(spec)[1], run("dense")[1])


def test_short_contexts_are_dense_and_counted():
    spec = SPECS[1]
    _, found, steps, _ = run(spec, dense_below=3 * 43)  # the longest row has 38 to 46 tokens, the others have 6 to 30
    dense, sparse = run("dense")[1], run(spec)[1]
    torch.testing.assert_close(found[:5], dense[:5])
    torch.testing.assert_close(found[5:, :, 1:], dense[5:, :, 1:])
    torch.testing.assert_close(found[5:, :, 0], sparse[5:, :, 0])
    assert not torch.allclose(dense[:5], sparse[:5], atol=1e-3)
    assert not torch.allclose(dense[5:, :, 0], sparse[5:, :, 0], atol=1e-3)
    assert steps.totals.dense_rows == 3 * 5 + 2 * (STEPS - 5)
    assert steps.totals.selections == (STEPS - 5) * 3 * 2


@pytest.mark.parametrize("spec", SPECS)
def test_rows_that_are_to_read_all_keys_do_and_are_counted(spec):
    """Beside others, whose outputs are what they were."""
    last, asked = (3, 4), [True, False, False, False, False]
    _, found, steps, own = run(spec, padding=last, dense=asked)
    _, sparse, alone, _ = run(spec, padding=last)
    dense = run("dense", padding=last)[1]
    torch.testing.assert_close(found[:, :, 0], dense[:, :, 0])
    torch.testing.assert_close(found[:, :, 1:], sparse[:, :, 1:])
    assert spec == SPECS[0] or not torch.allclose(dense[:, :, 0], sparse[:, :, 0], atol=1e-3)
    read = [sum(float(layer.counters.keys_read) for layer in row) for row in own]
    whole = LAYERS * sum(PROMPTS[0] + step + 1 for step in range(STEPS))
    assert float(steps.keys_read()) == pytest.approx(whole + sum(read[1:]))
    assert (steps.totals.rows, steps.totals.dense_rows) == (3 * STEPS, STEPS)
    assert alone.totals.dense_rows == 0


def test_rows_are_counted_as_dense_once():
    steps = EngineSteps(of_layers(SPECS[1]), torch.device("cpu"), 40)
    lengths, table = torch.tensor([30, 9, 15, 8, 0]), torch.zeros(5, 8, dtype=torch.int32)
    long, short, prompt = [True, False, False, False, False], [False, True, False, False, False], 1
    how = {"prompts": [row == prompt for row in range(5)]}
    steps.begin(lengths, table, 30, [30, 15, 8], 4, dense=long, **how)
    assert steps.totals.dense_rows == 2, "the first, and the last, which is short"
    steps.begin(lengths, table, 30, [30, 9, 15, 8], 4, dense=short)
    assert steps.totals.dense_rows == 2 + 2, "short rows alone"
    steps.begin(lengths, table, 30, [30, 9, 15, 8], 4)
    assert steps.totals.dense_rows == 2 + 2 + 2


def test_rows_that_decode_are_counted_wherever_rows_of_prompts_are():
    steps, lengths = EngineSteps(of_layers(SPECS[1]), torch.device("cpu"), 40), [30, 9, 15, 8]
    table, short = torch.zeros(4, 8, dtype=torch.int32), [4 * length < 40 for length in lengths]
    for prompts in itertools.product([False, True], repeat=4):
        for dense in itertools.product([False, True], repeat=4):
            steps.totals = type(steps.totals)()
            decoding = [row for row in range(4) if not prompts[row]]
            how = {"prompts": list(prompts), "dense": list(dense)}
            steps.begin(torch.tensor(lengths), table, 30, [lengths[row] for row in decoding], **how)
            assert steps.totals.rows == len(decoding)
            assert steps.totals.dense_rows == sum(dense[row] or short[row] for row in decoding)


@pytest.mark.parametrize(("dense_below", "dense"), [(0, False), (1, True)])
def test_steps_whose_kernels_an_engine_launches_one_by_one_are_dense(dense_below, dense):
    steps = EngineSteps(of_layers(SPECS[1]), torch.device("cpu"), dense_below)
    rows = (torch.tensor([30, 20]), torch.zeros(2, 8, dtype=torch.int32), 30, [30, 20])
    steps.begin(*rows)
    assert not steps.dense
    steps.begin(*rows, launched=True)
    assert (steps.dense, steps.totals.dense_rows) == (dense, 2 * dense)


def test_steps_that_an_engine_attends_to_itself_are_counted_as_dense():
    steps = EngineSteps(of_layers(SPECS[1]), torch.device("cpu"), dense_below=0)
    for tokens in ([30, 20], [], [7]):
        steps.count_dense(tokens)
    assert (steps.totals.steps, steps.totals.rows, steps.totals.dense_rows, steps.totals.selections) == (2, 3, 3, 0)
    assert float(steps.keys_read()) == steps.totals.keys_available == 57 * LAYERS


@pytest.mark.parametrize("spec", [SPECS[1], *OF_PAGES])
@pytest.mark.parametrize("again", [False, True])
def test_an_audit_reads_all_keys_and_tells_what_share_of_the_attention_is_read(spec, again):
    engine, steps = Engine(), EngineSteps(of_layers(spec), torch.device("cpu"), 0)
    for row, length in enumerate(PROMPTS):
        _, k, v = (x[:, row] for x in engine.draw(length))
        engine.write(row, k, v, 0, steps)
    tokens = engine.lengths[engine.real].tolist()
    q = torch.randn(LAYERS, engine.rows, HEADS, 1, DIM, generator=engine.generator)

    def outs():
        memory = [(engine.memory[n, ..., :DIM], engine.memory[n, ..., DIM:]) for n in range(LAYERS)]
        return torch.stack([steps.attend(n, q[n], *memory[n], Logits(SCALING)) for n in range(LAYERS)])

    steps.begin(engine.lengths, engine.table, max(tokens), tokens, len(PROMPTS))
    sparse, read = (outs(), steps.keys_read().item()) if again else (None, 0.0)
    with steps.audit() as noted:
        found = outs()
    assert steps.keys_read() == read
    if not again:
        sparse = outs()
    assert torch.equal(outs(), sparse)
    table, chooses = BlockTable(engine.table, max(tokens)), 0
    for n in range(LAYERS):
        k, v = engine.memory[n, ..., :DIM], engine.memory[n, ..., DIM:]
        kv = KV(k, v, table, engine.lengths.long())
        torch.testing.assert_close(found[n], attend(q[n], kv, logits=Logits(SCALING)).out)
        chooses += not torch.allclose(found[n], sparse[n], atol=1e-3)
    shares = torch.stack(noted.mass)[:, engine.real]
    assert len(noted.mass) == chooses > 0
    assert 0 < shares.min() < 0.95 < shares.max() + 0.3 <= 1.3 + 1e-5
    assert shares[:, 1].mean() > shares[:, 0].mean(), "the shortest row leaves least out"


def test_the_share_of_an_audit_is_that_of_the_probabilities_read():
    """Of a method of known keys: the best four of each KV head, by the mean attention of its heads."""
    spec = "oracle_topk:top_k=4,decode_only=true"
    engine, steps = Engine(padding=()), EngineSteps(of_layers(spec), torch.device("cpu"), 0)
    q, k, v = engine.draw(21)
    for row in range(3):
        engine.write(row, k[:, row], v[:, row], 0, steps)
    steps.begin(engine.lengths, engine.table, 21, [21] * 3)
    with steps.audit() as noted:
        for n in range(LAYERS):
            blocks = engine.memory[n]
            steps.attend(n, q[n][:, :, -1:], blocks[..., :DIM], blocks[..., DIM:], Logits(SCALING))
    last = LAYERS - 1
    logits = q[last][:, :, -1].unflatten(1, (KV_HEADS, -1)) @ k[last].mT * SCALING
    mass = logits.softmax(-1)
    best = mass.mean(2).topk(4).indices
    read = mass.gather(3, best[:, :, None].expand(-1, -1, mass.shape[2], -1)).sum(-1)
    torch.testing.assert_close(noted.mass[-1], read.mean((1, 2)))


def one_step(spec, steps, engine, row, k, v, first):
    """The outputs of a request's next token, and those that a request alone would have had, ``[layers, Hq, D]``."""
    length = k.shape[2]
    q = torch.randn(LAYERS, HEADS, length, DIM, generator=engine.generator)
    engine.write(row, k[:, :, first:], v[:, :, first:], first, steps)
    phase, expected, found = Phase(prompt_end=length - 1), [], []
    for n, method in of_layers(spec).items():
        layer = Layer(method, Counters(), phase, 0)
        for part in (slice(length - 1), slice(length - 1, length)):
            layer.announce(part.stop - (part.start or 0))
            out = layer.attend(q[n, None, :, part], k[n, None, :, part], v[n, None, :, part], None, Logits(SCALING))
        expected.append(out[0].flatten(0, 1))
    steps.begin(engine.lengths[row : row + 1], engine.table[row : row + 1], length, [length])
    for n in range(LAYERS):
        blocks = engine.memory[n]
        out = steps.attend(n, q[n, None, :, -1:], blocks[..., :DIM], blocks[..., DIM:], Logits(SCALING))
        found.append(out[0, :, 0])
    return torch.stack(found), torch.stack(expected)


@pytest.mark.parametrize("spec", OF_PAGES)
def test_summaries_belong_to_blocks_and_not_to_requests(spec):
    """A block is filled again by another request, and one that is full is shared with a request that never wrote it."""
    engine, steps = Engine(padding=(), width=10), EngineSteps(of_layers(spec), torch.device("cpu"))
    first, second = (engine.draw(40)[1:] for _ in range(2))
    old, its = one_step(spec, steps, engine, 0, *(x[:, 0, :, :33] for x in first), 0)
    torch.testing.assert_close(old, its)
    engine.table[1] = engine.table[0].flip(0)  # the first request has ended
    new, its = one_step(spec, steps, engine, 1, *(x[:, 1, :, :38] for x in second), 0)
    torch.testing.assert_close(new, its)
    engine.table[2, :6] = engine.table[1, :6]  # 24 tokens of its prompt are in the cache
    shared = [torch.cat([x[:, 1, :, :24], x[:, 2, :, :12]], 2) for x in second]
    found, its = one_step(spec, steps, engine, 2, *shared, 24)
    torch.testing.assert_close(found, its)
    dense, _ = one_step("dense", EngineSteps(of_layers("dense"), torch.device("cpu")), engine, 2, *shared, 24)
    assert not torch.allclose(found, dense, atol=1e-3)


def test_pages_divide_blocks():
    steps = EngineSteps(of_layers("locks:page_size=3,rank=2"), torch.device("cpu"))
    with pytest.raises(ValueError, match="pages of 3 tokens do not divide the engine's blocks of 4"):
        steps.allocate(0, GEOMETRY, torch.empty(9, KV_HEADS, BLOCK, DIM, device="meta"))


def test_summaries_are_allocated_once():
    """Before the first token where the engine tells how many blocks there are; later cache tensors are as many."""
    engine, steps = Engine(), EngineSteps(of_layers("locks:page_size=4,rank=2"), torch.device("cpu"))
    memory = engine.memory[0]
    assert not steps.summarises(0)
    steps.allocate(0, GEOMETRY, memory.to("meta"))
    assert steps.summarises(0)
    records = steps._caches[0].tensors["records"]
    assert records.shape[:3] == (len(memory), KV_HEADS, 1)
    slots = torch.arange(4, 12)
    for blocks in (memory.normal_(generator=engine.generator), memory.clone()):
        steps.written(0, HEADS, blocks[..., :DIM], blocks[..., DIM:], slots)
        assert steps._caches[0].tensors["records"] is records
    assert records.flatten(1).any(1).nonzero()[:, 0].tolist() == [1, 2]


def test_a_layer_that_chooses_by_the_keys_themselves_keeps_no_summaries():
    spec = "kascade_paper:top_k=9,anchors=[0],decode_only=true"
    engine, steps = Engine(padding=(), width=10), EngineSteps(of_layers(spec), torch.device("cpu"), dense_below=0)
    one_step(spec, steps, engine, 0, *(x[:, 0, :, :33] for x in engine.draw(40)[1:]), 0)
    assert len(steps._caches) == LAYERS
    assert not any(steps.summarises(n) for n in range(LAYERS))


def test_layers_that_the_engine_reads_itself_are_counted():
    steps = EngineSteps(of_layers(SPECS[2]), torch.device("cpu"), dense_below=100)
    assert [n for n in range(LAYERS) if steps.reads_all(n)] == [0]
    steps.begin(torch.tensor([30, 20]), torch.zeros(2, 8, dtype=torch.int32), 30, [30, 20])
    assert steps.dense
    for n in range(LAYERS):
        assert steps.reads_all(n)
        steps.read_by_engine(n)
    assert float(steps.keys_read()) == steps.totals.keys_available == 50 * LAYERS


def test_memory_may_be_replaced_between_steps():
    """An engine makes throw-away caches while it measures memory."""
    engine, steps = Engine(padding=()), EngineSteps(of_layers("dense"), torch.device("cpu"))
    q, k, v = engine.draw(5)
    for row in range(3):
        engine.write(row, k[:, row], v[:, row], 0)
    outs = []
    for memory in (engine.memory, engine.memory.flip(1)):
        table = engine.table if memory is engine.memory else memory.shape[1] - 1 - engine.table
        steps.begin(engine.lengths, table, 5, [5, 5, 5])
        blocks = memory[2]
        outs.append(steps.attend(2, q[2][:, :, -1:], blocks[..., :DIM], blocks[..., DIM:], Logits(SCALING)))
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(outs[0], attend(q[2][:, :, -1:], KV(k[2], v[2]), logits=Logits(SCALING)).out)


def test_buffers_of_a_number_of_rows_keep_their_addresses():
    """So that a captured step reads what the next one writes."""
    steps, found = EngineSteps(of_layers("dense"), torch.device("cpu")), []
    for lengths in ([3, 4], [1, 2, 3], [9, 0]):
        rows = torch.tensor(lengths)
        steps.begin(rows, torch.zeros(len(rows), 8, dtype=torch.int32), 9, [length for length in lengths if length])
        found.append((steps._step[0].numbers.data_ptr(), steps._step[0]["counts"].tolist()))
    assert found[0][0] == found[2][0] != found[1][0]
    assert [counts for _, counts in found] == [[3, 4], [1, 2, 3], [9, 0]]


class Pool(TorchDispatchMode):
    """Memory from which an engine allocates its caches, and that it drops while it sleeps."""

    def __init__(self):
        super().__init__()
        self.allocated = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.allocated += [out] if isinstance(out, torch.Tensor) and not out.is_meta else []
        return out

    def sleep_and_wake(self):
        for one in self.allocated:
            one.fill_(torch.nan if one.is_floating_point() else torch.iinfo(one.dtype).max)


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_of_an_engine_that_has_slept_is_needed(spec):
    """The counters go on, and answers are those of an engine that has just begun."""
    fresh = EngineSteps(of_layers(spec), torch.device("cpu"), 0)
    with Pool() as pool:
        slept = EngineSteps(of_layers(spec), torch.device("cpu"), 0)
        for n, method in slept.methods.items():
            if method.channels(GEOMETRY):
                slept.allocate(n, GEOMETRY, torch.empty(3 * 40 + 1, KV_HEADS, BLOCK, DIM, device="meta"))
    assert bool(pool.allocated) == (spec in OF_PAGES)

    def outs(steps, seed):
        engine = Engine(padding=(), seed=seed)
        q, k, v = engine.draw(max(PROMPTS))
        for row, length in enumerate(PROMPTS):
            engine.write(row, k[:, row, :, :length], v[:, row, :, :length], 0, steps)
        steps.begin(engine.lengths, engine.table, max(PROMPTS), list(PROMPTS))
        blocks = [(engine.memory[n, ..., :DIM], engine.memory[n, ..., DIM:]) for n in range(LAYERS)]
        found = [steps.attend(n, q[n, :, :, -1:], *blocks[n], Logits(SCALING)) for n in range(LAYERS)]
        return torch.stack(found)

    outs(slept, 1)
    before = float(slept.keys_read())
    pool.sleep_and_wake()
    torch.testing.assert_close(outs(slept, 2), outs(fresh, 2))
    assert float(slept.keys_read()) - before == pytest.approx(float(fresh.keys_read()))


CAN = {"dense", "kascade", "kascade_pages", "oracle_topk", "omnikv", "lessismore", "pages", "locks"}


@dataclass(frozen=True)
class Newest(methods.ReadsChosen):
    """An author's method that reads the newest key alone."""

    name: ClassVar[str] = "newest"

    def choose(self, cache, q, scaling):
        return cache.positions == (cache.plan["lengths"] - 1)[:, None, None]


@pytest.mark.parametrize("prompts", [True, False])
def test_rows_of_prompts_are_read_whole_by_an_authors_method_too(prompts):
    engine, logits = Engine(), Logits(SCALING)
    for row, length in enumerate(PROMPTS):
        _, k, v = (x[:, row] for x in engine.draw(length))
        engine.write(row, k, v, 0)
    steps = EngineSteps({0: Newest()}, torch.device("cpu"), 0)
    tokens = engine.lengths[engine.real].tolist()
    longest = max(tokens)
    marks = [prompts] * engine.rows
    steps.begin(engine.lengths, engine.table, longest, [] if prompts else tokens, len(PROMPTS), marks)
    q = torch.randn(engine.rows, HEADS, 1, DIM, generator=engine.generator)
    k, v = engine.memory[0, ..., :DIM], engine.memory[0, ..., DIM:]
    table = BlockTable(engine.table, longest)
    whole = attend(q, KV(k, v, lengths=engine.lengths.long(), block_table=table), logits=logits).out
    same = torch.allclose(steps.attend(0, q, k, v, logits)[engine.real], whole[engine.real], atol=1e-5)
    assert same == prompts
    assert float(steps.keys_read()) == (0 if prompts else len(PROMPTS))


@pytest.mark.parametrize("name", methods.names())
def test_methods_that_cannot_run_say_why(name):
    small = methods.make(name, **methods.get(name).about.small_budget)
    if name in CAN and getattr(small, "decode_only", True) is False:
        assert "add decode_only=true" in obstacle(small.for_layer(1, 4), GEOMETRY)
        small = methods.make(small, decode_only=True)
    if name in ("pages", "kascade_pages"):
        assert "requests share blocks: add weighted=false" in obstacle(small, GEOMETRY)
        small = methods.make(small, weighted=False)
    reasons = [obstacle(small.for_layer(n, 4), GEOMETRY) for n in range(4)]
    assert any(reasons) == (name not in CAN)
    assert all(small.name in reason or reason == "" or name in ("per_layer", "mixed") for reason in reasons)


def test_state_that_a_setting_adds_is_refused():
    spec = "kascade_pages:pool=kv_head,pooling=post_softmax,anchors=[1]"
    assert "requests share blocks: add weighted=false" in obstacle(methods.parse(spec).for_layer(1, 4), GEOMETRY)
    assert "state beside the keys" in obstacle(methods.parse("sparq"), GEOMETRY)


def test_nothing_stands_for_the_rest_of_a_row_that_is_read_whole(monkeypatch):
    def choose(self, cache, q, scaling):
        there = (cache.plan["lengths"] > 0)[:, None, None]  # no padding
        keys = there.int().expand(-1, KV_HEADS, 1) - 1
        rest = Rest(torch.full_like(q, 9.0), there.float().expand(q.shape[:3]))
        return Choice(keys=keys, read=torch.ones(len(q), 1, dtype=torch.int64), rest=rest)

    monkeypatch.setattr(methods.get("oracle_topk"), "choose", choose)
    found = run("oracle_topk:decode_only=true,dense_layers=0", padding=(3, 4), dense=[True, False, True, False, False])[
        1
    ]
    dense = run("dense", padding=(3, 4))[1]
    torch.testing.assert_close(found[:, :, [0, 2]], dense[:, :, [0, 2]])
    assert (found[:, :, 1] == 9).all()


def test_a_layer_that_is_sparse_at_any_length_is_so_beside_layers_that_are_not():
    """By default; a user's `dense_below` is of all that name any length."""

    class AtAnyLength(methods.get("quest")):
        sparse_from_tokens = 0

    class Always(methods.get("quest")):
        sparse_from_tokens = None

    layers = {0: methods.make("quest"), 1: AtAnyLength(), 2: Always()}
    for dense_below, expected in (("auto", [True, False, False]), (100, [True, True, False])):
        steps = EngineSteps(layers, torch.device("cpu"), dense_below)
        steps.dense = True
        assert [steps.reads_all(layer) for layer in layers] == expected


def test_settings_of_an_author_mean_nothing_to_the_runtime(monkeypatch):
    """Whatever they are called: the runtime asks what the class declares."""
    monkeypatch.setattr(base, "REGISTRY", base.REGISTRY.copy())

    @methods.register
    class Mine(methods.ReadsChosen):
        name = "settings_by_known_names"
        every: int = methods.setting(2, "reads each n-th key")
        weighted: bool = methods.setting(True, "weighs them")
        evict_every: int = methods.setting(64, "is written to a log")
        decode_only: bool = methods.setting(False, "is written, too")
        pool: str = methods.setting("head", "and this")
        calibration: str = methods.setting("", "and this")

        def choose(self, cache, q, scaling):
            return cache.positions % self.every == 0

    method = Mine()
    assert obstacle(method, GEOMETRY) == ""
    assert not methods.sparse_prompt(method)
    assert method.prompt_evicts_every == 0
    assert method.role.chooses
    assert not method.role.reads_all
