"""What caches hold while a prompt and its answer come, as measured and as drawn."""

import pytest

from benchmarks import cache_memory

METHODS = ("dense", "snapkv:top_k=0.25", "pages:top_k=64,page_size=4")


@pytest.fixture
def rows(tiny_folder, monkeypatch):
    monkeypatch.setattr(cache_memory, "OFFLOADED", METHODS[-1])
    plan = {"context": 192, "new": 5, "chunk": 64, "hot": 0.6, "dtype": "float32", "device": "cpu"}
    return cache_memory.run(cache_memory.Plan(str(tiny_folder), METHODS, **plan))


def test_points_are_what_is_held_and_the_most_before(rows, tmp_path):
    assert [row["case"]["method"] for row in rows] == [*METHODS, METHODS[-1]]
    dense, snapkv, pages, offloaded = ([point[:2] for point in row["points"]] for row in rows)
    assert [tokens for tokens, _ in dense] == [64, 128, 192, 193, 194, 195, 196]
    (at_end, peak), (left_at, left) = snapkv[2:4]
    assert at_end == left_at == 192
    assert left < dense[2][1] <= peak
    assert dense[-1][1] < pages[-1][1]
    assert offloaded[-1][1] < offloaded[-6][1]  # buffers of the prompt, which go when decode steps begin
    assert [row["points"][-1][2] > 0 for row in rows] == [False, False, False, True]
    cache_memory.draw(rows, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000
