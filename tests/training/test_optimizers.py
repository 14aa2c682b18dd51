"""Optimizers by name, as a class and as an instance; parameter groups."""

import io
import os
import subprocess
import sys

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


def test_importing_timm_does_not_lift_the_compilers_limit():
    code = (
        "import torch\n"
        "from sgnb.hyperparams import TrainingHyperparams\n"
        "from sgnb.training.optimizers import build_optimizer\n"
        "build_optimizer(torch.nn.Linear(2, 2), TrainingHyperparams(optimizer='Lion'), torch.device('cpu'))\n"
        "print(torch._dynamo.config.recompile_limit)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "8\n"


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


class OfTwo(torch.optim.SGD):
    def __init__(self, params, lr=0.1, one=1, other=2):
        super().__init__(params, lr)


@pytest.mark.parametrize(
    ("optimizer", "given", "message"),
    [
        ("SGD", {"momentun": 0.5}, ": SGD does not take them: it has no argument momentun; did you mean momentum?"),
        ("RMSpropTF", {"epsilon": 1}, ": RMSpropTF does not take them: it has no argument epsilon; did you mean eps?"),
        ("Lamb", {"max_grad_nrm": 1}, ": Lamb does not take them: it has no argument max_grad_nrm; "
                                      "did you mean max_grad_norm?"),
        ("Lion", {"beta": 0.9}, ": Lion does not take them: it has no argument beta; did you mean betas?"),
        (OfTwo, {"momentum": 0.9}, ": OfTwo does not take them: it has no argument momentum; it has one, other"),
        ("SGD", {"lr": 0.1}, ".lr: the rate is given by training_hyperparams.initial_lr"),
        ("Adam", {"eps": -1.0}, ": Adam does not take them: Invalid epsilon value: -1.0"),
        ("Adam", {"fused": True, "foreach": True},
         ": Adam does not take them: `fused` and `foreach` cannot be `True` together."),
    ],
)  # fmt: skip
def test_a_parameter_that_does_not_fit_is_named(optimizer, given, message):
    hp = TrainingHyperparams(optimizer=optimizer, optimizer_params=given)
    with pytest.raises(HyperparamsError) as caught:
        build_optimizer(a_model(), hp)
    assert str(caught.value) == f"training_hyperparams.optimizer_params{message}"


def test_a_class_that_takes_anything_is_given_it():
    class Mine(torch.optim.SGD):
        def __init__(self, params, **options):
            self.scale = options.pop("scale")
            super().__init__(params, **options)

    optimizer = build_optimizer(a_model(), TrainingHyperparams(optimizer=Mine, optimizer_params={"scale": 3}))
    assert optimizer.scale == 3
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_timm_is_not_loaded_for_the_optimizers_of_torch():
    code = (
        "import sys, torch; from sgnb.hyperparams import TrainingHyperparams; "
        "from sgnb.training.optimizers import build_optimizer; "
        "build_optimizer(torch.nn.Linear(1, 1), TrainingHyperparams(), torch.device('cpu')); "
        "print('timm' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_a_class_is_built_and_an_instance_is_kept():
    model = a_model()
    assert isinstance(build_optimizer(model, TrainingHyperparams(optimizer=torch.optim.Adagrad)), torch.optim.Adagrad)
    mine = torch.optim.SGD(model.parameters(), lr=0.7)
    kept = build_optimizer(model, TrainingHyperparams(optimizer=mine, initial_lr=None))
    assert kept is mine
    group = kept.param_groups[0]
    assert (group["initial_lr"], group["name"], group["fused"], group["foreach"]) == (0.7, "default", None, None)


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


def test_a_prefix_of_the_model_that_matches_nothing_is_not_blamed_on_the_user():
    model = Finetuned(*a_model())
    model.rates = {"default": 0.1, "head": 0.2}
    with pytest.raises(HyperparamsError) as caught:
        build_optimizer(model, TrainingHyperparams(finetune=True, initial_lr=0.1))
    assert str(caught.value) == "training_hyperparams.finetune: no parameter's name begins with 'head'"


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
    old = build_optimizer(model, TrainingHyperparams(optimizer_params={"foreach": True, "maximize": True}))
    new, how = build_on(model, TrainingHyperparams(), CPU)
    load_optimizer_state(new, old.state_dict())
    assert (how, new.param_groups[0]["fused"], new.param_groups[0]["foreach"]) == ("fused", True, None)
    assert new.param_groups[0]["maximize"]  # This is what it computes, not how.


def test_the_counters_go_where_this_optimizer_wants_them_not_where_the_old_one_had_them():
    old = torch.optim.Adam(nn.Linear(2, 1).parameters(), foreach=False)
    for group in old.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    old.step()
    new = torch.optim.Adam(nn.Linear(2, 1, device="meta").parameters(), capturable=True)
    load_optimizer_state(new, old.state_dict())
    assert {values["step"].device.type for values in new.state.values()} == {"meta"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_went_through_a_file_goes_on_as_if_it_had_not(name):
    def steps(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, TrainingHyperparams(optimizer=name))
    steps(model, optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    expected = steps(model, optimizer)
    other = nn.Linear(3, 2)
    new = build_optimizer(other, TrainingHyperparams(optimizer=name))
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    load_optimizer_state(new, state)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(steps(other, new), expected, strict=True))


def test_a_resumed_run_has_the_rates_that_it_is_told():
    model = a_model()
    old = build_optimizer(model, TrainingHyperparams(initial_lr=0.1)).state_dict()
    del old["param_groups"][0]["name"]
    new = build_optimizer(model, TrainingHyperparams(initial_lr=0.5))
    load_optimizer_state(new, old)
    assert (new.param_groups[0]["initial_lr"], new.param_groups[0]["name"]) == (0.5, "default")


def test_a_state_without_the_keys_of_a_cyclic_scheduler_leaves_them():
    model = a_model()
    new = build_optimizer(model, TrainingHyperparams())
    torch.optim.lr_scheduler.OneCycleLR(new, 0.3, total_steps=9)
    load_optimizer_state(new, build_optimizer(model, TrainingHyperparams()).state_dict())
    assert new.param_groups[0]["max_lr"] == 0.3


def test_adafactor_may_keep_sums_of_rows():
    model = a_model()
    hp = TrainingHyperparams(optimizer=torch.optim.Adafactor)
    old = build_optimizer(model, hp)
    model(torch.ones(2, 3, 3, 3)).square().sum().backward()
    old.step()
    new = build_optimizer(model, hp)
    load_optimizer_state(new, old.state_dict())
    assert len(new.state) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"optimizer": "AdamW"},
            "the checkpoint is of another optimizer than SGD: amsgrad, betas, dampening, decoupled_weight_decay, eps, "
            "momentum, nesterov differ",
        ),
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
    assert str(caught.value) == message
    assert mine.state_dict() == before


@pytest.mark.parametrize(
    ("mine", "other", "message"),
    [
        (
            {"optimizer": "Adam"}, {"optimizer": "AdamW"},
            "the checkpoint is of another optimizer than Adam: decoupled_weight_decay is True, expected False",
        ),
        (
            {"initial_lr": {"0": 0.1, "default": 0.1}}, {"initial_lr": {"3": 0.1, "default": 0.1}},
            "the optimizer has a group '0' where the checkpoint has '3'",
        ),
    ],
)  # fmt: skip
def test_a_state_that_would_load_and_be_wrong_is_named(mine, other, message):
    model = a_model()
    old = build_optimizer(model, TrainingHyperparams(**other)).state_dict()
    new = build_optimizer(model, TrainingHyperparams(**mine))
    with pytest.raises(ValueError) as caught:
        load_optimizer_state(new, old)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "state", [[], {}, {"state": {}, "param_groups": [{"lr": 1}]}, {"state": 1, "param_groups": []}]
)
def test_what_is_no_state_is_said(state):
    with pytest.raises(ValueError) as caught:
        load_optimizer_state(build_optimizer(a_model(), TrainingHyperparams()), state)
    assert str(caught.value) == "optimizer_state_dict is not the state of an optimizer"


def test_a_state_of_nobody_is_named():
    mine = build_optimizer(a_model(), TrainingHyperparams())
    state = {**mine.state_dict(), "state": {7: {"momentum_buffer": torch.zeros(3)}}}
    with pytest.raises(ValueError) as caught:
        load_optimizer_state(mine, state)
    assert str(caught.value) == "the checkpoint has a state of parameter 7, which is in none of its groups"


def test_a_state_of_other_shapes_is_named():
    mine = build_optimizer(a_model(), TrainingHyperparams())
    state = mine.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.zeros(4, 3, 5, 5)}}
    with pytest.raises(ValueError) as caught:
        load_optimizer_state(mine, state)
    assert str(caught.value) == "momentum_buffer of the optimizer's parameter 0 is (4, 3, 5, 5), expected (4, 3, 3, 3)"
