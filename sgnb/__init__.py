"""Faster PyTorch vision training from a notebook, and the proof of it.

Everything here is loaded when it is first used, so that `import sgnb` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgnb.bench import compare
    from sgnb.history import History
    from sgnb.hyperparams import HyperparamsError, TrainingHyperparams
    from sgnb.pitfalls import check
    from sgnb.recipes import Recipe, list_recipes, load_recipe, save_recipe
    from sgnb.run import Run
    from sgnb.training import Trainer, explain, find_batch_size
    from sgnb.ui import panel

__version__ = "0.1.0"
__all__ = [
    "History",
    "HyperparamsError",
    "Recipe",
    "Run",
    "Trainer",
    "TrainingHyperparams",
    "__version__",
    "check",
    "compare",
    "explain",
    "find_batch_size",
    "list_recipes",
    "load_recipe",
    "panel",
    "save_recipe",
]

_HOMES = {
    "History": "sgnb.history",
    "HyperparamsError": "sgnb.hyperparams",
    "Recipe": "sgnb.recipes",
    "Run": "sgnb.run",
    "Trainer": "sgnb.training",
    "TrainingHyperparams": "sgnb.hyperparams",
    "check": "sgnb.pitfalls",
    "compare": "sgnb.bench",
    "explain": "sgnb.training",
    "find_batch_size": "sgnb.training",
    "list_recipes": "sgnb.recipes",
    "load_recipe": "sgnb.recipes",
    "panel": "sgnb.ui",
    "save_recipe": "sgnb.recipes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sgnb' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
