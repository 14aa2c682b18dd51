"""The optimizer of a run: by name with SuperGradients' defaults, a class, or the user's own instance."""

from __future__ import annotations

import inspect
import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from sgnb.hyperparams import HyperparamsError, Problem, TrainingHyperparams, nearest

# SuperGradients' defaults, where they are not the classes' own.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "SGD": {"weight_decay": 1e-4, "momentum": 0.9},
    "Adam": {"weight_decay": 1e-4},
    "RMSprop": {"weight_decay": 1e-4, "momentum": 0.9},
    "RMSpropTF": {"weight_decay": 1e-4, "momentum": 0.9},
}
_OF_TIMM = ("RMSpropTF", "Lamb", "Lion")
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")  # How an optimizer computes, not what.
# What a group holds besides its optimizer's options: torch's, ours, Lamb's counter, and those of cyclic schedulers.
_BESIDES = {"params", "param_names", "name", "initial_lr", "step"}
_BESIDES |= {"max_lr", "min_lr", "max_momentum", "base_momentum", *_IMPLEMENTATIONS}
_WHERE = "training_hyperparams.optimizer_params"
NO_DECAY = "/no decay"  # Ends the name of the half of a group that is not decayed.
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
            group.setdefault("name", "default")
        return hp.optimizer, _implementation(hp.optimizer)
    kind = _class_of(hp.optimizer) if isinstance(hp.optimizer, str) else hp.optimizer
    groups = _parameter_groups(model, hp)
    known = _checked_arguments(kind, hp)
    arguments = {**_DEFAULTS.get(hp.optimizer if isinstance(hp.optimizer, str) else "", {}), **hp.optimizer_params}
    if "lr" in known:
        arguments["lr"] = groups[0]["lr"]  # Each group has its own; timm's corrected_weight_decay refers to this one.
    if not any(name in arguments for name in _IMPLEMENTATIONS) and _has_fused(kind, groups):
        arguments["fused"] = True
    try:
        optimizer = cast(torch.optim.Optimizer, kind(groups, **arguments))
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: flags that exclude each other.
        raise HyperparamsError(
            [Problem(where=_WHERE, message=f"{kind.__name__} does not take them: {error}")]
        ) from error
    return optimizer, _implementation(optimizer)


def _checked_arguments(kind: type[torch.optim.Optimizer], hp: TrainingHyperparams) -> set[str]:
    """Return what the constructor takes; `optimizer_params` that are not among it are an error."""
    signature = inspect.signature(kind).parameters
    known = [name for name in signature if name not in ("self", "params", "lr")]
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values())
    problems = []
    for name in hp.optimizer_params:
        if name == "lr":
            problems.append(
                Problem(where=f"{_WHERE}.lr", message="the rate is given by training_hyperparams.initial_lr")
            )
        elif name not in known and not anything:
            hint = nearest(name, known) or f"; it has {', '.join(known)}"
            message = f"{kind.__name__} does not take them: it has no argument {name}{hint}"
            problems.append(Problem(where=_WHERE, message=message))
    if problems:
        raise HyperparamsError(problems)
    return set(signature)


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    if name in _OF_TIMM:
        # Its import lifts the compiler's limit of recompilations to a million, for everything in this process.
        with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
            import timm.optim

        return cast(type[torch.optim.Optimizer], getattr(timm.optim, name))
    return cast(type[torch.optim.Optimizer], getattr(torch.optim, name))


def _has_fused(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> bool:
    """Tell whether the one kernel for all parameters can be used. It pays on the CPU too.

    Shortest of 30 runs of 10 or 40 steps, taken in turn, on 2 cores, torch 2.14, 60 tensors: for-loop, foreach, fused.
    SGD with momentum: 8 k parameters 0.81, 0.44, 0.38 ms; 7.9 M 8.1, 17, 4.2 ms. AdamW: 2.3, 1.3, 0.40; 16, 27, 5.5 ms.
    So foreach, which loses where a step takes long, is left to GPUs: torch and timm choose it there by themselves.
    """
    devices = {p.device.type for group in groups for p in group["params"]}
    floating = all(p.is_floating_point() for group in groups for p in group["params"])
    # Subclasses may override what the kernel does.
    return kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) and floating and devices <= {"cpu", "cuda"}


