import dataclasses

import pytest

from sgnb.events import (
    CompileEnded,
    CompileFailed,
    CompileStarted,
    EpochStarted,
    Event,
    RunEnded,
    RunStarted,
    StepEnded,
)
from sgnb.ui.progress import Progress

STARTED = RunStarted(
    experiment_name="digits",
    run_dir="run",
    device="cpu",
    dtype="float32",
    start_epoch=1,
    max_epochs=5,
    train_batches=20,
    valid_batches=5,
    batch_size=64,
    num_parameters=1000,
    training_hyperparams={},
    machine={},
)


def step(phase: str, batch: int, loss: float | None = None) -> StepEnded:
    return StepEnded(phase=phase, epoch=2, batch=batch, num_batches=20, loss=loss, lr=0.1)  # type: ignore[arg-type]


COMPILED = CompileEnded(graph="train", seconds=12, num_graphs=1, num_breaks=0, cache_hits=0, cache_misses=1)


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ([], "starting the process…"),
        ([STARTED], "preparing the first epoch…"),
        ([STARTED, CompileStarted(graph="train", time=100.0)], "compiling the training graph… 12 s"),
        ([STARTED, CompileStarted(graph="valid", time=111.2)], "compiling the validation graph… 1 s"),
        ([STARTED, CompileStarted(graph="train"), COMPILED], "preparing the first epoch…"),
        ([STARTED, CompileStarted(graph="train"), CompileFailed(reason="no g++")], "preparing the first epoch…"),
        ([STARTED, EpochStarted(epoch=2)], "epoch 2 of 5: about to start"),
        ([STARTED, step("train", 7, 0.5)], "epoch 2 of 5: training, batch 7 of 20, loss 0.5000"),
        ([STARTED, step("train", 7, 0.5), step("valid", 3)], "epoch 2 of 5: validating, batch 3 of 20, loss 0.5000"),
        (
            [STARTED, RunEnded(status="failed", seconds=3.0, reason="out of memory")],
            "failed after 3.0 s: out of memory",
        ),
    ],
)
def test_the_line_says_what_the_run_does(events: list[Event], line: str) -> None:
    progress = Progress()
    for event in events:
        progress.update(event)
    assert progress.line(now=112.0) == line


def test_a_resumed_run_begins_with_the_epochs_it_has() -> None:
    progress = Progress()
    progress.update(dataclasses.replace(STARTED, start_epoch=3))
    assert progress.completed_epochs == 2
