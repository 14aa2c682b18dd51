"""Metrics by name, as objects, and their errors."""

import pytest
import torch
import torchmetrics

from sgnb.hyperparams import HyperparamsError
from sgnb.training.metrics import Accuracy, Top5, build_metrics

CPU = torch.device("cpu")
LOGITS = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1], [0.2, 0.3, 0.5]])


def test_accuracy_counts_samples_over_batches_of_any_size():
    metric = Accuracy()
    metric.update(LOGITS, torch.tensor([1, 1, 2]))
    metric.update(LOGITS[:1], torch.tensor([1]))
    assert metric.compute().item() == pytest.approx(3 / 4)


def test_accuracy_takes_soft_labels_and_pixels():
    metric = Accuracy()
    metric.update(LOGITS, torch.eye(3)[[1, 0, 0]])
    assert metric.compute().item() == pytest.approx(2 / 3)
    metric.reset()
    metric.update(LOGITS.T.reshape(1, 3, 3, 1), torch.tensor([1, 0, 0]).reshape(1, 3, 1))
    assert metric.compute().item() == pytest.approx(2 / 3)


def test_top5_needs_the_class_among_five():
    metric = Top5()
    logits = torch.arange(8.0).repeat(2, 1)
    metric.update(logits, torch.tensor([3, 2]))
    assert metric.compute().item() == 0.5


def test_names_mappings_and_objects_are_built():
    mine = torchmetrics.MeanMetric()
    built = build_metrics(["Accuracy", {"MulticlassF1Score": {"num_classes": 3}}, mine], "where", CPU)
    assert list(built) == ["Accuracy", "MulticlassF1Score", "MeanMetric"]
    assert built["MeanMetric"] is mine


def test_all_wrong_metrics_are_named_at_once():
    with pytest.raises(HyperparamsError) as caught:
        build_metrics(["Acuracy", {"Top5": {"k": 3}}, 7], "training_hyperparams.valid_metrics_list", CPU)
    first, second, third = caught.value.problems
    assert str(first) == "training_hyperparams.valid_metrics_list.0: no such metric: 'Acuracy'; did you mean Accuracy?"
    assert str(second).startswith("training_hyperparams.valid_metrics_list.1: ")
    assert "unexpected keyword argument 'k'" in str(second)
    assert str(third) == (
        "training_hyperparams.valid_metrics_list.2: "
        "expected a name, {name: {arguments}} or a torchmetrics object, got 7"
    )
