"""The optimizer of a run: by name with SuperGradients' defaults, a class, or the user's own instance."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from sgnb.hyperparams import HyperparamsError, Problem, TrainingHyperparams

# SuperGradients' defaults, where they are not the classes' own.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "SGD": {"weight_decay": 1e-4, "momentum": 0.9},
    "Adam": {"weight_decay": 1e-4},
    "RMSprop": {"weight_decay": 1e-4, "momentum": 0.9},
    "RMSpropTF": {"weight_decay": 1e-4, "momentum": 0.9},
}
_OF_TIMM = ("RMSpropTF", "Lamb", "Lion")
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")  # How an optimizer computes, not what.
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def build_optimizer(
    model: nn.Module, hp: TrainingHyperparams, device: torch.device
) -> tuple[torch.optim.Optimizer, str]:
    """Return an optimizer over the parameters of `model`, and how it computes: fused, foreach or for-loop.

    Each group has its peak rate in `initial_lr`. Parameters that belong to a prefix of `initial_lr` with rate 0 are
    frozen: `requires_grad` becomes False.

    Raises:
        HyperparamsError: when `optimizer_params` do not fit, a prefix matches nothing, or nothing is left to train.
    """
    if isinstance(hp.optimizer, torch.optim.Optimizer):
        for group in hp.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return hp.optimizer, _implementation(hp.optimizer)
    kind = _class_of(hp.optimizer) if isinstance(hp.optimizer, str) else hp.optimizer
    groups = _parameter_groups(model, hp)
    arguments = {**_DEFAULTS.get(hp.optimizer if isinstance(hp.optimizer, str) else "", {}), **hp.optimizer_params}
    if not any(name in arguments for name in _IMPLEMENTATIONS) and _has_fused(kind, groups):
        arguments["fused"] = True
    try:
        optimizer = cast(torch.optim.Optimizer, kind(groups, **arguments))
    except (TypeError, ValueError) as error:
        where = "training_hyperparams.optimizer_params"
        raise HyperparamsError(
            [Problem(where=where, message=f"{kind.__name__} does not take them: {error}")]
        ) from error
    return optimizer, _implementation(optimizer)


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    if name in _OF_TIMM:
        import timm.optim

        return cast(type[torch.optim.Optimizer], getattr(timm.optim, name))
    return cast(type[torch.optim.Optimizer], getattr(torch.optim, name))


def _has_fused(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> bool:
    """Tell whether the one kernel for all parameters can be used. It pays on the CPU too.

    Median of a step on 2 cores, for-loop, foreach and fused: SGD with momentum on resnet18 16, 18 and 7 ms, on
    MobileNetV3-small 5.2, 5.2 and 1.7 ms; AdamW 38, 38 and 9 ms, 13, 11 and 3 ms (`tests/benchmarks/optimizers.py`).
    """
    devices = {p.device.type for group in groups for p in group["params"]}
    floating = all(p.is_floating_point() for group in groups for p in group["params"])
    # Subclasses may override what the kernel does.
    return kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) and floating and devices <= {"cpu", "cuda"}


def _implementation(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    on_gpu = any(p.is_cuda for p in group["params"])
    # torch's own choice where nothing is said: foreach on a GPU.
    foreach = group.get("foreach")
    return "foreach" if foreach or (foreach is None and "foreach" in group and on_gpu) else "for-loop"


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict, but compute as before: torch would take over `fused` and the like from the checkpoint.

    Raises:
        ValueError: saying what differs, before anything is changed.
    """
    own, given = optimizer.state_dict(), state
    if not isinstance(given.get("param_groups"), list) or not isinstance(given.get("state"), dict):
        raise ValueError("optimizer_state_dict is not the state of an optimizer")
    sizes, given_sizes = ([len(group["params"]) for group in each["param_groups"]] for each in (own, given))
    if sizes != given_sizes:
        raise ValueError(f"the optimizer has groups of {sizes} parameters, the checkpoint has {given_sizes}")
    keys, given_keys = (set().union(*each["param_groups"]) - {"params", *_IMPLEMENTATIONS} for each in (own, given))
    if keys != given_keys:
        differing = ", ".join(sorted(keys ^ given_keys))
        raise ValueError(f"the checkpoint is of another optimizer than {type(optimizer).__name__}: {differing} differ")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in given["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != parameters[index].shape:
                shapes = f"{tuple(value.shape)}, expected {tuple(parameters[index].shape)}"
                raise ValueError(f"{name} of the optimizer's parameter {index} is {shapes}")
    before = [{name: group[name] for name in _IMPLEMENTATIONS if name in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(given)
    for group, implementation in zip(optimizer.param_groups, before, strict=True):
        group.update(implementation)


def _rates(model: nn.Module, hp: TrainingHyperparams) -> dict[str, float]:
    """Return the rate of each prefix of parameter names, and of the rest as default."""
    if not hp.finetune:
        return hp.initial_lr if isinstance(hp.initial_lr, dict) else {"default": hp.initial_lr or 0.0}
    ask, where = getattr(model, "get_finetune_lr_dict", None), "training_hyperparams.finetune"
    if not callable(ask):
        message = (
            f"{type(model).__name__} has no get_finetune_lr_dict(lr) that says which rates it wants; "
            "write initial_lr: {<prefix of parameter names>: rate, default: rate} instead"
        )
        raise HyperparamsError([Problem(where=where, message=message)])
    rates = ask(hp.initial_lr)
    if not isinstance(rates, dict) or "default" not in rates or not all(_is_rate(rate) for rate in rates.values()):
        message = f"expected {{prefix: rate}} with a default from get_finetune_lr_dict, got {rates!r}"
        raise HyperparamsError([Problem(where=where, message=message)])
    return {str(prefix): float(rate) for prefix, rate in rates.items()}


def _is_rate(rate: object) -> bool:
    return isinstance(rate, int | float) and math.isfinite(rate) and rate >= 0


def _parameter_groups(model: nn.Module, hp: TrainingHyperparams) -> list[dict[str, Any]]:
    rates = _rates(model, hp)
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
