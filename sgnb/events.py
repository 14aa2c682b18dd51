"""What happened in a run: frozen records in the past tense, one JSON line each.

A listener is a plain function of one event, called in the thread that trains; it may block (that is how `compare` paces
two runs). Every run begins with `RunStarted` and ends with exactly one `RunEnded`, also when it fails.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SCHEMA_VERSION = 1
EVENTS_FILE = "events.jsonl"

Phase = Literal["train", "valid"]
Graph = Literal["train", "valid"]
Status = Literal["finished", "stopped", "failed"]


class EventError(ValueError):
    """A line is not an event that this version can read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    time: float = field(default_factory=time.time)  # Unix seconds.


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted(_Event):
    """A run began. `dtype` is that of the autocast region: float32, bfloat16 or float16."""

    schema_version: int = SCHEMA_VERSION
    experiment_name: str
    run_dir: str
    device: str
    dtype: str
    start_epoch: int  # From 1; more than 1 in a resumed run.
    max_epochs: int
    train_batches: int
    valid_batches: int
    batch_size: int
    num_parameters: int
    optimizer: str = ""  # Its class and implementation: "SGD, fused".
    training_hyperparams: dict[str, Any]  # The changed values; Python objects as their repr.
    machine: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileStarted(_Event):
    """The compiler began to work on a graph; nothing else is heard of the run until `CompileEnded`."""

    graph: Graph


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileEnded(_Event):
    """A graph is compiled. `seconds` is wall time of the whole warm-up call, never part of an epoch."""

    graph: Graph
    seconds: float
    num_graphs: int
    num_breaks: int
    cache_hits: int
    cache_misses: int
    seconds_by_phase: dict[str, float] = field(default_factory=dict)  # tracing, autograd, code generation.
    guard_us: float = 0.0  # What a call spends on checking that its graph still fits.


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphBroke(_Event):
    """The compiler could not go through a line of the model: two graphs, and Python in between."""

    reason: str  # One sentence, the compiler's words.
    file: str
    line: int
    page: str = ""  # The page of PyTorch's documentation on this kind of break.


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileFailed(_Event):
    """The run goes on eagerly; `reason` is one sentence, `hint` what to do about it."""

    reason: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileChecked(_Event):
    """One batch was run compiled and eagerly; a `difference` is relative to the eager value."""

    agreed: bool
    loss_difference: float
    grad_norm_difference: float
    output_difference: float
    tolerance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompiled(_Event):
    """The compiler ran again in mid-run."""

    epoch: int
    seconds: float
    num_graphs: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecompileLimitReached(_Event):
    """The compiler gave a function up after too many recompilations; it runs eagerly from now on."""

    function: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory(_Event):
    """The device's memory was not enough for a batch. `pieces` is how many parts a batch is split into from now on."""

    epoch: int
    batch: int
    batch_size: int
    allocated_mib: float
    total_mib: float
    pieces: int  # 1: it is not split, and the run ends.
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatesSkipped(_Event):
    """Several updates in a row had gradients that are not finite, so the weights stayed as they were."""

    epoch: int
    batch: int
    in_a_row: int
    loss_scale: float  # 1.0 unless the run is in float16.


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStarted(_Event):
    """The clock of an epoch is about to start."""

    epoch: int  # From 1.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnded(_Event):
    """A sign of life, a few times a second at most. `loss` (training only) may be some steps old; None: unknown yet."""

    phase: Phase
    epoch: int
    batch: int  # From 1.
    num_batches: int
    loss: float | None
    lr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochEnded(_Event):
    """One pass of training, and the validation if one was due.

    `train_seconds` and `valid_seconds` are wall time of the whole loops: loader, transfer, forward, backward, update,
    loss and metrics. Their sum is the quantity of SuperGradients' table. Checkpoints are outside both.
    """

    epoch: int
    train_seconds: float
    valid_seconds: float  # 0.0 without a validation.
    train_loader_wait_seconds: float  # Part of train_seconds in which the loop waited for the next batch.
    valid_loader_wait_seconds: float
    compile_seconds: float  # Part of both in which the compiler worked; 0.0 unless something recompiled.
    checkpoint_seconds: float
    train_loss: float
    valid_loss: float | None
    train_metrics: dict[str, float]
    valid_metrics: dict[str, float]
    lr: float  # At the last update.
    num_samples: int  # Trained on.
    num_updates: int
    skipped_updates: int  # fp16 overflow.
    peak_mib: float  # Of the device; on the CPU, of the process since it began.
    train_losses: dict[str, float] = field(default_factory=dict)  # Parts of the loss, by name.
    valid_losses: dict[str, float] = field(default_factory=dict)
    raw_valid_loss: float | None = None  # Of the weights without averaging, where ema_params.validate_raw asks for it.
    raw_valid_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def epoch_seconds(self) -> float:
        """Training and validation loops together."""
        return self.train_seconds + self.valid_seconds

    @property
    def samples_per_second(self) -> float:
        """Training samples over training time."""
        return self.num_samples / self.train_seconds if self.train_seconds else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved(_Event):
    """A checkpoint is on the disk, whole."""

    path: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointLoaded(_Event):
    """A run went on from a checkpoint."""

    path: str
    epoch: int  # The last one that was completed.
    batch: int = 0  # The last one of the next epoch; 0 at an epoch's border.


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed(_Event):
    """Something that the user should know; a setting that has no effect is one such thing."""

    level: Literal["information", "warning"]
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded(_Event):
    """The last event of every run."""

    status: Status
    seconds: float
    reason: str = ""


