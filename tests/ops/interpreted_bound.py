"""Decode steps of an engine with a bound far above its rows: the same outputs, and no more work, than with a near one.

Kernels run under Triton's interpreter, which counts what they multiply and read.
"""

import functools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from foveate import methods
from foveate.ops import Logits, dispatch
from foveate.ops.attend import decode_kernel
from foveate.ops.gpu import tiles
from foveate.ops.score import bounds_kernel, kept_logits_kernel, low_rank_kernel, pooled_kernel
from foveate.ops.select import rows_kernel
from foveate.runtime import EngineSteps

pytestmark = pytest.mark.usefixtures("poisoned")

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 16
LENGTHS = (300, 170, 0, 33)
"""Of rows, the third of which is padding."""
NEAR, FAR = 304, 1536
SPECS = [
    "dense",
    "kascade_paper:top_k=0.2,min_k=4,anchors=[0,2],decode_only=true",
    "kascade:top_k=0.2,min_k=4,anchors=[1]",
    'kascade_paper:top_k=40,anchors=[1],heads={"2": [1, 0]},decode_only=true',
    "oracle_topk:top_k=0.2,min_k=4,decode_only=true",
    "omnikv:top_k=0.2,min_k=4,filters=[1],wait=0",
    "omnikv:top_k=0.2,min_k=4,filters=[1],wait=0,score=logit",
    "pages:top_k=0.2,page_size=8,rank=1,weighted=false",
    "locks:top_k=0.2,page_size=16,rank=2",
    "kascade_pages:top_k=0.2,min_k=4,pool=kv_head,pooling=post_softmax,anchors=[1],weighted=false",
    "kascade_pages:top_k=40,pool=kv_head,pooling=post_softmax,anchors=[0],first_layer=pages,page_size=4,weighted=false",
]


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch):
    """Kernels run, as on a GPU of few multiprocessors; only short rows are kept whole."""
    monkeypatch.setattr(dispatch, "use_kernel", lambda *tensors: True)
    for kernel in (decode_kernel, pooled_kernel, kept_logits_kernel, low_rank_kernel, bounds_kernel, rows_kernel):
        monkeypatch.setattr(kernel, "multiprocessors", lambda device: 6)
    monkeypatch.setattr(rows_kernel, "_HELD", 512)


@contextmanager
def counted(monkeypatch):
    """Matrix products and bytes read inside the block."""
    builder, work = interpreter.interpreter_builder, SimpleNamespace(products=0, read=0)
    dot, load = builder.create_dot, builder.create_masked_load

    def create_dot(*arguments):
        work.products += 1
        return dot(*arguments)

    def create_masked_load(pointers, mask, *arguments):
        found = load(pointers, mask, *arguments)
        work.read += int(mask.data.sum()) * found.data.itemsize
        return found

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_dot", create_dot)
        patch.setattr(builder, "create_masked_load", create_masked_load)
        yield work


def layers_of(spec):
    """One layer where all are alike, else anchors and those after them."""
    return 3 if spec.startswith(("kascade", "omnikv")) else 1


def step(monkeypatch, spec, bound, captured=False, layers=None):
    """Outputs of a step's layers, ``[layers, B, Hq, D]``, and its work; of one to be ``captured``, of prompts' rows."""
    layers = layers or layers_of(spec)
    generator = torch.Generator().manual_seed(0)
    table = torch.full((len(LENGTHS), -(-bound // BLOCK)), 1 << 20, dtype=torch.int32)  # read, it is out of memory
    blocks = [-(-length // BLOCK) for length in LENGTHS]
    order = torch.randperm(sum(blocks), generator=generator).int()
    for row, own in enumerate(order.split(blocks)):
        table[row, : len(own)] = own
    memory = torch.randn(layers, len(order), KV_HEADS, BLOCK, 2 * DIM, generator=generator)
    q = 2 * torch.randn(layers, len(LENGTHS), HEADS, 1, DIM, generator=generator)
    steps = EngineSteps({n: methods.parse(spec).for_layer(n, layers) for n in range(layers)}, q.device, dense_below=0)
    slots = torch.arange(len(order) * BLOCK)
    for n in range(layers):
        steps.written(n, HEADS, memory[n, ..., :DIM], memory[n, ..., DIM:], slots)
    with counted(monkeypatch) as work:
        if captured:
            steps.begin_capture(torch.tensor(LENGTHS), table, bound)
        else:
            steps.begin(torch.tensor(LENGTHS), table, bound, LENGTHS)
        outs = [
            steps.attend(n, q[n], memory[n, ..., :DIM], memory[n, ..., DIM:], Logits(DIM**-0.5)) for n in range(layers)
        ]
    return torch.stack(outs)[:, :, :, 0], work, float(steps.keys_read())


@functools.cache
def dense_step(layers):
    """What a step of dense attention gives, and its work."""
    with pytest.MonkeyPatch.context() as patch:
        outs, work, _ = step(patch, "dense", NEAR, layers=layers)
    return outs, work


@pytest.mark.parametrize("spec", SPECS)
def test_a_far_bound_gives_the_same_for_the_same_work(spec, monkeypatch):
    near, work, read = step(monkeypatch, spec, NEAR)
    far, work_of_far, read_of_far = step(monkeypatch, spec, FAR)
    torch.testing.assert_close(far, near)
    assert read_of_far == pytest.approx(read)
    assert not far[:, LENGTHS.index(0)].any()
    assert work_of_far.products == work.products
    # of a list of places in pages, which is as long as the bound asks, keys are made to its end
    assert work_of_far.read <= (1.4 if spec.startswith("kascade_pages") else 1.1) * work.read


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_scored_for_rows_that_are_read_whole(spec, monkeypatch):
    outs, work, _ = step(monkeypatch, spec, NEAR, captured=True)
    expected, dense = dense_step(layers_of(spec))
    torch.testing.assert_close(outs, expected)
    assert work.read <= 1.08 * dense.read
    if "page" not in spec:  # a program of pages looks at one block of them at least
        assert work.products == dense.products


@triton.jit
def _splits_of_rows(found_ptr, here_ptr, rows, splits, room):
    used, each = tiles.split_of_row(tl.load(here_ptr + tl.program_id(0)), rows, splits, room)
    tl.store(found_ptr + 2 * tl.program_id(0), used)
    tl.store(found_ptr + 2 * tl.program_id(0) + 1, each)


@pytest.mark.parametrize("rows", [8, 64, 256, 1024])
@pytest.mark.parametrize("bound", [128, 2048, 8192])
def test_a_row_takes_what_it_would_be_given_alone(rows, bound):
    """Of the grid of a far bound: all that the longest would be given, and of others by the same estimate."""
    room = 396
    here = sorted({n for n in (0, 1, 2, 13, 20, 50, 100, 128, 400, 2048, 8192) if n <= bound})
    splits, each = tiles.split(rows, bound, room)
    found = torch.zeros(len(here), 2, dtype=torch.int32)
    _splits_of_rows[(len(here),)](found, torch.tensor(here, dtype=torch.int32), rows, splits, room)

    def time(programs, blocks):
        return (-(-rows * programs // room) + 0.5) * (blocks + 2) + programs / 64

    for blocks, (programs, of_program) in zip(here, found.tolist()):
        assert programs * of_program >= blocks
        assert (programs - 1) * of_program < max(blocks, 1)
        assert 1 <= programs <= splits
        assert time(programs, of_program) <= 1.1 * time(*tiles.split(rows, max(blocks, 1), room))
    assert tuple(found[-1].tolist()) == (splits, each)
