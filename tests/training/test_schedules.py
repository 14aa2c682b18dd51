"""Learning rates against closed forms."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from sgnb.hyperparams import HyperparamsError, TrainingHyperparams
from sgnb.training.optimizers import build_optimizer, load_optimizer_state
from sgnb.training.schedules import Schedule, lr_at

N = 10  # Updates per epoch.


def rates(**values):
    hp = TrainingHyperparams(max_epochs=6, **values)
    return [lr_at(update, initial_lr=0.1, hp=hp, updates_per_epoch=N) for update in range(6 * N)]


def half_way(*, initial_lr, epoch, iter, max_epoch, iters_per_epoch):
    return initial_lr * (1 - 0.5 * (epoch + iter / iters_per_epoch) / max_epoch)


SCHEDULES = [
    {"lr_mode": "StepLRScheduler", "lr_updates": [1, 3, 4], "lr_decay_factor": 0.1},
    {"lr_mode": "StepLRScheduler", "step_lr_update_freq": 0.8, "lr_decay_factor": 0.5},
    {"lr_mode": "ExponentialLRScheduler", "lr_decay_factor": 0.7},
    {"lr_mode": "PolyLRScheduler"},
    {"lr_mode": "CosineLRScheduler", "cosine_final_lr_ratio": 0.05},
    {"lr_mode": "FunctionLRScheduler", "lr_schedule_function": half_way},
]
WARM_UPS = [
    {},
    {"lr_warmup_epochs": 2},
    {"lr_warmup_epochs": 1, "warmup_initial_lr": {"default": 0.0, "1": 0.03}},
    {"lr_warmup_steps": 7, "warmup_mode": "LinearBatchLRWarmup"},
    {"lr_warmup_steps": 7, "warmup_mode": "LinearBatchLRWarmup", "warmup_initial_lr": 1e-6},
    {"lr_warmup_steps": 1, "warmup_mode": "LinearBatchLRWarmup", "warmup_initial_lr": 1e-6},
]


def by_the_book(e, b, n, lr0, w0, *, values):
    """The formulas of SuperGradients as its code has them, for batch `b` of epoch `e`; here a batch is an update."""
    m, w, c = 6, values.get("lr_warmup_epochs", 0), values.get("lr_cooldown_epochs", 0)
    steps = values.get("lr_warmup_steps", 0)
    if e < w:
        return w0 + e * (lr0 - w0) / w
    if n * e + b < steps:
        return torch.linspace(w0, lr0, steps, dtype=torch.float64)[n * e + b].item()
    mode, decay, end = values["lr_mode"], values.get("lr_decay_factor"), m - c
    if mode == "StepLRScheduler":  # Set at the end of an epoch, from the first after the warm-up on.
        frequency = values.get("step_lr_update_freq")
        updates = values.get("lr_updates") or [
            at for k in range(1, 20) if w <= (at := math.ceil(frequency * k)) < m - c
        ]
        ended = min(e, end) - 1  # This epoch was the last that a cool-down let end so.
        return lr0 if ended < w else lr0 * decay ** len([at for at in updates if at <= ended])
    if e >= end:
        e, b = end - 1, n - 1
    passed, length = n * (e - w) + b, n * (m - w - c)
    if mode == "ExponentialLRScheduler":
        return lr0 * decay ** (passed / n)
    if mode == "FunctionLRScheduler":
        return half_way(initial_lr=lr0, epoch=e - w, iter=b, max_epoch=m - w - c, iters_per_epoch=n)
    passed, length = passed - steps, length - steps  # SuperGradients leaves this to Cosine: Poly would jump.
    if mode == "PolyLRScheduler":
        return lr0 * (1 - passed / length) ** 0.9
    ratio = values["cosine_final_lr_ratio"]
    return ratio * lr0 + (1 - ratio) * lr0 * 0.5 * (1 + math.cos(math.pi * passed / (length + 1)))


@pytest.mark.parametrize("cool_down", [0, 2])
@pytest.mark.parametrize("warm_up", WARM_UPS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda values: "-".join(map(str, values.values()))[:30])
@pytest.mark.parametrize("updates_per_epoch", [2, 5])
def test_the_rate_of_every_update_of_every_group_is_that_of_the_formulas(
    schedule, warm_up, cool_down, updates_per_epoch
):
    values = {**schedule, **warm_up, "lr_cooldown_epochs": cool_down}
    hp = TrainingHyperparams(max_epochs=6, initial_lr={"default": 0.1, "1": 0.2}, **values)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer, _ = build_optimizer(model, hp, torch.device("cpu"))
    driven, update = Schedule(hp, optimizer, updates_per_epoch), 0
    for epoch in range(6):
        for batch in range(updates_per_epoch):
            driven.apply(update)
            for group in optimizer.param_groups:
                lr0 = {"default": 0.1, "1": 0.2}[group["name"]]
                length = values.get("lr_warmup_epochs", 0) or values.get("lr_warmup_steps", 0)
                w0 = values.get("warmup_initial_lr", lr0 / (length + 1))
                w0 = w0[group["name"]] if isinstance(w0, dict) else w0
                expected = by_the_book(epoch, batch, updates_per_epoch, lr0, w0, values=values)
                assert group["lr"] == pytest.approx(expected, rel=1e-9), (epoch, batch, group["name"])
            update += 1
            driven.update_ended(update)
        driven.epoch_ended(epoch + 1, {"loss": 1.0})
    assert driven.state_dict() == {}


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


EVERY_ONE = {
    "StepLR": {"step_size": 2}, "MultiStepLR": {"milestones": [1, 3]}, "ConstantLR": {}, "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9}, "PolynomialLR": {"total_iters": 9}, "CosineAnnealingLR": {"T_max": 9},
    "CosineAnnealingWarmRestarts": {"T_0": 2}, "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 60}, "ReduceLROnPlateau": {"metric_name": "loss", "patience": 0},
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step}, "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY_ONE)
def test_its_state_survives_a_file_and_goes_on_where_it_was(name, tmp_path):
    hp = TrainingHyperparams(lr_mode={name: EVERY_ONE[name]})

    def three_epochs(schedule, optimizer, first):
        for update in range(first, first + 3 * N):
            schedule.apply(update)
            yield optimizer.param_groups[0]["lr"]
            optimizer.step()
            schedule.update_ended(update + 1)
            if update % N == N - 1:
                schedule.epoch_ended(update // N + 1, {"loss": 1.0})

    optimizer, _ = build_optimizer(nn.Linear(2, 2), hp, torch.device("cpu"))
    schedule = Schedule(hp, optimizer, N)
    before = list(three_epochs(schedule, optimizer, 0))
    torch.save((schedule.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    after = list(three_epochs(schedule, optimizer, 3 * N))
    assert len({*before, *after}) > 1

    states = torch.load(tmp_path / "state.pt", weights_only=True)
    optimizer, _ = build_optimizer(nn.Linear(2, 2), hp, torch.device("cpu"))
    schedule = Schedule(hp, optimizer, N)
    schedule.load_state_dict(states[0])
    load_optimizer_state(optimizer, states[1])
    assert list(three_epochs(schedule, optimizer, 3 * N)) == after


def test_torch_does_not_warn_when_a_run_resumes_between_the_last_update_and_the_end_of_the_epoch():
    hp = TrainingHyperparams(initial_lr=0.1, lr_mode={"StepLR": {"step_size": 1, "gamma": 0.5}})
    optimizer, _ = build_optimizer(nn.Linear(2, 2), hp, torch.device("cpu"))
    schedule = Schedule(hp, optimizer, N)
    optimizer.step()
    schedule.update_ended(N)
    state = schedule.state_dict()
    optimizer, _ = build_optimizer(nn.Linear(2, 2), hp, torch.device("cpu"))
    schedule = Schedule(hp, optimizer, N)
    schedule.load_state_dict(state)
    schedule.epoch_ended(1, {})
    schedule.apply(N)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_an_epoch_without_a_validation_leaves_the_plateau_as_it_is():
    hp = TrainingHyperparams(initial_lr=0.1, lr_mode={"ReduceLROnPlateau": {"metric_name": "loss", "patience": 0}})
    optimizer, _ = build_optimizer(nn.Linear(2, 2), hp, torch.device("cpu"))
    schedule = Schedule(hp, optimizer, 1)
    for epoch, values in enumerate([{"loss": 1.0}, {}, {"loss": 0.5}, {"loss": 0.5}], start=1):
        optimizer.step()
        schedule.update_ended(epoch)
        schedule.epoch_ended(epoch, values)
        schedule.apply(epoch)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 if epoch == 4 else 0.1)


def test_a_warm_up_that_names_no_group_is_an_error():
    hp = TrainingHyperparams(
        initial_lr={"default": 0.1, "0": 0, "1": 0.2},
        lr_warmup_epochs=1,
        warmup_initial_lr={"default": 0.0, "0": 0.1, "head": 0.1},  # "0" is frozen, and may be named.
    )
    optimizer, _ = build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), hp, torch.device("cpu"))
    with pytest.raises(HyperparamsError) as caught:
        Schedule(hp, optimizer, N)
    assert str(caught.value) == "training_hyperparams.warmup_initial_lr.head: initial_lr has no such prefix"


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
        (
            {"ReduceLROnPlateau": {"metric_name": "loss", "phase": "TRAIN_BATCH_END"}},
            r"^training_hyperparams.lr_mode.ReduceLROnPlateau.phase: expected one of TRAIN_EPOCH_START, "
            r"TRAIN_EPOCH_END, VALIDATION_EPOCH_END: a metric is measured once an epoch, got 'TRAIN_BATCH_END'$",
        ),
        ({"ChainedScheduler": {}}, r"^training_hyperparams.lr_mode: expected one of .*, got 'ChainedScheduler'$"),
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
    where = "training_hyperparams.lr_mode.ReduceLROnPlateau.metric_name"
    expected = f"{where}: expected one of Accuracy, loss, got 'Acuracy'"
    assert str(caught.value) == f"{expected}; did you mean Accuracy?"
