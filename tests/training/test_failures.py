"""Failures, injected: nothing that was saved is lost, the error names its cause, and the last good checkpoint loads."""

import errno
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sgnb.events import EpochStarted, OutOfMemory, RunEnded, StepEnded, UpdatesSkipped
from sgnb.history import History
from sgnb.hyperparams import HyperparamsError, Problem
from sgnb.training import CheckpointError, DivergedError, Trainer

SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from sgnb import Trainer
{before}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 2))
model.register_buffer("ballast", torch.zeros({ballast}))
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
values = {{"silent_mode": True, "max_epochs": {epochs}, "ema": True, "seed": 3}}
values |= eval(sys.argv[2])
print("ready", flush=True)
trainer = Trainer("t", run_dir=sys.argv[1], device="cpu")
trainer.train(model, values, DataLoader(data, 8, shuffle=True), DataLoader(data, 32))
"""


def start(run_dir, *, before="", ballast=100, epochs=4, **values):
    script = textwrap.dedent(SCRIPT).format(before=before, ballast=ballast, epochs=epochs)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir), repr(values)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def state_of(run_dir):
    return torch.load(run_dir / "ckpt_latest.pth", weights_only=True)


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_killed_at_any_moment_goes_on_and_ends_bitwise_equal(tmp_path):
    chance = random.Random(0)
    epochs, ballast = 12, 500_000  # 2 MB and more in each file, so that it is often killed while it writes.
    process = start(tmp_path / "straight", epochs=epochs, ballast=ballast)
    process.communicate(timeout=120)
    for _ in range(5):
        resume = (tmp_path / "killed" / "ckpt_latest.pth").exists()
        process = start(tmp_path / "killed", epochs=epochs, ballast=ballast, resume=resume)
        process.stdout.readline()
        time.sleep(chance.uniform(0.05, 0.35))
        process.kill()
        process.communicate()
        if (tmp_path / "killed" / "ckpt_latest.pth").exists():
            assert state_of(tmp_path / "killed")["epoch"] <= epochs
    if state_of(tmp_path / "killed")["epoch"] < epochs:
        _, errors = start(
            tmp_path / "killed", epochs=epochs, ballast=ballast, resume=True
        ).communicate(timeout=120)  # fmt: skip
        assert errors == ""
    straight, killed = state_of(tmp_path / "straight"), state_of(tmp_path / "killed")
    assert same(straight["net"], killed["net"])
    assert same(straight["ema_net"], killed["ema_net"])


def test_a_full_disk_is_named_and_the_checkpoint_before_stays(tmp_path):
    run_dir = tmp_path / "run"
    start(run_dir, epochs=1, ballast=200_000).communicate(timeout=120)
    good = state_of(run_dir)
    limit = (run_dir / "ckpt_latest.pth").stat().st_size // 2
    before = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    process = start(run_dir, before=before, epochs=2, ballast=200_000, resume=True)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith(
        f"OSError: [Errno {errno.EFBIG}] File too large: {run_dir / 'ckpt_latest.pth'}: this checkpoint ("
    )
    assert last.endswith("MiB) was not written; the one before it is as it was")
    assert same(good["net"], state_of(run_dir)["net"])
    assert [path.name for path in run_dir.iterdir() if path.name.endswith(".tmp")] == []
    assert History.load(run_dir).status == "failed"


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("it_ran",)


def test_a_hostile_checkpoint_runs_nothing(setup, monkeypatch):
    monkeypatch.chdir(setup.root)
    (setup.root / "evil.pth").write_bytes(pickle.dumps({"net": Hostile()}))
    torch.save({"net": Hostile()}, setup.root / "worse.pth")
    for name in ("evil.pth", "worse.pth"):
        with pytest.raises(CheckpointError, match="not a checkpoint that can be read safely"):
            setup.train(resume_path=name)
    assert not (setup.root / "it_ran").exists()


def finite(state):
    return all(tensor.isfinite().all() for tensor in state.values() if tensor.is_floating_point())


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_batch_of_nan_is_skipped_and_leaves_no_trace_in_weights_statistics_and_averages(setup, clip):
    setup.inputs[0] = float("nan")
    history = setup.train(max_epochs=2, ema=True, clip_grad_norm=clip)
    assert [(epoch.num_updates, epoch.skipped_updates) for epoch in history.epochs] == [(4, 1), (4, 1)]
    assert finite(setup.model.state_dict())
    state = state_of(setup.trainer.run_dir)
    assert finite(state["net"])
    assert finite(state["ema_net"])
    assert (state["num_updates"], state["ema_updates"]) == (8, 8)
    assert "the training loss of epoch 1 is nan; 1 updates were skipped." in history.notices


def test_a_loss_that_is_nan_for_good_ends_the_run_and_the_checkpoint_before_loads(setup):
    def spoil(event):
        if isinstance(event, EpochStarted) and event.epoch == 2:
            setup.inputs[:] = float("nan")

    setup.listeners = [spoil]
    setup.batch_size = 2
    with pytest.raises(DivergedError) as caught:
        setup.train(max_epochs=3)
    latest = setup.trainer.run_dir / "ckpt_latest.pth"
    assert str(caught.value) == (
        "The gradients of 32 updates in a row are not finite (epoch 2, batch 32). Look for NaN in the inputs and "
        "targets, lower initial_lr, add a warm-up or clip_grad_norm; in float16, mixed_precision_dtype: bfloat16 has "
        f"the range of float32. {latest} holds epoch 1."
    )
    history = History.load(setup.trainer.run_dir)
    (skipped,) = [event for event in history.events if isinstance(event, UpdatesSkipped)]
    assert (skipped.epoch, skipped.batch, skipped.in_a_row) == (2, 5, 5)
    assert history.ended.reason.startswith("DivergedError: ")
    assert finite(state_of(setup.trainer.run_dir)["net"])


def test_weights_that_become_nan_are_found_before_they_are_saved(setup):
    def spoil(event):
        if isinstance(event, StepEnded) and (event.phase, event.epoch, event.batch) == ("train", 2, 5):
            with torch.no_grad():
                setup.model[0].weight[0] = float("nan")

    setup.listeners = [spoil]
    with pytest.raises(DivergedError, match=r"^Weights are not finite after epoch 2\. "):
        setup.train(max_epochs=3)
    assert state_of(setup.trainer.run_dir)["epoch"] == 1
    assert finite(state_of(setup.trainer.run_dir)["net"])


def test_a_fused_optimizer_skips_by_itself_as_on_a_gpu():
    from sgnb.training.precision import Precision

    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    precision = Precision(torch.float32, torch.device("cpu"))
    for loss, grad in ((1.0, 1.0), (float("nan"), float("nan")), (1.0, 1.0)):
        weight.grad = torch.full((3,), grad)
        precision._step_on_device(optimizer, torch.tensor(loss))
    assert torch.allclose(weight, torch.full((3,), 0.8))
    assert (precision.take_skipped(), precision.take_skipped()) == (1, 0)


def test_a_stop_with_weights_of_nan_leaves_the_checkpoint_of_the_last_epoch(setup):
    def spoil(event):
        if isinstance(event, StepEnded) and (event.phase, event.epoch, event.batch) == ("train", 2, 5):
            with torch.no_grad():
                setup.model[0].weight[0] = float("nan")
            setup.trainer.stop()

    setup.listeners = [spoil]
    history = setup.train(max_epochs=3)
    assert history.notices == ["the weights are not finite, so the checkpoint of the last epoch was left as it is."]
    assert state_of(setup.trainer.run_dir)["epoch"] == 1
    assert finite(state_of(setup.trainer.run_dir)["net"])


class LoaderThatFails(list):
    def __iter__(self):
        yield from list.__iter__(self)
        raise OSError("cannot read image 7.png")


def fails(setup, error, reason, **arguments):
    """Train until it fails; return the events."""
    trainer = Trainer("t", run_dir=setup.root / "failed", device="cpu", listeners=arguments.pop("listeners", []))
    train, valid = setup.loaders()
    values = {"silent_mode": True, "max_epochs": 2, **arguments.pop("values", {})}
    with pytest.raises(type(error), match=str(error)) as caught:
        trainer.train(
            arguments.pop("model", setup.new_model()),
            values,
            arguments.pop("train", train),
            arguments.pop("valid", valid),
        )
    history = History.load(setup.root / "failed")
    assert [type(event) for event in history.events].count(RunEnded) == 1
    assert history.ended.reason == reason
    return caught.value


def test_a_loader_that_raises_in_validation_is_the_error_of_the_run(setup):
    _, valid = setup.loaders()
    batches = LoaderThatFails([*valid][:1])
    batches.__class__.__len__ = lambda _: 3
    fails(setup, OSError("cannot read image 7.png"), "OSError: cannot read image 7.png", valid=batches)


def test_a_worker_that_is_killed_is_an_error_and_not_a_stall(setup):
    class Deadly(TensorDataset):
        def __getitem__(self, index):
            if index == 40 and torch.utils.data.get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    loader = DataLoader(Deadly(setup.inputs, setup.targets), 16, num_workers=1)
    trainer = Trainer("t", run_dir=setup.root / "failed", device="cpu")
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        trainer.train(setup.new_model(), {"silent_mode": True}, loader)
    assert "DataLoader worker" in History.load(setup.root / "failed").ended.reason


def test_a_metric_that_cannot_be_computed_is_named(setup):
    import torchmetrics

    class Never(torchmetrics.Metric):
        def update(self, output, target):
            pass

        def compute(self):
            raise ZeroDivisionError("no samples of class 3")

    where = "training_hyperparams.train_metrics_list"
    message = f"{where}: Never cannot be computed: no samples of class 3"
    error = HyperparamsError([Problem(where=where, message=message.removeprefix(f"{where}: "))])
    fails(setup, error, f"HyperparamsError: {message}", values={"valid_metrics_list": [Never()]})


def test_a_listener_that_raises_ends_the_run_and_the_first_error_stays(setup):
    def listener(event):
        if isinstance(event, StepEnded):
            raise ValueError("the first")
        if isinstance(event, RunEnded):
            raise ValueError("the second")

    error = fails(setup, ValueError("the first"), "ValueError: the first", listeners=[listener])
    assert error.__notes__ == ["At the end of the run, a listener raised ValueError: the second"]


class Hungry(nn.Module):
    """Has memory for `limit` samples."""

    def __init__(self, limit):
        super().__init__()
        torch.manual_seed(0)
        self.limit, self.linear = limit, nn.Linear(192, 4)

    def forward(self, x):
        if self.training and len(x) > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {len(x)} samples")
        return self.linear(x.flatten(1))


def test_out_of_memory_says_what_to_try_and_gives_the_memory_back(setup):
    kept = []

    def remember(event):
        if isinstance(event, StepEnded) and event.phase == "train":
            kept.extend(weakref.ref(tensor) for tensor in setup.trainer._loop.ema._average_floats)
            setup.model.limit = 8

    setup.listeners = [remember]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        setup.train(Hungry(16), ema=True)
    told = (
        "Try batch size 8 with batch_accumulate: 2, which gives the same update; on_out_of_memory: halve does that by "
        "itself; find_batch_size measures what fits. It may also help to set mixed_precision: True."
    )
    assert told in caught.value.__notes__
    (event,) = [e for e in History.load(setup.trainer.run_dir).events if isinstance(e, OutOfMemory)]
    assert (event.epoch, event.batch, event.batch_size, event.pieces, event.advice) == (1, 2, 16, 1, told)
    gc.collect()
    assert kept
    assert all(reference() is None for reference in kept)  # While the error is still held.


@pytest.mark.parametrize("accumulate", [1, 3])
def test_batches_that_do_not_fit_go_through_in_pieces_with_the_same_result(setup, accumulate):
    values = {"max_epochs": 2, "batch_accumulate": accumulate, "initial_lr": 0.1}
    reference = setup.train(Hungry(1000), **values)
    expected = setup.weights()

    def shrink(event):
        if isinstance(event, StepEnded) and (event.epoch, event.batch) == (1, 2):
            setup.model.limit = 5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgnb.training.signs._SECONDS_BETWEEN", 0.0)
        setup.listeners = [shrink]
        history = setup.train(Hungry(1000), **values, on_out_of_memory="halve")
    told = [event for event in history.events if isinstance(event, OutOfMemory)]
    assert [event.pieces for event in told] == [2, 4]
    assert told[-1].advice == "From now on each batch goes through in 4 pieces of at most 4 samples."
    assert history["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-5)
    assert all(torch.allclose(expected[name], tensor, atol=1e-6) for name, tensor in setup.weights().items())


def test_single_samples_that_do_not_fit_are_an_error(setup):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        setup.train(Hungry(0), on_out_of_memory="halve")
    assert any("find_batch_size" in note for note in caught.value.__notes__)


def test_a_second_ctrl_c_ends_at_once_and_keeps_the_checkpoint_of_the_last_epoch(tmp_path):
    before = """
