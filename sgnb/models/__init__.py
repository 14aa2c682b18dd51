"""Models by name: `create_model("dscnn", num_classes=10)`."""

from sgnb.models.dscnn import DepthwiseSeparableCNN
from sgnb.models.registry import create_model, list_models, register_model

__all__ = ["DepthwiseSeparableCNN", "create_model", "list_models", "register_model"]
