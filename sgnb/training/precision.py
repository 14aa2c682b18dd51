"""The dtype rules of a run: autocast around forward and loss, and a loss scale where float16 needs one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sgnb.hyperparams import TrainingHyperparams
from sgnb.training.machine import cpu_computes_bf16, gpu_computes_bf16


def choose_dtype(hp: TrainingHyperparams, device: torch.device) -> tuple[torch.dtype, str | None]:
    """Return the dtype of the autocast region, and what the user should know when it is not the obvious one."""
    if not hp.mixed_precision:
        return torch.float32, None
    on_gpu = device.type == "cuda"
    if hp.mixed_precision_dtype == "auto":
        if on_gpu:
            return (torch.bfloat16 if gpu_computes_bf16(device) else torch.float16), None
        if cpu_computes_bf16():
            return torch.bfloat16, None
        return torch.float32, (
            f"mixed_precision is on, but this {device.type} has no bfloat16 arithmetic to gain from, so the run is in "
            "float32. mixed_precision_dtype: bfloat16 forces it."
        )
    dtype: torch.dtype = getattr(torch, hp.mixed_precision_dtype)
    emulated = dtype == torch.bfloat16 and not (gpu_computes_bf16(device) if on_gpu else cpu_computes_bf16())
    slow = emulated or (dtype == torch.float16 and not on_gpu)
    return (
        dtype,
        f"{hp.mixed_precision_dtype} is emulated on this {device.type}; expect a slower run." if slow else None,
    )


class Precision:
    """The dtype rules of a run. float16 scales the loss; bfloat16 and float32 do not need to.

    The order unscale, clip, step is that of https://docs.pytorch.org/docs/stable/notes/amp_examples.html.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def autocast(self) -> torch.autocast:
        """Return the region in which forward and loss run, in training and in validation alike."""
        return torch.autocast(
            self.device.type,
            dtype=self.dtype if self.dtype != torch.float32 else None,
            enabled=self.dtype != torch.float32,
        )

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to those that are there."""
        self.scaler.scale(loss).backward()

    def update(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        gradient_scale: float = 1.0,
        max_norm: float | None = None,
    ) -> bool:
        """Make one update from the gradients times `gradient_scale`, clipped to `max_norm`, and clear them.

        Returns whether the weights changed: float16 gradients that overflowed are thrown away.
        """
        self.scaler.unscale_(optimizer)
        if gradient_scale != 1.0:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], gradient_scale)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return not self.scaler.is_enabled() or self.scaler.get_scale() >= scale

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and its counters; empty unless the run is in float16."""
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the loss scale of a checkpoint of the same dtype; another dtype begins anew."""
        if self.scaler.is_enabled() and state:
            self.scaler.load_state_dict(state)
