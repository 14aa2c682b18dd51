"""The history of a run: its events, seen as columns with one value an epoch. Plots and reports read nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sgnb.events import (
    EVENTS_FILE,
    CompileEnded,
    CompileFailed,
    EpochEnded,
    Event,
    EventError,
    GraphBroke,
    Noticed,
    Recompiled,
    RecompileLimitReached,
    RunEnded,
    RunStarted,
    read_events,
)

_COLUMNS = (
    "epoch",
    "epoch_seconds",
    "train_seconds",
    "valid_seconds",
    "train_loader_wait_seconds",
    "valid_loader_wait_seconds",
    "compile_seconds",
    "checkpoint_seconds",
    "samples_per_second",
    "train_loss",
    "valid_loss",
    "raw_valid_loss",
    "lr",
    "peak_mib",
    "skipped_updates",
)


_PHASES = ("train", "valid", "raw_valid")


def _named(epoch: EpochEnded, phase: str) -> dict[str, float]:
    return {**getattr(epoch, f"{phase}_losses", {}), **getattr(epoch, f"{phase}_metrics")}


class History:
    """Events of one run. `history["train_loss"]` is a column; `pandas.DataFrame(history.to_dict())` works as well."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = []
        for event in events:
            self.append(event)

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read a run directory, or its `events.jsonl`.

        Raises:
            FileNotFoundError: when there is no such file.
            EventError: when a line cannot be read.
        """
        path = Path(path)
        file = path / EVENTS_FILE if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no events here; expected a run directory that holds {EVENTS_FILE}")
        return cls(read_events(file)[0])

    def append(self, event: Event) -> None:
        """Add an event. A history is a listener: `Trainer(..., listeners=[history.append])`."""
        if isinstance(event, RunStarted) and event.schema_version > 1:
            raise EventError(f"schema {event.schema_version} is newer than this sgnb can read (1); upgrade sgnb")
        self.events.append(event)

    @property
    def epochs(self) -> list[EpochEnded]:
        """The completed epochs; one that a resumed run repeated stands once, as it was last."""
        last = {event.epoch: event for event in self.events if isinstance(event, EpochEnded)}
        return [last[epoch] for epoch in sorted(last)]

    @property
    def started(self) -> RunStarted | None:
        """The latest beginning, or None before it."""
        return next((event for event in reversed(self.events) if isinstance(event, RunStarted)), None)

    @property
    def ended(self) -> RunEnded | None:
        """The end, or None while the run goes on."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, RunEnded) else None

    @property
    def status(self) -> str:
        """`finished`, `stopped`, `failed`, or `running` while there is no end."""
        return self.ended.status if self.ended else "running"

    @property
    def compile_seconds(self) -> float:
        """All time spent in compiling: the warm-ups before the first epoch and what recompiled later."""
        warm_ups = sum(event.seconds for event in self.events if isinstance(event, CompileEnded))
        return warm_ups + sum(epoch.compile_seconds for epoch in self.epochs)

    @property
    def compiled(self) -> bool:
        """Whether the epochs ran compiled code: a graph was made, and nothing fell back."""
        made = any(isinstance(event, CompileEnded) for event in self.events)
        return made and not any(isinstance(event, CompileFailed) for event in self.events)

    @property
    def graph_breaks(self) -> list[GraphBroke]:
        """Where the compiler could not go through the model, each place once."""
        return [event for event in self.events if isinstance(event, GraphBroke)]

    @property
    def recompiles(self) -> list[Recompiled | RecompileLimitReached]:
        """When the compiler had to begin again in mid-run, and what it gave up."""
        return [event for event in self.events if isinstance(event, Recompiled | RecompileLimitReached)]

    @property
    def notices(self) -> list[str]:
        """What the run had to say about its settings."""
        return [event.message for event in self.events if isinstance(event, Noticed)]

    @property
    def columns(self) -> list[str]:
        """Names for `history[name]`; metrics and the parts of a loss stand as `train/Accuracy` and `valid/Accuracy`.

        `raw_valid/Accuracy` is that of the weights without averaging, where `ema_params.validate_raw` asked for it.
        """
        metrics = dict.fromkeys(
            f"{phase}/{name}" for epoch in self.epochs for phase in _PHASES for name in _named(epoch, phase)
        )
        return [*_COLUMNS, *metrics]

    def __getitem__(self, column: str) -> list[Any]:
        if column not in self.columns:
            raise KeyError(f"no column {column!r}; there are {', '.join(self.columns)}")
        phase, _, metric = column.partition("/")
        if metric:
            return [_named(epoch, phase).get(metric) for epoch in self.epochs]
        return [getattr(epoch, column) for epoch in self.epochs]

    def to_dict(self) -> dict[str, list[Any]]:
        """Return all columns."""
        return {column: self[column] for column in self.columns}

    def rows(self) -> list[dict[str, Any]]:
        """Return one mapping an epoch."""
        columns = self.to_dict()
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def __len__(self) -> int:
        return len(self.epochs)

    def __repr__(self) -> str:
        return f"<History: {self.status}, {len(self)} epochs>"

    def _repr_html_(self) -> str:
        shown = [name for name in self.columns if any(value not in (None, 0, 0.0) for value in self[name])]
        return html_table(shown, [[row[name] for name in shown] for row in self.rows()], caption=repr(self)[1:-1])


def html_table(header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """Return a plain HTML table; texts are escaped, numbers shortened."""
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(shorten(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def shorten(value: object) -> str:
    """Return a number with four significant digits, None as a dash, and anything else as it is."""
    if value is None:
        return "–"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
