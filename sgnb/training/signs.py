"""Signs of life inside an epoch: a few `StepEnded` a second, with a loss that nothing had to wait for."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from sgnb.events import Listener, Phase, StepEnded

_SECONDS_BETWEEN = 0.25


class DelayedLoss:
    """The loss of a recent step. On a GPU it is read one sign of life later, so that nothing waits for the device."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def exchange(self, loss: Tensor) -> float | None:
        """Hand in a loss, and get the last one that has arrived."""
        if loss.device.type != "cuda":
            return loss.item()
        arrived = self._host is not None and self._copied is not None and self._copied.query()
        value = self._host.item() if arrived and self._host is not None else None
        self._host = loss.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return value


class Signs:
    """Emits `StepEnded` a few times a second, and for the last batch."""

    def __init__(self, emit: Listener, phase: Phase, epoch: int, num_batches: int) -> None:
        self._emit, self._phase, self._epoch, self._num_batches = emit, phase, epoch, num_batches
        self._loss, self._last = DelayedLoss(), 0.0

    def give(self, batch: int, loss: Tensor, lr: float) -> None:
        """Say that a batch is done, if it is time to say something."""
        now = time.perf_counter()
        if now - self._last < _SECONDS_BETWEEN and batch != self._num_batches:
            return
        self._last = now
        self._emit(
            StepEnded(
                phase=self._phase,
                epoch=self._epoch,
                batch=batch,
                num_batches=self._num_batches,
                loss=self._loss.exchange(loss),
                lr=lr,
            )
        )
