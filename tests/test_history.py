from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sgnb.events import (
    CompileEnded,
    CompileFailed,
    EpochEnded,
    Event,
    EventError,
    Noticed,
    RunEnded,
    RunStarted,
    to_json,
)
from sgnb.history import History, html_table, shorten

STARTED = RunStarted(
    experiment_name="digits",
    run_dir="RUN_1",
    device="cpu",
    dtype="float32",
    start_epoch=1,
    max_epochs=2,
    train_batches=3,
    valid_batches=1,
    batch_size=16,
    num_parameters=10,
    training_hyperparams={},
    machine={},
)
COMPILED = CompileEnded(graph="train", seconds=10.0, num_graphs=1, num_breaks=0, cache_hits=0, cache_misses=1)


def epoch(number: int, **changes: object) -> EpochEnded:
    values = {
        "epoch": number,
        "train_seconds": 2.0,
        "valid_seconds": 1.0,
        "train_loader_wait_seconds": 0.5,
        "valid_loader_wait_seconds": 0.25,
        "compile_seconds": 0.0,
        "checkpoint_seconds": 0.0,
        "train_loss": 1 / number,
        "valid_loss": None if number == 1 else 0.5,
        "train_metrics": {},
        "valid_metrics": {} if number == 1 else {"Accuracy": 0.9},
        "lr": 0.01,
        "num_samples": 40,
        "num_updates": 3,
        "skipped_updates": 0,
        "peak_mib": 1234.5,
    }
    return EpochEnded(**{**values, **changes})  # type: ignore[arg-type]


def test_a_history_has_one_value_an_epoch_in_every_column() -> None:
    history = History([STARTED, epoch(1), epoch(2)])
    assert history["epoch"] == [1, 2]
    assert history["epoch_seconds"] == [3.0, 3.0]
    assert history["samples_per_second"] == [20.0, 20.0]
    assert history["train_loss"] == [1.0, 0.5]
    assert history["valid_loss"] == [None, 0.5]
    assert history["valid/Accuracy"] == [None, 0.9]
    assert len(history) == 2
    assert history.rows()[1]["valid/Accuracy"] == 0.9
    assert list(history.to_dict()) == list(history.rows()[0]) == history.columns


def test_an_unknown_column_names_those_that_exist() -> None:
    with pytest.raises(KeyError) as caught:
        History([epoch(2)])["loss"]
    assert caught.value.args == (
        "no column 'loss'; there are epoch, epoch_seconds, train_seconds, valid_seconds, train_loader_wait_seconds,"
        " valid_loader_wait_seconds, compile_seconds, checkpoint_seconds, samples_per_second, train_loss, valid_loss,"
        " raw_valid_loss, lr, peak_mib, skipped_updates, valid/Accuracy",
    )


def test_a_repeated_epoch_stands_once_as_it_was_last() -> None:
    history = History([STARTED, epoch(1), epoch(2), STARTED, epoch(2, train_loss=9.0), epoch(3)])
    assert history["epoch"] == [1, 2, 3]
    assert history["train_loss"][1] == 9.0


def test_the_status_is_that_of_the_end() -> None:
    history = History()
    assert (history.status, history.started, history.ended) == ("running", None, None)
    history.append(STARTED)
    ended = RunEnded(status="stopped", seconds=1.0)
    history.append(ended)
    assert (history.status, history.started, history.ended) == ("stopped", STARTED, ended)
    history.append(STARTED)  # Resumed.
    assert history.status == "running"


def test_compile_seconds_are_the_warm_ups_and_the_recompilations() -> None:
    recompiled = epoch(2, compile_seconds=4.0)
    history = History([COMPILED, dataclasses.replace(COMPILED, graph="valid"), epoch(1), recompiled])
    assert history.compile_seconds == 24.0


def test_a_run_that_fell_back_is_not_compiled() -> None:
    assert not History([epoch(1)]).compiled
    assert History([COMPILED]).compiled
    assert not History([COMPILED, CompileFailed(reason="no")]).compiled


def test_notices_are_listed() -> None:
    assert History([Noticed(level="information", message="so")]).notices == ["so"]


def test_a_history_is_read_from_a_run_directory_or_a_file(tmp_path: Path) -> None:
    events: list[Event] = [STARTED, epoch(1)]
    file = tmp_path / "events.jsonl"
    file.write_text("".join(to_json(event) + "\n" for event in events))
    assert History.load(tmp_path).events == History.load(str(file)).events == events


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        History.load(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'events.jsonl'}: no events here; expected a run directory that holds events.jsonl"
    )


def test_events_of_a_newer_schema_are_refused() -> None:
    with pytest.raises(EventError) as caught:
        History([dataclasses.replace(STARTED, schema_version=2)])
    assert str(caught.value) == "schema 2 is newer than this sgnb can read (1); upgrade sgnb"


def test_the_html_is_escaped_and_leaves_empty_columns_out() -> None:
    history = History([STARTED, epoch(1), epoch(2, valid_metrics={"<b>": 0.5})])
    text = history._repr_html_()
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "skipped" not in text
    assert "<caption>History: running, 2 epochs</caption>" in text
    assert html_table(["a_b"], [[1.0]]) == (
        "<table><thead><tr><th>a b</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.123456, "0.1235"), (1234.56, "1,234.6"), (3, "3"), ("x", "x"), (float("nan"), "nan")],
)
def test_numbers_are_shortened(value: object, text: str) -> None:
    assert shorten(value) == text
