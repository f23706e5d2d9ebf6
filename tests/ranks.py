"""Processes that work together as under torchrun, without the start of Python and torch that each would need."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore


def run_ranks(world: int, main: Callable[..., None], *arguments: Any, folder: Path) -> list[str]:
    """Run a function of a module in so many copies of this process, each with the environment of its rank.

    Returns what each rank printed, its errors included; a rank that fails or takes minutes is an ``AssertionError``.
    """
    # after a backward pass a process that sees a GPU has threads of autograd, which a copy of it would lack
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "CUDA_VISIBLE_DEVICES": ""}
    files = [folder / f"rank{rank}.txt" for rank in range(world)]
    ranks = []
    for rank, file in enumerate(files):
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(context.Process(target=_rank, args=(file, environment, main, arguments), daemon=True))
        ranks[-1].start()
    end = time.monotonic() + 300
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    said = [file.read_text(encoding="utf-8") for file in files]
    assert codes == [0] * world, (codes, *said)
    return said


def _rank(file: Path, environment: dict[str, str], main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    with file.open("w", encoding="utf-8") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        sys.stdout = sys.stderr = said
        torch.set_num_threads(1)
        try:
            main(*arguments)
        except BaseException:
            traceback.print_exc()
            raise
