"""Losses by name. A loss takes the model's output and the targets and returns a scalar, or `(scalar, components)`."""

from sgnb.losses.classification import CrossEntropyLoss
from sgnb.losses.registry import build_loss, list_losses, register_loss

__all__ = ["CrossEntropyLoss", "build_loss", "list_losses", "register_loss"]
