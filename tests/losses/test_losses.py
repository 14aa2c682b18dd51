"""Losses by name, against values computed by hand."""

import math

import pytest
import torch
from torch import nn

from sgnb.hyperparams import HyperparamsError
from sgnb.losses import CrossEntropyLoss, build_loss

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
TARGETS = torch.tensor([0, 2])


def log_softmax(row):
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


LOGP = [log_softmax(row) for row in LOGITS.tolist()]


def test_cross_entropy_is_the_mean_of_the_negative_log_probabilities():
    assert CrossEntropyLoss()(LOGITS, TARGETS).item() == pytest.approx(-(LOGP[0][0] + LOGP[1][2]) / 2)


def test_smoothing_spreads_a_share_over_all_classes():
    expected = -sum(0.9 * row[t] + 0.1 * sum(row) / 3 for row, t in zip(LOGP, (0, 2), strict=True)) / 2
    assert CrossEntropyLoss(smooth_eps=0.1)(LOGITS, TARGETS).item() == pytest.approx(expected)


def test_soft_labels_are_taken():
    soft = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    expected = -((LOGP[0][0] + LOGP[0][1]) / 2 + LOGP[1][2]) / 2
    assert CrossEntropyLoss()(LOGITS, soft).item() == pytest.approx(expected)


def test_ignored_samples_do_not_count_and_16_bits_are_enough_for_logits():
    assert CrossEntropyLoss(ignore_index=2)(LOGITS, TARGETS).item() == pytest.approx(-LOGP[0][0])
    assert CrossEntropyLoss()(LOGITS.bfloat16(), TARGETS).dtype == torch.float32


def test_names_mappings_classes_and_modules_are_built():
    assert build_loss("CrossEntropyLoss", {"smooth_eps": 0.2}).smooth_eps == 0.2
    assert build_loss({"CrossEntropyLoss": {"smooth_eps": 0.3}}, {}).smooth_eps == 0.3
    assert isinstance(build_loss(nn.L1Loss, {}), nn.L1Loss)
    mine = nn.L1Loss()
    assert build_loss(mine, {}) is mine


@pytest.mark.parametrize(
    ("spec", "params", "message"),
    [
        (
            "CrossEntropy",
            {},
            "training_hyperparams.loss: expected one of BCEWithLogitsLoss, CrossEntropyLoss, MSELoss, got "
            "'CrossEntropy'; did you mean CrossEntropyLoss?",
        ),
        (
            "CrossEntropyLoss",
            {"smooth_eps": 2},
            "training_hyperparams.criterion_params: CrossEntropyLoss does not take them: smooth_eps: expected at "
            "least 0 and less than 1, got 2",
        ),
    ],
)
def test_what_cannot_be_built_is_named(spec, params, message):
    with pytest.raises(HyperparamsError) as caught:
        build_loss(spec, params)
    assert str(caught.value) == message
