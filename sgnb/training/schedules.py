"""Learning rates as pure functions of the update, with SuperGradients' schedules and meanings.

An update is one optimizer step; `updates_per_epoch` is N, and an epoch counts from 0. Where SuperGradients counts
batches (a warm-up that ends with the first epoch, accumulation that shifts the schedule), these count updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sgnb.hyperparams import TrainingHyperparams


def lr_at(update: int, *, initial_lr: float, hp: TrainingHyperparams, updates_per_epoch: int) -> float:
    """Return the learning rate of the update with this number (from 0)."""
    epoch = update // updates_per_epoch
    if epoch < hp.lr_warmup_epochs:
        start = initial_lr / (hp.lr_warmup_epochs + 1) if hp.warmup_initial_lr is None else hp.warmup_initial_lr
        return start + epoch * (initial_lr - start) / hp.lr_warmup_epochs
    if update < hp.lr_warmup_steps:
        start = initial_lr / (hp.lr_warmup_steps + 1) if hp.warmup_initial_lr is None else hp.warmup_initial_lr
        return start + update * (initial_lr - start) / max(1, hp.lr_warmup_steps - 1)
    last = (hp.max_epochs - hp.lr_cooldown_epochs) * updates_per_epoch - 1
    return _SCHEDULES[hp.lr_mode](min(update, last), initial_lr, hp, updates_per_epoch)


def _step(update: int, initial_lr: float, hp: TrainingHyperparams, updates_per_epoch: int) -> float:
    # SuperGradients multiplies at the end of the named epoch, so the next one is the first to feel it.
    epoch = update // updates_per_epoch
    if hp.step_lr_update_freq is not None:
        frequency = hp.step_lr_update_freq
        many = math.ceil(hp.max_epochs / frequency) + 1
        updates = [math.ceil(frequency * k) for k in range(1, many)]
    else:
        updates = list(hp.lr_updates)
    num_updates = sum(hp.lr_warmup_epochs <= at < epoch for at in updates)
    return initial_lr * math.pow(hp.lr_decay_factor or 0.0, num_updates)


def _exponential(update: int, initial_lr: float, hp: TrainingHyperparams, updates_per_epoch: int) -> float:
    passed = update / updates_per_epoch - hp.lr_warmup_epochs
    return initial_lr * math.pow(hp.lr_decay_factor or 0.0, passed)


def _poly(update: int, initial_lr: float, hp: TrainingHyperparams, updates_per_epoch: int) -> float:
    passed, length = _span(update, hp, updates_per_epoch)
    return initial_lr * math.pow(1 - passed / length, 0.9)


def _cosine(update: int, initial_lr: float, hp: TrainingHyperparams, updates_per_epoch: int) -> float:
    passed, length = _span(update, hp, updates_per_epoch)
    ratio = hp.cosine_final_lr_ratio
    return initial_lr * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * passed / (length + 1))))


def _function(update: int, initial_lr: float, hp: TrainingHyperparams, updates_per_epoch: int) -> float:
    assert hp.lr_schedule_function is not None  # The record demands it.
    epoch, batch = divmod(update, updates_per_epoch)
    return float(
        hp.lr_schedule_function(
            initial_lr=initial_lr, epoch=epoch, iter=batch, max_epoch=hp.max_epochs, iters_per_epoch=updates_per_epoch
        )
    )


def _span(update: int, hp: TrainingHyperparams, updates_per_epoch: int) -> tuple[int, int]:
    """Return how far into the schedule proper an update is, and how long that is; both in updates."""
    warm_up = hp.lr_warmup_epochs * updates_per_epoch + hp.lr_warmup_steps
    length = (hp.max_epochs - hp.lr_cooldown_epochs) * updates_per_epoch - warm_up
    return max(0, update - warm_up), max(1, length)


_SCHEDULES: dict[str, Callable[[int, float, TrainingHyperparams, int], float]] = {
    "StepLRScheduler": _step,
    "ExponentialLRScheduler": _exponential,
    "PolyLRScheduler": _poly,
    "CosineLRScheduler": _cosine,
    "FunctionLRScheduler": _function,
}


class Schedule:  # SHIM
    def __init__(self, hp, optimizer, updates_per_epoch):
        self.hp, self.o, self.n = hp, optimizer, updates_per_epoch

    def apply(self, update):
        for g in self.o.param_groups:
            g["lr"] = lr_at(update, initial_lr=g["initial_lr"], hp=self.hp, updates_per_epoch=self.n)

    def update_ended(self, n): ...
    def epoch_ended(self, e, v): ...
    def state_dict(self):
        return {}

    def load_state_dict(self, s): ...
