"""Learning rates against closed forms."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from sgnb.hyperparams import HyperparamsError, TrainingHyperparams
from sgnb.training.optimizers import build_optimizer
from sgnb.training.schedules import Schedule, lr_at

N = 10  # Updates per epoch.


def rates(**values):
    hp = TrainingHyperparams(max_epochs=6, **values)
    return [lr_at(update, initial_lr=0.1, hp=hp, updates_per_epoch=N) for update in range(6 * N)]


def test_cosine_falls_from_the_peak_to_the_final_ratio():
    total = 6 * N
    expected = [0.1 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * k / (total + 1)))) for k in range(total)]
    assert rates(lr_mode="CosineLRScheduler", cosine_final_lr_ratio=0.05) == pytest.approx(expected)


def test_poly_has_the_power_of_nine_tenths():
    assert rates(lr_mode="PolyLRScheduler") == pytest.approx([0.1 * (1 - k / 60) ** 0.9 for k in range(60)])


def test_exponential_multiplies_once_an_epoch_smoothly():
    expected = [0.1 * 0.5 ** (k / N) for k in range(60)]
    assert rates(lr_mode="ExponentialLRScheduler", lr_decay_factor=0.5) == pytest.approx(expected)


def test_step_multiplies_after_the_named_epochs():
    found = rates(lr_mode="StepLRScheduler", lr_updates=[1, 3], lr_decay_factor=0.1)
    assert found[::N] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_step_frequency_may_be_a_fraction_of_epochs():
    found = rates(lr_mode="StepLRScheduler", step_lr_update_freq=1.5, lr_decay_factor=0.1)  # After epochs 2, 3, 5.
    assert found[::N] == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.001, 0.001])


def test_warm_up_by_epochs_rises_in_steps_and_the_schedule_begins_after_it():
    found = rates(lr_mode="PolyLRScheduler", lr_warmup_epochs=2)
    assert found[0] == found[N - 1] == pytest.approx(0.1 / 3)
    assert found[N] == pytest.approx(0.1 / 3 + (0.1 - 0.1 / 3) / 2)
    assert found[2 * N :] == pytest.approx([0.1 * (1 - k / 40) ** 0.9 for k in range(40)])


def test_warm_up_by_updates_may_be_longer_than_an_epoch():
    found = rates(
        lr_mode="PolyLRScheduler", warmup_mode="LinearBatchLRWarmup", lr_warmup_steps=25, warmup_initial_lr=0.0
    )
    assert found[:25] == pytest.approx([0.1 * k / 24 for k in range(25)])
    assert found[25:] == pytest.approx([0.1 * (1 - k / 35) ** 0.9 for k in range(35)])


def test_cool_down_keeps_the_last_rate():
    found = rates(lr_mode="CosineLRScheduler", lr_cooldown_epochs=2)
    assert len(set(found[4 * N - 1 :])) == 1
    assert found[4 * N - 1] < 0.01


def test_a_function_is_given_what_supergradients_gives_it():
    def schedule(*, initial_lr, epoch, iter, max_epoch, iters_per_epoch):
        return initial_lr * (1 - (epoch * iters_per_epoch + iter) / (max_epoch * iters_per_epoch))

    found = rates(lr_mode="FunctionLRScheduler", lr_schedule_function=schedule)
    assert found == pytest.approx([0.1 * (1 - k / 60) for k in range(60)])


def test_the_warm_up_may_begin_elsewhere_for_each_prefix():
    hp = TrainingHyperparams(
        initial_lr={"default": 0.1, "1": 0.2}, lr_warmup_epochs=2, warmup_initial_lr={"default": 0.0, "1": 0.05},
        lr_mode="PolyLRScheduler", zero_weight_decay_on_bias_and_bn=True,
    )  # fmt: skip
    optimizer, _ = build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), hp, torch.device("cpu"))
    schedule = Schedule(hp, optimizer, N)
    seen = []
    for update in (0, N, 2 * N):
        schedule.apply(update)
        seen.append({group["name"]: group["lr"] for group in optimizer.param_groups})
    assert seen[0] == {"default": 0.0, "default/no decay": 0.0, "1": 0.05, "1/no decay": 0.05}
    assert seen[1] == pytest.approx({"default": 0.05, "default/no decay": 0.05, "1": 0.125, "1/no decay": 0.125})
    assert seen[2] == pytest.approx({"default": 0.1, "default/no decay": 0.1, "1": 0.2, "1/no decay": 0.2})


def drive(hp, *, epochs=6, values=None, resume_at=None):
    """Return the rate of every update."""
    optimizer, _ = build_optimizer(nn.Linear(2, 2), hp, torch.device("cpu"))
    schedule, rates, updates = Schedule(hp, optimizer, N), [], 0
    for epoch in range(1, epochs + 1):
        if epoch == resume_at:
            state = schedule.state_dict(), optimizer.state_dict()
            optimizer, _ = build_optimizer(nn.Linear(2, 2), hp, torch.device("cpu"))
            optimizer.load_state_dict(state[1])
            schedule = Schedule(hp, optimizer, N)
            schedule.load_state_dict(state[0])
        for _ in range(N):
            schedule.apply(updates)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            updates += 1
            schedule.update_ended(updates)
        schedule.epoch_ended(epoch, {"loss": values[epoch - 1]} if values else {})
    return rates


def by_hand(make, *, per_update, epochs, values=None):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    scheduler, rates = make(optimizer), []
    for epoch in range(epochs):
        for _ in range(N):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if per_update:
                scheduler.step()
        if not per_update:
            scheduler.step(*([values[epoch]] if values else []))
    return rates


LOSSES = [1.0, 0.5, 0.5, 0.5, 0.5, 0.5]
OF_TORCH = [
    ({"StepLR": {"step_size": 2, "gamma": 0.5}}, lambda o: lr_scheduler.StepLR(o, 2, 0.5), False, None),
    (
        {"MultiStepLR": {"milestones": [1, 3], "phase": "VALIDATION_EPOCH_END"}},
        lambda o: lr_scheduler.MultiStepLR(o, [1, 3]), False, None,
    ),
    (
        {"CosineAnnealingLR": {"T_max": 60, "phase": "TRAIN_BATCH_STEP"}},
        lambda o: lr_scheduler.CosineAnnealingLR(o, 60), True, None,
    ),
    (
        {"OneCycleLR": {"max_lr": 0.1, "total_steps": 61}},
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=61), True, None,
    ),
    (
        {"ReduceLROnPlateau": {"metric_name": "loss", "patience": 1}},
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1), False, LOSSES,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("lr_mode", "make", "per_update", "values"), OF_TORCH, ids=lambda value: str(value)[:20])
def test_a_scheduler_of_torch_does_as_it_does_by_hand_also_resumed(lr_mode, make, per_update, values):
    hp = TrainingHyperparams(max_epochs=6, initial_lr=0.1, lr_mode=lr_mode)
    expected = by_hand(make, per_update=per_update, epochs=6, values=values)
    assert drive(hp, values=values) == pytest.approx(expected)
    assert drive(hp, values=values, resume_at=4) == pytest.approx(expected)
    if not per_update:  # It begins when the warm-up is over.
        warm = TrainingHyperparams(max_epochs=8, initial_lr=0.1, lr_mode=lr_mode, lr_warmup_epochs=2)
        found = drive(warm, epochs=8, values=values and [9.0, 9.0, *values])
        assert found[:N] == pytest.approx([0.1 / 3] * N)
        assert found[2 * N :] == pytest.approx(expected)


def test_its_state_can_be_loaded_safely(tmp_path):
    hp = TrainingHyperparams(lr_mode={"OneCycleLR": {"max_lr": 0.1, "total_steps": 100}})
    optimizer, _ = build_optimizer(nn.Linear(2, 2), hp, torch.device("cpu"))
    torch.save(Schedule(hp, optimizer, N).state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["last_warms_up"] is True


@pytest.mark.parametrize(
    ("lr_mode", "message"),
    [
        ({"StepLr": {}}, r"training_hyperparams.lr_mode: expected one of .*, got 'StepLr'; did you mean StepLR\?$"),
        ({"StepLR": {}}, r"training_hyperparams.lr_mode.StepLR: does not take these arguments: .*step_size"),
        (
            {"StepLR": {"step_size": 1, "phase": "EPOCH_END"}},
            r"training_hyperparams.lr_mode.StepLR.phase: expected one of .*, got 'EPOCH_END'",
        ),
        (
            {"ReduceLROnPlateau": {}},
            r"training_hyperparams.lr_mode.ReduceLROnPlateau.metric_name: is required by ReduceLROnPlateau and belongs "
            r"to it alone: the name of a validation metric, or loss",
        ),
    ],
)
def test_a_scheduler_that_cannot_be_built_is_named(lr_mode, message):
    hp = TrainingHyperparams(lr_mode=lr_mode)
    optimizer, _ = build_optimizer(nn.Linear(2, 2), hp, torch.device("cpu"))
    with pytest.raises(HyperparamsError, match=message):
        Schedule(hp, optimizer, N)


def test_a_metric_that_the_validation_does_not_give_is_named():
    hp = TrainingHyperparams(lr_mode={"ReduceLROnPlateau": {"metric_name": "Acuracy"}})
    optimizer, _ = build_optimizer(nn.Linear(2, 2), hp, torch.device("cpu"))
    schedule = Schedule(hp, optimizer, N)
    schedule.update_ended(1)
    with pytest.raises(HyperparamsError) as caught:
        schedule.epoch_ended(1, {"Accuracy": 0.5, "loss": 1.0})
    expected = "training_hyperparams.lr_mode.metric_name: expected one of Accuracy, loss, got 'Acuracy'"
    assert str(caught.value) == f"{expected}; did you mean Accuracy?"
