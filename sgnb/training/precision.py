"""The dtype rules of a run: autocast around forward and loss, and a loss scale where float16 needs one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
        # One object for all steps, which are never one inside the other: making one takes as long as a small layer, and
        # so does entering one that does nothing.
        self._autocast: AbstractContextManager[Any] = (
            nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)
        )
        self._skipped_on_device = torch.zeros((), device=device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the region in which forward and loss run, in training and in validation alike."""
        return self._autocast

    def apart_from_the_callers(self) -> AbstractContextManager[Any]:
        """Return the region of a whole float32 run, in which an autocast region of the caller has no effect.

        Not for the other dtypes: inside of it, torch would not forget the weights that it has cast for a step.
        """
        return torch.autocast(self.device.type, enabled=False) if self.dtype == torch.float32 else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to those that are there."""
        self.scaler.scale(loss).backward()

    def update(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        loss: Tensor | None = None,
        gradient_scale: float = 1.0,
        max_norm: float | None = None,
    ) -> bool:
        """Make one update from the gradients times `gradient_scale`, clipped to `max_norm`, and clear them.

        Gradients that are not finite are thrown away: in float16 the scaler looks at each of them; else the norm where
        they are clipped, or `loss` (0-dim) tells. Returns whether the weights changed. On a GPU that is not waited for:
        a fused optimizer skips the update by itself, and `take_skipped` counts; others have no such protection there.
        """
        self.scaler.unscale_(optimizer)
        if gradient_scale != 1.0:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], gradient_scale)
        if max_norm is not None:
            loss = nn.utils.clip_grad_norm_(parameters, max_norm)
        if self.scaler.is_enabled():
            scale = self.scaler.get_scale()
            self.scaler.step(optimizer)
            self.scaler.update()
            changed = self.scaler.get_scale() >= scale
        elif loss is not None and self.device.type == "cpu":
            changed = math.isfinite(loss.item())
            if changed:
                optimizer.step()
        else:
            self._step_on_device(optimizer, loss)
            changed = True
        optimizer.zero_grad(set_to_none=True)
        return changed

    def _step_on_device(self, optimizer: torch.optim.Optimizer, loss: Tensor | None) -> None:
        if loss is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.step()
            return
        # How GradScaler tells a fused optimizer to do nothing; both attributes are read by step() alone.
        optimizer.grad_scale, optimizer.found_inf = None, (~loss.isfinite()).float()  # type: ignore[attr-defined]
        self._skipped_on_device += optimizer.found_inf  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with; 1.0 unless in float16."""
        return float(self.scaler.get_scale())

    def take_skipped(self) -> int:
        """Return how many updates the device has skipped since the last call; waits for it."""
        skipped = int(self._skipped_on_device.item())
        self._skipped_on_device.zero_()
        return skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and its counters; empty unless the run is in float16."""
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the loss scale of a checkpoint of the same dtype; another dtype begins anew."""
        if self.scaler.is_enabled() and state:
            self.scaler.load_state_dict(state)
