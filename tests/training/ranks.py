"""Runs a function in several processes of one gloo group, for tests."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240) -> list[Any]:
    """Return what `function(rank, world_size, *args)` returned in each process."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        work = (function, world_size, folder, args)
        processes = [context.Process(target=_rank, args=(rank, *work)) for rank in range(world_size)]
        for process in processes:
            process.start()
        limit = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, limit - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        # Errors are on the standard error of the processes, which pytest shows.
        assert codes == [0] * world_size, f"exit codes {codes} after at most {timeout} s"
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(rank: int, function: Any, world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(function(rank, world_size, *args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
