"""Runs from beginning to end, with every option, and the ways in which they can end."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils.data import DataLoader, TensorDataset

from sgnb.events import CompileFailed, EpochEnded, EpochStarted, Noticed, RunEnded, RunStarted, StepEnded
from sgnb.history import History
from sgnb.hyperparams import HyperparamsError
from sgnb.training import CheckpointError, DataError, Trainer

AOT = {"torch_compile": True, "torch_compile_options": {"backend": "aot_eager"}}


def same(left, right, tolerance=0.0):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.allclose(tensor.double(), right[name].double(), rtol=0, atol=tolerance), name


def test_it_learns_and_the_history_tells_it_all(setup):
    history = setup.train(max_epochs=8, initial_lr=0.3)
    assert history["valid/Accuracy"][-1] > 0.9
    assert history["train_loss"][-1] < history["train_loss"][0]
    assert history["epoch"] == list(range(1, 9))
    assert history.status == "finished"
    assert isinstance(history.events[0], RunStarted)
    assert [type(event) for event in history.events].count(RunEnded) == 1
    assert History.load(setup.trainer.run_dir).to_dict() == history.to_dict()


def test_every_epoch_is_split_and_the_parts_fit_into_the_whole(setup):
    for epoch in setup.train().epochs:
        assert 0 < epoch.train_loader_wait_seconds < epoch.train_seconds
        assert 0 < epoch.valid_loader_wait_seconds < epoch.valid_seconds
        assert epoch.epoch_seconds == epoch.train_seconds + epoch.valid_seconds
        assert (epoch.num_samples, epoch.num_updates, epoch.skipped_updates) == (70, 5, 0)
        assert epoch.compile_seconds == 0.0


def test_the_same_seed_gives_the_same_weights_and_another_one_does_not(setup):
    setup.dropout = 0.5
    setup.train()
    first = setup.weights()
    setup.train()
    same(first, setup.weights())
    setup.train(seed=7)
    assert not torch.equal(first["6.weight"], setup.weights()["6.weight"])


@pytest.mark.parametrize(
    ("compiled", "bf16", "ema", "accumulate"),
    list(itertools.product([False, True], [False, True], [False, True], [1, 3])),
)
def test_every_combination_trains_to_the_losses_of_the_plain_run(setup, compiled, bf16, ema, accumulate):
    reference = setup.train(batch_accumulate=accumulate)["train_loss"]
    options = {**(AOT if compiled else {}), "ema": ema, "batch_accumulate": accumulate}
    if bf16:
        options |= {"mixed_precision": True, "mixed_precision_dtype": "bfloat16"}
    history = setup.train(**options)
    assert history["train_loss"] == pytest.approx(reference, rel=2e-2 if bf16 else 1e-4)
    assert not any(isinstance(event, CompileFailed) for event in history.events)
    assert history["compile_seconds"] == [0.0, 0.0]
    assert list(setup.model.state_dict()) == list(setup.new_model().state_dict())


def test_accumulation_equals_a_larger_batch_also_in_the_short_last_window(setup):
    # Without BatchNorm, whose statistics are those of the small batch.
    setup.new_model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).requires_grad_(True)
    torch.manual_seed(1)
    model = setup.new_model()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    setup.batch_size = 48
    setup.train(model, max_epochs=1)
    large = setup.weights()
    model.load_state_dict(start)
    setup.batch_size = 16
    setup.train(model, max_epochs=1, batch_accumulate=3)  # 70 samples: windows of 48 and of 16 + 6.
    same(large, setup.weights(), tolerance=1e-6)


def test_validation_measures_the_averaged_weights_and_the_caller_gets_them(setup):
    history = setup.train(ema=True, ema_params={"decay": 0.5, "decay_type": "constant"}, **AOT)
    _, loader = setup.loaders()
    found = Trainer("again", ckpt_root_dir=setup.root, device="cpu").evaluate(
        setup.model, loader, {"silent_mode": True}
    )
    assert found["loss"] == pytest.approx(history["valid_loss"][-1], rel=1e-5)
    assert found["Accuracy"] == history["valid/Accuracy"][-1]
    state = torch.load(setup.trainer.run_dir / "ckpt_latest.pth", weights_only=True)
    same(state["ema_net"], setup.weights())
    assert not torch.equal(state["net"]["6.weight"], state["ema_net"]["6.weight"])


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(setup):
    setup.dropout = 0.3
    options = {"ema": True, "max_epochs": 4, "initial_lr": 0.05}
    setup.train(**options)
    straight = setup.weights()

    setup.experiment = "interrupted"

    def stop_before_epoch_3(event):
        if isinstance(event, EpochStarted) and event.epoch == 3:
            setup.trainer.stop()

    setup.listeners = [stop_before_epoch_3]
    stopped = setup.train(**options)
    assert stopped.status == "stopped"
    assert stopped.ended.reason == "2 of 4 epochs are complete"
    setup.listeners = []
    resumed = setup.train(**options, resume=True)
    assert resumed["epoch"] == [3, 4]
    same(straight, setup.weights())
    assert History.load(setup.trainer.run_dir)["epoch"] == [1, 2, 3, 4]


def test_a_compiled_run_goes_on_from_an_eager_checkpoint_and_back(setup):
    setup.train(max_epochs=1)
    eager = setup.trainer.run_dir / "ckpt_latest.pth"
    assert setup.train(max_epochs=2, resume_path=str(eager), **AOT)["epoch"] == [2]
    compiled = setup.trainer.run_dir / "ckpt_latest.pth"
    assert setup.train(max_epochs=3, resume_path=str(compiled))["epoch"] == [3]


@pytest.mark.parametrize(
    ("hyperparams", "message"),
    [
        ({"resume": True}, r"^training_hyperparams.resume: no run in .*small holds a ckpt_latest.pth to go on from$"),
        (
            {"resume": True, "run_id": "RUN_1"},
            r"^training_hyperparams.run_id: .*RUN_1 holds no ckpt_latest.pth; runs that do: none$",
        ),
    ],
)
def test_nothing_to_resume_is_an_error(setup, hyperparams, message):
    with pytest.raises(CheckpointError, match=message):
        setup.train(**hyperparams)


def test_a_finished_run_is_not_resumed_in_silence(setup):
    setup.train(max_epochs=1)
    with pytest.raises(HyperparamsError, match="has completed 1 epochs; expected more than that, got 1"):
        setup.train(max_epochs=1, resume=True)


def test_a_checkpoint_of_another_model_names_what_differs(setup):
    setup.train(max_epochs=1)
    path = str(setup.trainer.run_dir / "ckpt_latest.pth")
    other = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    with pytest.raises(
        CheckpointError, match=r"belongs to another model: unknown 0.weight; unknown 0.bias; .* and 4 more"
    ):
        setup.train(other, resume_path=path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x80\x02K\x01."])
def test_a_broken_or_foreign_checkpoint_is_named(setup, content):
    path = setup.root / "broken.pth"
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"broken.pth: (not a checkpoint that can be read safely|expected a mapping)"
    ):
        setup.train(resume_path=str(path))


def test_nothing_is_written_when_the_hyperparameters_are_wrong(setup):
    for wrong in (
        {"torch_complie": True},
        {"loss": "CrossEntropy"},
        {"metric_to_watch": "Acuracy"},
        {"optimizer_params": {"x": 1}},
    ):
        with pytest.raises(HyperparamsError):
            setup.train(**wrong)
    assert list(setup.root.iterdir()) == []


def test_the_metric_to_watch_decides_what_is_best(setup):
    history = setup.train(max_epochs=3, metric_to_watch="loss")
    best = torch.load(setup.trainer.run_dir / "ckpt_best.pth", weights_only=True)
    assert best["acc"] == min(history["valid_loss"])
    with pytest.raises(HyperparamsError) as caught:
        setup.train(metric_to_watch="Acuracy")
    assert str(caught.value) == (
        "training_hyperparams.metric_to_watch: expected one of Accuracy, loss, got 'Acuracy'; did you mean Accuracy?"
    )


def test_a_regression_trains_without_naming_metrics(setup):
    setup.targets = setup.targets.float().unsqueeze(1).repeat(1, 4)
    assert "valid/Accuracy" not in setup.train(loss=nn.MSELoss()).columns


def test_a_metric_that_does_not_fit_is_named(setup):
    with pytest.raises(HyperparamsError, match=r"valid_metrics_list: BinaryAccuracy cannot be computed from"):
        setup.train(train_metrics_list=[], valid_metrics_list=["BinaryAccuracy"])
    assert History.load(setup.trainer.run_dir).status == "failed"


def test_a_model_that_cannot_be_compiled_trains_eagerly_and_says_why(setup):
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = setup.new_model()

        def forward(self, x):
            if torch.compiler.is_compiling():
                raise NotImplementedError("this part is not for compilers")
            return self.body(x)

    history = setup.train(Breaks(), **AOT)
    failed = next(event for event in history.events if isinstance(event, CompileFailed))
    assert failed.reason == "the compiler made no graph of this model, which then runs eagerly in silence."
    assert not history.compiled
    assert history.status == "finished"


def test_a_compiler_that_raises_is_quoted_or_with_fullgraph_raised(setup):
    def broken_backend(graph, inputs):
        raise ValueError("no such operation in my compiler\nand more lines")

    torch._dynamo.register_backend(broken_backend, name="broken_for_this_test")
    options = {"torch_compile": True, "torch_compile_options": {"backend": "broken_for_this_test"}}
    history = setup.train(**options, max_epochs=1)
    failed = next(event for event in history.events if isinstance(event, CompileFailed))
    assert "no such operation in my compiler" in failed.reason
    assert failed.hint.startswith("torch_compile: False avoids the attempt")
    assert history.status == "finished"
    options["torch_compile_options"]["fullgraph"] = True
    with pytest.raises(Exception, match="no such operation in my compiler"):
        setup.train(**options, max_epochs=1)
    assert History.load(setup.trainer.run_dir).status == "failed"


def test_compiled_code_that_computes_something_else_is_not_trusted(setup):
    class Cheats(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = setup.new_model()

        def forward(self, x):
            return self.body(x) * (2.0 if torch.compiler.is_compiling() else 1.0)

    reference = setup.train(Cheats())["train_loss"]
    history = setup.train(Cheats(), **AOT)
    assert any(isinstance(event, CompileFailed) and "disagree" in event.reason for event in history.events)
    assert history["train_loss"] == reference


def test_dropout_is_no_disagreement(setup):
    setup.dropout = 0.5
    history = setup.train(**AOT)
    assert not any(isinstance(event, CompileFailed) for event in history.events)


def test_without_a_compiler_the_run_is_eager_and_says_how_to_get_one(setup):
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        history = setup.train(torch_compile=True, max_epochs=1)
    failed = next(event for event in history.events if isinstance(event, CompileFailed))
    assert failed.reason.startswith(
        "torch.compile needs a C++ compiler, and there is none on the PATH. Install one: apt-get"
    )
    assert (history.status, history.compiled) == ("finished", False)


def test_options_without_effect_are_said(setup):
    history = setup.train(sync_bn=True, max_epochs=1)
    assert history.notices == ["sync_bn has nothing to synchronise in one process; BatchNorm stays as it is."]


def test_a_stop_ends_after_the_batch_with_a_checkpoint_and_a_usable_model(setup):
    def stop_at_once(event):
        if isinstance(event, StepEnded):
            setup.trainer.stop()

    setup.listeners = [stop_at_once]
    history = setup.train()
    assert history.status == "stopped"
    assert len(history) == 0
    assert (setup.trainer.run_dir / "ckpt_latest.pth").exists()
    assert setup.model(setup.inputs[:2]).shape == (2, 4)


def test_an_error_in_a_loader_is_the_error_of_the_run(setup):
    class Bad(TensorDataset):
        def __getitem__(self, index):
            raise OSError("cannot read image 7.png")

    trainer = Trainer("bad", ckpt_root_dir=setup.root, device="cpu")
    loader = DataLoader(Bad(setup.inputs, setup.targets), 4)
    with pytest.raises(OSError, match=r"cannot read image 7\.png"):
        trainer.train(setup.new_model(), {"silent_mode": True}, loader)
    assert History.load(trainer.run_dir).ended.reason == "OSError: cannot read image 7.png"


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "train_loader: yields no batch; with drop_last=True a batch size above the number of samples does that"),
        ([torch.zeros(2, 3)], "train_loader: expected batches of (inputs, targets), got Tensor"),
        (iter(()), "train_loader: has no length; give the length of an epoch with max_train_batches"),
    ],
)
def test_loaders_that_cannot_be_trained_on_are_named(setup, loader, message):
    with pytest.raises(DataError) as caught:
        Trainer("t", ckpt_root_dir=setup.root, device="cpu").train(setup.new_model(), {"silent_mode": True}, loader)
    assert str(caught.value) == message


def test_an_overflow_is_counted_and_moves_neither_schedule_nor_average(setup):
    setup.inputs[:] = 3e4  # float16 activations overflow at once.
    history = setup.train(max_epochs=1, mixed_precision=True, mixed_precision_dtype="float16", ema=True)
    (epoch,) = history.epochs
    assert (epoch.num_updates, epoch.skipped_updates) == (0, 5)
    assert epoch.lr == 0.01
    assert torch.load(setup.trainer.run_dir / "ckpt_latest.pth", weights_only=True)["ema_updates"] == 0


def test_a_loader_that_is_shorter_than_its_length_skips_nothing(setup):
    class Shorter(DataLoader):
        def __len__(self):
            return 100

    loader = Shorter(TensorDataset(setup.inputs, setup.targets), 16)
    history = Trainer("t", ckpt_root_dir=setup.root, device="cpu").train(
        setup.new_model(), {"silent_mode": True, "max_epochs": 1, "batch_accumulate": 2}, loader
    )
    assert (history.epochs[0].num_updates, history.epochs[0].skipped_updates) == (3, 0)


def test_a_nan_loss_is_noticed(setup):
    setup.inputs[0] = float("nan")
    history = setup.train(max_epochs=1)
    assert any(
        isinstance(event, Noticed) and event.level == "warning" and "nan" in event.message for event in history.events
    )


def test_torchrun_with_several_processes_is_refused(setup, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2: this version trains in one process"):
        setup.train()


def test_a_wrapped_compiled_model_keeps_plain_keys(setup):
    model = setup.new_model()
    setup.train(torch.compile(model, backend="eager"), max_epochs=1)
    state = torch.load(setup.trainer.run_dir / "ckpt_latest.pth", weights_only=True)
    assert list(state["net"]) == list(model.state_dict())


def test_ctrl_c_ends_softly(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import time, torch
            from torch.utils.data import DataLoader, TensorDataset
            from sgnb import Trainer
            from sgnb.events import StepEnded
            def slow(event):
                if isinstance(event, StepEnded):
                    print("step", flush=True)
                    time.sleep(0.3)
            data = TensorDataset(torch.randn(64, 3), torch.randint(0, 2, (64,)))
            model = torch.nn.Linear(3, 2)
            history = Trainer("t", ckpt_root_dir="runs", listeners=[slow]).train(
                model, {"silent_mode": True, "max_epochs": 1000}, DataLoader(data, 1))
            print(history.status, model(torch.zeros(1, 3)).shape, flush=True)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout.readline() == "step\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert output.splitlines()[-1] == "stopped torch.Size([1, 2])"
    assert list(tmp_path.glob("runs/t/RUN_*/ckpt_latest.pth"))


def test_epochs_are_emitted_in_order_and_the_listener_may_block(setup):
    order = []
    setup.listeners = [lambda event: order.append(type(event))]
    setup.train()
    kept = [kind for kind in order if kind in (EpochStarted, EpochEnded)]
    assert kept == [EpochStarted, EpochEnded] * 2
