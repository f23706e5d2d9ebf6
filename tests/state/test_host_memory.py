"""Host memory of a layer: how it is copied, rearranged, sized and pinned."""

import copy
import itertools
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

from foveate.runtime import offload
from foveate.state import host_memory
from foveate.state.host_memory import HostMemory

SLOTS = 96


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(host_memory, "SEGMENT_BYTES", 1 << 12)
    made = HostMemory(2, 2, (8, 4), 4, torch.float32, torch.device("cpu"))
    made.reserve(SLOTS)
    made.write(0, 0, torch.randn(2, 2, SLOTS, 8), torch.randn(2, 2, SLOTS, 4))
    return made


@pytest.fixture
def most(monkeypatch):
    """How many segments there were at once."""
    alive, counts = weakref.WeakSet(), []

    class Counted(host_memory._Segment):
        def __init__(self, *given):
            super().__init__(*given)
            alive.add(self)
            counts.append(len(alive))

    monkeypatch.setattr(host_memory, "_Segment", Counted)
    return counts


def content(memory):
    k, v = (torch.empty(memory.batch, 2, SLOTS, dim) for dim in (8, 4))
    memory.read(0, SLOTS, 0, k, v)
    return k, v


def test_rows_are_taken_segment_by_segment(most, memory):
    before, number = content(memory), len(memory._segments)
    assert number > 2
    memory.take_rows([1, 0, 1])
    assert max(most) == number + 1
    for now, then in zip(content(memory), before):
        assert torch.equal(now, then[[1, 0, 1]])
    assert [x.data_ptr() for x in memory.pages.keys] == memory.pages.addresses[0, :number].tolist()


@pytest.mark.parametrize(("first", "last"), [(0, SLOTS), (3, 5), (7, 8), (30, 75)])
@pytest.mark.parametrize(("row", "rows"), [(0, 2), (0, 1), (1, 1)])
def test_some_slots_of_some_rows_are_written_and_read(memory, row, rows, first, last):
    """Across segments, and nothing else is touched."""
    expected, new = content(memory), [torch.randn(rows, 2, last - first, dim) for dim in (8, 4)]
    memory.write(row, first, *new)
    for one, x in zip(expected, new):
        one[row : row + rows, :, first:last] = x
    for found, wanted in zip(content(memory), expected):
        assert torch.equal(found, wanted)
    read = [torch.full_like(x, torch.nan) for x in new]
    memory.read(first, last, row, *read)
    for found, wanted in zip(read, new):
        assert torch.equal(found, wanted)


def test_a_copy_is_copied_once(most, memory):
    number = len(memory._segments)
    with mock.patch.object(torch.Tensor, "__deepcopy__", side_effect=AssertionError):
        twin = copy.deepcopy(memory)
    assert max(most) == 2 * number
    for now, then in zip(content(twin), content(memory)):
        assert torch.equal(now, then)
    for mine, its in itertools.product(twin.pages.keys, memory.pages.keys):
        assert mine.data_ptr() != its.data_ptr()


def test_a_short_first_prompt_does_not_make_small_segments():
    memory = HostMemory(1, 2, (8, 8), 16, torch.float32, torch.device("cpu"))
    memory.reserve(64)
    assert memory.slots == 4096
    memory = HostMemory(1, 8, (512, 512), 16, torch.float32, torch.device("cpu"))
    memory.reserve(16)
    assert memory.slots == (8 << 20) // (8 * 1024 * 4)


@pytest.mark.parametrize(("code", "says"), [(2, "too little is free; read fewer"), (1, r"\(1\): read fewer")])
def test_what_cannot_be_pinned_is_said_and_the_error_cleared(code, says, monkeypatch):
    device, runtime, entered = torch.device("cuda", 1), mock.MagicMock(), []
    runtime.cudaHostRegister.return_value = code
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda one: entered.append(one) or mock.MagicMock())
    launched = mock.Mock(side_effect=RuntimeError)
    monkeypatch.setattr(torch, "ones", launched)
    with pytest.raises(RuntimeError, match=f"offload=True: 0 MB of host memory could not be pinned.*{says}.*leave off"):
        host_memory._pin(torch.zeros(4), device)
    assert entered == [device]
    assert launched.call_count == 1
    assert runtime.cudaHostRegister.call_args.args[2] == 1


def test_memory_is_unpinned_on_its_device(monkeypatch):
    device, waited, entered, runtime = torch.device("cuda", 1), [], [], mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda one: entered.append(one) or mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    host_memory._unpin(123, torch.zeros(1), device)
    assert (waited, entered) == ([device], [device])
    runtime.cudaHostUnregister.assert_called_once_with(123)


def test_the_page_cache_of_a_group_is_free(monkeypatch):
    files = {
        "meminfo": "MemAvailable: 1000000 kB\n",
        "memory.max": "5000\n",
        "memory.current": "4500\n",
        "memory.stat": "anon 100\ninactive_file 1500\nactive_file 500\n",
    }
    monkeypatch.setattr(offload.Path, "read_text", lambda path, encoding: files[path.name])
    assert offload._free_host_memory() == 2500


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_not_shared_with_forked_processes():
    x = host_memory._zeros((1 << 20,), torch.float32)
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, permissions = line.split()[:2]
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= x.data_ptr() < last:
            found.append(permissions)
    assert found == ["rw-p"]  # private, not shared
    assert not x.any()


def test_memory_that_cannot_be_allocated():
    with pytest.raises(RuntimeError, match=r"offload=True: .* MB of host memory could not be allocated"):
        host_memory._zeros((1 << 40, 1 << 20), torch.float32)
