"""An interrupted run that is resumed ends bitwise equal to one that was not, wherever it was interrupted."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sgnb.events import CheckpointLoaded, EpochStarted, Noticed, StepEnded
from sgnb.history import History
from sgnb.training import CheckpointError
from sgnb.training.signs import Signs

BATCHES = 5  # 70 samples in batches of 16.


class Augmented(Dataset):
    """Draws from all three generators for each sample, as augmentations do."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.rand(()) + np.random.rand()
        return self.inputs[index] + 0.1 * float(noise), self.targets[index]


@pytest.fixture
def every_batch_is_told(monkeypatch):
    monkeypatch.setattr("sgnb.training.signs._SECONDS_BETWEEN", 0.0)


def stop_at(setup, epoch, batch, phase="train"):
    def listener(event):
        at_border = batch == 0 and isinstance(event, EpochStarted) and event.epoch == epoch
        inside = isinstance(event, StepEnded) and (event.phase, event.epoch, event.batch) == (phase, epoch, batch)
        if at_border or inside:
            setup.trainer.stop()

    return listener


def tensors_of(path):
    state = torch.load(path, weights_only=True)
    momenta = [value["momentum_buffer"] for value in state["optimizer_state_dict"]["state"].values()]
    return [*state["net"].values(), *state.get("ema_net", {}).values(), *momenta]


def columns(history):
    kept = [
        name for name in history.columns if "loss" in name or "Accuracy" in name or name in ("lr", "skipped_updates")
    ]
    return {name: history[name] for name in kept}


PLACES = [(3, 0, "train"), (2, 1, "train"), (2, 2, "train"), (2, BATCHES, "train"), (2, 2, "valid"), (1, 3, "train")]


