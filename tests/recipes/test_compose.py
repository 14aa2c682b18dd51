"""Composition by Hydra: overrides, groups, people's own folders, errors."""

import pytest
from hydra.core.global_hydra import GlobalHydra

from sgnb.hyperparams import HyperparamsError
from sgnb.recipes import RecipeError, list_recipes, load_recipe
from sgnb.recipes.compose import expand_sweep


def test_overrides_add_change_and_remove():
    overrides = ["training_hyperparams.ema=True", "+training_hyperparams.seed=7", "~arch_params.width", "batch=1"]
    with pytest.raises(HyperparamsError, match=r"^batch: no such key$"):
        load_recipe("digits_dscnn", overrides)
    recipe = load_recipe("digits_dscnn", overrides[:3])
    assert (recipe.training_hyperparams.ema, recipe.training_hyperparams.seed, recipe.arch_params) == (True, 7, {})


def test_a_group_is_swapped_as_a_whole():
    recipe = load_recipe("digits_dscnn", ["dataset_params=synthetic", "training_hyperparams=default_train_params"])
    assert recipe.dataset_params["synthetic"] is True
    assert recipe.training_hyperparams.changed() == {}


@pytest.fixture
def own_folder(tmp_path):
    (tmp_path / "training_hyperparams").mkdir()
    (tmp_path / "training_hyperparams" / "long.yaml").write_text("defaults: [digits_dscnn]\nmax_epochs: 300\n")
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - digits_dscnn\n  - override training_hyperparams: long\n  - _self_\n"
        "experiment_name: ${architecture}_long\n"
    )
    return tmp_path


def test_peoples_own_recipes_use_the_packages_groups(own_folder):
    recipe = load_recipe("mine", config_dir=own_folder)
    assert recipe.training_hyperparams.max_epochs == 300
    assert recipe.training_hyperparams.initial_lr == 0.1
    assert recipe.experiment_name == "dscnn_long"
    assert f"--config-dir={own_folder}" in recipe.to_command()
    assert load_recipe("mine", recipe.overrides_from_base(), config_dir=own_folder) == recipe
    assert load_recipe(own_folder / "mine.yaml") == recipe
    assert list_recipes(own_folder) == sorted([*list_recipes(), "mine"])


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("digits_dscn", [], "no recipe has the name 'digits_dscn'; did you mean digits_dscnn?; there are digits_dscnn"),
        ("nowhere.yaml", [], "nowhere.yaml: no such file"),
        (
            "digits_dscnn",
            ["dataset_params=sinthetic"],
            "digits_dscnn: dataset_params: expected one of digits, synthetic, got 'sinthetic'; did you mean synthetic?",
        ),
        (
            "digits_dscnn",
            "training_hyperparams.ema=True",
            "overrides: expected a list of texts, got the text 'training_hyperparams.ema=True'; write "
            "['training_hyperparams.ema=True']",
        ),
    ],
)
def test_what_cannot_be_composed_is_explained(name, overrides, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "training_hyperparams.torch_complie=True",
            "training_hyperparams.torch_complie: no such key; did you mean torch_compile?",
        ),
        (
            "training_hyperparams.ema_params.dekay=1",
            "training_hyperparams.ema_params.dekay: no such key; did you mean decay?",
        ),
        ("dataset_params.sinthetic=True", "dataset_params.sinthetic: no such key; did you mean synthetic?"),
        ("num_gpuss=2", "num_gpuss: no such key; did you mean num_gpus?"),
        ("experiment_name=a/b", "experiment_name: expected a plain file name, got 'a/b'"),
    ],
)
def test_typos_have_a_nearest_name_in_every_section(override, message):
    with pytest.raises(HyperparamsError) as caught:
        load_recipe("digits_dscnn", [override])
    assert str(caught.value) == message


@pytest.mark.parametrize("override", ["a=[1", "=3", "training_hyperparams", "x=${nope}", "a.b=1,2"])
def test_bad_grammar_is_an_error_of_ours_and_leaves_hydra_as_it_was(override):
    with pytest.raises((RecipeError, HyperparamsError)):
        load_recipe("digits_dscnn", [override])
    assert GlobalHydra.instance().hydra is None


def test_an_override_that_cannot_be_read_is_quoted():
    message = "the override 'a=[1' cannot be read; expected key=value, with quotes round what is more than a word"
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits_dscnn", ["a=[1"])
    assert str(caught.value) == f"digits_dscnn: {message}"
    with pytest.raises(RecipeError) as caught:
        expand_sweep(["a=[1"])
    assert str(caught.value) == message


def test_a_sweep_is_the_cartesian_product():
    assert expand_sweep(["a=1,2", "b=x", "c=p,q"]) == [
        ["a=1", "b=x", "c=p"],
        ["a=1", "b=x", "c=q"],
        ["a=2", "b=x", "c=p"],
        ["a=2", "b=x", "c=q"],
    ]
    with pytest.raises(RecipeError):
        expand_sweep(["a=[1"])
