"""What is worth keeping: the best epoch, those that were asked for, the average of the best; and when to give up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgnb.hyperparams import TrainingHyperparams
from sgnb.training.checkpoint import LATEST, BestSnapshots

AVERAGE = "average_model.pth"
_SNAPSHOTS = "best_weights"


class Keeper:
    """Judges each validated epoch. `watch` is the metric that decides and whether more of it is better."""

    def __init__(self, hp: TrainingHyperparams, watch: tuple[str, bool] | None, run_dir: Path) -> None:
        self.hp, self.watch, self.run_dir = hp, watch, run_dir
        self.best: float | None = None
        self._to_beat: float | None = None  # Early stopping has its own: small gains add up to no improvement.
        self._waited = 0
        greater = watch is None or watch[1]
        wanted = hp.average_best_models and watch is not None
        self._snapshots = BestSnapshots(run_dir / _SNAPSHOTS, greater_is_better=greater) if wanted else None

    def judge(self, epoch: int, values: Mapping[str, float], weights: Callable[[], dict[str, Tensor]]) -> list[Path]:
        """Return where this epoch's checkpoint goes. `values` is empty for one that was not validated."""
        paths = [self.run_dir / LATEST]
        if epoch in self.hp.save_ckpt_epoch_list:
            paths.append(self.run_dir / f"ckpt_epoch_{epoch}.pth")
        if self.watch is not None and values:
            value = values[self.watch[0]]
            if self._better(value, self.best):
                self.best = value
                paths.append(self.run_dir / self.hp.ckpt_best_name)
            if self._better(value, self._to_beat, self.hp.early_stopping_min_delta):
                self._to_beat, self._waited = value, 0
            else:
                self._waited += 1
            if self._snapshots is not None and not math.isnan(value):
                self._snapshots.add(epoch, value, weights())
        return paths if self.hp.save_model else []

    def _better(self, value: float, other: float | None, delta: float = 0.0) -> bool:
        if math.isnan(value):
            return False
        return other is None or (
            value > other + delta if self.watch is None or self.watch[1] else value < other - delta
        )

    @property
    def reason_to_end(self) -> str:
        """Why it is time to end before `max_epochs`, or an empty text."""
        patience = self.hp.early_stopping_patience
        if patience is None or self._waited < patience or self.watch is None:
            return ""
        many = "validation" if patience == 1 else "validations"
        best = "" if self._to_beat is None else f" than {self._to_beat:.6g}"
        return f"early stopping: {patience} {many} without a better {self.watch[0]}{best}"

    def average(self, device: torch.device) -> dict[str, Tensor] | None:
        """Return the mean of the best weights, or None where none were kept."""
        return self._snapshots.average(device) if self._snapshots is not None and self._snapshots.values else None

    def remove_snapshots(self) -> None:
        """Delete what the average was made of."""
        if self._snapshots is not None:
            self._snapshots.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know."""
        snapshots = {} if self._snapshots is None else self._snapshots.values
        return {"best": self.best, "to_beat": self._to_beat, "waited": self._waited, "snapshots": dict(snapshots)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint knew; snapshots count where their files are."""
        self.best, self._to_beat, self._waited = state["best"], state["to_beat"], state["waited"]
        if self._snapshots is not None:
            self._snapshots.take_over(state["snapshots"])
