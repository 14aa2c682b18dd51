"""The training command: exit codes, messages, sweeps."""

import pytest

from sgnb import History
from sgnb.train_from_recipe import main

TINY = [
    "dataset_params=synthetic",
    "+dataset_params.train_dataset_params.num_samples=64",
    "+dataset_params.val_dataset_params.num_samples=32",
    "arch_params.width=4",
    "training_hyperparams.max_epochs=1",
    "training_hyperparams.silent_mode=True",
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_sweep_trains_each_combination_and_options_may_stand_anywhere(capsys):
    assert main(["training_hyperparams.seed=1,2", "-m", *TINY, "--config-name=digits_dscnn"]) == 0
    output = capsys.readouterr()
    run_dirs = output.out.split()
    seeds = [History.load(run_dir).started.training_hyperparams["seed"] for run_dir in run_dirs]
    assert seeds == [1, 2]
    assert "python -m sgnb.train_from_recipe --config-name=digits_dscnn" in output.err


def test_the_composed_recipe_is_printed_and_not_trained(capsys, tmp_path):
    assert main(["--config-name=digits_dscnn", "training_hyperparams.ema=True", "--cfg", "job"]) == 0
    assert "  ema: true\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-name=digits_dscn"], "no recipe has the name 'digits_dscn'; did you mean digits_dscnn?"),
        (
            ["--config-name=digits_dscnn", "training_hyperparams.emaa=1"],
            "training_hyperparams.emaa: no such key; did you mean ema?",
        ),
        (
            ["--config-name=digits_dscnn", "num_gpus=2"],
            "ask for several processes, and this version trains in one process",
        ),
        (["--config-name=digits_dscnn", "training_hyperparams.resume=True"], "holds a ckpt_latest.pth to go on from"),
    ],
)
def test_bad_input_is_explained_without_a_traceback_and_nothing_is_written(arguments, message, capsys, tmp_path):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
