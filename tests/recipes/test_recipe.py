"""The record of a recipe and the forms in which it leaves."""

import shlex
import stat

import pytest

from sgnb.hyperparams import HyperparamsError
from sgnb.recipes import Recipe, RecipeError, load_recipe, save_recipe

TINY = [
    "dataset_params=synthetic",
    "+dataset_params.train_dataset_params.num_samples=64",
    "+dataset_params.val_dataset_params.num_samples=32",
    "arch_params.width=4",
    "training_hyperparams.max_epochs=1",
    "training_hyperparams.silent_mode=True",
]


@pytest.fixture
def recipe():
    return load_recipe("digits_dscnn")


HOSTILE = [
    {"loss": {"CrossEntropyLoss": {"smooth_eps": 0.1, "weight": [1.0, 2.5]}}},
    {"optimizer_params": {"momentum": 1e-05, "nesterov": True, "x": None}},
    {"resume_path": "it's a \"path\" \\ with\\' everything, [even] {this}: ${nothing} = ü\\"},
    {"resume_path": " "},
    {"resume_path": "null"},
    {"resume_path": "1e5"},
    {"valid_metrics_list": ["Accuracy", {"MulticlassF1Score": {"num_classes": 10}}]},
    {"valid_metrics_list": []},
    {"initial_lr": {"default": 0.1, "head": 0.0}},
    {"ema": True, "ema_params": {"decay": 0.9, "decay_type": "threshold"}},
    {"metric_to_watch": None},
    {"lr_mode": "StepLRScheduler", "lr_updates": [2, 3], "lr_decay_factor": 0.1},
]


@pytest.mark.parametrize("changes", HOSTILE, ids=str)
def test_the_command_leads_back_to_the_same_recipe(recipe, changes):
    changed = recipe.with_hyperparams(**changes)
    words = shlex.split(changed.to_command())
    assert words[:4] == ["python", "-m", "sgnb.train_from_recipe", "--config-name=digits_dscnn"]
    assert load_recipe("digits_dscnn", words[4:]) == changed


def test_the_command_tells_what_was_removed(recipe):
    changed = load_recipe("digits_dscnn", ["~arch_params.width", "dataset_params=synthetic", "num_gpus=2"])
    assert load_recipe("digits_dscnn", changed.overrides_from_base()) == changed


def test_overrides_of_a_recipe_keep_its_changes_also_when_a_group_is_swapped(recipe):
    changed = recipe.with_hyperparams(max_epochs=9).override(["training_hyperparams.ema=True"])
    swapped = changed.override(["dataset_params=synthetic"])
    assert (swapped.training_hyperparams.max_epochs, swapped.training_hyperparams.ema) == (9, True)
    assert swapped.dataset_params["synthetic"] is True
    assert (swapped.name, recipe.dataset_params["synthetic"]) == ("digits_dscnn", False)


def test_an_unchanged_recipe_has_a_short_command(recipe):
    assert recipe.to_command() == "python -m sgnb.train_from_recipe --config-name=digits_dscnn"


@pytest.mark.parametrize("changes", HOSTILE, ids=str)
def test_yaml_leads_back_to_the_same_recipe(recipe, changes, tmp_path):
    changed = recipe.with_hyperparams(**changes)
    loaded = load_recipe(save_recipe(changed, tmp_path / "mine.yaml"))
    assert loaded.to_dict() == changed.to_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_recipe_that_cannot_be_written_leaves_the_old_file(recipe, tmp_path):
    path = save_recipe(recipe, tmp_path / "mine.yaml")
    before = path.read_text()
    with pytest.raises(HyperparamsError) as caught:
        save_recipe(recipe.with_hyperparams(lr_mode="FunctionLRScheduler", lr_schedule_function=max), path)
    assert str(caught.value) == (
        "training_hyperparams.lr_schedule_function: <built-in function max> is a Python object, which YAML cannot "
        "hold; use a name instead"
    )
    assert path.read_text() == before
    assert stat.S_ISREG(path.stat().st_mode)


def test_the_python_code_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(load_recipe("digits_dscnn", TINY).to_python(), names)
    assert names["history"].status == "finished"
    assert list(tmp_path.glob("checkpoints/digits_dscnn/RUN_*/ckpt_best.pth"))


def test_it_builds_the_same_model_and_data_order_each_time():
    recipe = load_recipe("digits_dscnn", TINY)
    first, second = ([batch[1].tolist() for batch in recipe.build_loaders()[0]] for _ in range(2))
    assert first == second
    left, right = recipe.build_model(), recipe.build_model()
    assert all((a == b).all() for a, b in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize("overrides", [["num_gpus=2"], ["multi_gpu=DDP"]])
def test_several_processes_are_refused_not_ignored(overrides, tmp_path):
    recipe = load_recipe("digits_dscnn", [*overrides, f"ckpt_root_dir={tmp_path}/runs"])
    with pytest.raises(
        RecipeError, match="ask for several processes, and this version trains in one process; set num_gpus=1"
    ):
        recipe.train()
    assert not (tmp_path / "runs").exists()


def test_training_params_is_another_word():
    values = {"architecture": "dscnn", "train_dataloader": "digits_train", "training_params": {"ema": True}}
    assert Recipe.from_dict(values).training_hyperparams.ema
    with pytest.raises(
        HyperparamsError, match=r"^training_params: is another word for training_hyperparams; give one of them$"
    ):
        Recipe.from_dict({**values, "training_hyperparams": {}})


def test_all_problems_of_all_sections_come_at_once():
    with pytest.raises(HyperparamsError) as caught:
        Recipe.from_dict(
            {
                "architecture": 3,
                "num_gpuss": 2,
                "training_hyperparams": {"emaa": True, "max_epochs": 0},
                "arch_params": {"_target_": "os.system"},
            }
        )
    assert {str(problem) for problem in caught.value.problems} == {
        "arch_params._target_: a recipe cannot run code; use a registered name",
        "training_hyperparams.emaa: no such key; did you mean ema?",
        "training_hyperparams.max_epochs: expected at least 1, got 0",
        "architecture: expected a text, got 3",
        "num_gpuss: no such key; did you mean num_gpus?",
        "train_dataloader: is required, and is missing",
    }


def test_a_recipe_without_a_name_has_no_command():
    recipe = Recipe(architecture="dscnn", train_dataloader="digits_train")
    with pytest.raises(
        RecipeError, match="was not loaded by name, so no command can refer to it; save it with save_recipe"
    ):
        recipe.to_command()
