from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from sgnb.events import (
    SCHEMA_VERSION,
    CheckpointLoaded,
    CheckpointSaved,
    CompileChecked,
    CompileEnded,
    CompileFailed,
    CompileStarted,
    EpochEnded,
    EpochStarted,
    Event,
    EventError,
    EventWriter,
    GraphBroke,
    Noticed,
    OutOfMemory,
    Recompiled,
    RecompileLimitReached,
    RunEnded,
    RunStarted,
    StepEnded,
    UpdatesSkipped,
    cache_state,
    from_json,
    read_events,
    sentence,
    to_json,
)

STARTED = RunStarted(
    time=1.0,
    experiment_name="digits",
    run_dir="checkpoints/digits/RUN_1",
    device="cpu",
    dtype="float32",
    start_epoch=1,
    max_epochs=2,
    train_batches=3,
    valid_batches=1,
    batch_size=16,
    num_parameters=12345,
    training_hyperparams={"max_epochs": 2},
    machine={"cores": 2},
)
EPOCH = EpochEnded(
    time=2.0,
    epoch=1,
    train_seconds=1.5,
    valid_seconds=0.5,
    train_loader_wait_seconds=0.1,
    valid_loader_wait_seconds=0.0,
    compile_seconds=0.0,
    checkpoint_seconds=0.01,
    train_loss=math.nan,
    valid_loss=0.25,
    train_metrics={"Accuracy": math.inf},
    valid_metrics={"Accuracy": 0.5},
    lr=0.01,
    num_samples=48,
    num_updates=3,
    skipped_updates=0,
    peak_mib=100.0,
)
EVENTS: list[Event] = [
    STARTED,
    CompileStarted(graph="train"),
    CompileEnded(graph="train", seconds=12.34, num_graphs=1, num_breaks=2, cache_hits=0, cache_misses=1),
    CompileFailed(reason="No compiler.", hint="Install g++."),
    CompileChecked(
        agreed=False, loss_difference=1e-3, grad_norm_difference=math.inf, output_difference=0.0, tolerance=1e-2
    ),
    GraphBroke(reason="print", file="m.py", line=3, page="https://x/gb0059.html"),
    RecompileLimitReached(function="forward", reason="k == 8"),
    OutOfMemory(
        epoch=1, batch=2, batch_size=64, allocated_mib=1.5, total_mib=16384.0, pieces=1, advice="Try batch size 32."
    ),
    UpdatesSkipped(epoch=1, batch=9, in_a_row=5, loss_scale=0.5),
    Recompiled(epoch=2, seconds=3.0, num_graphs=3, reason="a new shape"),
    EpochStarted(epoch=1),
    StepEnded(phase="train", epoch=1, batch=1, num_batches=3, loss=None, lr=0.1),
    EPOCH,
    CheckpointSaved(path="ckpt_latest.pth", epoch=1),
    CheckpointLoaded(path="ckpt_latest.pth", epoch=1),
    Noticed(level="warning", message="äö <b> \n"),
    RunEnded(status="failed", seconds=4.0, reason="it broke"),
]


def same(one: Event, other: Event) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)  # NaN is not equal to itself; its repr is.


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_from_its_line(event: Event) -> None:
    line = to_json(event)
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert same(from_json(line), event)


def test_every_kind_of_event_was_tried() -> None:
    assert {type(event) for event in EVENTS} == set(Event.__args__)


def test_an_event_is_frozen_and_knows_its_time() -> None:
    event = EpochStarted(epoch=1)
    assert event.time > 1e9
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.epoch = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"event": "Bogus"}', "'Bogus'"),
        ('{"event": "EpochStarted", "epoch": 1, "more": 2}', "'more'"),
        ("[1]", "pop expected at most 1 argument, got 2"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"epoch": 1}', "'event'"),
    ],
)
def test_a_line_of_another_version_is_refused_with_its_text(line: str, reason: str) -> None:
    with pytest.raises(EventError) as caught:
        from_json(line)
    beginning = f"not an event of schema {SCHEMA_VERSION}: {line!r} ("
    assert str(caught.value).startswith(beginning)
    assert str(caught.value).endswith("); was it written by a newer sgnb?")


def test_a_reader_takes_whole_lines_only_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    assert read_events(file) == ([], 0)
    first, second = to_json(EVENTS[1]) + "\n", to_json(EVENTS[6]) + "\n"
    file.write_text(first + second[:10])
    events, offset = read_events(file)
    assert events == [EVENTS[1]]
    assert offset == len(first)
    with file.open("a") as stream:
        stream.write(second[10:])
    assert read_events(file, offset) == ([EVENTS[6]], len(first + second))


def test_a_broken_line_is_named_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    first = to_json(EVENTS[1]) + "\n"
    file.write_text(first + "{}\n")
    with pytest.raises(EventError) as caught:
        read_events(file)
    assert str(caught.value) == (
        f"{file}, byte {len(first)}: not an event of schema 1: '{{}}' ('event'); was it written by a newer sgnb?"
    )


def test_a_writer_appends_one_line_an_event(tmp_path: Path) -> None:
    file = tmp_path / "run" / "events.jsonl"
    for event in EVENTS:
        writer = EventWriter(file)
        writer(event)
        writer.close()
    events, _ = read_events(file)
    assert len(events) == len(EVENTS)
    assert all(map(same, events, EVENTS))


def test_seconds_of_an_epoch_are_those_of_both_loops() -> None:
    assert EPOCH.epoch_seconds == 2.0
    assert EPOCH.samples_per_second == 32.0
    assert math.isnan(dataclasses.replace(EPOCH, train_seconds=0.0).samples_per_second)


def test_a_log_has_a_sentence_for_what_matters() -> None:
    assert [sentence(event) for event in EVENTS] == [
        "digits on cpu in float32, 12,345 parameters",
        "compiling the training graph…",
        "compiled the training graph in 12.3 s (cold cache, 2 graph breaks)",
        "not compiled, the run goes on eagerly: No compiler. Install g++.",
        "compiled and eager DISAGREE (loss differs by 1.0e-03, gradient norm by inf, tolerance 1e-02)",
        "graph break at m.py:3: print (https://x/gb0059.html)",
        "given up by the compiler, eager from now on: forward; k == 8",
        "out of memory in epoch 1, batch 2 (64 samples): 2 of 16,384 MiB allocated. Try batch size 32.",
        "warning: 5 updates in a row skipped (epoch 1, batch 9): the gradients are not finite, loss scale 0.5",
        "recompiled in epoch 2 for 3.0 s: a new shape",
        None,
        None,
        "epoch 1: 2.00 s, train loss nan, valid loss 0.2500, Accuracy 0.5000, 32 samples/s",
        None,
        "going on after epoch 1 from ckpt_latest.pth",
        "warning: äö <b> \n",
        "failed after 4.0 s: it broke",
    ]


@pytest.mark.parametrize(
    ("hits", "misses", "state"), [(0, 2, "cold cache"), (2, 0, "warm cache"), (1, 1, "partly warm cache")]
)
def test_the_cache_is_cold_warm_or_partly_warm(hits: int, misses: int, state: str) -> None:
    assert cache_state(hits, misses) == state
