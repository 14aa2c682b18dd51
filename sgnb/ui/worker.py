"""Slow work beside the callbacks: one thread at most, which ends when there is nothing more to do."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable


class Worker:
    """Does `work` in a thread, once more if it was asked for meanwhile, and never twice at a time."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work, self._name = work, name
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._is_asked = self._is_closed = False
        # What the work prints belongs to the cell that made the panel, not to whichever runs just then.
        self._context = contextvars.copy_context()

    def ask(self, _change: object = None) -> None:
        """Have the work done soon."""
        with self._lock:
            self._is_asked = True
            if self._is_closed or not self._idle.is_set():
                return
            self._idle.clear()
        threading.Thread(target=self._context.copy().run, args=(self._loop,), name=self._name, daemon=True).start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do. Returns whether that came about in time."""
        return self._idle.wait(timeout)

    def close(self) -> None:
        """Begin nothing new."""
        with self._lock:
            self._is_closed = True

    def _loop(self) -> None:
        while True:
            with self._lock:
                if self._is_closed or not self._is_asked:
                    self._idle.set()
                    return
                self._is_asked = False
            self._work()
