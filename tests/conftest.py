"""What holds for every test: it leaves no environment variable, thread or child process behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from sgnb.events import CompileEnded, CompileFailed, EpochEnded, RunEnded, RunStarted
from sgnb.history import History

GRACE_SECONDS = 5.0
# The inductor sets its own variables and keeps its compile workers for the next graph; multiprocessing keeps a tracker.
KEPT_VARIABLES = ("PYTEST_", "TORCH", "TRITON_", "KMP_", "OMP_")
KEPT_PROCESSES = ("compile_worker", "resource_tracker", "forkserver")
KEPT_THREADS = ("ThreadPoolExecutor", "asyncio_")  # Idle workers of pools that libraries keep.


@pytest.fixture(scope="session", autouse=True)
def one_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share one cache of compiled graphs inside the run: the user's if it is set, else one that starts empty."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        yield
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    yield
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    variables, threads, processes = _variables(), set(threading.enumerate()), _processes()
    torch_threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if torch_threads is not None:
        sys.modules["torch"].set_num_threads(torch_threads)
    changed = {name for name, _ in variables.items() ^ _variables().items()}
    _restore(variables)
    assert not changed, f"the test changed environment variables: {sorted(changed)}"
    left = _wait_for_none(lambda: [thread.name for thread in _threads() - threads])
    assert not left, f"the test left threads behind: {left}"
    orphans = _wait_for_none(lambda: sorted(_processes().keys() - processes.keys()))
    commands = [_processes().get(pid, "") for pid in orphans]
    _end(orphans)
    assert not orphans, f"the test left processes behind: {commands}"


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(KEPT_VARIABLES)}


def _restore(variables: dict[str, str]) -> None:
    for name in _variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.daemon and not t.name.startswith(KEPT_THREADS)}


def _processes() -> dict[int, str]:
    """Return the commands of this process's own children that still run, by their process ids."""
    found = {}
    for child in psutil.Process().children():
        try:
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not any(word in command for word in KEPT_PROCESSES):
                found[child.pid] = command
        except psutil.NoSuchProcess:
            continue  # It ended in between.
    return found


def _end(pids: list[int]) -> None:
    for child in psutil.Process().children():
        if child.pid in pids:
            child.kill()


def _wait_for_none(look: Callable[[], list[Any]]) -> list[Any]:
    end = time.monotonic() + GRACE_SECONDS
    while (left := look()) and time.monotonic() < end:
        time.sleep(0.05)
    return left


@pytest.fixture
def a_history():
    """Return a function that makes a history of epochs with these seconds."""
    return _a_history


def _a_history(seconds, *, compile_seconds=0.0, failed="", loss=0.5, cache=(0, 2)):
    history = History()
    history.append(
        RunStarted(
            experiment_name="e", run_dir="r", device="cpu", dtype="float32", start_epoch=1, max_epochs=len(seconds),
            train_batches=1, valid_batches=1, batch_size=1, num_parameters=1, training_hyperparams={},
            machine={"cpu": "a <fast> one", "cores": 2},
        )
    )  # fmt: skip
    if compile_seconds:
        hits, misses = cache
        history.append(
            CompileEnded(
                graph="train", seconds=compile_seconds, num_graphs=1, num_breaks=0, cache_hits=hits, cache_misses=misses
            )
        )
    if failed:
        history.append(CompileFailed(reason=failed))
    for epoch, value in enumerate(seconds, 1):
        history.append(
            EpochEnded(
                epoch=epoch,
                train_seconds=0.8 * value,
                valid_seconds=0.2 * value,
                train_loader_wait_seconds=0.1 * value,
                valid_loader_wait_seconds=0.0,
                compile_seconds=0.0,
                checkpoint_seconds=0.0,
                train_loss=loss,
                valid_loss=0.4,
                train_metrics={},
                valid_metrics={"Accuracy": 0.9},
                lr=0.1,
                num_samples=100,
                num_updates=10,
                skipped_updates=0,
                peak_mib=500.0,
            )
        )
    history.append(RunEnded(status="finished", seconds=1.0))
    return history
