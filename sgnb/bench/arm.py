"""One arm of a comparison: a run that begins an epoch when it is told to, by a line on its standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sgnb.events import EpochStarted, Event, RunEnded
from sgnb.recipes.worker import train_in


def pace(event: Event) -> None:
    """Wait before the clock of an epoch starts, until it is this arm's turn, and at the end until all arms are done.

    A process that ends keeps a core busy for a second or more, which the last epoch of another arm would feel.

    Raises:
        RuntimeError: when the comparison is gone, so that no arm is left behind.
    """
    if isinstance(event, RunEnded):
        sys.stdin.read()
    if isinstance(event, EpochStarted) and not sys.stdin.readline():
        raise RuntimeError("the comparison that paces this run has ended")


def main(argv: Sequence[str] | None = None) -> int:
    """Train in the directory that is the only argument."""
    (run_dir,) = sys.argv[1:] if argv is None else argv
    return train_in(Path(run_dir), [pace])


if __name__ == "__main__":
    raise SystemExit(main())
