"""The run state and its view, with a process replaced by a file that the test writes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sgnb.events import CompileStarted, EpochEnded, EpochStarted, Event, EventWriter, RunEnded, RunStarted, StepEnded
from sgnb.recipes import Recipe
from sgnb.ui.guard import Guard
from sgnb.ui.run_state import PANEL_FILE, RunState
from sgnb.ui.runs import line_html, run_panel
from sgnb.ui.state import PanelState


class FakeRun:
    """A run without a process: the test writes its events and says when it ends."""

    made: ClassVar[list[FakeRun]] = []

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.status, self.log = run_dir, "running", "log <b>line</b>"
        self.asked: list[str] = []

    @classmethod
    def start(cls, recipe: Recipe, run_dir: Path | None = None) -> FakeRun:
        folder = Path(recipe.ckpt_root_dir) / "digits" / f"RUN_{len(cls.made)}"
        folder.mkdir(parents=True)
        cls.made.append(cls(folder))
        return cls.made[-1]

    start_comparison = start

    @classmethod
    def find(cls, root: str | Path) -> list[FakeRun]:
        return [run for run in reversed(cls.made) if Path(root) in run.run_dir.parents]

    def write(self, *events: Event, arm: str = "") -> None:
        writer = EventWriter(self.run_dir / arm / "events.jsonl")
        for event in events:
            writer(event)
        writer.close()

    def stop(self) -> None:
        self.asked.append("stop")

    def kill(self) -> None:
        self.asked.append("kill")

    def log_tail(self, n: int = 40) -> str:
        return self.log


ENDED = RunEnded(status="finished", seconds=2.0)


@pytest.fixture(autouse=True)
def fake_run(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRun.made = []
    monkeypatch.setattr("sgnb.ui.run_state.Run", FakeRun)
    monkeypatch.setattr("sgnb.ui.run_state.PERIOD_SECONDS", 0.01)


@pytest.fixture
def runs() -> Iterator[RunState]:
    state = RunState("main", Guard())
    yield state
    state.close()
    assert not state.guard.errors


@pytest.fixture
def state(recipe: Recipe) -> PanelState:
    return PanelState(recipe)


def wait_for(condition: Any, timeout_seconds: float = 10) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


class View:
    """The widgets of a run panel by what they are."""

    def __init__(self, panel: Any) -> None:
        buttons, self.status, self.line, self.epochs, self.batches, self.results, self.log_fold = panel.children[:7]
        self.run, self.compare, self.stop = buttons.children
        self.log = self.log_fold.children[0]


def test_run_follows_a_run_from_start_to_end(
    state: PanelState, runs: RunState, started: RunStarted, epoch_ended: Callable[..., EpochEnded]
) -> None:
    view = View(run_panel(state, runs))
    assert (view.run.disabled, view.stop.disabled) == (False, True)
    view.run.click()
    (run,) = FakeRun.made
    assert json.loads((run.run_dir / PANEL_FILE).read_text()) == {"key": "main", "kind": "run"}
    assert (view.run.disabled, view.compare.disabled, view.stop.disabled) == (True, True, False)
    run.write(
        started, EpochStarted(epoch=1), StepEnded(phase="train", epoch=1, batch=7, num_batches=20, loss=1.5, lr=0.1)
    )
    wait_for(lambda: "epoch 1 of 2: training, batch 7 of 20, loss 1.5000" in view.line.value)
    assert (view.epochs.value, view.epochs.max, view.batches.value, view.batches.max) == (0, 2, 7, 20)
    assert view.results.value == ""
    run.write(epoch_ended(1))
    wait_for(lambda: view.results.value)
    assert "<svg" in view.results.value
    assert "<td>1.25</td>" in view.results.value
    run.write(epoch_ended(2), ENDED)
    run.status = "finished"
    runs.join(timeout=10)
    assert runs.status == "finished"
    assert "<b>Finished.</b>" in view.status.value
    assert "finished after 2.0 s" in view.line.value
    assert (view.run.disabled, view.stop.disabled, view.epochs.layout.display) == (False, True, "none")


def test_stop_asks_first_and_kills_when_asked_again(state: PanelState, runs: RunState) -> None:
    view = View(run_panel(state, runs))
    view.run.click()
    (run,) = FakeRun.made
    view.stop.click()
    assert (run.asked, runs.status, view.stop.description) == (["stop"], "stopping", "Kill (loses this epoch)")
    view.stop.click()
    assert run.asked == ["stop", "kill"]
    run.status = "died"
    runs.join(timeout=10)
    assert runs.status == "died"


def test_a_run_that_died_says_its_last_words(state: PanelState, runs: RunState) -> None:
    view = View(run_panel(state, runs))
    view.run.click()
    FakeRun.made[0].log = "Killed: out of <memory>"
    FakeRun.made[0].status = "died"
    runs.join(timeout=10)
    assert "The process died without a word of its own." in view.status.value
    assert "Killed: out of &lt;memory&gt;" in view.status.value


def test_compiling_ticks(runs: RunState, recipe: Recipe, started: RunStarted) -> None:
    run = FakeRun.start(recipe)
    run.write(started, CompileStarted(graph="train", time=100.0))
    runs.follow(run)
    assert "compiling the training graph… 12 s" in line_html(runs, now=112.3)


def test_texts_of_logs_and_metrics_are_escaped(
    state: PanelState, runs: RunState, started: RunStarted, epoch_ended: Callable[..., EpochEnded]
) -> None:
    view = View(run_panel(state, runs))
    view.run.click()
    FakeRun.made[0].write(started, epoch_ended(1))
    wait_for(lambda: view.results.value)
    assert "Accuracy<b>" not in view.results.value
    assert "Accuracy&lt;b&gt;" in view.results.value
    assert "log &lt;b&gt;line&lt;/b&gt;" in view.log.value


def test_nothing_starts_while_input_is_to_be_corrected(state: PanelState, runs: RunState) -> None:
    guard = Guard()
    view = View(run_panel(state, runs, guard))
    state.set("max_epochs", 0)
    view.run.click()
    assert [str(error) for error in guard.errors] == ["training_hyperparams.max_epochs: expected at least 1, got 0"]
    assert FakeRun.made == []


def test_a_second_run_waits_for_the_first(runs: RunState, recipe: Recipe) -> None:
    runs.start(recipe)
    with pytest.raises(RuntimeError) as caught:
        runs.start(recipe)
    assert str(caught.value) == (
        "this panel's run is still going on: stop it first, or open another panel with panel(key=...)"
    )


def test_a_new_panel_finds_the_running_run_of_its_key(
    runs: RunState, recipe: Recipe, started: RunStarted, epoch_ended: Callable[..., EpochEnded]
) -> None:
    for key, status in (("main", "running"), ("main", "finished"), ("other", "running")):
        earlier = RunState(key, Guard())
        earlier.start(recipe)
        FakeRun.made[-1].status = status
        earlier.close()
    FakeRun.made[0].write(started, epoch_ended(1))
    runs.find(recipe.ckpt_root_dir)
    assert runs.run is FakeRun.made[0]
    assert runs.status == "running"
    assert len(runs.arms["run"]) == 1


def test_a_new_panel_replays_the_last_run_when_none_is_running(
    runs: RunState, recipe: Recipe, started: RunStarted, epoch_ended: Callable[..., EpochEnded]
) -> None:
    earlier = RunState("main", Guard())
    earlier.start(recipe)
    earlier.close()
    FakeRun.made[0].status = "finished"
    FakeRun.made[0].write(started, epoch_ended(1), epoch_ended(2), ENDED)
    runs.find(recipe.ckpt_root_dir)
    assert (runs.status, len(runs.arms["run"])) == ("finished", 2)


def test_runs_that_no_panel_started_are_left_alone(runs: RunState, recipe: Recipe) -> None:
    FakeRun.start(recipe)
    runs.find(recipe.ckpt_root_dir)
    assert (runs.run, runs.status) == (None, "idle")


def test_a_comparison_shows_both_arms(
    state: PanelState, runs: RunState, started: RunStarted, epoch_ended: Callable[..., EpochEnded]
) -> None:
    view = View(run_panel(state, runs))
    view.compare.click()
    (run,) = FakeRun.made
    wait_for(lambda: "starting the processes…" in view.line.value)
    run.write(started, epoch_ended(1, seconds=0.9), arm="baseline")
    run.write(started, CompileStarted(graph="train"), arm="compile")
    wait_for(lambda: "compile: compiling the training graph…" in view.line.value)
    assert "baseline: epoch" in view.line.value or "baseline: preparing" in view.line.value
    wait_for(lambda: "baseline s" in view.results.value)
    assert view.epochs.max == 4


def test_an_unreadable_line_is_shown_and_the_panel_goes_on(state: PanelState) -> None:
    guard = Guard()
    runs = RunState("main", guard)
    view = View(run_panel(state, runs, guard))
    view.run.click()
    with (FakeRun.made[0].run_dir / "events.jsonl").open("a") as file:
        file.write("no json\n")
    runs.join(timeout=10)
    assert "not an event of schema 1" in guard.notice.value
    assert not view.run.disabled
    runs.close()


def test_closing_ends_the_thread_and_leaves_the_run(recipe: Recipe) -> None:
    runs = RunState("main", Guard())
    runs.start(recipe)
    runs.close()
    assert not any(thread.name == "sgnb-panel-main" for thread in threading.enumerate())
    assert FakeRun.made[0].asked == []
