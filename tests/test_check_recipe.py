"""The command that checks a recipe before it runs."""

import json
import subprocess
import sys

import pytest

from sgnb import load_recipe
from sgnb.check_recipe import main
from sgnb.pitfalls import gather_facts, judge

DIGITS = "--config-name=digits_dscnn"
LAPTOP = {"devices": [], "cpu_bf16": False, "python": "3.11.7", "cores": 2, "compiler_problem": None}
T4 = {
    "devices": [{"name": "Tesla T4", "memory_gib": 14.6, "capability": "7.5", "bf16": False}],
    "cpu_bf16": False,
    "python": "3.12.1",
    "compiler_problem": None,
}


@pytest.fixture(autouse=True)
def _laptop(monkeypatch):
    monkeypatch.setattr("sgnb.training.machine.describe_machine", lambda: LAPTOP)
    for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_sound_recipe_ends_with_0(capsys):
    assert main([DIGITS]) == 0
    assert capsys.readouterr().out == "No pitfalls found.\n"


def test_a_warning_is_shown_and_is_no_failure(capsys):
    assert main([DIGITS, "training_hyperparams.mixed_precision=True"]) == 0
    assert capsys.readouterr().out.startswith("1 warning.\n\nwarning AMP103, mixed_precision: ")


def test_an_error_ends_with_1(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([DIGITS]) == 1
    assert capsys.readouterr().out.startswith("1 error.\n\nerror DDP104: ")


def test_json_is_for_programs(capsys):
    assert main([DIGITS, "training_hyperparams.mixed_precision=True", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["code"], found["severity"], found["fix"]) == ("AMP103", "warning", {"mixed_precision": False})


def test_bad_input_ends_with_2_and_is_told_without_a_traceback(capsys):
    assert main([DIGITS, "training_hyperparams.max_epochs=0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "training_hyperparams.max_epochs: expected at least 1, got 0\n"


def test_flags_may_stand_between_the_overrides(capsys):
    words = ["training_hyperparams.ema=True", "--json", "training_hyperparams.torch_compile=True"]
    assert main([DIGITS, *words]) == 0
    assert [found["code"] for found in json.loads(capsys.readouterr().out)] == ["EMA101"]


def test_an_unknown_recipe_ends_with_2(capsys):
    assert main(["--config-name=digits_dscn"]) == 2
    assert "digits_dscnn" in capsys.readouterr().err


def test_the_command_runs_as_a_module():
    command = [sys.executable, "-m", "sgnb.check_recipe", DIGITS, "--json"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    assert isinstance(json.loads(outcome.stdout), list)


@pytest.mark.parametrize(("machine", "codes"), [(LAPTOP, []), (T4, ["AMP102"])], ids=["laptop", "T4"])
def test_what_the_shipped_recipe_shows_with_its_defaults(machine, codes):
    recipe = load_recipe("digits_dscnn")
    train_loader, _ = recipe.build_loaders()
    facts = gather_facts(recipe, machine=machine, model=recipe.build_model(), train_loader=train_loader)
    assert [finding.code for finding in judge(facts)] == codes
