"""How arms are measured: each in its own process, warmed up first, then epoch by epoch in turn, never two at a time.

The order within a pair of epochs alternates (A B, B A, ...), so that a machine that grows slower or faster favours no
arm. Both arms have the same seed and the same data order.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from sgnb.bench.comparison import Comparison
from sgnb.events import EVENTS_FILE, CompileStarted, EpochEnded, EpochStarted, Event, RunEnded, read_events, sentence
from sgnb.history import History
from sgnb.recipes import Recipe, save_recipe

ARMS: Mapping[str, Sequence[str]] = {
    "baseline": ("training_hyperparams.torch_compile=False",),
    "compile": ("training_hyperparams.torch_compile=True",),
}
_POLL_SECONDS = 0.05
_LOG_LINES = 15


class BenchmarkError(RuntimeError):
    """An arm ended before it was measured; the message holds its last words."""


class BenchmarkStopped(RuntimeError):  # noqa: N818 (being asked to stop is no error)
    """The comparison was asked to stop."""


def compare(
    recipe: Recipe | str,
    *,
    arms: Mapping[str, Sequence[str]] | None = None,
    epochs: int = 5,
    out_dir: str | Path | None = None,
    progress: bool | Callable[[str], None] = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Measure `arms` of a recipe, and return the comparison; rows, table and report are saved beside the arms' events.

    Args:
        recipe: A recipe or its name.
        arms: Overrides by name; the others are compared with the first. By default torch_compile off and on.
        epochs: Timed epochs of each arm. SuperGradients' table has 5.
        out_dir: Where everything is written; by default `benchmarks/<recipe>/<time>/`.
        progress: Whether to show lines on standard error, or a function that gets them.
        should_stop: Asked several times a second.

    Raises:
        BenchmarkError: when an arm ends before it was measured; the other ones are ended too.
        BenchmarkStopped: when `should_stop` said so.
    """
    from sgnb.recipes import load_recipe

    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    arms = ARMS if arms is None else arms
    if len(arms) < 2 or epochs < 1:
        raise ValueError(f"compare: expected two arms or more and one epoch or more, got {len(arms)} and {epochs}")
    common = [f"training_hyperparams.max_epochs={epochs}", "training_hyperparams.save_model=False"]
    recipes = {name: recipe.override([*common, *overrides]) for name, overrides in arms.items()}
    stamp = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    out = Path(out_dir) if out_dir is not None else Path("benchmarks") / recipe.run_name / stamp
    show = _shower(progress)
    running: list[_Arm] = []
    with contextlib.ExitStack() as ends:  # It ends every arm, also when the end of another one raises.
        for name, arm_recipe in recipes.items():  # One after the other: the compiler of one must not slow another down.
            running.append(_Arm(name, arm_recipe, out.resolve() / name, show, should_stop))
            ends.callback(running[-1].end)
            running[-1].wait_for(EpochStarted, 1)
        for epoch in range(1, epochs + 1):
            for arm in running if epoch % 2 else reversed(running):
                arm.run_epoch(epoch)
    comparison = Comparison({arm.name: arm.history for arm in running}, recipe=recipe)
    comparison.save(out)
    return comparison


class _Arm:
    """The process of an arm, and what it has said so far."""

    def __init__(self, name: str, recipe: Recipe, run_dir: Path, show: _Show, should_stop: Callable[[], bool]) -> None:
        self.name, self.run_dir, self.history = name, run_dir, History()
        self._show, self._should_stop, self._offset = show, should_stop, 0
        events = run_dir / EVENTS_FILE
        if events.exists():
            raise FileExistsError(f"{run_dir}: holds an earlier measurement; give another out_dir")
        save_recipe(recipe, run_dir / "recipe.yaml")
        with (run_dir / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgnb.bench.arm", str(run_dir)],
                stdin=subprocess.PIPE,
                bufsize=0,  # What a dead arm did not take must not come up again when the pipe is closed.
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run_epoch(self, epoch: int) -> None:
        """Let the arm run one epoch, and return when it waits again or has ended."""
        assert self._process.stdin is not None  # It is a pipe.
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._error() from None
        self.wait_for(EpochEnded, epoch)
        self.wait_for(EpochStarted, epoch + 1)

    def wait_for(self, kind: type[EpochStarted | EpochEnded], epoch: int) -> None:
        """Read the arm's events until this one; a finished run is as good."""
        since, compiling = time.monotonic(), False
        while True:
            alive = self._process.poll() is None
            events, self._offset = read_events(self.run_dir / EVENTS_FILE, self._offset)
            for event in events:
                self.history.append(event)
                compiling = isinstance(event, CompileStarted)
                since = time.monotonic()
                self._tell(event)
            if self._has(kind, epoch):
                return
            ended = self.history.ended
            if (ended is not None and ended.status != "finished") or (not alive and not events):
                raise self._error()
            if self._should_stop():
                raise BenchmarkStopped(f"stopped while the arm {self.name} was at work")
            if compiling:
                started = next(e for e in reversed(self.history.events) if isinstance(e, CompileStarted))
                self._show.tick(f"{self.name}: {sentence(started)} {time.monotonic() - since:.0f} s")
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """End the process; it has finished by itself when all went well."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # A dead arm's token is still in the buffer.
                self._process.stdin.close()
        try:
            # One that has told its end needs a moment to go; another one is not waited for.
            self._process.wait(timeout=30 if self.history.ended is not None else 0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _has(self, kind: type[EpochStarted | EpochEnded], epoch: int) -> bool:
        found = any(isinstance(event, kind) and event.epoch == epoch for event in self.history.events)
        ended = self.history.ended
        return found or (kind is EpochStarted and ended is not None and ended.status == "finished")

    def _tell(self, event: Event) -> None:
        text = sentence(event)
        if isinstance(event, EpochEnded):
            started = self.history.started
            text = f"epoch {event.epoch}/{started.max_epochs if started else '?'}: {event.epoch_seconds:.2f} s"
        if text is not None and not isinstance(event, RunEnded):
            self._show.line(f"{self.name}: {text}")

    def _error(self) -> BenchmarkError:
        log = (self.run_dir / "log.txt").read_text(errors="replace").splitlines()[-_LOG_LINES:]
        ended = self.history.ended
        reason = f": {ended.reason}" if ended is not None and ended.reason else ""
        words = "\n".join(["its last words:", *log]) if log else "it left no words"
        return BenchmarkError(f"the arm {self.name} ended before it was measured{reason}\n{words}")


class _Show:
    """Lines of progress; a ticking one replaces itself on a terminal, and comes every five seconds elsewhere."""

    def __init__(self, write: Callable[[str], None] | None, stream: TextIO | None) -> None:
        self._write, self._stream = write, stream
        self._ticked = 0.0
        self._terminal = stream is not None and stream.isatty()
        self._open = False

    def line(self, text: str) -> None:
        if self._open and self._stream is not None:
            self._stream.write("\r\x1b[K")
            self._open = False
        if self._write is not None:
            self._write(text)
        elif self._stream is not None:
            print(text, file=self._stream, flush=True)
        self._ticked = time.monotonic()

    def tick(self, text: str) -> None:
        if time.monotonic() - self._ticked < (1.0 if self._terminal else 5.0):
            return
        if not self._terminal:
            self.line(text)
            return
        assert self._stream is not None  # It is a terminal.
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
        self._open, self._ticked = True, time.monotonic()


def _shower(progress: bool | Callable[[str], None]) -> _Show:
    if callable(progress):
        return _Show(progress, None)
    return _Show(None, sys.stderr if progress else None)
