"""The loop: epochs of training and validation, timed as SuperGradients' table times them, and split.

An epoch's clock covers loader, transfer, forward, loss, backward, update, metrics and validation. Compiling,
checkpoints and the first batch of the run (needed to warm up) are outside it, in compiled and eager runs alike. The
device is synchronised at the borders of an epoch only.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn

from sgnb.events import (
    CheckpointSaved,
    CompileFailed,
    EpochEnded,
    EpochStarted,
    Listener,
    Noticed,
    Phase,
    Recompiled,
    StepEnded,
)
from sgnb.hyperparams import HyperparamsError, Problem, TrainingHyperparams, nearest
from sgnb.losses import build_loss
from sgnb.training.checkpoint import LATEST, load_weights, save_checkpoint
from sgnb.training.compilation import CompileWatcher, WarmUp, preserved_rng
from sgnb.training.ema import Ema
from sgnb.training.loaders import Batch, Batches, last_batch_size, mark_batch_dynamic, num_batches
from sgnb.training.machine import compile_problem
from sgnb.training.metrics import build_metrics
from sgnb.training.optimizers import build_optimizer
from sgnb.training.precision import Precision, choose_dtype
from sgnb.training.schedules import lr_at
from sgnb.training.steps import StepResult, eval_step, train_step

_SECONDS_BETWEEN_SIGNS = 0.25
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, numpy and random."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@dataclass(slots=True)
class Tally:
    """Sums over a pass, kept on the device until they are asked for."""

    metrics: dict[str, torchmetrics.Metric]
    where: str
    loss_sum: Tensor
    num_samples: int = 0

    def add(self, result: StepResult, batch: Batch) -> None:
        """Count one batch; the mean loss is that over samples, not over batches."""
        self.loss_sum += result.loss * batch.num_samples
        self.num_samples += batch.num_samples
        for name, metric in self.metrics.items():
            try:
                metric.update(result.output.float(), batch.targets)
            except Exception as error:
                message = f"{name} cannot be computed from this model's output and these targets: {error}"
                raise HyperparamsError([Problem(where=self.where, message=message)]) from error

    def compute(self) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the metrics."""
        loss = self.loss_sum.item() / self.num_samples if self.num_samples else math.nan
        return loss, {name: float(metric.compute()) for name, metric in self.metrics.items()}


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


@dataclass(slots=True)
class _Seconds:
    train: float = 0.0
    valid: float = 0.0
    train_wait: float = 0.0
    valid_wait: float = 0.0


