"""Learning rates against closed forms."""

import math

import pytest

from sgnb.hyperparams import TrainingHyperparams
from sgnb.training.schedules import lr_at

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
