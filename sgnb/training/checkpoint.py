"""Checkpoints: SuperGradients' file names and keys, written whole or not at all, loadable with `weights_only=True`."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

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
    try:
        with atomic_write(path) as file:
            file.write(buffer.getbuffer())
    except OSError as error:
        kept = "; the one before it is as it was" if path.exists() else ""
        reason = f"{error.strerror}: {path}: this checkpoint ({buffer.tell() / 2**20:,.1f} MiB) was not written{kept}"
        raise OSError(error.errno, reason) from error


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


def fitting_weights(model: nn.Module, state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return `state["net"]` when it fits `model`, which stays as it is.

    Raises:
        CheckpointError: naming what does not fit.
    """
    own, given = model.state_dict(), state["net"]
    if not isinstance(given, dict) or not all(isinstance(value, Tensor) for value in given.values()):
        raise CheckpointError(f"{path}: expected net to map names to tensors; this is no checkpoint of sgnb")
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
    return given


_OF_A_RUN: dict[str, type | tuple[type, ...]] = {
    "epoch": int,
    "num_updates": int,
    "optimizer_state_dict": dict,
    "scaler_state_dict": dict,
    "scheduler_state_dict": dict,
    "keeper": dict,
    "loader_generators": list,
    "in_epoch": (dict, type(None)),
}


def check_run_state(state: dict[str, Any], path: Path) -> None:
    """Make sure that a checkpoint holds a run to go on with.

    Raises:
        CheckpointError: when it holds weights alone, or something that sgnb does not write.
    """
    lacking = [key for key in _OF_A_RUN if key not in state]
    if lacking:
        raise CheckpointError(f"{path}: holds weights but no run to go on with; it lacks {', '.join(lacking)}")
    for key, kind in _OF_A_RUN.items():
        if not isinstance(state[key], kind) or isinstance(state[key], bool):
            raise CheckpointError(f"{path}: {key} is {type(state[key]).__name__}; this is no checkpoint of sgnb")


class BestSnapshots:
    """The weights of the best validated epochs, for their average; each is written once.

    SuperGradients keeps ten as well, and rewrites all of them after every validation.
    """

    def __init__(self, folder: Path, *, greater_is_better: bool, limit: int = 10) -> None:
        self.folder = folder
        self.limit = limit
        self._sign = 1 if greater_is_better else -1
        self.values: dict[int, float] = {}  # By epoch.

    def add(self, epoch: int, value: float, weights: dict[str, Tensor]) -> None:
        """Keep the weights of an epoch while they are among the best."""
        ranked = sorted({**self.values, epoch: value}.items(), key=lambda item: -self._sign * item[1])
        self.values = dict(ranked[: self.limit])
        if epoch in self.values:
            self.folder.mkdir(exist_ok=True)
            save_checkpoint(self._path(epoch), {"net": weights})
        for worse, _ in ranked[self.limit :]:
            self._path(worse).unlink(missing_ok=True)

    def average(self, device: torch.device) -> dict[str, Tensor]:
        """Return the mean of the weights that are kept; integers are those of the best."""
        total: dict[str, Tensor] = {}
        for epoch in self.values:  # The best first.
            weights = load_checkpoint(self._path(epoch), device)["net"]
            for name, tensor in weights.items():
                if name not in total:
                    total[name] = tensor.double() if tensor.is_floating_point() else tensor
                elif tensor.is_floating_point():
                    total[name] += tensor
        first = load_checkpoint(self._path(next(iter(self.values))), device)["net"]
        return {
            name: (total[name] / len(self.values)).to(tensor.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in first.items()
        }

    def take_over(self, values: dict[int, float]) -> None:
        """Go on with those of an earlier run whose files are here."""
        self.values = {epoch: value for epoch, value in values.items() if self._path(epoch).is_file()}

    def remove(self) -> None:
        """Delete the snapshots, when their average is on the disk."""
        for epoch in self.values:
            self._path(epoch).unlink(missing_ok=True)
        self.folder.rmdir()

    def _path(self, epoch: int) -> Path:
        return self.folder / f"epoch_{epoch}.pth"


def find_run(experiment_dir: Path, run_id: str | None, name: str = LATEST) -> Path:
    """Return the run directory to resume: `run_id`, or the newest that holds the checkpoint `name`.

    Raises:
        CheckpointError: when there is none.
    """
    if run_id is not None:
        run_dir = experiment_dir / run_id
        if not (run_dir / name).is_file():
            known = ", ".join(sorted(path.parent.name for path in experiment_dir.glob(f"RUN_*/{name}"))) or "none"
            raise CheckpointError(f"training_hyperparams.run_id: {run_dir} holds no {name}; runs that do: {known}")
        return run_dir
    runs = sorted(path.parent for path in experiment_dir.glob(f"RUN_*/{name}"))
    if not runs:
        raise CheckpointError(f"training_hyperparams.resume: no run in {experiment_dir} holds a {name} to go on from")
    return runs[-1]
