"""One step of training and one of validation: arguments in, tensors out, nothing read back from the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sgnb.training.loaders import Batch
from sgnb.training.precision import Precision


@dataclass(frozen=True, slots=True)
class StepResult:
    """The mean loss of a batch (0-dim, detached, float32) and the model's main output (detached)."""

    loss: Tensor
    output: Tensor


def train_step(
    model: nn.Module, batch: Batch, *, criterion: nn.Module, precision: Precision, weight: float = 1.0
) -> StepResult:
    """Add the gradients of `weight` times the loss of one batch. `Precision.update` then makes the update."""
    with precision.autocast():
        output, loss = _forward(model, batch, criterion)
    precision.backward(loss if weight == 1.0 else loss * weight)
    return StepResult(loss.detach().float(), _main(output).detach())


@torch.no_grad()
def eval_step(model: nn.Module, batch: Batch, *, criterion: nn.Module, precision: Precision) -> StepResult:
    """Run one batch forward. The autocast region is that of training: another one would cost another graph."""
    with precision.autocast():
        output, loss = _forward(model, batch, criterion)
    return StepResult(loss.float(), _main(output))


def _forward(model: nn.Module, batch: Batch, criterion: nn.Module) -> tuple[Any, Tensor]:
    output = model(batch.inputs)
    loss = criterion(output, batch.targets)
    # SuperGradients' losses return (loss, components).
    return output, loss[0] if isinstance(loss, tuple | list) else loss


def _main(output: Any) -> Tensor:
    """Models with auxiliary heads return a tuple, the main output first."""
    main: Tensor = output[0] if isinstance(output, tuple | list) else output
    return main
