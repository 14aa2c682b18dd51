"""A run as a process of its own, known by its directory: start, follow, stop, and find it again.

The process outlives the kernel that started it. Its directory is complete without it: `recipe.yaml`, `process.json`,
`events.jsonl`, `log.txt`, checkpoints; a file with the name `stop` asks it to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from sgnb.events import EVENTS_FILE, Event, RunEnded, from_json, read_events
from sgnb.history import History

if TYPE_CHECKING:
    from sgnb.recipes import Recipe

RunStatus = Literal["running", "finished", "stopped", "failed", "died"]
LOG_FILE, PROCESS_FILE, RECIPE_FILE, STOP_FILE = "log.txt", "process.json", "recipe.yaml", "stop"
_POLL_SECONDS = 0.2
_LAST_LINES_BYTES = 65536
_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}  # Those of this process, to be reaped.


class Run:
    """A run directory, and the process that works in it, if it still does."""

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir).resolve()
        if not (self.run_dir / PROCESS_FILE).is_file():
            raise FileNotFoundError(f"{self.run_dir}: no run; expected a directory that holds {PROCESS_FILE}")
        self._offset = 0

    @classmethod
    def start(cls, recipe: Recipe, run_dir: str | Path | None = None) -> Run:
        """Start to train a recipe in a process of its own, and return at once.

        Raises:
            HyperparamsError: when the recipe holds Python objects, which a process cannot be given by YAML.
            FileExistsError: when there is a run in `run_dir` already.
        """
        return cls._start(recipe, run_dir, "sgnb.run")

    @classmethod
    def start_comparison(cls, recipe: Recipe, run_dir: str | Path | None = None) -> Run:
        """Start `compare(recipe)` in a process of its own; each arm has a directory in the run's."""
        return cls._start(recipe, run_dir, "sgnb.benchmark", "--run-dir")

    @classmethod
    def _start(cls, recipe: Recipe, run_dir: str | Path | None, *module: str) -> Run:
        from sgnb.recipes import save_recipe

        if run_dir is None:
            stamp = datetime.now(UTC).strftime("%Y%m%d_%H%M%S_%f")
            run_dir = Path(recipe.ckpt_root_dir) / recipe.run_name / f"RUN_{stamp}"
        path = Path(run_dir).resolve()
        if (path / PROCESS_FILE).exists():
            raise FileExistsError(f"{path}: holds a run already; give another run_dir")
        save_recipe(recipe, path / RECIPE_FILE)
        with (path / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the kernel's terminal is not for it, and its group can be ended.
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        _CHILDREN[process.pid] = process
        created = psutil.Process(process.pid).create_time()
        (path / PROCESS_FILE).write_text(json.dumps({"pid": process.pid, "created": created}))
        return cls(path)

    @classmethod
    def find(cls, ckpt_root_dir: str | Path) -> list[Run]:
        """Return the runs below a folder, the newest first."""
        found = Path(ckpt_root_dir).glob(f"**/{PROCESS_FILE}")
        return [cls(path.parent) for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]

    @property
    def status(self) -> RunStatus:
        """`running`, how it ended, or `died` when the process is gone and has left no end."""
        alive = self._process() is not None  # Before the reading: an end may be written in between.
        ended = self._end()
        if ended is not None:
            return ended.status
        return "running" if alive else "died"

    @property
    def history(self) -> History:
        """What has happened so far."""
        return History(read_events(self.run_dir / EVENTS_FILE)[0])

    def poll(self) -> list[Event]:
        """Return the events since the last call; the first call returns all."""
        events, self._offset = read_events(self.run_dir / EVENTS_FILE, self._offset)
        return events

    def log_tail(self, n: int = 40) -> str:
        """Return the last lines that the process wrote: its last words, when it died."""
        path = self.run_dir / LOG_FILE
        return "\n".join(_last_lines(path)[-n:]) if path.exists() else ""

    def stop(self) -> None:
        """Ask the run to end after its current batch, with a checkpoint."""
        (self.run_dir / STOP_FILE).touch()

    def kill(self) -> None:
        """End the process and all that it started, now."""
        process = self._process()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # It ended by itself meanwhile.
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(timeout=10)

    def wait(self, timeout: float | None = None) -> History:
        """Wait for the end and return the history. Ctrl-C asks the run to stop; a second one gives up waiting.

        Raises:
            TimeoutError: after `timeout` seconds; the run goes on.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        asked = False
        while True:
            try:  # Around the look at the process too: Ctrl-C may come at any moment.
                if self._process() is None:
                    return self.history
                if limit is not None and time.monotonic() > limit:
                    raise TimeoutError(f"{self.run_dir}: still running after {timeout} s")
                time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                if asked:
                    raise
                self.stop()
                asked = True

    def __await__(self) -> Generator[Any, None, History]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> History:
        while self._process() is not None:
            await asyncio.sleep(_POLL_SECONDS)
        return self.history

    def __repr__(self) -> str:
        return f"<Run {self.run_dir.name}: {self.status}>"

    def _process(self) -> psutil.Process | None:
        """Return the process while it lives. A number that another process got meanwhile is not ours."""
        values = json.loads((self.run_dir / PROCESS_FILE).read_text())
        child = _CHILDREN.get(values["pid"])
        if child is not None and child.poll() is not None:
            del _CHILDREN[values["pid"]]
        try:
            process = psutil.Process(values["pid"])
            alive = abs(process.create_time() - values["created"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if alive else None

    def _end(self) -> RunEnded | None:
        path = self.run_dir / EVENTS_FILE
        lines = _last_lines(path) if path.exists() else []
        last = (
            from_json(lines[-1]) if lines and lines[-1].endswith("}") and '"event": "RunEnded"' in lines[-1] else None
        )
        return last if isinstance(last, RunEnded) else None


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_LINES_BYTES))
        return file.read().decode(errors="replace").splitlines()


def main(argv: Sequence[str] | None = None) -> int:
    """Train in the run directory that is the only argument: what the process of a run does."""
    from sgnb.recipes.worker import train_in

    (run_dir,) = sys.argv[1:] if argv is None else argv
    return train_in(Path(run_dir))


if __name__ == "__main__":
    raise SystemExit(main())
