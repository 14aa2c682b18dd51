"""Cross entropy with SuperGradients' arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgnb.losses.registry import register_loss


@register_loss
class CrossEntropyLoss(nn.Module):
    """Mean cross entropy of logits [B, K, ...] and class indices [B, ...] or soft labels [B, K, ...], in float32.

    Args:
        smooth_eps: Share of the label that is spread over all classes (https://arxiv.org/abs/1512.00567).
        ignore_index: Class index whose samples do not count.
        weight: A factor for each of the K classes.
    """

    weight: Tensor | None

    def __init__(
        self, smooth_eps: float = 0.0, ignore_index: int = -100, weight: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        if not 0 <= smooth_eps < 1:
            raise ValueError(f"smooth_eps: expected at least 0 and less than 1, got {smooth_eps!r}")
        self.smooth_eps = smooth_eps
        self.ignore_index = ignore_index
        self.register_buffer("weight", None if weight is None else torch.as_tensor(weight, dtype=torch.float32))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss, a scalar."""
        return F.cross_entropy(
            logits.float(),
            target.float() if target.is_floating_point() else target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.smooth_eps,
        )
