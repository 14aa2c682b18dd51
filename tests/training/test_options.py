"""Options of a run, one by one and all together."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sgnb.events import CheckpointSaved, CompileFailed, EpochStarted, Noticed, RunStarted
from sgnb.hyperparams import HyperparamsError
from sgnb.training import Trainer
from sgnb.training.checkpoint import BestSnapshots

AOT = {"torch_compile": True, "torch_compile_options": {"backend": "aot_eager"}}
CONSTANT = {"ema": True, "ema_params": {"decay": 0.5, "decay_type": "constant"}}


def load(path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("compiled", "bf16", "ema", "accumulate"),
    list(itertools.product([False, True], [False, True], [False, True], [1, 3])),
)
def test_channels_last_trains_to_the_losses_of_the_plain_run_with_everything_else(
    setup, compiled, bf16, ema, accumulate
):
    reference = setup.train(batch_accumulate=accumulate)["train_loss"]
    options = {**(AOT if compiled else {}), "ema": ema, "batch_accumulate": accumulate, "channels_last": True}
    if bf16:
        options |= {"mixed_precision": True, "mixed_precision_dtype": "bfloat16"}
    history = setup.train(**options)
    assert history["train_loss"] == pytest.approx(reference, rel=2e-2 if bf16 else 1e-4)
    assert not any(isinstance(event, CompileFailed) for event in history.events)
    assert setup.model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_without_images_is_said(setup):
    setup.inputs = setup.inputs.flatten(1)
    history = setup.train(nn.Linear(192, 4), max_epochs=1, channels_last=True)
    assert history.notices == ["channels_last has no effect: no input is [B, C, H, W]."]


class Parts(nn.Module):
    component_names = ("ce", "decay")

    def __init__(self, kind="tensor"):
        super().__init__()
        self.kind = kind

    def forward(self, output, target):
        ce, decay = nn.functional.cross_entropy(output, target), 0.1 * output.square().mean()
        parts = {"ce": ce, "decay": decay} if self.kind == "mapping" else torch.stack([ce, decay]).detach()
        return ce + decay, parts


@pytest.mark.parametrize("kind", ["tensor", "mapping"])
def test_the_parts_of_a_loss_are_means_over_samples_and_add_up(setup, kind):
    history = setup.train(loss=Parts(kind), max_epochs=1)
    epoch = history.epochs[0]
    assert history["valid/decay"] == [epoch.valid_losses["decay"]]
    assert list(epoch.train_losses) == list(epoch.valid_losses) == ["ce", "decay"]
    assert sum(epoch.train_losses.values()) == pytest.approx(epoch.train_loss, rel=1e-5)
    assert sum(epoch.valid_losses.values()) == pytest.approx(epoch.valid_loss, rel=1e-5)


def test_parts_may_be_given_names_and_a_wrong_number_of_them_is_an_error(setup):
    epoch = setup.train(loss=Parts(), max_epochs=1, loss_logging_items_names=["a", "b"]).epochs[0]
    assert list(epoch.train_losses) == ["a", "b"]
    with pytest.raises(HyperparamsError) as caught:
        setup.train(loss=Parts(), max_epochs=1, loss_logging_items_names=["a"])
    where = "training_hyperparams.loss_logging_items_names"
    assert str(caught.value) == f"{where}: expected a name for each of the loss's 2 parts, got ['a']"


def test_the_weights_without_averaging_are_validated_too_when_asked_for(setup):
    raw = setup.train(max_epochs=2)
    both = setup.train(max_epochs=2, ema=True, ema_params={**CONSTANT["ema_params"], "validate_raw": True})
    assert both["raw_valid_loss"] == raw["valid_loss"]
    assert both["raw_valid/Accuracy"] == raw["valid/Accuracy"]
    assert both["valid_loss"] != raw["valid_loss"]


def test_averaged_weights_equal_an_average_kept_by_hand_also_compiled(setup):
    by_hand, decay = {}, 0.5

    def watch(model):
        class Watched(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                with torch.no_grad():
                    for name, tensor in model.state_dict().items():
                        if tensor.is_floating_point():
                            by_hand[name] = decay * by_hand[name] + (1 - decay) * tensor
                        else:
                            by_hand[name] = tensor.clone()

        return Watched

    model = setup.new_model()
    by_hand.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
    setup.train(model, optimizer=watch(model), initial_lr=0.1, **CONSTANT, **AOT)
    found = setup.weights()
    assert all(torch.allclose(found[name].double(), by_hand[name].double(), rtol=0, atol=1e-6) for name in by_hand)


def test_early_stopping_waits_for_as_many_validations_as_it_was_told(setup):
    losses = iter([1.0, 0.9, 0.895, 0.89, 0.88])

    class Told(nn.Module):
        def forward(self, output, target):
            loss = nn.functional.cross_entropy(output, target)
            return loss if torch.is_grad_enabled() else loss * 0 + next(losses)

    data = TensorDataset(setup.inputs, setup.targets)
    setup.loaders = lambda: (DataLoader(data, 16), DataLoader(data, 70))
    values = {"metric_to_watch": "loss", "early_stopping_patience": 2, "early_stopping_min_delta": 0.05}
    history = setup.train(loss=Told(), max_epochs=5, valid_metrics_list=[], **values)
    assert history["valid_loss"] == pytest.approx([1.0, 0.9, 0.895, 0.89])
    assert history.status == "finished"
    assert history.ended.reason == "early stopping: 2 validations without a better loss than 0.9"
    assert load(setup.trainer.run_dir / "ckpt_best.pth")["epoch"] == 4  # Better by little is the best all the same.


def test_early_stopping_without_validation_is_said(setup):
    data = DataLoader(TensorDataset(setup.inputs, setup.targets), 16)
    trainer = Trainer("t", ckpt_root_dir=setup.root, device="cpu")
    values = {"silent_mode": True, "max_epochs": 1, "early_stopping_patience": 1, "average_best_models": True}
    assert trainer.train(setup.new_model(), values, data).notices == [
        "early_stopping_patience has no effect without a valid_loader.",
        "average_best_models has no effect without a valid_loader.",
    ]


def test_a_plateau_cannot_be_watched_without_validation(setup):
    data = DataLoader(TensorDataset(setup.inputs, setup.targets), 16)
    values = {"silent_mode": True, "lr_mode": {"ReduceLROnPlateau": {"metric_name": "loss"}}}
    with pytest.raises(HyperparamsError) as caught:
        Trainer("t", ckpt_root_dir=setup.root, device="cpu").train(setup.new_model(), values, data)
    where = "training_hyperparams.lr_mode.ReduceLROnPlateau"
    assert str(caught.value) == f"{where}: watches a metric of the validation, and there is no valid_loader"


def test_the_epochs_that_were_asked_for_are_kept_and_validated(setup):
    history = setup.train(max_epochs=5, run_validation_freq=4, save_ckpt_epoch_list=[1, 3])
    names = sorted(path.name for path in setup.trainer.run_dir.glob("*.pth"))
    assert names == ["ckpt_best.pth", "ckpt_epoch_1.pth", "ckpt_epoch_3.pth", "ckpt_latest.pth"]
    assert load(setup.trainer.run_dir / "ckpt_epoch_3.pth")["epoch"] == 3
    assert [epoch.epoch for epoch in history.epochs if epoch.valid_loss is not None] == [1, 3, 4, 5]


def test_the_best_weights_are_averaged_and_the_average_is_validated(setup):
    history = setup.train(max_epochs=4, average_best_models=True, save_ckpt_epoch_list=[1, 2, 3, 4], **CONSTANT)
    run_dir = setup.trainer.run_dir
    kept = [load(run_dir / f"ckpt_epoch_{epoch}.pth")["ema_net"] for epoch in (1, 2, 3, 4)]
    found = load(run_dir / "average_model.pth")
    for name, tensor in found["net"].items():
        if tensor.is_floating_point():
            mean = torch.stack([weights[name].double() for weights in kept]).mean(0)
            assert torch.allclose(tensor.double(), mean, atol=1e-6), name
    model = setup.new_model()
    model.load_state_dict(found["net"])
    _, loader = setup.loaders()
    measured = Trainer("e", ckpt_root_dir=setup.root, device="cpu").evaluate(model, loader, {"silent_mode": True})
    assert measured == pytest.approx(found["metrics"]["valid"])
    assert any(isinstance(event, CheckpointSaved) and "average_model" in event.path for event in history.events)
    assert not (run_dir / "best_weights").exists()
    same = {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}
    assert all(torch.equal(same[name], kept[-1][name]) for name in same)


def test_only_the_best_snapshots_stay_each_written_once(tmp_path):
    snapshots = BestSnapshots(tmp_path / "s", greater_is_better=False, limit=3)
    for epoch, value in enumerate([5.0, 3.0, 4.0, 9.0, 1.0], 1):
        snapshots.add(epoch, value, {"w": torch.tensor([value])})
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["epoch_2.pth", "epoch_3.pth", "epoch_5.pth"]
    assert snapshots.average(torch.device("cpu"))["w"].item() == pytest.approx((3.0 + 4.0 + 1.0) / 3)
    snapshots.remove()
    assert not (tmp_path / "s").exists()


def test_a_resumed_run_averages_the_snapshots_of_both_parts(setup):
    setup.listeners = [lambda e: setup.trainer.stop() if isinstance(e, EpochStarted) and e.epoch == 3 else None]
    setup.train(max_epochs=4, average_best_models=True)
    setup.listeners = []
    setup.train(max_epochs=4, average_best_models=True, resume=True)
    resumed = load(setup.trainer.run_dir / "average_model.pth")["net"]
    setup.experiment = "straight"
    setup.train(max_epochs=4, average_best_models=True)
    straight = load(setup.trainer.run_dir / "average_model.pth")["net"]
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_a_callback_sees_every_training_batch_and_may_change_it(setup):
    seen = []

    def callback(inputs, targets, batch_idx):
        seen.append((batch_idx, tuple(inputs.shape)))
        return inputs * 0, targets

    reference = setup.train(max_epochs=1)["train_loss"]
    history = setup.train(max_epochs=1, pre_prediction_callback=callback)
    assert seen == [(0, (16, 3, 8, 8)), *[(i, (16, 3, 8, 8)) for i in (1, 2, 3)], (4, (6, 3, 8, 8))]
    assert history["train_loss"] != reference


def test_process_wide_switches_are_put_back(setup):
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    during = []
    setup.listeners = [lambda _: during.append(torch.are_deterministic_algorithms_enabled())]
    setup.train(max_epochs=1, deterministic=True)
    assert during[0] is True
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == before


def test_tf32_on_a_cpu_is_said_to_have_no_effect(setup):
    history = setup.train(max_epochs=1, matmul_precision="tf32")
    assert history.notices == ["matmul_precision: tf32 is for GPUs; on this cpu float32 stays exact."]


def test_how_the_optimizer_computes_is_told(setup):
    history = setup.train(max_epochs=1)
    started = next(event for event in history.events if isinstance(event, RunStarted))
    assert started.optimizer == "SGD, fused"
    assert not any(isinstance(event, Noticed) for event in history.events)


def test_a_scheduler_of_torch_is_stepped_and_resumed(setup):
    values = {"max_epochs": 4, "lr_mode": {"StepLR": {"step_size": 1, "gamma": 0.5}}, "initial_lr": 0.1}
    assert setup.train(**values)["lr"] == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    setup.listeners = [lambda e: setup.trainer.stop() if isinstance(e, EpochStarted) and e.epoch == 3 else None]
    setup.experiment = "interrupted"
    setup.train(**values)
    setup.listeners = []
    assert setup.train(**values, resume=True)["lr"] == pytest.approx([0.025, 0.0125])


def test_evaluating_changes_neither_weights_nor_what_is_trained(setup):
    model = setup.new_model()
    model[0].weight.requires_grad_(False)
    _, loader = setup.loaders()
    rates = {"initial_lr": {"default": 0.1, "6": 0}, "warmup_initial_lr": {"default": 0.0, "6": 0.0}}
    values = {"silent_mode": True, "ema": True, "lr_warmup_epochs": 1, **rates}
    Trainer("e", ckpt_root_dir=setup.root, device="cpu").evaluate(model, loader, values)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.weight"]
    assert model.training
