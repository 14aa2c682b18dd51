"""The loop: epochs of training and validation, timed as SuperGradients' table times them, and split.

An epoch's clock covers loader, transfer, forward, loss, backward, update, metrics and validation. Compiling,
checkpoints and the first batch of the run (needed to warm up) are outside it, in compiled and eager runs alike. The
device is synchronised at the borders of an epoch only.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
    OutOfMemory,
    Recompiled,
    UpdatesSkipped,
)
from sgnb.hyperparams import CUDA_GRAPH_MODES, HyperparamsError, Problem, TrainingHyperparams
from sgnb.losses import build_loss
from sgnb.training.checkpoint import LATEST, fitting_weights, save_checkpoint
from sgnb.training.compilation import ModelWatch, WarmUp, compile_targets, problems_on, start_afresh
from sgnb.training.ema import Ema, all_finite, swapped
from sgnb.training.epoch import Epoch, Measured, Tally, Window
from sgnb.training.keeper import AVERAGE, Keeper
from sgnb.training.loaders import Batch, Batches, Mover, last_batch_size, num_batches, tensors_in
from sgnb.training.machine import compile_problem
from sgnb.training.memory import advice, is_out_of_memory, memory_mib, release
from sgnb.training.metrics import metric_to_watch, metrics_of_run
from sgnb.training.optimizers import build_optimizer, load_optimizer_state
from sgnb.training.precision import Precision, choose_dtype
from sgnb.training.randomness import (
    generators_of,
    preserved_generators,
    preserved_rng,
    rng_state,
    seed_everything,
    set_rng_state,
)
from sgnb.training.schedules import Schedule
from sgnb.training.signs import Signs
from sgnb.training.steps import StepResult, eval_step, train_step
from sgnb.training.watcher import CompileWatcher

_SKIPS_WORTH_A_WORD = 5  # float16 begins with a loss scale that is too large, and finds a better one in a few updates.
_SKIPS_TO_GIVE_UP = 32  # From 65536, the scale is then below 2**-15, and no scale helps.


class DivergedError(RuntimeError):
    """Gradients or weights are not finite, and will not be again."""


@dataclass(slots=True)
class Loop:
    """All that a run works with. `completed_epochs`, `epoch` (the one under way) and `num_updates` are its place."""

    model: nn.Module
    hp: TrainingHyperparams
    train_loader: Any
    valid_loader: Any | None
    device: torch.device
    emit: Listener
    stop: threading.Event
    run_dir: Path = field(default_factory=Path)
    notices: list[Noticed] = field(default_factory=list)
    completed_epochs: int = 0
    num_updates: int = 0
    epoch: Epoch | None = None
    compiling: bool = False
    compiled: bool = False
    criterion: nn.Module = field(init=False)
    precision: Precision = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    implementation: str = field(init=False)  # Of the optimizer: fused, foreach or for-loop.
    schedule: Schedule = field(init=False)
    ema: Ema | None = field(init=False)
    keeper: Keeper = field(init=False)
    train_batches: int = field(init=False)
    valid_batches: int = field(init=False, default=0)
    train_metrics: dict[str, torchmetrics.Metric] = field(init=False)
    valid_metrics: dict[str, torchmetrics.Metric] = field(init=False)
    watcher: CompileWatcher = field(init=False)
    _move: Mover = field(init=False)
    _parameters: list[nn.Parameter] = field(init=False)
    _statistics: _Statistics = field(init=False)
    _pieces: int = 1  # Parts of a batch that go through the model one after the other.
    _skipped_in_a_row: int = 0
    _warm_up: WarmUp | None = None
    _model_watch: ModelWatch | None = None
    _swap_checked: bool = False
    _generator_states: list[Tensor] | None = None  # At the beginning of the epoch under way.

    def __post_init__(self) -> None:
        hp = self.hp
        problems = problems_on(hp, self.device)
        if self.valid_loader is None and isinstance(hp.lr_mode, dict) and "ReduceLROnPlateau" in hp.lr_mode:
            message = "watches a metric of the validation, and there is no valid_loader"
            problems.append(Problem(where="training_hyperparams.lr_mode.ReduceLROnPlateau", message=message))
        if problems:
            raise HyperparamsError(problems)
        self.train_batches = num_batches(self.train_loader, hp.max_train_batches, "train_loader")
        if self.valid_loader is not None:
            self.valid_batches = num_batches(self.valid_loader, hp.max_valid_batches, "valid_loader")
        dtype, notice = choose_dtype(hp, self.device)
        self.precision = Precision(dtype, self.device)
        self.criterion = build_loss(hp.loss, hp.criterion_params).to(self.device)
        self.train_metrics, self.valid_metrics = metrics_of_run(hp, self.criterion, self.device)
        watch = metric_to_watch(hp, self.valid_metrics)
        self.keeper = Keeper(hp, watch if self.valid_loader is not None else None, self.run_dir)
        self.model.to(self.device)
        if hp.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self._move = Mover(self.device, channels_last=hp.channels_last)
        self.optimizer, self.implementation = build_optimizer(self.model, hp, self.device)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.schedule = Schedule(hp, self.optimizer, self.updates_per_epoch)
        total = self.updates_per_epoch * hp.max_epochs
        self.ema = Ema(self.model, hp.ema_params, total_updates=total) if hp.ema else None
        self._statistics = _Statistics(self.model)
        self.watcher = CompileWatcher(self.emit)
        self._note("information", notice)
        self._note_what_has_no_effect()

    def _note(self, level: str, message: str | None) -> None:
        if message:
            self.notices.append(Noticed(level=level, message=message))  # type: ignore[arg-type]

    def _note_what_has_no_effect(self) -> None:
        hp = self.hp
        if hp.sync_bn:
            self._note("information", "sync_bn has nothing to synchronise in one process; BatchNorm stays as it is.")
        if self.valid_loader is None:
            for name in ("early_stopping_patience", "average_best_models"):
                if getattr(hp, name):
                    self._note("warning", f"{name} has no effect without a valid_loader.")
        if last_batch_size(self.train_loader, self.train_batches) == 1:
            self._note(
                "warning",
                "The last training batch of each epoch has one sample. BatchNorm fails where it then has one value per "
                "channel, and the compiler needs a graph of its own; drop_last=True in the loader leaves it out.",
            )

    @property
    def updates_per_epoch(self) -> int:
        """The last window of an epoch may be shorter, and makes an update as well."""
        return math.ceil(self.train_batches / self.hp.batch_accumulate)

    @property
    def batch_size(self) -> int:
        """As the loader has it; 0 when it does not say."""
        return getattr(self.train_loader, "batch_size", None) or 0

    def run(self) -> None:
        """Train until `max_epochs`, a stop, or what `Keeper` has as a reason to end."""
        with self.watcher, self.precision.apart_from_the_callers():
            first = self._first_batches()
            while self.completed_epochs < self.hp.max_epochs and not self.keeper.reason_to_end:
                self.epoch = self.epoch or self._new_epoch(self.completed_epochs + 1)
                self.emit(EpochStarted(epoch=self.epoch.number))
                if not self.stop.is_set():
                    self._one_epoch(self.epoch, first)
                first = None
                if self.stop.is_set():
                    break
        if self.stop.is_set() and self.hp.save_model:
            self._save_where_it_stopped()
        if not self.stop.is_set():
            self._average_best()
        if self.ema is not None and self.ema.num_updates:
            self.ema.copy_to_model()  # What was validated is what the caller gets.

    def _save_where_it_stopped(self) -> None:
        if self._is_finite():
            self._save([self.run_dir / LATEST], {})
        else:
            message = "the weights are not finite, so the checkpoint of the last epoch was left as it is."
            self.emit(Noticed(level="warning", message=message))

    def _first_batches(self) -> Batches | None:
        """Return the batches with which the run begins and the graphs were made; None: all of its epoch's are done."""
        self.epoch = self.epoch or self._new_epoch(self.completed_epochs + 1)
        in_validation = self.epoch.num_batches == self.train_batches  # Where the run that is resumed was stopped.
        if in_validation:  # One to make the graphs with.
            with preserved_rng(), preserved_generators(self.train_loader):
                batches = Batches(self.train_loader, 1, "train_loader", self._move)
        else:
            batches = self._new_batches(self.epoch)
        if self.hp.channels_last and not any(t.ndim == 4 for t in tensors_in(batches.first().inputs)):
            self.emit(Noticed(level="warning", message="channels_last has no effect: no input is [B, C, H, W]."))
        if self.hp.torch_compile or self.hp.torch_compile_loss:
            start_afresh()
            self._compile(batches)
        return None if in_validation else batches

    def _new_epoch(self, number: int) -> Epoch:
        self._statistics.keep()
        return Epoch(number, self._tally(self.train_metrics, "train"))

    def _one_epoch(self, epoch: Epoch, batches: Batches | None) -> None:
        compile_before, graphs_before = self.watcher.seconds, self.watcher.counts()["num_graphs"]
        mark = self.watcher.mark()
        if epoch.num_batches < self.train_batches:
            self._train(epoch, batches)
        if self.stop.is_set():
            return
        train = epoch.tally.compute()
        self._look_after_training(epoch, train.loss)
        valid, raw = self._validate_if_due(epoch)
        epoch.seconds.compile += self.watcher.seconds - compile_before
        if self.stop.is_set():
            return
        if self.watcher.seconds > compile_before:
            self.emit(
                Recompiled(
                    epoch=epoch.number,
                    seconds=self.watcher.seconds - compile_before,
                    num_graphs=self.watcher.counts()["num_graphs"] - graphs_before,
                    reason=self.watcher.last_reason(mark),
                )
            )
        for change in self._model_watch.changes() if self._model_watch is not None else ():
            self.emit(Noticed(level="warning", message=change))
        self.completed_epochs, self.epoch, self._generator_states = epoch.number, None, None
        self._finish(epoch, train, valid, raw)

    def _finish(self, epoch: Epoch, train: Measured, valid: Measured | None, raw: Measured | None) -> None:
        """Save what is worth it, and say how the epoch was."""
        values = {} if valid is None else {**valid.metrics, "loss": valid.loss}
        lr = self._lr
        self.schedule.epoch_ended(epoch.number, values)
        start = time.perf_counter()
        paths = self.keeper.judge(epoch.number, values, self._validated_weights)
        self._save(paths, values)
        seconds = epoch.seconds
        self.emit(
            EpochEnded(
                epoch=epoch.number,
                train_seconds=seconds.train,
                valid_seconds=seconds.valid,
                train_loader_wait_seconds=seconds.train_wait,
                valid_loader_wait_seconds=seconds.valid_wait,
                compile_seconds=seconds.compile,
                checkpoint_seconds=time.perf_counter() - start,
                train_loss=train.loss,
                train_losses=train.parts,
                train_metrics=train.metrics,
                valid_loss=None if valid is None else valid.loss,
                valid_losses={} if valid is None else valid.parts,
                valid_metrics={} if valid is None else valid.metrics,
                raw_valid_loss=None if raw is None else raw.loss,
                raw_valid_metrics={} if raw is None else raw.metrics,
                lr=lr,
                num_samples=train.num_samples,
                num_updates=epoch.num_updates,
                skipped_updates=epoch.skipped_updates,
                peak_mib=self._peak_mib(),
            )
        )
        for path in paths:
            self.emit(CheckpointSaved(path=str(path), epoch=epoch.number))

    def _train(self, epoch: Epoch, batches: Batches | None) -> None:
        start = self._now()
        if batches is None:
            batches = self._new_batches(epoch)
            epoch.seconds.train_wait += time.perf_counter() - start
        self.model.train()
        signs = Signs(self.emit, "train", epoch.number, self.train_batches)
        for batch in batches:
            epoch.num_batches += 1
            for piece, result in self._accumulate(epoch, self._prepared(batch, epoch.num_batches - 1)):
                epoch.tally.add(result, piece)
            if epoch.num_batches % self.hp.batch_accumulate == 0 or epoch.num_batches == self.train_batches:
                self._update(epoch)
            signs.give(epoch.num_batches, result.loss, self._lr)
            if self.stop.is_set():
                epoch.rng = rng_state()
                break
        else:
            if epoch.window.first:  # The loader was shorter than its length.
                self._update(epoch)
            epoch.num_batches = self.train_batches
        epoch.seconds.train_wait += batches.wait_seconds
        epoch.seconds.train += self._now() - start

    def _prepared(self, batch: Batch, index: int) -> Batch:
        if self.hp.pre_prediction_callback is None:
            return batch
        inputs, targets = self.hp.pre_prediction_callback(batch.inputs, batch.targets, index)
        return replace(batch, inputs=inputs, targets=targets)

    def _accumulate(self, epoch: Epoch, batch: Batch) -> list[tuple[Batch, StepResult]]:
        """Add the gradients of one batch to the window's, in as many pieces as the memory needs."""
        window, todo = epoch.window, [batch]
        window.first = window.first or batch.num_samples
        window.num_samples += batch.num_samples
        if self.hp.on_out_of_memory == "halve":
            window.batches.append(batch)
        while True:
            try:
                # Not comprehensions: before Python 3.12 their frames hold on to all that they see, also when cleared.
                for each in todo:
                    results = []
                    for piece in each.split(self._pieces):
                        results.append(self._piece(window, piece))
                return results
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._out_of_memory(error, epoch, batch)
            # Outside of the except block: the error held on to the memory. What the failed batch has added to the
            # gradients cannot be told from the rest, so the window begins anew.
            self.optimizer.zero_grad(set_to_none=True)
            window.loss, todo = None, window.batches

    def _piece(self, window: Window, piece: Batch) -> tuple[Batch, StepResult]:
        # The mean over the window's samples, however its batches differ in size.
        weight = piece.num_samples / window.first
        result = self.train_step(piece, weight=weight)
        window.loss = result.loss if window.loss is None else window.loss + result.loss
        return piece, result

    def _out_of_memory(self, error: Exception, epoch: Epoch, batch: Batch) -> None:
        """Say it, and split further or raise."""
        allocated, total = memory_mib(self.device)
        halve = self.hp.on_out_of_memory == "halve" and 2 * self._pieces <= batch.num_samples
        self._pieces = 2 * self._pieces if halve else self._pieces
        size = math.ceil(batch.num_samples / self._pieces)
        how = f"From now on each batch goes through in {self._pieces} pieces of at most {size} samples."
        told = how if halve else advice(self.hp, batch.num_samples)
        self.emit(
            OutOfMemory(
                epoch=epoch.number,
                batch=epoch.num_batches,
                batch_size=batch.num_samples,
                allocated_mib=allocated,
                total_mib=total,
                pieces=self._pieces if halve else 1,
                advice=told,
            )
        )
        if not halve:
            error.add_note(told)
            raise error
        release(error)

    def train_step(self, batch: Batch, weight: float = 1.0) -> StepResult:
        """Add the gradients of one batch."""
        self._mark_step()
        return train_step(self.model, batch, criterion=self.criterion, precision=self.precision, weight=weight)

    def eval_step(self, batch: Batch) -> StepResult:
        """Run one batch forward, without gradients."""
        self._mark_step()
        return eval_step(self.model, batch, criterion=self.criterion, precision=self.precision)

    def _mark_step(self) -> None:
        if self.compiled and self.hp.compile_mode in CUDA_GRAPH_MODES:
            torch.compiler.cudagraph_mark_step_begin()

    def _update(self, epoch: Epoch) -> None:
        """Make one update from the window's gradients. One that is skipped moves neither schedule nor average."""
        window, epoch.window = epoch.window, Window()
        self.schedule.apply(self.num_updates)
        changed = self.precision.update(
            self._parameters,
            self.optimizer,
            loss=window.loss,
            gradient_scale=window.first / window.num_samples,
            max_norm=self.hp.clip_grad_norm,
        )
        if not changed:
            self._skip(epoch)
            return
        self._skipped_in_a_row = 0
        self.num_updates += 1
        epoch.num_updates += 1
        self.schedule.update_ended(self.num_updates)
        if self.ema is not None:
            self.ema.update()

    def _skip(self, epoch: Epoch) -> None:
        self._statistics.heal()
        epoch.skipped_updates += 1
        self._skipped_in_a_row += 1
        scale = self.precision.loss_scale
        if self._skipped_in_a_row == _SKIPS_WORTH_A_WORD:
            self.emit(
                UpdatesSkipped(
                    epoch=epoch.number, batch=epoch.num_batches, in_a_row=self._skipped_in_a_row, loss_scale=scale
                )
            )
        if self._skipped_in_a_row >= _SKIPS_TO_GIVE_UP:
            raise DivergedError(
                f"The gradients of {self._skipped_in_a_row} updates in a row are not finite "
                f"(epoch {epoch.number}, batch {epoch.num_batches}). {self._way_out()}"
            )

    def _look_after_training(self, epoch: Epoch, train_loss: float) -> None:
        """Make sure that what is validated and saved is finite, outside of the clocks."""
        skipped = self.precision.take_skipped()
        if skipped:
            epoch.skipped_updates += skipped
            epoch.num_updates -= skipped
            self._statistics.heal()
            if self.ema is not None:
                self.ema.heal()
        if not self._is_finite():
            raise DivergedError(f"Weights are not finite after epoch {epoch.number}. {self._way_out()}")
        if not math.isfinite(train_loss):
            many = f"; {epoch.skipped_updates} updates were skipped" if epoch.skipped_updates else ""
            message = f"the training loss of epoch {epoch.number} is {train_loss}{many}."
            self.emit(Noticed(level="warning", message=message))

    def _way_out(self) -> str:
        saved = self.run_dir / LATEST
        last = f" {saved} holds epoch {self.completed_epochs}." if saved.is_file() else ""
        return (
            "Look for NaN in the inputs and targets, lower initial_lr, add a warm-up or clip_grad_norm; in float16, "
            f"mixed_precision_dtype: bfloat16 has the range of float32.{last}"
        )

    def _is_finite(self) -> bool:
        tensors = [t for t in self.model.state_dict().values() if isinstance(t, Tensor) and t.is_floating_point()]
        return all_finite(tensors) and (self.ema is None or self.ema.is_finite())

    def _validate_if_due(self, epoch: Epoch) -> tuple[Measured | None, Measured | None]:
        """Return what the validation gave, and what it gave without averaging where that was asked for."""
        hp, number = self.hp, epoch.number
        due = number % hp.run_validation_freq == 0 or number == hp.max_epochs or number in hp.save_ckpt_epoch_list
        if self.valid_loader is None or not due:
            return None, None
        start, raw = self._now(), None
        if self.ema is not None and self.ema.num_updates:
            with self.ema.swapped():
                measured = self.validate(self.valid_loader, epoch, check_swap=self.compiled and not self._swap_checked)
            if self.ema.params.validate_raw and measured is not None:
                raw = self.validate(self.valid_loader, epoch)
        else:
            measured = self.validate(self.valid_loader, epoch)
        epoch.seconds.valid += self._now() - start
        return measured, raw

    def validate(self, loader: Any, epoch: Epoch | None = None, *, check_swap: bool = False) -> Measured | None:
        """Return means over `loader` with the weights as they are, or None when the run was stopped meanwhile."""
        tally = self._tally(self.valid_metrics, "valid")
        limit = num_batches(loader, self.hp.max_valid_batches, "valid_loader")
        start = time.perf_counter()
        batches = Batches(loader, limit, "valid_loader", self._move)
        wait = time.perf_counter() - start
        self.model.eval()
        signs = Signs(self.emit, "valid", 0 if epoch is None else epoch.number, limit)
        for number, batch in enumerate(batches, 1):
            result = self.eval_step(batch)
            if check_swap and number == 1 and self._warm_up is not None:
                self._swap_checked = True
                self.compiled = self._warm_up.agrees(batch, result.output, dtype=self.precision.dtype)
                self.model.eval()
                result = result if self.compiled else self.eval_step(batch)
            tally.add(result, batch)
            signs.give(number, result.loss, self._lr)
            if self.stop.is_set():
                return None
        if epoch is not None:
            epoch.seconds.valid_wait += wait + batches.wait_seconds
        return tally.compute()

    def _compile(self, batches: Batches) -> None:
        options = self.hp.torch_compile_options
        problem = compile_problem(self.device.type) if options.backend == "inductor" else None
        if problem is not None:
            if options.fullgraph:
                raise RuntimeError(problem)
            self.emit(CompileFailed(reason=problem))
            return
        targets = compile_targets(self.model, self.criterion, self.hp)
        if self.hp.torch_compile_regions == "auto":
            regions = sum(len(group) for group in targets if len(group) > 1)
            found = f"compiles {regions} repeated blocks" if regions else "found no repeated blocks: compiles the whole"
            self.emit(Noticed(level="information", message=f"torch_compile_regions: auto {found}."))
        self._warm_up = WarmUp(
            self.model,
            targets,
            train_step=self.train_step,
            eval_step=self.eval_step,
            watcher=self.watcher,
            emit=self.emit,
        )
        with preserved_rng(), preserved_generators(self.train_loader, self.valid_loader):
            train = self._sizes(batches, self.train_loader, self.train_batches)
            valid: list[Batch] = []
            if self.valid_loader is not None:
                first = Batches(self.valid_loader, 1, "valid_loader", self._move)
                valid = self._sizes(first, self.valid_loader, self.valid_batches)
            self.compiling = True
            try:
                self.compiled = self._warm_up.run(self.hp, train, valid, dtype=self.precision.dtype)
            finally:
                self.compiling = False
        if self.compiled:
            self._model_watch = ModelWatch(self.model)

    def _sizes(self, batches: Batches, loader: Any, limit: int) -> list[Batch]:
        """Return the first batch, and as much of it as the loader's last batch will have."""
        first, last = batches.first(), last_batch_size(loader, limit)
        return [first] if last is None or last >= first.num_samples else [first, first.head(last)]

    def _new_batches(self, epoch: Epoch) -> Batches:
        # Every random number of an epoch follows from the seed and the epoch: compiled and eager runs, which draw
        # different numbers for dropout, see the same data order, and a resumed run goes on as if nothing had happened.
        seed_everything(self.hp.seed + epoch.number)
        self._generator_states = [g.get_state() for g in generators_of(self.train_loader, self.valid_loader)]
        rng = epoch.rng
        return Batches(
            self.train_loader,
            self.train_batches,
            "train_loader",
            self._move,
            skip=epoch.num_batches,
            before_first=None if rng is None else lambda: set_rng_state(rng),
        )

    def _tally(self, metrics: dict[str, torchmetrics.Metric], phase: str) -> Tally:
        names = self.hp.loss_logging_items_names
        if names is None:
            names = getattr(self.criterion, "component_names", None)
        return Tally(metrics, f"training_hyperparams.{phase}_metrics_list", self.device, names)

    def _validated_weights(self) -> dict[str, Tensor]:
        return self.model.state_dict() if self.ema is None else self.ema.state_dict()

    def _average_best(self) -> None:
        """Write the average of the best weights, with how it validates."""
        average = self.keeper.average(self.device)
        if average is None or self.valid_loader is None:
            return
        live = {name: tensor for name, tensor in self.model.state_dict().items() if isinstance(tensor, Tensor)}
        with swapped(live, average):
            measured = self.validate(self.valid_loader)
        if measured is None:  # Stopped; the snapshots stay for the resumed run.
            return
        values = {**measured.metrics, "loss": measured.loss}
        save_checkpoint(self.run_dir / AVERAGE, {"net": average, "metrics": {"valid": values}})
        self.emit(CheckpointSaved(path=str(self.run_dir / AVERAGE), epoch=self.completed_epochs))
        told = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.emit(Noticed(level="information", message=f"the average of the best weights validates with {told}."))
        self.keeper.remove_snapshots()

    def _save(self, paths: list[Path], values: dict[str, float]) -> None:
        """Write a checkpoint with SuperGradients' keys; `epoch` is the number of completed epochs."""
        if not paths:
            return
        name = self.keeper.watch[0] if self.keeper.watch is not None else None
        epoch = self.epoch if self.epoch is not None and self.epoch.num_batches else None
        generators = self._generator_states
        if generators is None or (epoch is not None and epoch.num_batches == self.train_batches):
            generators = [g.get_state() for g in generators_of(self.train_loader, self.valid_loader)]
        state = {
            "net": self.model.state_dict(),
            "epoch": self.completed_epochs,
            "acc": values.get(name) if name is not None else None,
            "metrics": {"tracked_metric_name": name, "valid": values},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scaler_state_dict": self.precision.state_dict(),
            "scheduler_state_dict": self.schedule.state_dict(),
            "keeper": self.keeper.state_dict(),
            "num_updates": self.num_updates,
            "loader_generators": generators,  # A resumed epoch begins anew with its loader, and skips what it had.
            "in_epoch": None if epoch is None else epoch.state_dict(self.model),
        }
        if self.ema is not None:
            state |= {"ema_net": self.ema.state_dict(), "ema_updates": self.ema.num_updates}
        for path in paths:
            save_checkpoint(path, state)

    def load(self, state: dict[str, Any], path: Path) -> None:
        """Take over a checkpoint that `check_run_state` has accepted.

        Raises:
            CheckpointError: when it belongs to another model.
            Exception: of any kind, when its parts are not what sgnb writes.
        """
        weights = fitting_weights(self.model, state, path)
        if self.hp.load_opt_params:
            load_optimizer_state(self.optimizer, state["optimizer_state_dict"])
            self.schedule.load_state_dict(state["scheduler_state_dict"])
        self.precision.load_state_dict(state["scaler_state_dict"])
        self.keeper.load_state_dict(state["keeper"])
        self.completed_epochs, self.num_updates = state["epoch"], state["num_updates"]
        generators = generators_of(self.train_loader, self.valid_loader)
        if len(generators) == len(state["loader_generators"]):
            for generator, saved in zip(generators, state["loader_generators"], strict=True):
                generator.set_state(saved.cpu())
        else:
            self._note("warning", f"the loaders have other generators than those of {path}; data order is another.")
        if self.ema is not None:
            if "ema_net" in state:
                self.ema.load_state_dict(state["ema_net"], num_updates=state["ema_updates"])
            else:
                self._note("information", f"{path} holds no average of the weights; averaging begins with its weights.")
                self.ema.load_state_dict(state["net"], num_updates=0)
        if state["in_epoch"] is not None:
            self.epoch = self._new_epoch(self.completed_epochs + 1)
            self.epoch.load_state_dict(state["in_epoch"], self.model)
            if getattr(self.train_loader, "persistent_workers", False):
                self._note("warning", "persistent workers keep random states that no checkpoint holds; order is exact.")
        self.model.load_state_dict(weights)  # Last: whatever is wrong with the rest, the model is as it was.
        self._statistics.keep()

    @property
    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

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


class _Statistics:
    """A model's floating buffers, such as BatchNorm's running means, in which one batch of NaN would stay for ever."""

    def __init__(self, model: nn.Module) -> None:
        self._live = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._kept = [buffer.detach().clone() for buffer in self._live]

    @torch.no_grad()
    def keep(self) -> None:
        """Remember them, at the beginning of an epoch."""
        if self._live:
            torch._foreach_copy_(self._kept, self._live)

    @torch.no_grad()
    def heal(self) -> None:
        """Take the remembered value where one is not finite."""
        for live, kept in zip(self._live, self._kept, strict=True):
            live.copy_(torch.where(live.isfinite(), live, kept))
