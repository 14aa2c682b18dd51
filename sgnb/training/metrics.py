"""Metrics by SuperGradients' names, by torchmetrics' names, or as torchmetrics objects; sums stay on the device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torchmetrics
import torchmetrics.classification
import torchmetrics.regression
from torch import Tensor, nn

from sgnb.hyperparams import HyperparamsError, Problem, TrainingHyperparams, nearest


class Accuracy(torchmetrics.Metric):
    """Share of samples (or pixels) whose highest logit is that of their class.

    Logits are [B, K, ...], targets class indices [B, ...] or soft labels [B, K, ...].
    """

    higher_is_better = True
    full_state_update = False
    k = 1
    correct: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("correct", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Count one batch."""
        index = target.argmax(dim=1) if target.shape == logits.shape else target
        top = logits.topk(min(self.k, logits.shape[1]), dim=1).indices
        self.correct += (top == index.unsqueeze(1)).any(dim=1).sum()
        self.total += index.numel()

    def compute(self) -> Tensor:
        """Return the share so far."""
        return self.correct / self.total


class Top5(Accuracy):
    """Share of samples whose class is among the five highest logits."""

    k = 5


_BY_NAME: dict[str, type[torchmetrics.Metric]] = {"Accuracy": Accuracy, "Top5": Top5}


def build_metrics(specs: Sequence[Any], where: str, device: torch.device) -> dict[str, torchmetrics.Metric]:
    """Return metrics by name from names, `{name: {arguments}}` mappings and torchmetrics objects.

    Raises:
        HyperparamsError: for an unknown name or arguments that a metric does not take.
    """
    metrics, problems = {}, []
    for index, spec in enumerate(specs):
        try:
            name, metric = _build(spec)
        except (TypeError, ValueError) as error:
            problems.append(Problem(where=f"{where}.{index}", message=str(error)))
            continue
        if name in metrics:
            problems.append(Problem(where=f"{where}.{index}", message=f"a second metric with the name {name}"))
        metrics[name] = metric.to(device)
    if problems:
        raise HyperparamsError(problems)
    return metrics


def metrics_of_run(
    hp: TrainingHyperparams, criterion: nn.Module, device: torch.device
) -> tuple[dict[str, torchmetrics.Metric], dict[str, torchmetrics.Metric]]:
    """Return the metrics of training and validation; each has objects of its own, as a metric holds sums.

    Raises:
        HyperparamsError: as `build_metrics`.
    """
    by_default = ("Accuracy",) if type(criterion).__name__ == "CrossEntropyLoss" else ()
    specs = by_default if hp.valid_metrics_list is None else hp.valid_metrics_list
    valid = build_metrics(specs, "training_hyperparams.valid_metrics_list", device)
    if hp.train_metrics_list is None:
        return {name: metric.clone() for name, metric in valid.items()}, valid
    return build_metrics(hp.train_metrics_list, "training_hyperparams.train_metrics_list", device), valid


def metric_to_watch(hp: TrainingHyperparams, valid: Mapping[str, torchmetrics.Metric]) -> tuple[str, bool]:
    """Return the name of the metric that decides what is best, and whether more of it is better.

    Raises:
        HyperparamsError: when there is no metric of that name.
    """
    name = hp.metric_to_watch or next(iter(valid), "loss")
    names = [*valid, "loss"]
    if name not in names:
        message = f"expected one of {', '.join(names)}, got {name!r}{nearest(name, names)}"
        raise HyperparamsError([Problem(where="training_hyperparams.metric_to_watch", message=message)])
    greater = hp.greater_metric_to_watch_is_better
    return name, name != "loss" if greater is None else greater


def _build(spec: Any) -> tuple[str, torchmetrics.Metric]:
    if isinstance(spec, torchmetrics.Metric):
        return type(spec).__name__, spec
    if isinstance(spec, str):
        spec = {spec: {}}
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ValueError(f"expected a name, {{name: {{arguments}}}} or a torchmetrics object, got {spec!r}")
    name, arguments = next(iter(spec.items()))
    return name, _class_of(name)(**(arguments or {}))


def _class_of(name: str) -> type[torchmetrics.Metric]:
    known = dict(_BY_NAME)
    for module in (torchmetrics.classification, torchmetrics.regression):
        for found, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, torchmetrics.Metric):
                known.setdefault(found, value)
    if name not in known:
        raise ValueError(f"no such metric: {name!r}{nearest(str(name), known)}")
    return known[name]
