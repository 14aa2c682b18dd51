"""A run's progress in a terminal or a notebook cell: a bar an epoch, and a ticking line while the compiler works."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from tqdm.auto import tqdm

from sgnb.events import (
    CompileEnded,
    CompileFailed,
    CompileStarted,
    EpochEnded,
    EpochStarted,
    Event,
    RunEnded,
    StepEnded,
    sentence,
)

_TICK_SECONDS = 1.0


class Progress:
    """A listener that shows events with tqdm. Without a terminal it writes one line for each thing worth a line."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._lines = "ipykernel" not in sys.modules and not sys.stderr.isatty()
        self._ticker: threading.Event | None = None

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, StepEnded):
            self._show_step(event)
            return
        if isinstance(event, EpochStarted | EpochEnded | CompileEnded | CompileFailed | RunEnded):
            self._close()
        text = sentence(event)
        if isinstance(event, CompileStarted):
            self._start_ticking(text or "")
        elif text is not None:
            tqdm.write(text, file=sys.stderr)

    def _show_step(self, event: StepEnded) -> None:
        if self._lines:
            return
        name = f"{'epoch' if event.phase == 'train' else 'validation'} {event.epoch}"
        bar = self._bar
        if bar is None or bar.desc != f"{name}: ":
            self._close()
            bar = self._bar = tqdm(total=event.num_batches, desc=name, unit="batch", leave=False)
        if event.loss is not None:
            bar.set_postfix(loss=f"{event.loss:.4f}", lr=f"{event.lr:.2e}", refresh=False)
        bar.update(event.batch - bar.n)

    def _start_ticking(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)
        if self._lines:
            return
        done, start = threading.Event(), time.monotonic()
        bar: tqdm[Any] = tqdm(desc=text, bar_format="{desc}", leave=False)
        self._bar, self._ticker = bar, done

        def tick() -> None:
            while not done.wait(_TICK_SECONDS):
                bar.set_description_str(f"{text} {time.monotonic() - start:.0f} s")

        threading.Thread(target=tick, name="sgnb-progress", daemon=True).start()

    def _close(self) -> None:
        if self._ticker is not None:
            self._ticker.set()
            self._ticker = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None
