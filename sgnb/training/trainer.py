"""`Trainer.train`: one call that trains a model, and the only place that knows how a run can end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from sgnb.events import (
    EVENTS_FILE,
    CheckpointLoaded,
    Event,
    EventWriter,
    Listener,
    Noticed,
    RunEnded,
    RunStarted,
    Status,
)
from sgnb.history import History
from sgnb.hyperparams import HyperparamsError, Problem, TrainingHyperparams, objects_in
from sgnb.training.checkpoint import CheckpointError, check_run_state, find_run, load_checkpoint
from sgnb.training.compilation import own_compiled_call
from sgnb.training.flags import run_flags
from sgnb.training.loop import Loop
from sgnb.training.machine import describe_machine
from sgnb.training.memory import is_out_of_memory, release
from sgnb.training.progress import Progress
from sgnb.training.randomness import preserved_rng, seed_everything

Hyperparams = TrainingHyperparams | Mapping[str, Any]


_EVALUATED = (
    "mixed_precision",
    "mixed_precision_dtype",
    "channels_last",
    "loss",
    "criterion_params",
    "valid_metrics_list",
    "loss_logging_items_names",
    "max_valid_batches",
)  # What matters where nothing is trained.


class Trainer:
    """Trains models under one experiment's name.

    Args:
        experiment_name: Names the folder of the experiment's runs.
        ckpt_root_dir: Where experiments lie. A run's folder is `<ckpt_root_dir>/<experiment_name>/RUN_<time>/`.
        run_dir: This very folder instead.
        device: `cpu`, `cuda` or `cuda:1`; None takes the GPU where there is one.
        training_hyperparams: What `train` uses when it is not given any; `training_params` is another word for it.
        listeners: Functions of one event, see `sgnb.events`. What one raises ends the run; `stop` ends it softly.
    """

    def __init__(
        self,
        experiment_name: str,
        *,
        ckpt_root_dir: str | Path = "checkpoints",
        run_dir: str | Path | None = None,
        device: str | torch.device | None = None,
        training_hyperparams: Hyperparams | None = None,
        training_params: Hyperparams | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        if not isinstance(experiment_name, str) or not experiment_name or Path(experiment_name).name != experiment_name:
            raise ValueError(f"experiment_name: expected a name that can be a folder's, got {experiment_name!r}")
        self.experiment_name = experiment_name
        self.ckpt_root_dir = Path(ckpt_root_dir)
        self.device = _device(device)
        self.training_hyperparams = _one_of(training_hyperparams, training_params)
        self.listeners = list(listeners)
        self.run_dir: Path | None = Path(run_dir) if run_dir is not None else None
        self._fixed_run_dir = run_dir is not None
        self._stop = threading.Event()
        self._loop: Loop | None = None

    @property
    def compiling(self) -> bool:
        """Whether the compiler is at work; a stop is heard when it has finished."""
        return self._loop is not None and self._loop.compiling

    def stop(self) -> None:
        """Ask the run to end after the current batch, with a checkpoint. May be called from any thread."""
        self._stop.set()

    def train(
        self,
        model: nn.Module,
        training_hyperparams: Hyperparams | None = None,
        train_loader: Any = None,
        valid_loader: Any = None,
        *,
        training_params: Hyperparams | None = None,
    ) -> History:
        """Train `model` in place and return what happened.

        With `ema` on, the model holds the averaged weights afterwards, as they were validated. Ctrl-C ends the run
        after the current batch, with a checkpoint and a usable model; a second one raises.

        Args:
            model: Any module whose output the loss understands. It is moved to the device.
            training_hyperparams: A record or a mapping; None: what the trainer was made with, or the defaults.
            train_loader: Yields `(inputs, targets, ...)`, inputs [B, ...].
            valid_loader: The same for validation; None: no validation, no `ckpt_best.pth`.
            training_params: Another word for `training_hyperparams`.

        Raises:
            HyperparamsError: before anything is written, with all problems at once.
            DataError: when a loader is empty or yields something else.
            CheckpointError: when there is nothing to resume, or it does not fit.
            DivergedError: when gradients or weights are not finite for good; the last checkpoint is from before.
            torch.OutOfMemoryError: with notes of what to try; the memory is free again.
        """
        given = _one_of(training_hyperparams, training_params)
        hp = TrainingHyperparams.from_dict(self.training_hyperparams if given is None else given)
        _check_arguments(model, train_loader)
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper would prefix every state key.
        self._stop.clear()
        seed_everything(hp.seed)
        history = History()
        listeners: list[Listener] = [history.append, *self.listeners, *([] if hp.silent_mode else [Progress()])]
        was_training = model.training
        try:
            with own_compiled_call(model), run_flags(hp, self.device) as notices:
                checkpoint = self._checkpoint_to_resume(hp)
                run_dir = self._new_run_dir(checkpoint if hp.resume else None)
                self._loop = Loop(
                    model, hp, train_loader, valid_loader, self.device, _fan_out(listeners), self._stop, run_dir
                )
                if checkpoint is not None:
                    self._resume(self._loop, checkpoint)
                run_dir.mkdir(parents=True, exist_ok=True)
                self.run_dir = run_dir
                with EventWriter(run_dir / EVENTS_FILE) as writer:
                    listeners.insert(0, writer)
                    self._run(self._loop, checkpoint, notices)
        except (RuntimeError, MemoryError) as error:
            self._loop = None
            if is_out_of_memory(error):
                release(error)  # Whoever keeps the error, as IPython does, would keep the run's tensors with it.
            raise
        finally:
            self._loop = None
            model.train(was_training)
        return history

    def evaluate(
        self, model: nn.Module, loader: Any, training_hyperparams: Hyperparams | None = None
    ) -> dict[str, float]:
        """Return the mean loss and the metrics of `model` over `loader`, under `loss`, by name."""
        hp = TrainingHyperparams.from_dict(
            self.training_hyperparams if training_hyperparams is None else training_hyperparams
        )
        _check_arguments(model, loader)
        listeners: list[Listener] = [] if hp.silent_mode else [Progress()]
        plain = TrainingHyperparams(**{name: getattr(hp, name) for name in _EVALUATED})
        was_training, frozen = model.training, [p for p in model.parameters() if not p.requires_grad]
        try:
            with preserved_rng():
                loop = Loop(model, plain, loader, loader, self.device, _fan_out(listeners), threading.Event())
                measured = loop.validate(loader)
        finally:
            model.train(was_training).requires_grad_(True)
            for parameter in frozen:
                parameter.requires_grad_(False)
        assert measured is not None  # Nobody can stop it.
        return {"loss": measured.loss, **measured.parts, **measured.metrics}

    def _run(self, loop: Loop, resumed: Path | None, notices: list[str]) -> None:
        start = time.monotonic()

        def end(status: Status, reason: str = "") -> None:
            loop.emit(RunEnded(status=status, seconds=time.monotonic() - start, reason=reason))

        def end_after(error: BaseException, status: Status, reason: str) -> None:
            try:
                end(status, reason)
            except Exception as another:  # noqa: BLE001 - a listener's own; it is told with what ended the run
                error.add_note(f"At the end of the run, a listener raised {type(another).__name__}: {another}")

        try:
            loop.emit(self._started(loop))
            if resumed is not None:
                batch = loop.epoch.num_batches if loop.epoch is not None else 0
                loop.emit(CheckpointLoaded(path=str(resumed), epoch=loop.completed_epochs, batch=batch))
            for notice in (*(Noticed(level="warning", message=text) for text in notices), *loop.notices):
                loop.emit(notice)
            with self._soft_interrupt():
                loop.run()
        except KeyboardInterrupt as error:
            reason = "interrupted before the current batch was done; the checkpoint is that of the last epoch"
            end_after(error, "stopped", reason)
            raise
        except BaseException as error:
            end_after(error, "failed", f"{type(error).__name__}: {error}")
            raise
        if self._stop.is_set():
            half = (
                f", and {loop.epoch.num_batches} batches of the next" if loop.epoch and loop.epoch.num_batches else ""
            )
            end("stopped", f"{loop.completed_epochs} of {loop.hp.max_epochs} epochs are complete{half}")
        else:
            end("finished", loop.keeper.reason_to_end)

    def _started(self, loop: Loop) -> RunStarted:
        return RunStarted(
            experiment_name=self.experiment_name,
            run_dir=str(loop.run_dir),
            device=str(self.device),
            dtype=str(loop.precision.dtype).removeprefix("torch."),
            start_epoch=loop.completed_epochs + 1,
            max_epochs=loop.hp.max_epochs,
            train_batches=loop.train_batches,
            valid_batches=loop.valid_batches,
            batch_size=loop.batch_size,
            num_parameters=sum(p.numel() for p in loop.model.parameters()),
            optimizer=f"{type(loop.optimizer).__name__}, {loop.implementation}",
            training_hyperparams=_plain(loop.hp.changed()),
            machine=describe_machine(),
        )

    def _checkpoint_to_resume(self, hp: TrainingHyperparams) -> Path | None:
        if hp.resume_path is not None:
            return Path(hp.resume_path)
        if hp.resume and self._fixed_run_dir and self.run_dir is not None:
            return self.run_dir / hp.ckpt_name
        if hp.resume:
            return find_run(self.ckpt_root_dir / self.experiment_name, hp.run_id, hp.ckpt_name) / hp.ckpt_name
        return None

    def _resume(self, loop: Loop, path: Path) -> None:
        state = load_checkpoint(path, self.device)
        check_run_state(state, path)
        completed, wanted = state["epoch"], loop.hp.max_epochs
        if completed >= wanted:
            where = "training_hyperparams.max_epochs"
            message = f"{path} has completed {completed} epochs; expected more than that, got {wanted}"
            raise HyperparamsError([Problem(where=where, message=message)])
        try:
            loop.load(state, path)
        except CheckpointError:
            raise
        except Exception as error:  # Anything may be in a file.
            raise CheckpointError(f"{path}: does not fit this run ({type(error).__name__}: {error})") from error

    def _new_run_dir(self, resumed: Path | None) -> Path:
        if self._fixed_run_dir and self.run_dir is not None:
            return self.run_dir
        if resumed is not None:
            return resumed.parent
        stamp = datetime.now(UTC).strftime("%Y%m%d_%H%M%S_%f")
        return self.ckpt_root_dir / self.experiment_name / f"RUN_{stamp}"

    @contextmanager
    def _soft_interrupt(self) -> Iterator[None]:
        """Turn the first Ctrl-C into a stop. Only the main thread can; elsewhere `stop` is the way."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_interrupt(signum: int, frame: FrameType | None) -> None:
            if self._stop.is_set() or self.compiling:  # The compiler may need minutes, and there is nothing to lose.
                raise KeyboardInterrupt
            self.stop()

        before = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _fan_out(listeners: list[Listener]) -> Listener:
    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return emit


def _one_of(training_hyperparams: Hyperparams | None, training_params: Hyperparams | None) -> Hyperparams | None:
    if training_hyperparams is not None and training_params is not None:
        raise TypeError("training_hyperparams and training_params are two words for one thing; give one of them")
    return training_params if training_hyperparams is None else training_hyperparams


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device: {device} was asked for, but torch sees no GPU here; leave device out to take the CPU"
        )
    return chosen


def _check_arguments(model: object, train_loader: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if train_loader is None:
        raise TypeError("train_loader: is required; expected an iterable of (inputs, targets) batches")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise RuntimeError(
            f"WORLD_SIZE is {world_size}: this version trains in one process. Start it without torchrun, or with "
            "--nproc-per-node=1."
        )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: repr(value) if objects_in(value, name) else value for name, value in values.items()}
