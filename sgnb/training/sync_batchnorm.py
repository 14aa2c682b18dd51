"""BatchNorm over the batches of all processes, in a way that `torch.compile` can follow.

`nn.SyncBatchNorm` breaks the graph at every layer (it drops empty ranks by a mask, pytorch#161302) and knows GPUs only.
Here one functional collective forward and one backward stay inside the graph, on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# The operators behind torch's functional collectives, whose Python names differ between torch 2.11 and 2.14.
_COLLECTIVES = torch.ops._c10d_functional


@contextmanager
def synced_batchnorm(model: nn.Module) -> Iterator[int]:
    """Let every BatchNorm of `model` use the batches of all processes meanwhile. Yields how many there are.

    Only the classes change, so that state keys, parameters and hooks stay what they are; a subclass keeps what it adds.
    Needs the default process group.

    Raises:
        ValueError: naming a layer that normalises in a `forward` of its own; nothing has changed then.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    kinds = [_synced(type(layer), name) for name, layer in layers]
    before = [type(layer) for _, layer in layers]
    for (_, layer), kind in zip(layers, kinds, strict=True):
        layer.__class__ = kind
    try:
        yield len(layers)
    finally:
        for (_, layer), kind in zip(layers, before, strict=True):
            layer.__class__ = kind


class SyncNorm(_BatchNorm):
    """BatchNorm whose statistics in training are those of all processes. In evaluation it is BatchNorm."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [B, C, ...]; B may differ between processes, and be 0."""
        if not self.training or dist.get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output, mean, var, count = _SyncNorm.apply(
            input, self.weight, self.bias, self.eps, dist.get_world_size(), _group_name()
        )
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach(), var.detach() * (count / (count - 1).clamp(min=1)))
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor) -> None:
        assert self.running_mean is not None  # The caller has looked.
        assert self.running_var is not None
        share: Tensor | float | None = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:  # A tensor: BatchNorm reads its counter on the host here, which no graph can hold.
                share = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        share = 0.0 if share is None else share
        self.running_mean.add_((mean.to(self.running_mean.dtype) - self.running_mean) * share)
        self.running_var.add_((var.to(self.running_var.dtype) - self.running_var) * share)


class _OfSyncBatchNorm(SyncNorm):
    """In the place of `nn.SyncBatchNorm`, whose own `forward` refuses CPUs."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class _SyncNorm(torch.autograd.Function):
    """Gradients are those of the sum of all processes' losses; weight and bias get this process's part, for DDP."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, world_size: int, group: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide, channels = _wide(x), x.shape[1]
        size = x.numel() // channels
        if x.shape[0] == 0:
            mean = squares = wide.new_zeros(channels)
        else:
            var, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
            squares = var * size
        own = torch.cat([mean, squares, torch.full_like(mean[:1], size)])
        every = _COLLECTIVES.wait_tensor(_COLLECTIVES.all_gather_into_tensor(own, world_size, group)).view(
            world_size, -1
        )
        means, squares, counts = every[:, :channels], every[:, channels:-1], every[:, -1:]
        # The parts are put together as Chan, Golub and LeVeque do (1979): sums of squares would lose a small deviation
        # beside a large mean.
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        var = (squares.sum(0) + ((means - mean).square() * counts).sum(0)) / count
        inverse = torch.rsqrt(var + eps)
        output = (wide - _broad(mean, x)) * _broad(inverse, x)
        if weight is not None:
            output = output * _broad(weight, x)
        if bias is not None:
            output = output + _broad(bias, x)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.has_bias, ctx.group = bias is not None, group
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        wide = _wide(grad)
        normalised = (_wide(x) - _broad(mean, x)) * _broad(inverse, x)
        dims, channels = _all_but_channels(x), x.shape[1]
        sum_grad, sum_product = wide.sum(dims), (wide * normalised).sum(dims)
        own = torch.cat([sum_grad, sum_product])
        every = _COLLECTIVES.wait_tensor(_COLLECTIVES.all_reduce(own, "sum", ctx.group)) / count
        scale = inverse if weight is None else inverse * weight
        centred = wide - _broad(every[:channels], x) - normalised * _broad(every[channels:], x)
        grad_input = (centred * _broad(scale, x)).to(x.dtype)
        grad_weight = None if weight is None else sum_product.to(weight.dtype)
        grad_bias = sum_grad.to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return grad_input, grad_weight, grad_bias, None, None, None


@functools.cache
def _kind(of: type[_BatchNorm]) -> type[_BatchNorm]:
    return type(f"Sync{of.__name__}", (of, SyncNorm), {"__module__": __name__})  # SyncNorm comes after all of `of`.


def _synced(of: type[_BatchNorm], name: str) -> type[_BatchNorm]:
    if issubclass(of, SyncNorm):
        return of
    if issubclass(of, nn.SyncBatchNorm):
        return _OfSyncBatchNorm
    own = next(vars(base)["forward"] for base in of.__mro__ if "forward" in vars(base))
    if own is _BatchNorm.forward or "batch_norm" not in own.__code__.co_names:
        return _kind(of)  # type: ignore[arg-type]  # mypy takes a class for one of its objects here.
    if own.__module__.startswith("timm.") and {"drop", "act"} <= set(own.__code__.co_names):
        return _with_activation(of)  # type: ignore[arg-type]
    raise ValueError(
        f"training_hyperparams.sync_bn: {name} ({of.__name__}) calls batch_norm in a forward of its own, where it "
        "cannot be synchronised. Let it call super().forward(x), or set sync_bn: False."
    )


@functools.cache
def _with_activation(of: type[_BatchNorm]) -> type[_BatchNorm]:
    """Timm's BatchNormAct2d computes `act(drop(batch_norm(x)))` itself."""

    def forward(self: Any, x: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(SyncNorm.forward(self, x)))
        return output

    return type(f"Sync{of.__name__}", (of, SyncNorm), {"__module__": __name__, "forward": forward})


def _group_name() -> str:
    group = dist.group.WORLD
    assert group is not None  # synced_batchnorm needs it.
    return group.group_name


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _broad(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.ndim - 2))