import time
from sgnb.events import StepEnded
def slow(event):
    if isinstance(event, StepEnded) and event.epoch == 2:
        print("step", flush=True)
        time.sleep(60)
Trainer.__init__.__kwdefaults__["listeners"] = [slow]
"""
    process = start(tmp_path / "run", before=before)
    try:
        while process.stdout.readline() != "step\n":
            pass
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert state_of(tmp_path / "run")["epoch"] == 1
    history = History.load(tmp_path / "run")
    assert history.status == "stopped"
    assert history.ended.reason == (
        "interrupted before the current batch was done; the checkpoint is that of the last epoch"
    )


@pytest.mark.parametrize("ending", ["finished", "failed", "stopped"])
def test_whatever_the_end_the_process_is_as_it_was(setup, ending):
    before = (
        signal.getsignal(signal.SIGINT), torch.backends.cudnn.benchmark, torch._functorch.config.backward_pass_autocast,
        torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"), len(gc.callbacks),
    )  # fmt: skip

    def listener(event):
        if isinstance(event, StepEnded) and ending == "failed":
            raise ValueError("no more")
        if isinstance(event, StepEnded) and ending == "stopped":
            setup.trainer.stop()

    setup.listeners = [listener]
    model = setup.new_model().eval()
    values = {"torch_compile": True, "torch_compile_options": {"backend": "aot_eager"}, "deterministic": True}
    try:
        assert setup.train(model, **values).status == ending
    except ValueError:
        assert ending == "failed"
    after = (
        signal.getsignal(signal.SIGINT), torch.backends.cudnn.benchmark, torch._functorch.config.backward_pass_autocast,
        torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"), len(gc.callbacks),
    )  # fmt: skip
    assert after == before
    assert not model.training
    assert all(module._compiled_call_impl is None for module in model.modules())
