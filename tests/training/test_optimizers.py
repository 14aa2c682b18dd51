"""Optimizers by name, as a class and as an instance; parameter groups."""

import pytest
import torch
from torch import nn

from sgnb.hyperparams import OPTIMIZERS, HyperparamsError, TrainingHyperparams
from sgnb.training.optimizers import build_optimizer as build_on
from sgnb.training.optimizers import load_optimizer_state

CPU = torch.device("cpu")


def build_optimizer(model, hp):
    return build_on(model, hp, CPU)[0]


def a_model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


DEFAULTS = {
    "SGD": {"weight_decay": 1e-4, "momentum": 0.9},
    "Adam": {"weight_decay": 1e-4, "betas": (0.9, 0.999)},
    "AdamW": {"weight_decay": 1e-2, "betas": (0.9, 0.999)},
    "RMSprop": {"weight_decay": 1e-4, "momentum": 0.9, "alpha": 0.99},
    "RMSpropTF": {"weight_decay": 1e-4, "momentum": 0.9, "alpha": 0.9, "lr_in_momentum": True},
    "Lamb": {"weight_decay": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "grad_averaging": True, "max_grad_norm": 1.0},
    "Lion": {"weight_decay": 0.0, "betas": (0.9, 0.99)},
}


def test_there_are_defaults_for_every_name():
    assert set(DEFAULTS) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_name_has_supergradients_defaults(name):
    optimizer = build_optimizer(a_model(), TrainingHyperparams(optimizer=name, initial_lr=0.3))
    assert type(optimizer).__name__ == name
    group = optimizer.param_groups[0]
    assert group["lr"] == group["initial_lr"] == 0.3
    assert {key: group[key] for key in DEFAULTS[name]} == DEFAULTS[name]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_finds_its_way_down(name):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = build_optimizer(model, TrainingHyperparams(optimizer=name, initial_lr=0.01))
    inputs, wanted = torch.randn(64, 3), torch.randn(64, 1)
    losses = []
    for _ in range(50):
        loss = (model(inputs) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("values", "how"),
    [
        ({"optimizer": "SGD"}, "fused"),
        ({"optimizer": "AdamW"}, "fused"),
        ({"optimizer": "Adam", "optimizer_params": {"foreach": True}}, "foreach"),
        ({"optimizer": "Adam", "optimizer_params": {"fused": False}}, "for-loop"),
        ({"optimizer": "RMSprop"}, "for-loop"),
        ({"optimizer": "Lion"}, "for-loop"),
    ],
)
def test_how_it_computes_is_chosen_and_said(values, how):
    assert build_on(a_model(), TrainingHyperparams(**values), CPU)[1] == how


def test_the_fused_kernel_makes_the_same_updates():
    weights = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = a_model()
        hp = TrainingHyperparams(optimizer="SGD", optimizer_params={"fused": fused, "nesterov": True})
        optimizer = build_optimizer(model, hp)
        for _ in range(5):
            model(torch.ones(2, 3, 3, 3)).square().sum().backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(left, right, atol=1e-6) for left, right in zip(*weights, strict=True))


def test_a_subclass_keeps_its_own_step():
    class Mine(torch.optim.SGD):
        pass

    assert build_on(a_model(), TrainingHyperparams(optimizer=Mine), CPU)[1] == "for-loop"


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


class Finetuned(nn.Sequential):
    rates = None

    def get_finetune_lr_dict(self, lr):
        return {"default": lr, "0": 0.1 * lr} if self.rates is None else self.rates


def test_a_model_may_say_which_rates_it_wants_when_finetuned():
    hp = TrainingHyperparams(finetune=True, initial_lr=0.1)
    groups = {group["name"]: group["lr"] for group in build_optimizer(Finetuned(*a_model()), hp).param_groups}
    assert groups == {"default": 0.1, "0": pytest.approx(0.01)}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            a_model(),
            "training_hyperparams.finetune: Sequential has no get_finetune_lr_dict(lr) that says which rates it wants; "
            "write initial_lr: {<prefix of parameter names>: rate, default: rate} instead",
        ),
        (
            Finetuned(*a_model()),
            "training_hyperparams.finetune: expected {prefix: rate} with a default from get_finetune_lr_dict, "
            "got {'0': -1}",
        ),
    ],
)
def test_a_model_that_does_not_say_it_is_an_error(model, message):
    model.rates = {"0": -1}
    with pytest.raises(HyperparamsError) as caught:
        build_optimizer(model, TrainingHyperparams(finetune=True, initial_lr=0.1))
    assert str(caught.value) == message


def test_a_loaded_state_does_not_change_how_it_computes():
    model = a_model()
    old = build_optimizer(model, TrainingHyperparams(optimizer_params={"foreach": True}))
    new, how = build_on(model, TrainingHyperparams(), CPU)
    load_optimizer_state(new, old.state_dict())
    assert (how, new.param_groups[0]["fused"], new.param_groups[0]["foreach"]) == ("fused", True, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "AdamW"}, "the checkpoint is of another optimizer than SGD: "),
        (
            {"zero_weight_decay_on_bias_and_bn": True},
            "the optimizer has groups of [6] parameters, the checkpoint has [2, 4]",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_changes_nothing(change, message):
    model = a_model()
    mine = build_optimizer(model, TrainingHyperparams())
    before = mine.state_dict()
    with pytest.raises(ValueError) as caught:
        load_optimizer_state(mine, build_optimizer(model, TrainingHyperparams(**change)).state_dict())
    assert str(caught.value).startswith(message)
    assert mine.state_dict() == before


def test_a_state_of_other_shapes_is_named():
    mine = build_optimizer(a_model(), TrainingHyperparams())
    state = mine.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.zeros(4, 3, 5, 5)}}
    with pytest.raises(ValueError) as caught:
        load_optimizer_state(mine, state)
    assert str(caught.value) == "momentum_buffer of the optimizer's parameter 0 is (4, 3, 5, 5), expected (4, 3, 3, 3)"
