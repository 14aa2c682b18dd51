"""Learning rates as pure functions of the update, with SuperGradients' schedules and meanings.

An update is one optimizer step; `updates_per_epoch` is N, and an epoch counts from 0. Where SuperGradients counts
batches (a warm-up that ends with the first epoch, accumulation that shifts the schedule), these count updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from sgnb.hyperparams import HyperparamsError, Problem, TrainingHyperparams, nearest
from sgnb.training.optimizers import NO_DECAY


def lr_at(
    update: int, *, initial_lr: float, hp: TrainingHyperparams, updates_per_epoch: int, group: str = "default"
) -> float:
    """Return the learning rate of the update with this number (from 0) for a group of parameters.

    After the warm-up, a scheduler of torch goes its own way: `initial_lr` then.
    """
    if _warms_up(update, hp, updates_per_epoch):
        return _warm_up(update, initial_lr, hp, updates_per_epoch, group)
    if isinstance(hp.lr_mode, dict):
        return initial_lr
    # A step at the end of the last epoch before the cool-down is felt in the cool-down; the others end with their last.
    last = (hp.max_epochs - hp.lr_cooldown_epochs) * updates_per_epoch - (hp.lr_mode != "StepLRScheduler")
    return _SCHEDULES[hp.lr_mode](min(update, last), initial_lr, hp, updates_per_epoch)


def _warms_up(update: int, hp: TrainingHyperparams, updates_per_epoch: int) -> bool:
    return update < max(hp.lr_warmup_epochs * updates_per_epoch, hp.lr_warmup_steps)


def _warm_up(update: int, initial_lr: float, hp: TrainingHyperparams, updates_per_epoch: int, group: str) -> float:
    given = hp.warmup_initial_lr
    if isinstance(given, dict):
        given = given.get(group, given["default"])
    start = initial_lr / (hp.lr_warmup_epochs + hp.lr_warmup_steps + 1) if given is None else given
    if hp.lr_warmup_epochs:
        return start + update // updates_per_epoch * (initial_lr - start) / hp.lr_warmup_epochs
    return start + update * (initial_lr - start) / max(1, hp.lr_warmup_steps - 1)


class Schedule:
    """Sets the rates of an optimizer's groups: by `lr_at`, or by a scheduler of torch once the warm-up is over.

    A scheduler is stepped per update or per epoch, as its `phase` says in SuperGradients' words.

    Raises:
        HyperparamsError: when there is no such scheduler, its arguments do not fit, or a warm-up names no group.
    """

    def __init__(self, hp: TrainingHyperparams, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> None:
        self._hp, self._optimizer, self._updates_per_epoch = hp, optimizer, updates_per_epoch
        self._scheduler: LRScheduler | None = None
        self._metric: str | None = None
        self._per_update = False
        self._last_warms_up = True  # Nothing has been updated yet.
        self._check_warm_up()
        if isinstance(hp.lr_mode, dict):
            name, arguments = next(iter(hp.lr_mode.items()))
            self._scheduler, self._metric, self._per_update = _build_scheduler(name, arguments or {}, optimizer)

    def _check_warm_up(self) -> None:
        given, rates = self._hp.warmup_initial_lr, self._hp.initial_lr
        if not isinstance(given, dict) or self._hp.finetune:  # Then the model may have frozen groups that it names.
            return
        known = {"default", *(rates if isinstance(rates, dict) else ()), *map(_name_of, self._optimizer.param_groups)}
        where = "training_hyperparams.warmup_initial_lr"
        problems = [
            Problem(where=f"{where}.{name}", message=f"initial_lr has no such prefix{nearest(name, known)}")
            for name in given
            if name not in known
        ]
        if problems:
            raise HyperparamsError(problems)

    def apply(self, update: int) -> None:
        """Set the rates of the update with this number (from 0)."""
        groups = self._optimizer.param_groups
        if self._scheduler is not None and not self._warms_up(update):
            for group, rate in zip(groups, self._scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
            return
        for group in groups:
            group["lr"] = lr_at(
                update,
                initial_lr=group["initial_lr"],
                hp=self._hp,
                updates_per_epoch=self._updates_per_epoch,
                group=_name_of(group),
            )

    def update_ended(self, num_updates: int) -> None:
        """Go on to the next update, after so many."""
        self._last_warms_up = self._warms_up(num_updates - 1)
        if self._scheduler is not None and self._per_update and not self._last_warms_up:
            self._scheduler.step()

    def epoch_ended(self, epoch: int, values: Mapping[str, float]) -> None:
        """Go on to the next epoch. `values` are what the validation gave, empty without one.

        Raises:
            HyperparamsError: when the metric that the scheduler is to watch is not among them.
        """
        if self._scheduler is None or self._per_update or self._last_warms_up:
            return
        if self._metric is None:
            self._scheduler.step()
        elif self._metric in values:
            self._scheduler.step(values[self._metric])  # type: ignore[arg-type] # ReduceLROnPlateau takes a metric.
        elif values:
            message = f"expected one of {', '.join(values)}, got {self._metric!r}{nearest(self._metric, values)}"
            where = f"{_WHERE}.{type(self._scheduler).__name__}.metric_name"
            raise HyperparamsError([Problem(where=where, message=message)])

    def _warms_up(self, update: int) -> bool:
        return _warms_up(update, self._hp, self._updates_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where a scheduler of torch is; empty for the others, which need no memory."""
        if self._scheduler is None:
            return {}
        state = {name: value for name, value in self._scheduler.state_dict().items() if not callable(value)}
        return {"scheduler": state, "last_warms_up": self._last_warms_up}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the place of an earlier run with the same scheduler."""
        if self._scheduler is not None and state:
            # The updates were made by the optimizer of that run; torch would warn that this one has made none.
            self._optimizer._opt_called = not state["last_warms_up"]  # type: ignore[attr-defined]
            self._scheduler.load_state_dict(state["scheduler"])
            self._last_warms_up = state["last_warms_up"]


def _name_of(group: dict[str, Any]) -> str:
    return str(group.get("name", "default")).removesuffix(NO_DECAY)


def _build_scheduler(
    name: str, arguments: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> tuple[LRScheduler, str | None, bool]:
    """Return a scheduler of torch, the metric that it watches, and whether it counts updates rather than epochs."""
    known = {
        key: value
        for key, value in vars(lr_scheduler).items()
        if isinstance(value, type)
        and issubclass(value, LRScheduler)
        and not key.startswith("_")
        and key not in ("LRScheduler", "ChainedScheduler", "SequentialLR")  # They take schedulers, not numbers.
    }
    if name not in known:
        message = f"expected one of {', '.join(sorted(known))}, got {name!r}{nearest(str(name), known)}"
        raise HyperparamsError([Problem(where=_WHERE, message=message)])
    given = dict(arguments)
    phase, metric = given.pop("phase", None), given.pop("metric_name", None)
    problems = []
    if phase is not None and phase not in (*_PER_UPDATE, *_PER_EPOCH):
        choices = ", ".join((*_PER_UPDATE, *_PER_EPOCH))
        message = f"expected one of {choices}, got {phase!r}{nearest(str(phase), (*_PER_UPDATE, *_PER_EPOCH))}"
        problems.append(Problem(where=f"{_WHERE}.{name}.phase", message=message))
    if (name == "ReduceLROnPlateau") != (metric is not None):
        message = "is required by ReduceLROnPlateau and belongs to it alone: the name of a validation metric, or loss"
        problems.append(Problem(where=f"{_WHERE}.{name}.metric_name", message=message))
    elif metric is not None and phase in _PER_UPDATE:
        message = f"expected one of {', '.join(_PER_EPOCH)}: a metric is measured once an epoch, got {phase!r}"
        problems.append(Problem(where=f"{_WHERE}.{name}.phase", message=message))
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    try:
        scheduler = known[name](optimizer, **given)
    except (TypeError, ValueError) as error:
        problems.append(Problem(where=f"{_WHERE}.{name}", message=f"does not take these arguments: {error}"))
    if problems:
        raise HyperparamsError(problems)
    per_update = phase in _PER_UPDATE or (phase is None and name in ("OneCycleLR", "CyclicLR"))
    return scheduler, metric, per_update


_WHERE = "training_hyperparams.lr_mode"
_PER_UPDATE = ("TRAIN_BATCH_STEP", "TRAIN_BATCH_END")
_PER_EPOCH = ("TRAIN_EPOCH_START", "TRAIN_EPOCH_END", "VALIDATION_EPOCH_END")


def _step(update: int, initial_lr: float, hp: TrainingHyperparams, updates_per_epoch: int) -> float:
    # SuperGradients multiplies at the end of the named epoch, so the next one is the first to feel it.
    epoch = update // updates_per_epoch
    if hp.step_lr_update_freq is not None:
        frequency = hp.step_lr_update_freq
        many = math.ceil(hp.max_epochs / frequency) + 1
        updates = [at for k in range(1, many) if (at := math.ceil(frequency * k)) >= hp.lr_warmup_epochs]
    else:
        updates = list(hp.lr_updates)
    # The warm-up ends at the peak, whatever was named before; that is felt one epoch later.
    num_updates = sum(at < epoch for at in updates) if epoch > hp.lr_warmup_epochs else 0
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
            initial_lr=initial_lr,
            epoch=epoch - hp.lr_warmup_epochs,  # SuperGradients leaves warm-up and cool-down out of both.
            iter=batch,
            max_epoch=hp.max_epochs - hp.lr_warmup_epochs - hp.lr_cooldown_epochs,
            iters_per_epoch=updates_per_epoch,
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
