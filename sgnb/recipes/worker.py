"""The inside of a run's process: train the recipe of a run directory, hear its stop file, and always leave an end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from sgnb.events import EVENTS_FILE, EventWriter, Listener, RunEnded, RunStarted, Status, read_events
from sgnb.recipes.compose import load_recipe
from sgnb.training import Trainer

RECIPE_FILE = "recipe.yaml"
STOP_FILE = "stop"
_POLL_SECONDS = 0.2


def train_in(run_dir: Path, listeners: Sequence[Listener] = ()) -> int:
    """Train `recipe.yaml` of a run directory there. Returns the exit code: 0 unless the run failed."""
    start = time.monotonic()
    try:
        recipe = load_recipe(run_dir / RECIPE_FILE)
        trainer = recipe.build_trainer(run_dir, listeners)
        train_loader, valid_loader = recipe.build_loaders()
        model = recipe.build_model()
        with _stopped_by_file(trainer, run_dir, start):
            trainer.train(model, recipe.training_hyperparams, train_loader, valid_loader)
    except BaseException as error:  # noqa: BLE001 (a process without an end would seem to have died)
        traceback.print_exc()  # The log holds the whole story; the end, its cause.
        _end(run_dir, "failed", f"{type(error).__name__}: {error}", start)
        return 1
    return 0


def _end(run_dir: Path, status: Status, reason: str, start: float) -> None:
    """Write the end of the run, unless the trainer has done so."""
    events, _ = read_events(run_dir / EVENTS_FILE)
    begun = max((index for index, event in enumerate(events) if isinstance(event, RunStarted)), default=-1)
    if any(isinstance(event, RunEnded) for event in events[begun + 1 :]) and begun >= 0:
        return
    writer = EventWriter(run_dir / EVENTS_FILE)
    writer(RunEnded(status=status, seconds=time.monotonic() - start, reason=reason))
    writer.close()


@contextlib.contextmanager
def _stopped_by_file(trainer: Trainer, run_dir: Path, start: float) -> Iterator[None]:
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_SECONDS):
            if not (run_dir / STOP_FILE).exists():
                continue
            if trainer.compiling:  # The compiler cannot be interrupted, and there is nothing to lose yet.
                _end(run_dir, "stopped", "stopped while compiling, before the first epoch", start)
                for child in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):  # It ended by itself meanwhile.
                        child.kill()
                os._exit(0)
            trainer.stop()

    thread = threading.Thread(target=watch, name="sgnb-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
