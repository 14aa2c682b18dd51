"""One step of training and one of validation: arguments in, tensors out, nothing read back from the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sgnb.training.loaders import Batch
from sgnb.training.precision import Precision


class StepResult(NamedTuple):
    """What a step computed, detached: the mean loss of the batch (0-dim, float32) and the model's main output.

    `parts` is what the loss says of itself besides: scalars by name, or a tensor [P], or None.
    """

    loss: Tensor
    output: Tensor
    parts: Mapping[str, Tensor] | Tensor | None = None


def train_step(
    model: nn.Module, batch: Batch, *, criterion: nn.Module, precision: Precision, weight: float = 1.0
) -> StepResult:
    """Add the gradients of `weight` times the loss of one batch. `Precision.update` then makes the update."""
    with precision.autocast():
        output, loss, parts = _forward(model, batch, criterion)
    precision.backward(loss if weight == 1.0 else loss * weight)
    loss = loss.detach()
    return StepResult(loss if loss.dtype == torch.float32 else loss.float(), _main(output).detach(), parts)


@torch.no_grad()
def eval_step(model: nn.Module, batch: Batch, *, criterion: nn.Module, precision: Precision) -> StepResult:
    """Run one batch forward. The autocast region is that of training: another one would cost another graph."""
    with precision.autocast():
        output, loss, parts = _forward(model, batch, criterion)
    return StepResult(loss.float(), _main(output), parts)


def _forward(model: nn.Module, batch: Batch, criterion: nn.Module) -> tuple[Any, Tensor, Any]:
    output = model(batch.inputs)
    loss = criterion(output, batch.targets)
    # SuperGradients' losses return (loss, parts).
    return (output, *loss) if isinstance(loss, tuple | list) else (output, loss, None)


def _main(output: Any) -> Tensor:
    """Models with auxiliary heads return a tuple, the main output first."""
    main: Tensor = output[0] if isinstance(output, tuple | list) else output
    return main
