"""An exponential moving average of the weights that works with torch.compile.

The averages are plain tensors beside the model. For validation they are swapped into the live model, in place, so there
is no second module, no second graph, and what is validated is what was averaged. SuperGradients' copy of a compiled
module ran the live weights instead, which is why its page warns of EMA with `torch.compile`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sgnb.hyperparams import EmaParams


@contextmanager
def swapped(live: dict[str, Tensor], source: dict[str, Tensor]) -> Iterator[None]:
    """Write `source` into the tensors `live`, and their own values back at the end."""
    kept = {name: tensor.clone() for name, tensor in live.items()}
    try:
        _write(live, source)
        yield
    finally:
        _write(live, kept)


@torch.no_grad()
def _write(live: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    for name, tensor in live.items():  # copy_ keeps the addresses, which CUDA graphs hold on to.
        tensor.copy_(source[name])


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Tell whether all values of floating tensors are finite; waits for the device once."""
    norms = torch._foreach_norm(list(tensors), math.inf)
    return not norms or bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


class Ema:
    """Averages of every floating parameter and buffer; integer buffers are copied. Counts real updates only."""

    def __init__(self, model: nn.Module, params: EmaParams, *, total_updates: int) -> None:
        self.params = params
        self.total_updates = max(1, total_updates)
        self.num_updates = 0
        live = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
        self._live = {name: tensor.detach() for name, tensor in live.items()}  # Detached: shares the storage.
        self._average = {name: tensor.clone() for name, tensor in self._live.items()}
        floating = [name for name, tensor in self._live.items() if tensor.is_floating_point()]
        others = [name for name in self._live if name not in set(floating)]
        self._live_floats = [self._live[name] for name in floating]
        self._average_floats = [self._average[name] for name in floating]
        self._live_others = [self._live[name] for name in others]
        self._average_others = [self._average[name] for name in others]

    def decay(self, num_updates: int) -> float:
        """Return the share of the average that the update with this number (from 1) keeps."""
        params, s = self.params, num_updates
        if params.decay_type == "constant":
            return params.decay
        if params.decay_type == "threshold":
            return min(params.decay, (1 + s) / (10 + s))
        return params.decay * (1 - math.exp(-params.beta * s / self.total_updates))

    @torch.no_grad()
    def update(self) -> None:
        """Take the live weights into the average. The caller sees to it that they are finite: see `Loop`."""
        self.num_updates += 1
        torch._foreach_lerp_(self._average_floats, self._live_floats, 1 - self.decay(self.num_updates))
        if self._live_others:
            torch._foreach_copy_(self._average_others, self._live_others)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Put the averages into the live model, and the live weights back at the end, whatever happens in between."""
        with swapped(self._live, self._average):
            yield

    def copy_to_model(self) -> None:
        """Put the averages into the live model for good."""
        _write(self._live, self._average)

    def is_finite(self) -> bool:
        """Tell whether all averages are finite."""
        return all_finite(self._average_floats)

    def heal(self) -> None:
        """Take the live value where an average is not finite."""
        for average, live in zip(self._average_floats, self._live_floats, strict=True):
            average.copy_(torch.where(average.isfinite(), average, live))

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights under the model's own names."""
        return {name: tensor.clone() for name, tensor in self._average.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor], *, num_updates: int) -> None:
        """Take over the averages of a checkpoint, and how many updates they have seen."""
        for name, tensor in self._average.items():
            tensor.copy_(state[name])
        self.num_updates = num_updates