Event = (
    RunStarted
    | CompileStarted
    | CompileEnded
    | CompileFailed
    | CompileChecked
    | GraphBroke
    | Recompiled
    | RecompileLimitReached
    | OutOfMemory
    | UpdatesSkipped
    | EpochStarted
    | StepEnded
    | EpochEnded
    | CheckpointSaved
    | CheckpointLoaded
    | Noticed
    | RunEnded
)
Listener = Callable[[Event], None]
_TYPES: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__args__}


def to_json(event: Event) -> str:
    """Return one line of `events.jsonl`, without the line break. Non-finite numbers are texts: "nan", "inf", "-inf"."""
    return json.dumps({"event": type(event).__name__, **_finite(dataclasses.asdict(event))}, allow_nan=False)


def from_json(line: str) -> Event:
    """Return the event of one line.

    Raises:
        EventError: when the line is no JSON, or of an event or a schema that this version does not know.
    """
    try:
        values = json.loads(line)
        kind = _TYPES[values.pop("event")]
        known = {spec.name: spec for spec in dataclasses.fields(kind)}
        return kind(**{name: _number(value, str(known[name].type)) for name, value in values.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"not an event of schema {SCHEMA_VERSION}: {line.rstrip()[:80]!r} ({error})"
        raise EventError(f"{what}; was it written by a newer sgnb?") from None


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Return the events of the whole lines after byte `offset`, and the offset to go on from.

    A line that is still being written (or that a killed process left half) is not read.

    Raises:
        EventError: naming the file and the byte where a line cannot be read.
    """
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    events: list[Event] = []
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        try:
            events.append(from_json(line.decode()))
        except ValueError as error:
            raise EventError(f"{path}, byte {offset}: {error}") from None
        offset += len(line)
    return events, offset


class EventWriter:
    """A listener that appends each event to a file as one line, so that a reader never sees a mixture of two."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # A killed process left half a line; the reader will name it.

    def __call__(self, event: Event) -> None:
        """Append the event."""
        self._file.write(to_json(event).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sentence(event: Event) -> str | None:
    """Return what a log says of an event, or None for one that a log leaves out."""
    return _SENTENCES[type(event).__name__](event) if type(event).__name__ in _SENTENCES else None


def cache_state(hits: int, misses: int) -> str:
    """Return what the compiler's cache was like for graphs with these hits and misses."""
    return "cold cache" if misses and not hits else "warm cache" if not misses else "partly warm cache"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _number(value: Any, declared: str) -> Any:
    if isinstance(value, str) and declared.startswith("float"):
        return float(value)
    if isinstance(value, dict) and declared == "dict[str, float]":
        return {name: float(item) for name, item in value.items()}
    return value


def _metrics(values: Mapping[str, float]) -> Iterator[str]:
    return (f"{name} {value:.4f}" for name, value in values.items())


def _of_epoch(event: EpochEnded) -> str:
    parts = [f"epoch {event.epoch}: {event.epoch_seconds:.2f} s", f"train loss {event.train_loss:.4f}"]
    if event.valid_loss is not None:
        parts += [f"valid loss {event.valid_loss:.4f}", *_metrics(event.valid_metrics)]
    return ", ".join([*parts, f"{event.samples_per_second:.0f} samples/s"])


def _of_compile(event: CompileEnded) -> str:
    details = [cache_state(event.cache_hits, event.cache_misses)] if event.cache_hits or event.cache_misses else []
    if event.num_breaks:
        details.append(f"{event.num_breaks} graph break{'' if event.num_breaks == 1 else 's'}")
    remark = f" ({', '.join(details)})" if details else ""
    return f"compiled the {_GRAPHS[event.graph]} graph in {event.seconds:.1f} s{remark}"


_GRAPHS = {"train": "training", "valid": "validation"}
_SENTENCES: dict[str, Callable[[Any], str]] = {
    "RunStarted": lambda e: f"{e.experiment_name} on {e.device} in {e.dtype}, {e.num_parameters:,} parameters",
    "CompileStarted": lambda e: f"compiling the {_GRAPHS[e.graph]} graph…",
    "CompileEnded": _of_compile,
    "CompileFailed": lambda e: f"not compiled, the run goes on eagerly: {e.reason} {e.hint}".strip(),
    "CompileChecked": lambda e: (
        f"compiled and eager {'agree' if e.agreed else 'DISAGREE'}"
        f" (loss differs by {e.loss_difference:.1e}, gradient norm by {e.grad_norm_difference:.1e},"
        f" tolerance {e.tolerance:.0e})"
    ),
    "Recompiled": lambda e: f"recompiled in epoch {e.epoch} for {e.seconds:.1f} s: {e.reason}",
    "GraphBroke": lambda e: f"graph break at {e.file}:{e.line}: {e.reason}" + (f" ({e.page})" if e.page else ""),
    "RecompileLimitReached": lambda e: f"given up by the compiler, eager from now on: {e.function}; {e.reason}",
    "OutOfMemory": lambda e: (
        f"out of memory in epoch {e.epoch}, batch {e.batch} ({e.batch_size} samples):"
        f" {e.allocated_mib:,.0f} of {e.total_mib:,.0f} MiB allocated. {e.advice}"
    ),
    "UpdatesSkipped": lambda e: (
        f"warning: {e.in_a_row} updates in a row skipped (epoch {e.epoch}, batch {e.batch}): the gradients are not"
        " finite" + (f", loss scale {e.loss_scale:g}" if e.loss_scale != 1.0 else "")
    ),
    "EpochEnded": _of_epoch,
    "CheckpointLoaded": lambda e: (
        f"going on after epoch {e.epoch}" + (f" and {e.batch} batches" if e.batch else "") + f" from {e.path}"
    ),
    "Noticed": lambda e: f"{e.level}: {e.message}",
    "RunEnded": lambda e: f"{e.status} after {e.seconds:.1f} s" + (f": {e.reason}" if e.reason else ""),
}