@dataclass(slots=True)
class Loop:
    """All that a run works with. `completed_epochs` and `num_updates` are its place."""

    model: nn.Module
    hp: TrainingHyperparams
    train_loader: Any
    valid_loader: Any | None
    device: torch.device
    emit: Listener
    stop: threading.Event
    notices: list[str] = field(default_factory=list)
    completed_epochs: int = 0
    num_updates: int = 0
    skipped_updates: int = 0
    best: float | None = None
    compiling: bool = False
    criterion: nn.Module = field(init=False)
    precision: Precision = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    ema: Ema | None = field(init=False)
    train_batches: int = field(init=False)
    valid_batches: int = field(init=False)
    train_metrics: dict[str, torchmetrics.Metric] = field(init=False)
    valid_metrics: dict[str, torchmetrics.Metric] = field(init=False)
    watch: tuple[str, bool] | None = field(init=False)
    compiled: bool = field(init=False, default=False)
    watcher: CompileWatcher = field(init=False, default_factory=CompileWatcher)

    def __post_init__(self) -> None:
        hp = self.hp
        self.train_batches = num_batches(self.train_loader, hp.max_train_batches, "train_loader")
        self.valid_batches = (
            num_batches(self.valid_loader, hp.max_valid_batches, "valid_loader") if self.valid_loader is not None else 0
        )
        dtype, notice = choose_dtype(hp, self.device)
        self.notices += [notice] if notice else []
        if hp.sync_bn:
            self.notices.append("sync_bn has nothing to synchronise in one process; BatchNorm stays as it is.")
        self.precision = Precision(dtype, self.device)
        self.criterion = build_loss(hp.loss, hp.criterion_params).to(self.device)
        self._build_metrics()
        self.model.to(self.device)
        self.optimizer = build_optimizer(self.model, hp)
        total = self.updates_per_epoch * hp.max_epochs
        self.ema = Ema(self.model, hp.ema_params, total_updates=total) if hp.ema else None

    @property
    def updates_per_epoch(self) -> int:
        """The last window of an epoch may be shorter, and makes an update as well."""
        return math.ceil(self.train_batches / self.hp.batch_accumulate)

    @property
    def batch_size(self) -> int:
        """As the loader has it; 0 when it does not say."""
        return getattr(self.train_loader, "batch_size", None) or 0

    def run(self, run_dir: Path) -> None:
        """Train until `max_epochs` or a stop."""
        compile_wanted = self.hp.torch_compile or self.hp.torch_compile_loss
        if compile_wanted:
            # All graphs of one forward() share one limit, above which torch runs it eagerly for good. Without this,
            # running a notebook's cell again and again would get there.
            torch._dynamo.reset()
        with self.watcher:
            batches: Batches | None = self._new_batches(self.completed_epochs + 1)
            if compile_wanted and batches is not None:
                self._warm_up(batches)
            for epoch in range(self.completed_epochs + 1, self.hp.max_epochs + 1):
                self.emit(EpochStarted(epoch=epoch))
                if self.stop.is_set():
                    break
                self._epoch(epoch, batches, run_dir)
                batches = None
                if self.stop.is_set():
                    break
        if self.stop.is_set() and self.hp.save_model:
            self._save(run_dir / LATEST, self.completed_epochs, {})
        if self.ema is not None and self.ema.num_updates:
            self.ema.copy_to_model()  # What was validated is what the caller gets.

    def _epoch(self, epoch: int, batches: Batches | None, run_dir: Path) -> None:
        seconds, compile_before, graphs_before = _Seconds(), self.watcher.seconds, self.watcher.counts()
        updates_before, skipped_before = self.num_updates, self.skipped_updates
        train = self._tally(self.train_metrics, "training_hyperparams.train_metrics_list")
        start = self._now()
        self._train(epoch, batches, train, seconds)
        train_loss, train_metrics = train.compute()
        seconds.train = self._now() - start
        if self.stop.is_set():
            return
        valid_loss, valid_metrics = self._validate_if_due(epoch, seconds)
        compile_seconds = self.watcher.seconds - compile_before
        if compile_seconds:
            graphs = self.watcher.counts()["num_graphs"] - graphs_before["num_graphs"]
            reason = self.watcher.last_reason()
            self.emit(Recompiled(epoch=epoch, seconds=compile_seconds, num_graphs=graphs, reason=reason))
        if not math.isfinite(train_loss):
            self.emit(Noticed(level="warning", message=f"the training loss of epoch {epoch} is {train_loss}."))
        self.completed_epochs = epoch
        values = {**valid_metrics, "loss": valid_loss} if valid_loss is not None else {}
        start = time.perf_counter()
        saved = self._save_checkpoints(run_dir, epoch, values)
        self.emit(
            EpochEnded(
                epoch=epoch,
                train_seconds=seconds.train,
                valid_seconds=seconds.valid,
                train_loader_wait_seconds=seconds.train_wait,
                valid_loader_wait_seconds=seconds.valid_wait,
                compile_seconds=compile_seconds,
                checkpoint_seconds=time.perf_counter() - start,
                train_loss=train_loss,
                valid_loss=valid_loss,
                train_metrics=train_metrics,
                valid_metrics=valid_metrics,
                lr=self.optimizer.param_groups[0]["lr"],
                num_samples=train.num_samples,
                num_updates=self.num_updates - updates_before,
                skipped_updates=self.skipped_updates - skipped_before,
                peak_mib=self._peak_mib(),
            )
        )
        for path in saved:
            self.emit(CheckpointSaved(path=str(path), epoch=epoch))

    def _train(self, epoch: int, batches: Batches | None, tally: Tally, seconds: _Seconds) -> None:
        start = time.perf_counter()
        batches = batches or self._new_batches(epoch)
        seconds.train_wait += time.perf_counter() - start
        self.model.train()
        signs, accumulate = _Signs(self, "train", epoch, self.train_batches), self.hp.batch_accumulate
        first = window = 0  # Samples in the first batch of the accumulation window, and in all of it.
        for number, batch in enumerate(batches, 1):
            self._prepare(batch)
            first = first or batch.num_samples
            # The mean over the window's samples, however its batches differ in size.
            result = self.train_step(batch, weight=batch.num_samples / first)
            window += batch.num_samples
            tally.add(result, batch)
            if number % accumulate == 0 or number == self.train_batches:
                self._update(first / window)
                first = window = 0
            signs.give(number, result.loss)
            if self.stop.is_set():
                break
        if window and not self.stop.is_set():  # The loader was shorter than its length.
            self._update(first / window)
        self.optimizer.zero_grad(set_to_none=True)
        seconds.train_wait += batches.wait_seconds

    def _update(self, gradient_scale: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(
                self.num_updates, initial_lr=group["initial_lr"], hp=self.hp, updates_per_epoch=self.updates_per_epoch
            )
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        changed = self.precision.update(
            parameters, self.optimizer, gradient_scale=gradient_scale, max_norm=self.hp.clip_grad_norm
        )
        if not changed:
            self.skipped_updates += 1
            return
        self.num_updates += 1
        if self.ema is not None:
            self.ema.update()

    def _validate_if_due(self, epoch: int, seconds: _Seconds) -> tuple[float | None, dict[str, float]]:
        due = epoch % self.hp.run_validation_freq == 0 or epoch == self.hp.max_epochs
        if self.valid_loader is None or not due:
            return None, {}
        start = self._now()
        averaged = self.ema.swapped() if self.ema is not None and self.ema.num_updates else contextlib.nullcontext()
        with averaged:
            loss, metrics, seconds.valid_wait = self.validate(self.valid_loader, epoch)
        seconds.valid = self._now() - start
        return loss, metrics

    def validate(self, loader: Any, epoch: int = 0) -> tuple[float, dict[str, float], float]:
        """Return mean loss, metrics and the seconds spent waiting for the loader, with the weights as they are."""
        tally = self._tally(self.valid_metrics, "training_hyperparams.valid_metrics_list")
        limit = num_batches(loader, self.hp.max_valid_batches, "valid_loader")
        start = time.perf_counter()
        batches = Batches(loader, limit, self.device, "valid_loader")
        wait = time.perf_counter() - start
        self.model.eval()
        signs = _Signs(self, "valid", epoch, limit)
        for number, batch in enumerate(batches, 1):
            self._prepare(batch)
            result = eval_step(self.model, batch, criterion=self.criterion, precision=self.precision)
            tally.add(result, batch)
            signs.give(number, result.loss)
        return *tally.compute(), wait + batches.wait_seconds

    def train_step(self, batch: Batch, weight: float = 1.0) -> StepResult:
        """Add the gradients of one batch."""
        return train_step(self.model, batch, criterion=self.criterion, precision=self.precision, weight=weight)

    def _warm_up(self, batches: Batches) -> None:
        problem = compile_problem(self.device.type) if self.hp.torch_compile_options.backend == "inductor" else None
        if problem is not None:
            if self.hp.torch_compile_options.fullgraph:
                raise RuntimeError(problem)
            self.emit(CompileFailed(reason=problem))
            return
        warm_up = WarmUp(
            self.model,
            self.criterion,
            train_step=self.train_step,
            eval_step=lambda batch: eval_step(self.model, batch, criterion=self.criterion, precision=self.precision),
            watcher=self.watcher,
            emit=self.emit,
        )
        with preserved_rng(), _preserved_generator(self.valid_loader):
            train = self._sizes(batches, self.train_loader, self.train_batches)
            valid: list[Batch] = []
            if self.valid_loader is not None:
                first = Batches(self.valid_loader, 1, self.device, "valid_loader")
                valid = self._sizes(first, self.valid_loader, self.valid_batches)
            self.compiling = True
            try:
                self.compiled = warm_up.run(self.hp, train, valid, dtype=self.precision.dtype)
            finally:
                self.compiling = False

    def _sizes(self, batches: Batches, loader: Any, limit: int) -> list[Batch]:
        """Return the first batch, and as much of it as the loader's last batch will have."""
        first, last = batches.first(), last_batch_size(loader, limit)
        return [first] if last is None or last >= first.num_samples else [first, first.head(last)]

    def _prepare(self, batch: Batch) -> None:
        if self.compiled:
            if self.hp.torch_compile_options.dynamic is None:
                mark_batch_dynamic(batch)
            if (self.hp.torch_compile_options.mode or self.hp.torch_compile_mode) in _CUDA_GRAPH_MODES:
                torch.compiler.cudagraph_mark_step_begin()

    def _new_batches(self, epoch: int) -> Batches:
        # Every random number of an epoch follows from the seed and the epoch: compiled and eager runs, which draw
        # different numbers for dropout, see the same data order, and a resumed run goes on as if nothing had happened.
        seed_everything(self.hp.seed + epoch)
        return Batches(self.train_loader, self.train_batches, self.device, "train_loader")

    def _build_metrics(self) -> None:
        hp = self.hp
        by_default = ("Accuracy",) if type(self.criterion).__name__ == "CrossEntropyLoss" else ()
        valid = by_default if hp.valid_metrics_list is None else hp.valid_metrics_list
        train = valid if hp.train_metrics_list is None else hp.train_metrics_list
        where = "training_hyperparams"
        self.valid_metrics = build_metrics(valid, f"{where}.valid_metrics_list", self.device)
        if hp.train_metrics_list is None:  # Objects of their own: a metric holds sums.
            self.train_metrics = {name: metric.clone() for name, metric in self.valid_metrics.items()}
        else:
            self.train_metrics = build_metrics(train, f"{where}.train_metrics_list", self.device)
        name = hp.metric_to_watch or next(iter(self.valid_metrics), "loss")
        names = [*self.valid_metrics, "loss"]
        if name not in names:
            message = f"expected one of {', '.join(names)}, got {name!r}{nearest(name, names)}"
            raise HyperparamsError([Problem(where=f"{where}.metric_to_watch", message=message)])
        greater = hp.greater_metric_to_watch_is_better
        self.watch = (name, name != "loss" if greater is None else greater) if self.valid_loader is not None else None

    def _tally(self, metrics: dict[str, torchmetrics.Metric], where: str) -> Tally:
        for metric in metrics.values():
            metric.reset()
        return Tally(metrics, where, torch.zeros((), device=self.device, dtype=torch.float32))

    def _save_checkpoints(self, run_dir: Path, epoch: int, values: dict[str, Any]) -> list[Path]:
        better = False
        if self.watch is not None and values:
            name, greater = self.watch
            value = values[name]
            better = self.best is None or (value > self.best if greater else value < self.best)
            self.best = value if better else self.best
        if not self.hp.save_model:
            return []
        paths = [run_dir / LATEST, *([run_dir / self.hp.ckpt_best_name] if better else [])]
        for path in paths:
            self._save(path, epoch, values)
        return paths

    def _save(self, path: Path, epoch: int, values: dict[str, Any]) -> None:
        """Write a checkpoint with SuperGradients' keys; `epoch` is the number of completed epochs."""
        generator = getattr(self.train_loader, "generator", None)
        state = {
            "net": self.model.state_dict(),
            "epoch": epoch,
            "acc": values.get(self.watch[0]) if self.watch else None,
            "metrics": {"tracked_metric_name": self.watch[0] if self.watch else None, "valid": values},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scaler_state_dict": self.precision.state_dict(),
            "best": self.best,
            "num_updates": self.num_updates,
            "loader_generator": generator.get_state() if generator is not None else None,
        }
        if self.ema is not None:
            state |= {"ema_net": self.ema.state_dict(), "ema_updates": self.ema.num_updates}
        save_checkpoint(path, state)

    def load(self, state: dict[str, Any], path: Path) -> None:
        """Take over a checkpoint of sgnb.

        Raises:
            CheckpointError: when it belongs to another model, or lacks what a resumed run needs.
        """
        load_weights(self.model, state, path)
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.precision.load_state_dict(state["scaler_state_dict"])
        self.completed_epochs, self.best = state["epoch"], state["best"]
        self.num_updates = state["num_updates"]
        if state["loader_generator"] is not None and getattr(self.train_loader, "generator", None) is not None:
            self.train_loader.generator.set_state(state["loader_generator"].cpu())
        if self.ema is not None:
            if "ema_net" in state:
                self.ema.load_state_dict(state["ema_net"], num_updates=state["ema_updates"])
            else:
                self.notices.append(f"{path} holds no average of the weights; averaging begins with its weights.")
                self.ema.load_state_dict(state["net"], num_updates=0)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _peak_mib(self) -> float:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**20
            torch.cuda.reset_peak_memory_stats(self.device)
            return peak
        import resource  # Not on Windows, where sgnb is not supported.

        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


class _Signs:
    """Emits `StepEnded` a few times a second, and for the last batch."""

    def __init__(self, loop: Loop, phase: Phase, epoch: int, num_batches: int) -> None:
        self._loop, self._phase, self._epoch, self._num_batches = loop, phase, epoch, num_batches
        self._loss, self._last = DelayedLoss(), 0.0

    def give(self, number: int, loss: Tensor) -> None:
        now = time.perf_counter()
        if now - self._last < _SECONDS_BETWEEN_SIGNS and number != self._num_batches:
            return
        self._last = now
        self._loop.emit(
            StepEnded(
                phase=self._phase,
                epoch=self._epoch,
                batch=number,
                num_batches=self._num_batches,
                loss=self._loss.exchange(loss),
                lr=self._loop.optimizer.param_groups[0]["lr"],
            )
        )


@contextlib.contextmanager
def _preserved_generator(loader: Any) -> Any:
    generator = getattr(loader, "generator", None)
    state = generator.get_state() if generator is not None else None
    try:
        yield
    finally:
        if generator is not None:
            generator.set_state(state)
