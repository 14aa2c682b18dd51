"""The largest batch size that fits, found by training on batches and putting everything back."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from sgnb.hyperparams import TrainingHyperparams
from sgnb.losses import build_loss
from sgnb.training.compilation import own_compiled_call
from sgnb.training.ema import Ema
from sgnb.training.flags import run_flags
from sgnb.training.loaders import Batch, Batches, DataError, Mover, map_tensors
from sgnb.training.memory import MIB, advice, is_out_of_memory, release
from sgnb.training.optimizers import build_optimizer
from sgnb.training.precision import Precision, choose_dtype
from sgnb.training.randomness import preserved_generators, preserved_rng
from sgnb.training.steps import train_step

_COMPILE_RESERVE = 0.25
_UNKNOWN_LIMIT = 4096


@dataclass(frozen=True)
class BatchSize:
    """The largest batch size that was tried and fits.

    `tried` holds (size, peak in MiB) in order; the peak is None where memory, less the reserve, was not enough.
    """

    batch_size: int
    tried: tuple[tuple[int, float | None], ...]
    reserve: float  # Share of the memory that stays free.
    remark: str = ""

    def __str__(self) -> str:
        """Say it in a sentence or two."""
        sizes = ", ".join(f"{size}{' (too large)' if peak is None else ''}" for size, peak in self.tried)
        peak = dict(self.tried)[self.batch_size] or 0.0
        what = f"batch size {self.batch_size}: {peak:,.0f} MiB at peak, with {self.reserve:.0%} of the memory kept free"
        return f"{what}; tried {sizes}. {self.remark}".strip()


def find_batch_size(
    model: nn.Module,
    train_loader: Any,
    training_hyperparams: TrainingHyperparams | Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
    max_batch_size: int | None = None,
    reserve: float = 0.1,
    steps: int = 2,
) -> BatchSize:
    """Return the largest batch size, to an eighth, whose training steps leave `reserve` of the memory free.

    Sizes double until one does not fit, then the gap is bisected. Each is trained on, eagerly, for `steps` whole steps,
    with one batch of the loader repeated or cut. The model, an optimizer given as an instance, the loader's generators
    and all random states are put back, also after an error; a GPU's peak statistics begin anew.

    Args:
        model: As for `Trainer.train`.
        train_loader: As for `Trainer.train`; one batch is taken. Its own batch size does not matter.
        training_hyperparams: As for `Trainer.train`; precision, optimizer and averaging take memory.
        device: None takes the GPU where there is one.
        max_batch_size: None: the number of samples of the data set, 4096 where it is not known.
        reserve: Share of the memory to keep free; at least 0.25 with `torch_compile`, as compiling takes more.
        steps: Training steps with each size.

    Raises:
        DataError: when the loader is an iterator, is empty or yields something else.
        torch.OutOfMemoryError: (or what else a shortage raises) when the smallest size does not fit; says what to try.
    """
    hp = TrainingHyperparams.from_dict(training_hyperparams)
    model = getattr(model, "_orig_mod", model)
    # BatchNorm needs more than one value per channel.
    start = 2 if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) else 1
    limit = _limit(train_loader, start, max_batch_size)
    if not 0 <= reserve < 1 or steps < 1:
        raise ValueError(f"expected a reserve from 0 to below 1 and steps from 1, got {reserve} and {steps}")
    reserve = max(reserve, _COMPILE_RESERVE) if hp.torch_compile else reserve
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        torch.cuda.init()  # Else its random state would not be kept.
    try:
        with own_compiled_call(model), preserved_rng(), run_flags(hp, chosen), _restored(model, chosen, hp.optimizer):
            # Not named here: this frame stays alive with an error that leaves it.
            gauge = _Gauge(chosen, reserve)
            tried = _search(_Trial(model, hp, _one_batch(train_loader), steps, gauge, chosen), start, limit)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            release(error)
            error.add_note(advice(hp, start))
        raise
    best = max(size for size, peak in tried if peak is not None)
    remarks = ["That is the largest size that was asked for; more may fit."] if best == limit else []
    if hp.torch_compile:
        remarks.append("The trial was eager; compiling may need up to twice the memory, hence the larger reserve.")
    if chosen.type != "cuda":
        remarks.append(f"On a {chosen.type} the limit is what the machine's other programs leave.")
    return BatchSize(best, tuple(tried), reserve, " ".join(remarks))


def _limit(loader: Any, start: int, wanted: int | None) -> int:
    if wanted is None:
        data = getattr(loader, "dataset", None)
        return max(start, len(data) if isinstance(data, Sized) else _UNKNOWN_LIMIT)
    if wanted < start:
        why = ", as BatchNorm needs more than one sample" if start > 1 else ""
        raise ValueError(f"max_batch_size: expected at least {start}{why}, got {wanted}")
    return wanted


def _one_batch(loader: Any) -> Batch:
    if isinstance(loader, Iterator):
        raise DataError("train_loader: is an iterator, which cannot take a batch back; expected a loader that can")
    with preserved_generators(loader):  # On the CPU, so that a peak is that of one batch only.
        return Batches(loader, 1, "train_loader", Mover(torch.device("cpu"))).first()


def _search(attempt: Callable[[int], float], start: int, limit: int) -> list[tuple[int, float | None]]:
    tried: list[tuple[int, float | None]] = []
    good, bad, size = 0, limit + 1, start
    while good < size < bad:
        try:
            tried.append((size, attempt(size)))
            good = size
        except (RuntimeError, MemoryError) as error:
            if good == 0 or not is_out_of_memory(error):
                raise
            release(error)
            tried.append((size, None))
            bad = size
        if bad > limit:
            size = min(2 * good, limit)
        elif bad - good <= max(1, good // 8):
            break
        else:
            middle = (good + bad) // 2
            size = middle // 8 * 8 if middle > 16 else middle
    return tried


@contextlib.contextmanager
def _restored(model: nn.Module, device: torch.device, optimizer: Any) -> Iterator[None]:
    """Have the model on the device, without gradients, and the user's optimizer as new; put both back at the end."""
    home = next((parameter.device for parameter in model.parameters()), device)
    modes = [(module, module.training) for module in model.modules()]
    parameters = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    # Values are kept on the CPU, so that they take nothing of what is measured.
    places: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (owner, name, tensor, tensor.detach().to("cpu", copy=True))
        for module in model.modules()
        for owner in (module._parameters, module._buffers)
        for name, tensor in owner.items()
        if tensor is not None
    ]
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    groups_before, state = [dict(group) for group in groups], getattr(optimizer, "state", None)
    try:
        for parameter, _, _ in parameters:
            parameter.grad = None
        if groups:
            optimizer.state = defaultdict(dict)
        model.to(device).train()
        yield
    finally:
        for parameter, _, _ in parameters:
            parameter.grad = None
        model.to(home)
        for owner, name, tensor, value in places:
            owner[name] = tensor
            tensor.detach().copy_(value)
        for parameter, grad, trained in parameters:
            parameter.requires_grad_(trained).grad = grad
        for module, training in modes:
            module.training = training
        if groups:
            optimizer.state = state
        for group, before in zip(groups, groups_before, strict=True):
            group.clear()
            group.update(before)


