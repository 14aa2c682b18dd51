"""Names in a recipe's `architecture` become modules here."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from sgnb.hyperparams import HyperparamsError, Problem, nearest

_MODELS: dict[str, Callable[..., nn.Module]] = {}
Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


def register_model(builder: Builder) -> Builder:
    """Make a function that returns a module known under its own name; use it as a decorator.

    Raises:
        ValueError: when the name is taken.
    """
    if builder.__name__ in _MODELS:
        raise ValueError(f"a model with the name {builder.__name__} is registered already")
    _MODELS[builder.__name__] = builder
    return builder


def list_models(pattern: str = "*") -> list[str]:
    """Return the names that match a shell pattern, sorted."""
    return sorted(fnmatch.filter(_MODELS, pattern))


def create_model(name: str, *, num_classes: int, **arch_params: Any) -> nn.Module:
    """Return a new model.

    Raises:
        HyperparamsError: for an unknown name, or arguments that the model does not take.
    """
    if name not in _MODELS:
        message = f"expected one of {', '.join(list_models())}, got {name!r}{nearest(str(name), _MODELS)}"
        raise HyperparamsError([Problem(where="architecture", message=message)])
    try:
        return _MODELS[name](num_classes=num_classes, **arch_params)
    except (TypeError, ValueError) as error:
        raise HyperparamsError([Problem(where="arch_params", message=f"{name} does not take them: {error}")]) from error
