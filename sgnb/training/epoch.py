"""One epoch under way: its sums, its clock and its accumulation window. A checkpoint in mid-epoch holds all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn

from sgnb.hyperparams import HyperparamsError, Problem
from sgnb.training.loaders import Batch
from sgnb.training.steps import StepResult


@dataclass(frozen=True, slots=True)
class Measured:
    """What a pass over a loader gave: mean loss, the means of its parts, and metrics, by name."""

    loss: float
    parts: dict[str, float]
    metrics: dict[str, float]
    num_samples: int


class Tally:
    """Sums over a pass, kept on the device until they are asked for. Means are over samples, not over batches."""

    def __init__(
        self, metrics: Mapping[str, torchmetrics.Metric], where: str, device: torch.device, names: Sequence[str] | None
    ) -> None:
        self.metrics, self.where, self.device, self.names = metrics, where, device, names
        self.num_samples = 0
        self.loss_sum = torch.zeros((), device=device)
        self.part_sums: dict[str, Tensor] = {}
        for metric in metrics.values():
            metric.reset()

    def add(self, result: StepResult, batch: Batch) -> None:
        """Count one batch."""
        self.loss_sum.add_(result.loss, alpha=batch.num_samples)
        self.num_samples += batch.num_samples
        if result.parts is not None:
            for name, part in self._named(result.parts).items():
                total = self.part_sums.setdefault(name, torch.zeros((), device=self.device))
                total.add_(part.detach().float(), alpha=batch.num_samples)
        output = result.output
        if output.dtype != torch.float32:
            output = output.float()
        for name, metric in self.metrics.items():
            try:
                metric.update(output, batch.targets)
            except Exception as error:
                message = f"{name} cannot be computed from this model's output and these targets: {error}"
                raise HyperparamsError([Problem(where=self.where, message=message)]) from error

    def _named(self, parts: Mapping[str, Tensor] | Tensor) -> dict[str, Tensor]:
        if isinstance(parts, Mapping):
            return {str(name): torch.as_tensor(part) for name, part in parts.items()}
        values = parts.reshape(-1).unbind()
        names = [str(index) for index in range(len(values))] if self.names is None else self.names
        if len(names) != len(values):
            message = f"expected a name for each of the loss's {len(values)} parts, got {list(names)}"
            raise HyperparamsError([Problem(where="training_hyperparams.loss_logging_items_names", message=message)])
        return dict(zip(names, values, strict=True))

    def compute(self) -> Measured:
        """Return the means."""
        count = self.num_samples or math.nan
        values: dict[str, float] = {}
        for name, metric in self.metrics.items():
            try:
                values[name] = float(metric.compute())
            except Exception as error:
                message = f"{name} cannot be computed: {error}"
                raise HyperparamsError([Problem(where=self.where, message=message)]) from error
        parts = {name: total.item() / count for name, total in self.part_sums.items()}
        return Measured(self.loss_sum.item() / count, parts, values, self.num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        for metric in self.metrics.values():
            metric.persistent(True)
        return {
            "num_samples": self.num_samples,
            "loss_sum": self.loss_sum,
            "part_sums": self.part_sums,
            "metrics": {name: metric.state_dict() for name, metric in self.metrics.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the sums of a checkpoint; those of metrics that it does not hold begin at zero."""
        self.num_samples = state["num_samples"]
        self.loss_sum, self.part_sums = state["loss_sum"], dict(state["part_sums"])
        for name, metric in self.metrics.items():
            if state["metrics"].get(name):
                metric.persistent(True)
                metric.load_state_dict(state["metrics"][name])
                metric._update_count = 1  # Else it warns that it was never updated.


@dataclass(slots=True)
class Window:
    """The batches whose gradients make the next update."""

    first: int = 0  # Samples in the first batch.
    num_samples: int = 0
    loss: Tensor | None = None  # Sum over the batches; only whether it is finite matters.
    batches: list[Batch] = field(default_factory=list)  # Kept only where one may have to be repeated.


@dataclass(slots=True)
class Seconds:
    """Wall seconds of an epoch's loops, and what they waited for their loaders."""

    train: float = 0.0
    valid: float = 0.0
    train_wait: float = 0.0
    valid_wait: float = 0.0
    compile: float = 0.0


@dataclass(slots=True)
class Epoch:
    """Where an epoch is: `num_batches` of it have been trained on."""

    number: int
    tally: Tally
    num_batches: int = 0
    num_updates: int = 0
    skipped_updates: int = 0
    seconds: Seconds = field(default_factory=Seconds)
    window: Window = field(default_factory=Window)
    rng: dict[str, Any] | None = None  # After the last batch, where the epoch was left in its middle.

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return all of it, with the gradients that the window holds."""
        window = self.window
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} if window.first else {}
        return {
            "num_batches": self.num_batches,
            "num_updates": self.num_updates,
            "skipped_updates": self.skipped_updates,
            "seconds": asdict(self.seconds),
            "tally": self.tally.state_dict(),
            "window": {
                "first": window.first, "num_samples": window.num_samples, "loss": window.loss, "grads": grads,
            },
            "rng": self.rng,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any], model: nn.Module) -> None:
        """Take over an epoch that was left in its middle."""
        self.num_batches = state["num_batches"]
        self.num_updates, self.skipped_updates = state["num_updates"], state["skipped_updates"]
        self.seconds, self.rng = Seconds(**state["seconds"]), state["rng"]
        self.tally.load_state_dict(state["tally"])
        window = dict(state["window"])
        grads = window.pop("grads")
        self.window = Window(**window)
        for name, parameter in model.named_parameters():
            parameter.grad = grads.get(name)
