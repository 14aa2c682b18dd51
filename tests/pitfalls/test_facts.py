"""Facts are read, never guessed, and reading them changes nothing."""

import subprocess
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sgnb.hyperparams import HyperparamsError, TrainingHyperparams
from sgnb.pitfalls import Facts, gather_facts

T4 = {"devices": [{"name": "Tesla T4", "memory_gib": 14.6, "capability": "7.5", "bf16": False}], "cpu_bf16": True}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def known(facts):
    return {name: getattr(facts, name) for name in Facts.__dataclass_fields__ if getattr(facts, name) not in (None, {})}


def test_hyperparameters_alone_say_nothing_of_the_machine():
    hyperparams = TrainingHyperparams(ema=True)
    assert known(gather_facts(hyperparams)) == {"training_hyperparams": hyperparams}


@pytest.mark.parametrize("word", ["training_hyperparams", "training_params"])
def test_a_mapping_may_hold_the_hyperparameters_under_their_name(word):
    assert gather_facts({word: {"ema": True}}) == gather_facts({"ema": True})


def test_the_keys_that_a_machine_leaves_out_are_not_known():
    assert gather_facts({}, machine={"python": "3.11.7"}).device_type is None
    assert gather_facts({}, machine={"devices": []}).device_type == "cpu"


def test_the_first_gpu_is_the_device():
    facts = gather_facts({}, machine=T4)
    assert (facts.device_type, facts.device_name, facts.device_capability) == ("cuda", "Tesla T4", (7, 5))
    assert (facts.device_memory_gib, facts.device_bf16) == (14.6, False)


def test_the_machine_that_we_are_on_is_described_in_the_words_that_the_rules_ask_for():
    from sgnb.training.machine import describe_machine

    facts = gather_facts({}, machine=describe_machine())
    assert facts.device_type in ("cpu", "cuda")
    assert isinstance(facts.cpu_bf16, bool)
    assert facts.python is not None


def test_layers_are_counted():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2), nn.BatchNorm1d(2))
    facts = gather_facts({}, model=model)
    assert (facts.num_batchnorm, facts.num_batchnorm_1d) == (2, 1)
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())


def test_the_last_batch_follows_from_the_loader():
    data = TensorDataset(torch.zeros(9, 1), torch.zeros(9))
    facts = gather_facts({}, train_loader=DataLoader(data, batch_size=4))
    assert (facts.num_train_samples, facts.num_train_batches, facts.last_batch_size) == (9, 3, 1)
    assert gather_facts({}, train_loader=DataLoader(data, batch_size=4, drop_last=True)).last_batch_size == 4
    assert gather_facts({"max_train_batches": 2}, train_loader=DataLoader(data, batch_size=4)).last_batch_size == 4


def test_a_loader_without_a_length_is_no_error():
    class Endless(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1)

    facts = gather_facts({}, train_loader=DataLoader(Endless(), batch_size=4))
    assert (facts.num_train_batches, facts.last_batch_size) == (None, None)


def test_gathering_leaves_model_data_order_and_random_numbers_alone():
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    loader = DataLoader(TensorDataset(torch.zeros(9, 1)), batch_size=4, shuffle=True)
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    gather_facts({}, model=model, train_loader=loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_recipe_tells_its_data_and_its_processes():
    recipe = types.SimpleNamespace(
        training_hyperparams=TrainingHyperparams(),
        dataset_params={
            "train_dataset_params": {"num_samples": 1793},
            "train_dataloader_params": {"batch_size": 64, "num_workers": 2},
        },
        num_gpus=8,
        multi_gpu="DDP",
    )
    facts = gather_facts(recipe)
    assert (facts.num_gpus, facts.multi_gpu, facts.num_train_batches, facts.last_batch_size) == (8, "DDP", 29, 1)


def test_a_recipe_that_keeps_its_data_to_itself_is_not_guessed_at():
    recipe = types.SimpleNamespace(training_hyperparams=TrainingHyperparams(), dataset_params={"synthetic": True})
    assert known(gather_facts(recipe)) == {"training_hyperparams": recipe.training_hyperparams}
    recipe.dataset_params = {"train_dataloader_params": {"batch_size": 64}}
    facts = gather_facts(recipe)
    assert (facts.batch_size, facts.last_batch_size) == (64, None)


def test_only_the_variables_that_rules_ask_for_are_read(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert gather_facts({}).environment == {"WORLD_SIZE": "2"}


def test_wrong_hyperparameters_are_told_with_their_name():
    with pytest.raises(HyperparamsError) as caught:
        gather_facts({"max_epochs": 0})
    assert str(caught.value) == "training_hyperparams.max_epochs: expected at least 1, got 0"


def test_judging_settings_imports_no_torch():
    code = (
        "import sys; from sgnb.pitfalls import Findings, gather_facts, judge; "
        "text = str(Findings(judge(gather_facts({'torch_compile': True, 'ema': True})))); "
        "assert 'EMA101' in text; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
