"""Optimizers by name, as a class and as an instance; parameter groups."""

import pytest
import torch
from torch import nn

from sgnb.hyperparams import HyperparamsError, TrainingHyperparams
from sgnb.training.optimizers import build_optimizer


def a_model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_each_name_has_supergradients_defaults(name):
    group = build_optimizer(a_model(), TrainingHyperparams(optimizer=name, initial_lr=0.3)).param_groups[0]
    assert group["lr"] == group["initial_lr"] == 0.3
    assert group["weight_decay"] == (1e-2 if name == "AdamW" else 1e-4)
    assert group.get("momentum", 0.9) == 0.9


def test_the_users_parameters_win():
    hp = TrainingHyperparams(optimizer="SGD", optimizer_params={"momentum": 0.5, "nesterov": True})
    group = build_optimizer(a_model(), hp).param_groups[0]
    assert (group["momentum"], group["nesterov"]) == (0.5, True)


def test_an_unknown_parameter_is_named():
    hp = TrainingHyperparams(optimizer="SGD", optimizer_params={"momentun": 0.5})
    with pytest.raises(
        HyperparamsError, match=r"^training_hyperparams.optimizer_params: SGD does not take them: .*momentun"
    ):
        build_optimizer(a_model(), hp)


def test_a_class_is_built_and_an_instance_is_kept():
    model = a_model()
    assert isinstance(build_optimizer(model, TrainingHyperparams(optimizer=torch.optim.Adagrad)), torch.optim.Adagrad)
    mine = torch.optim.SGD(model.parameters(), lr=0.7)
    kept = build_optimizer(model, TrainingHyperparams(optimizer=mine, initial_lr=None))
    assert kept is mine
    assert kept.param_groups[0]["initial_lr"] == 0.7


def test_biases_and_norms_may_go_without_decay():
    hp = TrainingHyperparams(zero_weight_decay_on_bias_and_bn=True)
    decay, no_decay = build_optimizer(a_model(), hp).param_groups
    assert [p.ndim for p in decay["params"]] == [4, 2]
    assert [p.ndim for p in no_decay["params"]] == [1, 1, 1, 1]
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (1e-4, 0.0)


def test_the_longest_prefix_gives_the_rate_and_zero_freezes():
    model = a_model()
    hp = TrainingHyperparams(initial_lr={"default": 0.1, "0": 0, "3": 0.2, "3.bias": 0.3})
    groups = {group["name"]: group for group in build_optimizer(model, hp).param_groups}
    assert {name: group["lr"] for name, group in groups.items()} == {"default": 0.1, "3": 0.2, "3.bias": 0.3}
    assert groups["3.bias"]["params"] == [model[3].bias]
    assert not model[0].weight.requires_grad


def test_a_prefix_that_matches_nothing_is_an_error():
    hp = TrainingHyperparams(initial_lr={"default": 0.1, "backbone": 0.01})
    with pytest.raises(HyperparamsError) as caught:
        build_optimizer(a_model(), hp)
    assert str(caught.value) == "training_hyperparams.initial_lr: no parameter's name begins with 'backbone'"


def test_nothing_left_to_train_is_an_error():
    with pytest.raises(HyperparamsError, match="nothing is left to train: every parameter is frozen"):
        build_optimizer(a_model(), TrainingHyperparams(initial_lr={"default": 0}))