def _implementation(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    # torch's own choice where nothing is said, and that is neither of the two: foreach on a GPU.
    unsaid = "foreach" in group and group["foreach"] is None and group.get("fused") is None
    by_itself = unsaid and not group.get("differentiable") and all(p.is_cuda for p in group["params"])
    return "foreach" if group.get("foreach") or by_itself else "for-loop"


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict, but compute as before: torch would take over `fused` and the like from the checkpoint.

    The names and peak rates of the groups stay too: they are what this run was told.

    Raises:
        ValueError: saying what differs, before anything is changed.
    """
    own = optimizer.state_dict()["param_groups"]
    misfit = _misfit_of_groups(optimizer, own, state) or _misfit_of_tensors(optimizer, state)
    if misfit:
        raise ValueError(misfit)
    # The flags go in before torch loads, because by them it chooses the device of the counters named step.
    stays = (*_IMPLEMENTATIONS, "name", "initial_lr")
    groups = [
        {**mine, **given, **{name: mine[name] for name in stays if name in mine}}
        for mine, given in zip(own, state["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})


def _misfit_of_groups(optimizer: torch.optim.Optimizer, own: list[dict[str, Any]], state: object) -> str | None:
    groups = state.get("param_groups") if isinstance(state, dict) and isinstance(state.get("state"), dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        return "optimizer_state_dict is not the state of an optimizer"
    sizes, given_sizes = ([len(group["params"]) for group in each] for each in (own, groups))
    if sizes != given_sizes:
        return f"the optimizer has groups of {sizes} parameters, the checkpoint has {given_sizes}"
    other = f"the checkpoint is of another optimizer than {type(optimizer).__name__}"
    differing = (set().union(*own) ^ set().union(*groups)) - _BESIDES
    if differing:
        return f"{other}: {', '.join(sorted(differing))} differ"
    for mine, given in zip(own, groups, strict=True):
        # SuperGradients calls both halves of a group the same. torch tells by position, whatever their names.
        names = [group.get("name", "default").removesuffix(NO_DECAY) for group in (mine, given)]
        if "name" in given and names[0] != names[1]:
            return f"the optimizer has a group {names[0]!r} where the checkpoint has {names[1]!r}"
        key = "decoupled_weight_decay"  # All that tells AdamW from Adam.
        if mine.get(key) != given.get(key):
            return f"{other}: {key} is {given.get(key)}, expected {mine.get(key)}"
    return None


def _misfit_of_tensors(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> str | None:
    ids = [index for group in state["param_groups"] for index in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shapes = {index: tuple(p.shape) for index, p in zip(ids, parameters, strict=True)}
    known = type(optimizer).__module__.startswith(("torch.", "timm."))  # Others may keep what they like.
    for index, values in state["state"].items():
        if index not in shapes:
            return f"the checkpoint has a state of parameter {index}, which is in none of its groups"
        for name, value in values.items() if known else ():
            if isinstance(value, Tensor) and value.ndim and not _fits(tuple(value.shape), shapes[index]):
                return f"{name} of the optimizer's parameter {index} is {tuple(value.shape)}, expected {shapes[index]}"
    return None


def _fits(shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    # Adafactor keeps sums over one dimension.
    return len(shape) == len(parameter) and all(
        size in (1, all_of_it) for size, all_of_it in zip(shape, parameter, strict=True)
    )


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
    return isinstance(rate, int | float) and not isinstance(rate, bool) and math.isfinite(rate) and rate >= 0


def _parameter_groups(model: nn.Module, hp: TrainingHyperparams) -> list[dict[str, Any]]:
    rates, where = _rates(model, hp), f"training_hyperparams.{'finetune' if hp.finetune else 'initial_lr'}"
    members: dict[str, list[str]] = {prefix: [] for prefix in rates}
    parameters = dict(model.named_parameters())
    for name in parameters:
        # The longest prefix wins, so that each parameter is in one group, in an order that is the same in each process.
        matching = [prefix for prefix in rates if prefix != "default" and name.startswith(prefix)]
        members[max(matching, key=len) if matching else "default"].append(name)
    problems = [
        Problem(where=where, message=f"no parameter's name begins with {prefix!r}")
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
            (NO_DECAY, [name for name in trained if name in undecayed], {"weight_decay": 0.0}),
        ):
            if chosen:
                params = [parameters[name] for name in chosen]
                groups.append({"params": params, "lr": rate, "initial_lr": rate, "name": prefix + suffix, **extra})
    if not groups:
        problems.append(Problem(where=where, message="nothing is left to train: every parameter is frozen"))
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
