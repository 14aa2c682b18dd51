"""Where a run stands, folded from its events: what the bars and the line above them show."""

from __future__ import annotations

from dataclasses import dataclass

from sgnb.events import (
    CompileEnded,
    CompileFailed,
    CompileStarted,
    EpochEnded,
    EpochStarted,
    Event,
    RunEnded,
    RunStarted,
    StepEnded,
    sentence,
)

_GRAPHS = {"train": "training", "valid": "validation"}


@dataclass(kw_only=True)
class Progress:
    """The state of one run; `update` takes its events in order."""

    max_epochs: int = 0
    epoch: int = 0
    completed_epochs: int = 0
    phase: str = "train"
    batch: int = 0
    num_batches: int = 0
    loss: float | None = None
    compiling: str | None = None
    compiling_since: float = 0.0
    started: bool = False
    end: str = ""

    def update(self, event: Event) -> None:
        """Take one event into account."""
        if isinstance(event, RunStarted):
            self.started, self.end, self.max_epochs = True, "", event.max_epochs
            self.completed_epochs = event.start_epoch - 1
        elif isinstance(event, CompileStarted):
            self.compiling, self.compiling_since = event.graph, event.time
        elif isinstance(event, CompileEnded | CompileFailed):
            self.compiling = None
        elif isinstance(event, EpochStarted):
            self.compiling, self.epoch, self.phase, self.batch, self.num_batches = None, event.epoch, "train", 0, 0
        elif isinstance(event, StepEnded):
            self.epoch, self.phase, self.batch, self.num_batches = (
                event.epoch,
                event.phase,
                event.batch,
                event.num_batches,
            )
            self.loss = event.loss if event.loss is not None else self.loss
        elif isinstance(event, EpochEnded):
            self.completed_epochs, self.loss = event.epoch, event.train_loss
            self.batch = self.num_batches
        elif isinstance(event, RunEnded):
            self.compiling, self.end = None, sentence(event) or event.status

    def line(self, now: float) -> str:
        """Return one line that says what the run does at `now` (Unix seconds)."""
        if self.end:
            return self.end
        if self.compiling:
            return f"compiling the {_GRAPHS[self.compiling]} graph… {max(0.0, now - self.compiling_since):.0f} s"
        if not self.started:
            return "starting the process…"
        if not self.epoch:
            return "preparing the first epoch…"
        if not self.num_batches:  # An arm of a comparison waits here for its turn.
            return f"epoch {self.epoch} of {self.max_epochs}: about to start"
        work = "training" if self.phase == "train" else "validating"
        loss = f", loss {self.loss:.4f}" if self.loss is not None else ""
        return f"epoch {self.epoch} of {self.max_epochs}: {work}, batch {self.batch} of {self.num_batches}{loss}"
