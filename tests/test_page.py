"""Every snippet of SuperGradients' page "Improving Training Time" runs, with the package name changed.

The snippets stand here as printed there (documentation/source/ImprovingTrainingTime.md, Apache-2.0). What the page
leaves out with `...` is filled in by `as_typed`, and nothing else.
"""

import textwrap

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sgnb import HyperparamsError, TrainingHyperparams, load_recipe, train_from_recipe

MIXED_PRECISION = """
from super_gradients import Trainer

trainer = Trainer("experiment_name")
model = ...

training_hyperparams = {"mixed_precision": True, ...:...}

trainer.train(model=model, training_hyperparams=training_hyperparams, ...)
"""
MIXED_PRECISION_YAML = """
# my_training_hyperparams.yaml

mixed_precision: True # Whether to use mixed precision or not.
"""
COMMAND = "python -m super_gradients.train_from_recipe --config-name=... training_hyperparams.torch_compile=True"
RECIPE_YAML = """
# my_training_recipe.yaml
training_hyperparams:
  torch_compile: True
  torch_compile_mode: default | reduce-overhead | max-autotune
"""
PROGRAM = """
from super_gradients.training import Trainer

trainer = Trainer(
    ...,
    training_hyperparams = {
        "torch_compile": True,
        ...
        }
    )
"""
EMA_YAML = """
  training_hyperparams:
    torch_compile: True
    ema: False
"""
AMP_YAML = """
training_hyperparams:
  torch_compile: True
  mixed_precision: True
"""
QUICK = '"max_epochs": 1, "silent_mode": True, "torch_compile_options": {"backend": "aot_eager"}'
TINY = [
    "dataset_params=synthetic",
    "+dataset_params.train_dataset_params.num_samples=64",
    "+dataset_params.val_dataset_params.num_samples=32",
    "arch_params.width=4",
    "training_hyperparams.max_epochs=1",
    "training_hyperparams.silent_mode=True",
    "training_hyperparams.torch_compile_options.backend=aot_eager",
]


def as_typed(snippet, **elisions):
    """Return a snippet with the package's name changed and its elisions filled in."""
    for printed, typed in elisions.values():
        assert printed in snippet
        snippet = snippet.replace(printed, typed)
    return textwrap.dedent(snippet.replace("super_gradients", "sgnb"))


@pytest.fixture
def loaders():
    images, targets = torch.randn(32, 3, 8, 8), torch.arange(32) % 4
    data = TensorDataset(images, targets)
    return {"train_loader": DataLoader(data, 16), "valid_loader": DataLoader(data, 16)}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def a_model():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(4))


def test_mixed_precision_in_a_script(loaders):
    model = a_model()
    model(torch.zeros(1, 3, 8, 8))
    names = {"model": model, **loaders}
    exec(
        as_typed(
            MIXED_PRECISION,
            model=("model = ...\n", ""),
            hyperparams=("...:...", QUICK),
            loaders=(", ...)", ", train_loader=train_loader, valid_loader=valid_loader)"),
        )
        + "\nhistory = trainer.train(model=model, training_hyperparams={'mixed_precision': True, 'max_epochs': 1, "
        "'silent_mode': True}, train_loader=train_loader)",
        names,
    )
    assert names["history"].status == "finished"


def test_mixed_precision_in_a_recipe(tmp_path):
    (tmp_path / "training_hyperparams").mkdir()
    file = tmp_path / "training_hyperparams" / "my_training_hyperparams.yaml"
    file.write_text(MIXED_PRECISION_YAML)
    assert TrainingHyperparams.from_yaml(file).changed() == {"mixed_precision": True}
    recipe = load_recipe("digits_dscnn", ["training_hyperparams=my_training_hyperparams"], config_dir=tmp_path)
    assert recipe.training_hyperparams.mixed_precision


def test_torch_compile_on_the_command_line(capsys):
    typed = as_typed(COMMAND, name=("=...", "=digits_dscnn"))
    _, _, module, *arguments = typed.split()
    assert module == train_from_recipe.__name__
    assert train_from_recipe.main([*arguments, *TINY]) == 0
    run_dir = capsys.readouterr().out.strip()
    assert run_dir.startswith("checkpoints/digits_dscnn/RUN_")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_torch_compile_in_a_recipe(mode, tmp_path):
    text = RECIPE_YAML.replace("default | reduce-overhead | max-autotune", mode)
    (tmp_path / "my_training_recipe.yaml").write_text("defaults: [digits_dscnn, _self_]\n" + text)
    recipe = load_recipe("my_training_recipe", TINY, config_dir=tmp_path)
    assert (recipe.training_hyperparams.torch_compile, recipe.training_hyperparams.torch_compile_mode) == (True, mode)
    history = recipe.train()
    assert history.compiled


def test_the_line_of_alternatives_as_printed_says_to_choose_one():
    with pytest.raises(HyperparamsError) as caught:
        TrainingHyperparams.from_yaml(RECIPE_YAML)
    assert str(caught.value).startswith("training_hyperparams.torch_compile_mode: expected one of 'default', ")
    assert str(caught.value).endswith(
        "got 'default | reduce-overhead | max-autotune' (write one of the alternatives, not all of them)"
    )


def test_torch_compile_in_a_program(loaders):
    typed = as_typed(
        PROGRAM, name=("    ...,", '    "experiment_name",'), hyperparams=("        ...\n", f"        {QUICK}\n")
    )
    names = {"model": a_model(), **loaders}
    names["model"](torch.zeros(1, 3, 8, 8))
    exec(typed + "\nhistory = trainer.train(model, train_loader=train_loader, valid_loader=valid_loader)", names)
    assert names["history"].compiled


@pytest.mark.parametrize(
    ("text", "expected"),
    [(EMA_YAML, {"torch_compile": True}), (AMP_YAML, {"torch_compile": True, "mixed_precision": True})],
)
def test_the_fragments_of_recipes_are_read(text, expected):
    assert TrainingHyperparams.from_yaml(text).changed() == expected
