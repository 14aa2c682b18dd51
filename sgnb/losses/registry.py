"""Names in `training_hyperparams.loss` become modules here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from sgnb.hyperparams import HyperparamsError, Problem, nearest

_LOSSES: dict[str, type[nn.Module]] = {
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss,
    "MSELoss": nn.MSELoss,
}
Loss = TypeVar("Loss", bound=type[nn.Module])


def register_loss(loss: Loss) -> Loss:
    """Make a module class known under its own name; use it as a decorator."""
    if loss.__name__ in _LOSSES:
        raise ValueError(f"a loss with the name {loss.__name__} is registered already")
    _LOSSES[loss.__name__] = loss
    return loss


def list_losses() -> list[str]:
    """Return the names, sorted."""
    return sorted(_LOSSES)


def build_loss(spec: Any, params: Mapping[str, Any]) -> nn.Module:
    """Return the loss of a name (with `params`), of `{name: {arguments}}`, of a class, or the module itself.

    Raises:
        HyperparamsError: for an unknown name, or arguments that the loss does not take.
    """
    where = "training_hyperparams.loss"
    if isinstance(spec, nn.Module):
        return spec
    if isinstance(spec, type) and issubclass(spec, nn.Module):
        return _call(spec, {}, where)
    if isinstance(spec, Mapping) and len(spec) == 1:
        name, arguments = next(iter(spec.items()))
        return _call(_class_of(name, where), arguments or {}, f"{where}.{name}")
    if not isinstance(spec, str):
        message = f"expected a name, {{name: {{arguments}}}} or a module, got {spec!r}"
        raise HyperparamsError([Problem(where=where, message=message)])
    return _call(_class_of(spec, where), params, "training_hyperparams.criterion_params")


def _class_of(name: str, where: str) -> type[nn.Module]:
    if name not in _LOSSES:
        known = ", ".join(list_losses())
        message = f"expected one of {known}, got {name!r}{nearest(str(name), _LOSSES)}"
        raise HyperparamsError([Problem(where=where, message=message)])
    return _LOSSES[name]


def _call(kind: type[nn.Module], arguments: Mapping[str, Any], where: str) -> nn.Module:
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        message = f"{kind.__name__} does not take them: {error}"
        raise HyperparamsError([Problem(where=where, message=message)]) from error
