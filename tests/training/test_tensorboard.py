from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sgnb.events import CompileEnded, CompileFailed, EpochEnded, Noticed, RunEnded, RunStarted
from sgnb.training.tensorboard import TensorBoard

STARTED = RunStarted(
    experiment_name="e", run_dir="r", device="cpu", dtype="float32", start_epoch=1, max_epochs=2, train_batches=1,
    valid_batches=1, batch_size=1, num_parameters=1, training_hyperparams={"max_epochs": 2}, machine={},
)  # fmt: skip


def read(folder):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def texts(accumulator, tag):
    return [event.tensor_proto.string_val[0].decode() for event in accumulator.Tensors(f"{tag}/text_summary")]


def scalars(accumulator, tag):
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_a_run_can_be_read_back(setup):
    setup.listeners.append(TensorBoard())
    history = setup.train(max_epochs=2, train_metrics_list=["Accuracy"])
    found = read(setup.trainer.run_dir)
    assert sorted(found.Tags()["scalars"]) == [
        "LR",
        "Peak_MiB",
        "Samples_per_second",
        "Seconds/checkpoint",
        "Seconds/compile",
        "Seconds/train",
        "Seconds/train_loader_wait",
        "Seconds/valid",
        "Seconds/valid_loader_wait",
        "Train_Accuracy",
        "Train_loss",
        "Valid_Accuracy",
        "Valid_loss",
    ]
    losses = [(epoch.epoch, pytest.approx(epoch.train_loss)) for epoch in history.epochs]
    assert scalars(found, "Train_loss") == losses
    assert scalars(found, "Valid_Accuracy") == [
        (epoch.epoch, pytest.approx(epoch.valid_metrics["Accuracy"])) for epoch in history.epochs
    ]
    assert "Notices/text_summary" in found.Tags()["tensors"]


def test_settings_and_notices_are_texts(tmp_path):
    board = TensorBoard(tmp_path)
    board(STARTED)
    board(CompileFailed(reason="It cannot.", hint="Do this."))
    board(Noticed(level="warning", message="look out"))
    board(CompileEnded(graph="train", seconds=2.5, num_graphs=1, num_breaks=0, cache_hits=0, cache_misses=1))
    board(RunEnded(status="failed", seconds=1.0, reason="why"))
    found = read(tmp_path)
    assert texts(found, "Hyperparameters") == [
        '```\n{\n    "device": "cpu",\n    "dtype": "float32",\n    "max_epochs": 2\n}\n```'
    ]
    assert texts(found, "Compile_failed") == ["not compiled, the run goes on eagerly: It cannot. Do this."]
    assert texts(found, "Notices") == [
        "warning: look out",
        "compiled the training graph in 2.5 s (cold cache)",
        "failed after 1.0 s: why",
    ]
    assert scalars(found, "Seconds/compile_train_graph") == [(0, 2.5)]


def test_parts_of_the_loss_and_the_weights_without_averaging_have_names_of_their_own(tmp_path, a_history):
    epoch = a_history([1.0]).epochs[0]
    values = {name: getattr(epoch, name) for name in epoch.__dataclass_fields__}
    parts = {"train_losses": {"box": 1.0}, "valid_losses": {"box": 2.0}, "raw_valid_loss": 3.0}
    board = TensorBoard(tmp_path)
    board(STARTED)
    board(EpochEnded(**{**values, **parts, "raw_valid_metrics": {"Accuracy": 4.0}}))
    board(RunEnded(status="finished", seconds=1.0))
    found = read(tmp_path)
    tags = ("Train_box", "Valid_box", "Raw_valid_loss", "Raw_valid_Accuracy")
    assert [scalars(found, tag) for tag in tags] == [[(1, 1.0)], [(1, 2.0)], [(1, 3.0)], [(1, 4.0)]]


def test_an_event_outside_a_run_is_left_out(tmp_path):
    board = TensorBoard(tmp_path)
    board(Noticed(level="warning", message="early"))
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError) as caught:
        TensorBoard()
    assert str(caught.value) == 'TensorBoard needs the package tensorboard: pip install "sgnb[tensorboard]"'


def test_the_package_is_loaded_when_a_run_starts():
    code = "import sys, sgnb.training.tensorboard as t; t.TensorBoard(); print('tensorboard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"
