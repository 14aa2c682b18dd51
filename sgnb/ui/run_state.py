"""The run that a panel follows. One thread reads its files about four times a second; nothing else does.

The run is a process of its own and lives in its directory, so a panel can come and go: `find` gives the one to follow
after a reload, a restart of the kernel, or a second execution of the cell.
"""

from __future__ import annotations

import contextvars
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import traitlets

from sgnb.events import EVENTS_FILE, StepEnded, read_events
from sgnb.history import History
from sgnb.run import Run
from sgnb.ui.guard import Guard
from sgnb.ui.progress import Progress

if TYPE_CHECKING:
    from sgnb.bench import Comparison
    from sgnb.recipes import Recipe

Kind = Literal["run", "compare"]
PANEL_FILE = "panel.json"
PERIOD_SECONDS = 0.25
_LOG_LINES = 40


class Tail:
    """The events of one file so far: a history without the signs of life, and the progress that these tell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history, self.progress = History(), Progress()
        self._offset = 0

    def read(self) -> None:
        """Take in what was written since the last call."""
        events, self._offset = read_events(self.path, self._offset)
        for event in events:
            self.progress.update(event)
            if not isinstance(event, StepEnded):  # There may be a million of them.
                self.history.append(event)


class RunState(traitlets.HasTraits):
    """What is seen of the run: `revision` grows whenever there is something new to draw."""

    status = traitlets.Unicode("idle")  # idle, running, stopping, finished, stopped, failed, died.
    revision = traitlets.Int(0)

    def __init__(self, key: str = "main", guard: Guard | None = None) -> None:
        super().__init__()
        self.key, self.guard = key, guard or Guard()
        self.lock = threading.RLock()
        self.kind: Kind = "run"
        self.run: Run | None = None
        self.tails: dict[str, Tail] = {}
        self.log = ""
        self.comparison: Comparison | None = None
        self.on_end: Callable[[], None] | None = None
        # A thread made from here prints into the cell that made the panel, not into whichever runs just then.
        self._context = contextvars.copy_context()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_active(self) -> bool:
        """Whether there is a process at work."""
        return self.status in ("running", "stopping")

    @property
    def arms(self) -> dict[str, History]:
        """The histories to draw, by the name of the arm."""
        return {name: tail.history for name, tail in self.tails.items()}

    def start(self, recipe: Recipe, kind: Kind = "run") -> None:
        """Start a process for `recipe` and follow it.

        Raises:
            RuntimeError: when the panel's run is still going on.
        """
        with self.lock:
            if self.is_active:
                raise RuntimeError(
                    "this panel's run is still going on: stop it first, or open another panel with panel(key=...)"
                )
            run = Run.start(recipe) if kind == "run" else Run.start_comparison(recipe)
            self.guard.clear()
            (Path(run.run_dir) / PANEL_FILE).write_text(json.dumps({"key": self.key, "kind": kind}))
            self.follow(run, kind)

    def follow(self, run: Run, kind: Kind = "run") -> None:
        """Show `run` from its beginning, and on while it goes on."""
        with self.lock:
            self.run, self.kind, self.comparison, self.log = run, kind, None, ""
            self.tails = {"run": Tail(Path(run.run_dir) / EVENTS_FILE)} if kind == "run" else {}
            self.status = "running"
            self.revision += 1
            if kind == "run" and not self.update():
                return  # It ended long ago: what it left is drawn already.
            self._thread = threading.Thread(target=self._in_context, name=f"sgnb-panel-{self.key}", daemon=True)
            self._thread.start()

    def find(self, ckpt_root_dir: str | Path) -> Self:
        """Follow this key's newest running run below `ckpt_root_dir`, else its last one; none is no error."""
        marked = [(run, _marks(run)) for run in Run.find(ckpt_root_dir)]
        own = [(run, marks["kind"]) for run, marks in marked if marks.get("key") == self.key]
        running = [(run, kind) for run, kind in own if run.status == "running"]
        for run, kind in (running or own)[:1]:
            self.follow(run, kind)
        return self

    def stop(self) -> None:
        """Ask the run to end after its current batch, with a checkpoint; when asked already, end the process now."""
        with self.lock:
            if self.run is None or not self.is_active:
                return
            if self.status == "stopping":
                self.run.kill()
            else:
                self.run.stop()
                self.status = "stopping"

    def close(self) -> None:
        """Stop following. The run itself goes on."""
        self._closed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2)

    def join(self, timeout: float) -> None:
        """Wait until there is nothing more to follow."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _in_context(self) -> None:
        self._context.copy().run(self.guard(self._pump, user_action=False))

    def _pump(self) -> None:
        try:
            while not self._closed.is_set():
                if not self.update():
                    break
                self._closed.wait(PERIOD_SECONDS)
        finally:
            if self.is_active and not self._closed.is_set():  # The reading failed, which the guard shows.
                self.status = "died"
        if self.on_end is not None and not self._closed.is_set():
            self.on_end()

    def update(self) -> bool:
        """Read what is new and redraw. Returns whether the run goes on."""
        run = self.run
        if run is None:
            return False
        status = str(run.status)  # Before the reading: a run that has ended writes nothing after this line.
        if self.kind == "compare":
            self._find_arms(Path(run.run_dir))
        for tail in list(self.tails.values()):
            tail.read()
        self.log = run.log_tail(_LOG_LINES)
        with self.lock:
            if status != "running":
                self._finish(Path(run.run_dir))
                self.status = status
            self.revision += 1
        return status == "running"

    def _find_arms(self, run_dir: Path) -> None:
        for file in sorted(run_dir.glob(f"*/{EVENTS_FILE}")):
            if file.parent.name not in self.tails:
                self.tails = {**self.tails, file.parent.name: Tail(file)}

    def _finish(self, run_dir: Path) -> None:
        if self.kind == "compare" and (run_dir / "comparison.json").exists():
            from sgnb.bench import Comparison

            self.comparison = Comparison.load(run_dir)


def _marks(run: Run) -> dict[str, Any]:
    file = Path(run.run_dir) / PANEL_FILE
    try:
        marks = json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}  # A run that no panel started.
    return marks if isinstance(marks, dict) and marks.get("kind") in ("run", "compare") else {}
