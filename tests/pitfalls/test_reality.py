"""Where it is quick, the pitfall is met for real: it happens without the fix, and not with it."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sgnb.events import CompileFailed, Noticed
from sgnb.hyperparams import EmaParams
from sgnb.pitfalls import gather_facts, judge
from sgnb.training import Trainer
from sgnb.training.ema import Ema


def loader(num_samples, **options):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.arange(num_samples) % 2), batch_size=4, **options)


def train(tmp_path, model, train_loader, **hyperparams):
    hyperparams = {"max_epochs": 1, "silent_mode": True, "save_model": False, **hyperparams}
    return Trainer("reality", ckpt_root_dir=tmp_path, device="cpu").train(model, hyperparams, train_loader)


def codes(subject, **known):
    return {finding.code for finding in judge(gather_facts(subject, **known))}


def test_bn101_a_last_batch_of_one_ends_the_run_unless_it_is_dropped(tmp_path):
    def model():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    assert "BN101" in codes({}, model=model(), train_loader=loader(9))
    with pytest.raises(ValueError) as caught:
        train(tmp_path, model(), loader(9))
    assert (
        str(caught.value) == "Expected more than 1 value per channel when training, got input size torch.Size([1, 4])"
    )
    assert "BN101" not in codes({}, model=model(), train_loader=loader(9, drop_last=True))
    assert len(train(tmp_path, model(), loader(9, drop_last=True)).epochs) == 1


def test_tc103_a_disabled_compilation_compiles_nothing(tmp_path):
    hyperparams = {"torch_compile": True, "torch_compile_options": {"disable": True, "backend": "eager"}}
    assert "TC103" in codes(hyperparams)
    history = train(tmp_path, nn.Linear(4, 2), loader(8), **hyperparams)
    assert not history.compiled
    assert [event for event in history.events if isinstance(event, CompileFailed)]


def test_tc105_fullgraph_in_a_disabled_environment_is_an_error_of_torch():
    code = (
        "import torch; model = torch.nn.Linear(2, 2); model.compile(fullgraph={}, backend='eager'); "
        "model(torch.zeros(1, 2))"
    )
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    command = [sys.executable, "-c"]
    outcome = subprocess.run(
        [*command, code.format(True)], env=environment, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 1
    assert "fullgraph=True found no compiled frames" in outcome.stderr
    subprocess.run([*command, code.format(False)], env=environment, check=True)


def test_ddp101_one_process_leaves_batchnorm_as_it_is(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    history = train(tmp_path, model, loader(8), sync_bn=True)
    assert type(model[1]) is nn.BatchNorm1d
    assert [event.message for event in history.events if isinstance(event, Noticed)] == [
        "sync_bn has nothing to synchronise in one process; BatchNorm stays as it is."
    ]


@pytest.mark.parametrize(("decay_type", "hits"), [("exp", True), ("constant", True), ("threshold", False)])
def test_ema102_the_average_of_a_short_run_is_old_unless_its_decay_grows_with_the_updates(decay_type, hits):
    num_updates = 290
    hyperparams = {"max_epochs": 10, "ema": True, "ema_params": {"decay_type": decay_type}}
    found = codes(hyperparams, train_loader=loader(29 * 4))
    assert ("EMA102" in found) is hits
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    ema = Ema(model, EmaParams(decay_type=decay_type), total_updates=num_updates)
    for number in range(1, num_updates + 1):
        with torch.no_grad():
            model.weight.fill_(number)  # The weight is the number of the update, so the average is its mean age.
        ema.update()
    assert (ema.state_dict()["weight"].item() < 0.7 * num_updates) is hits
