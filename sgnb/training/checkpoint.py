"""Checkpoints: SuperGradients' file names and keys, written whole or not at all, loadable with `weights_only=True`."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

LATEST = "ckpt_latest.pth"


class CheckpointError(ValueError):
    """A checkpoint cannot be used, and why."""


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` only when it is complete and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain values only) to `path`, atomically."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with atomic_write(path) as file:
        file.write(buffer.getbuffer())


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """Return the content of a checkpoint of sgnb or SuperGradients, without running any code from it.

    Raises:
        FileNotFoundError: when there is no such file.
        CheckpointError: when it is truncated, no checkpoint, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises anything from EOFError to UnpicklingError here.
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: not a checkpoint that can be read safely ({cause[:200]})") from error
    if not isinstance(state, dict) or "net" not in state:
        raise CheckpointError(f"{path}: expected a mapping with the key net, which holds the model's weights")
    return state


def load_weights(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Load `state["net"]` into `model`.

    Raises:
        CheckpointError: naming what does not fit; the model is then as it was.
    """
    own, given = model.state_dict(), state["net"]
    wrong = [f"missing {name}" for name in own if name not in given]
    wrong += [f"unknown {name}" for name in given if name not in own]
    wrong += [
        f"{name} is {tuple(given[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{path}: belongs to another model: {'; '.join(wrong[:5])}{more}")
    model.load_state_dict(given)


def find_run(experiment_dir: Path, run_id: str | None) -> Path:
    """Return the run directory to resume: `run_id`, or the newest that holds a checkpoint.

    Raises:
        CheckpointError: when there is none.
    """
    if run_id is not None:
        run_dir = experiment_dir / run_id
        if not (run_dir / LATEST).is_file():
            known = ", ".join(sorted(path.parent.name for path in experiment_dir.glob(f"RUN_*/{LATEST}"))) or "none"
            raise CheckpointError(f"training_hyperparams.run_id: {run_dir} holds no {LATEST}; runs that do: {known}")
        return run_dir
    runs = sorted(path.parent for path in experiment_dir.glob(f"RUN_*/{LATEST}"))
    if not runs:
        raise CheckpointError(f"training_hyperparams.resume: no run in {experiment_dir} holds a {LATEST} to go on from")
    return runs[-1]