class _Trial:
    """Trains on batches of any size, as the run would; a call returns the peak in MiB or raises when out of memory."""

    def __init__(
        self, model: nn.Module, hp: TrainingHyperparams, source: Batch, steps: int, gauge: _Gauge, device: torch.device
    ) -> None:
        self.model, self.hp, self.source, self.steps, self.gauge, self.device = model, hp, source, steps, gauge, device
        self.criterion = build_loss(hp.loss, hp.criterion_params).to(device)
        self.optimizer, _ = build_optimizer(model, hp, device)
        self.ema = Ema(model, hp.ema_params, total_updates=1) if hp.ema else None
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # So many steps on one batch could end in NaN.
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # Its state is there from now on, also where float16 skips the first updates.

    def __call__(self, size: int) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        precision = Precision(choose_dtype(self.hp, self.device)[0], self.device)  # Shortage leaves a scaler half-way.
        self.gauge.start(size)
        hook = self.criterion.register_forward_hook(lambda *_: self.gauge.look())  # Where most is alive.
        try:
            batch = self._batch(size)
            for _ in range(self.steps):
                train_step(self.model, batch, criterion=self.criterion, precision=precision)
                precision.update(self.parameters, self.optimizer, max_norm=self.hp.clip_grad_norm)
                if self.ema is not None:
                    self.ema.update()
                self.gauge.look()
        finally:
            hook.remove()
        return self.gauge.end(size)

    def _batch(self, size: int) -> Batch:
        have, index = self.source.num_samples, torch.arange(size) % self.source.num_samples

        def taken(value: Tensor) -> Tensor:  # What has a batch dimension is as in Batch.head.
            return value[index] if value.ndim and value.shape[0] == have else value

        raw = map_tensors(taken, (self.source.inputs, self.source.targets))
        batch = Mover(self.device, channels_last=self.hp.channels_last)(raw, "train_loader")
        if self.hp.pre_prediction_callback is None:
            return batch
        inputs, targets = self.hp.pre_prediction_callback(batch.inputs, batch.targets, 0)
        return replace(batch, inputs=inputs, targets=targets)


class _Gauge:
    """Measures what a trial takes of a device's memory, and raises when less than the reserve is left."""

    def __init__(self, device: torch.device, reserve: float) -> None:
        self.device, self.reserve, self.per_sample, self.peak = device, reserve, 0.0, 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(device)
            self.others = total - free - torch.cuda.memory_reserved(device)  # Other programs, and CUDA itself.
        else:
            free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
        self.total, self.free, self.base = total, free, psutil.Process().memory_info().rss

    def start(self, size: int) -> None:
        """Begin with a size. On a CPU, one that cannot fit is not tried: the system would end the whole process."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        if self.per_sample:
            self._check(self.free - self.per_sample * size, size)
        self.peak, self.lowest = 0, self.total

    def look(self) -> None:
        """Take note of what is in use; a GPU does that by itself."""
        if self.device.type != "cuda":
            self.peak = max(self.peak, psutil.Process().memory_info().rss)
            self.lowest = min(self.lowest, psutil.virtual_memory().available)

    def end(self, size: int) -> float:
        """Return the peak in MiB."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_reserved(self.device)
            self.lowest = self.total - self.others - self.peak
            torch.cuda.reset_peak_memory_stats(self.device)
        self._check(self.lowest, size)
        self.per_sample = (self.peak - self.base) / size
        return self.peak / MIB

    def _check(self, left: float, size: int) -> None:
        if left < self.reserve * self.total:
            raise torch.OutOfMemoryError(
                f"a batch of {size} samples leaves {left / MIB:,.0f} MiB of {self.total / MIB:,.0f} MiB free; "
                f"expected at least {self.reserve:.0%}"
            )