@pytest.mark.usefixtures("every_batch_is_told")
@pytest.mark.parametrize(("epoch", "batch", "phase"), PLACES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_ends_bitwise_equal(setup, epoch, batch, phase, workers):
    check(setup, epoch, batch, phase, workers, batch_accumulate=2, ema=True, clip_grad_norm=1.0)


@pytest.mark.usefixtures("every_batch_is_told")
def test_also_in_float16_with_the_state_of_its_loss_scale(setup):
    check(setup, 2, 3, "train", 0, mixed_precision=True, mixed_precision_dtype="float16")


@pytest.mark.usefixtures("every_batch_is_told")
def test_also_compiled(setup):
    options = {"torch_compile": True, "torch_compile_options": {"backend": "aot_eager"}}
    assert check(setup, 2, 3, "train", 0, **options).compiled
    assert check(setup, 2, 2, "valid", 0, **options).compiled


@pytest.mark.usefixtures("every_batch_is_told")
def test_also_with_loaders_and_samplers_that_have_their_own_generators(setup):
    check(setup, 2, 2, "train", 0, generator=torch.Generator().manual_seed(5))
    check(setup, 3, 0, "train", 0, generator=torch.Generator().manual_seed(5))


@pytest.mark.usefixtures("every_batch_is_told")
def test_also_when_it_is_interrupted_again_at_once(setup):
    check(setup, 2, 2, "train", 0, again=True)


def check(setup, epoch, batch, phase, workers, *, generator=None, again=False, **options):
    setup.dropout = 0.3
    options = {"max_epochs": 3, "initial_lr": 0.05, **options}
    start = None if generator is None else generator.get_state()

    def loaders():
        if generator is not None:
            generator.set_state(start)
        data = Augmented(setup.inputs, setup.targets)
        train = DataLoader(data, 16, shuffle=True, num_workers=workers, generator=generator)
        return train, DataLoader(torch.utils.data.TensorDataset(setup.inputs, setup.targets), 32)

    setup.loaders = loaders
    setup.listeners = []
    setup.experiment = f"straight_{epoch}_{batch}"
    straight = setup.train(**options)
    expected = setup.weights(), tensors_of(setup.trainer.run_dir / "ckpt_latest.pth")

    setup.experiment = f"interrupted_{epoch}_{batch}"
    setup.listeners = [stop_at(setup, epoch, batch, phase)]
    assert setup.train(**options).status == "stopped"
    if again:
        setup.listeners = [lambda event: setup.trainer.stop() if isinstance(event, EpochStarted) else None]
        assert setup.train(**options, resume=True).status == "stopped"
    setup.listeners = []
    resumed = setup.train(**options, resume=True)
    assert resumed.status == "finished"
    found = setup.weights(), tensors_of(setup.trainer.run_dir / "ckpt_latest.pth")
    assert all(torch.equal(left, right) for left, right in zip(expected[1], found[1], strict=True))
    assert all(torch.equal(expected[0][name], found[0][name]) for name in expected[0])
    assert columns(History.load(setup.trainer.run_dir)) == columns(straight)
    return resumed


@pytest.mark.usefixtures("every_batch_is_told")
def test_where_it_goes_on_is_said_and_the_seconds_of_both_parts_count(setup):
    setup.listeners = [stop_at(setup, 1, 3)]
    stopped = setup.train()
    assert stopped.ended.reason == "0 of 2 epochs are complete, and 3 batches of the next"
    setup.listeners = []
    resumed = setup.train(resume=True)
    loaded = next(event for event in resumed.events if isinstance(event, CheckpointLoaded))
    assert (loaded.epoch, loaded.batch) == (0, 3)
    assert resumed.epochs[0].num_samples == 70
    assert resumed.epochs[0].num_updates == 5


def test_an_optimizer_that_is_not_to_be_loaded_begins_anew(setup):
    setup.train(max_epochs=1)
    setup.train(max_epochs=2, resume=True, load_opt_params=False)
    state = torch.load(setup.trainer.run_dir / "ckpt_latest.pth", weights_only=True)
    assert state["num_updates"] == 10


def test_another_optimizers_state_is_named(setup):
    setup.train(max_epochs=1)
    before = {name: tensor.clone() for name, tensor in setup.new_model().state_dict().items()}
    with pytest.raises(CheckpointError, match=r"ckpt_latest.pth: does not fit this run \(ValueError: "):
        setup.train(max_epochs=2, resume=True, optimizer="AdamW")
    assert all(torch.equal(before[name], tensor) for name, tensor in setup.weights().items())


def test_ckpt_name_chooses_the_file(setup):
    setup.train(max_epochs=3, save_ckpt_epoch_list=[1])
    assert setup.train(max_epochs=3, resume=True, ckpt_name="ckpt_epoch_1.pth")["epoch"] == [2, 3]


HOSTILE = [
    ("epoch", "two", "epoch is str; this is no checkpoint of sgnb"),
    ("epoch", True, "epoch is bool; this is no checkpoint of sgnb"),
    ("net", [1, 2], "expected net to map names to tensors; this is no checkpoint of sgnb"),
    ("optimizer_state_dict", {}, "does not fit this run"),
    ("loader_generators", ["x"], None),
    ("in_epoch", {"num_batches": 3}, "does not fit this run (KeyError: "),
    ("keeper", {}, "does not fit this run (KeyError: 'best')"),
]


@pytest.mark.parametrize(("key", "value", "message"), HOSTILE, ids=lambda value: str(value)[:12])
def test_a_checkpoint_with_something_else_in_it_is_named_and_changes_nothing(setup, key, value, message):
    setup.train(max_epochs=1)
    path = setup.trainer.run_dir / "ckpt_latest.pth"
    state = torch.load(path, weights_only=True)
    torch.save({**state, key: value}, path)
    model = setup.new_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if message is None:  # Another number of generators is a notice.
        history = setup.train(model, max_epochs=2, resume=True)
        assert any(isinstance(event, Noticed) and "other generators" in event.message for event in history.events)
        return
    with pytest.raises(CheckpointError) as caught:
        setup.train(model, max_epochs=2, resume=True)
    assert message in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_weights_alone_are_no_run_to_go_on_with(setup):
    path = setup.root / "weights.pth"
    torch.save({"net": setup.new_model().state_dict()}, path)
    with pytest.raises(CheckpointError, match="holds weights but no run to go on with; it lacks epoch, num_updates"):
        setup.train(resume_path=str(path))


def test_a_checkpoint_cut_short_is_named(setup):
    setup.train(max_epochs=1)
    path = setup.trainer.run_dir / "ckpt_latest.pth"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match="not a checkpoint that can be read safely"):
        setup.train(max_epochs=2, resume=True)


def test_signs_come_a_few_times_a_second_by_default():
    told = []
    signs = Signs(told.append, "train", 1, 1000)
    for batch in range(1, 500):
        signs.give(batch, torch.tensor(0.0), 0.1)
    assert len(told) <= 2
