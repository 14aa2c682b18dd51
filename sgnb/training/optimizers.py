"""The optimizer of a run: by name with SuperGradients' defaults, a class, or the user's own instance."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from sgnb.hyperparams import HyperparamsError, Problem, TrainingHyperparams

_BY_NAME: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"weight_decay": 1e-4, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"weight_decay": 1e-4}),
    "AdamW": (torch.optim.AdamW, {}),
    "RMSprop": (torch.optim.RMSprop, {"weight_decay": 1e-4, "momentum": 0.9}),
}
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def build_optimizer(model: nn.Module, hp: TrainingHyperparams) -> torch.optim.Optimizer:
    """Return an optimizer over the parameters of `model`; each group's peak rate stands in its `initial_lr`.

    Parameters that belong to a prefix of `initial_lr` with rate 0 are frozen: `requires_grad` becomes False.

    Raises:
        HyperparamsError: when `optimizer_params` do not fit, a prefix matches nothing, or nothing is left to train.
    """
    if isinstance(hp.optimizer, torch.optim.Optimizer):
        for group in hp.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return hp.optimizer
    kind, defaults = _BY_NAME[hp.optimizer] if isinstance(hp.optimizer, str) else (hp.optimizer, {})
    groups = _parameter_groups(model, hp)
    try:
        return cast(torch.optim.Optimizer, kind(groups, **{**defaults, **hp.optimizer_params}))
    except (TypeError, ValueError) as error:
        where = "training_hyperparams.optimizer_params"
        raise HyperparamsError(
            [Problem(where=where, message=f"{kind.__name__} does not take them: {error}")]
        ) from error


def _parameter_groups(model: nn.Module, hp: TrainingHyperparams) -> list[dict[str, Any]]:
    rates = hp.initial_lr if isinstance(hp.initial_lr, dict) else {"default": hp.initial_lr}
    members: dict[str, list[str]] = {prefix: [] for prefix in rates}
    parameters = dict(model.named_parameters())
    for name in parameters:
        # The longest prefix wins, so that each parameter is in one group, in an order that is the same in each process.
        matching = [prefix for prefix in rates if prefix != "default" and name.startswith(prefix)]
        members[max(matching, key=len) if matching else "default"].append(name)
    problems = [
        Problem(where="training_hyperparams.initial_lr", message=f"no parameter's name begins with {prefix!r}")
        for prefix, names in members.items()
        if not names and prefix != "default"
    ]
    undecayed = _undecayed(model) if hp.zero_weight_decay_on_bias_and_bn else set()
    groups: list[dict[str, Any]] = []
    for prefix, names in members.items():
        rate = rates[prefix]
        if rate == 0:
            for name in names:
                parameters[name].requires_grad_(False)
            continue
        trained = [name for name in names if parameters[name].requires_grad]
        for suffix, chosen, extra in (
            ("", [name for name in trained if name not in undecayed], {}),
            ("/no decay", [name for name in trained if name in undecayed], {"weight_decay": 0.0}),
        ):
            if chosen:
                params = [parameters[name] for name in chosen]
                groups.append({"params": params, "lr": rate, "initial_lr": rate, "name": prefix + suffix, **extra})
    if not groups:
        problems.append(
            Problem(
                where="training_hyperparams.initial_lr", message="nothing is left to train: every parameter is frozen"
            )
        )
    if problems:
        raise HyperparamsError(problems)
    return groups


def _undecayed(model: nn.Module) -> set[str]:
    names = set()
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if isinstance(module, _NORMS) or name == "bias":
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


_old_build = build_optimizer


def build_optimizer(model, hp, device=None):
    return _old_build(model, hp), "foreach"  # SHIM


def load_optimizer_state(optimizer, state):
    optimizer.load_state_dict(state)  # SHIM
