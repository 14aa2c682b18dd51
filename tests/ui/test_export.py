import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sgnb.recipes import Recipe, load_recipe
from sgnb.ui.export import export_panel, save_to
from sgnb.ui.state import PanelState


@pytest.fixture
def state(recipe: Recipe) -> PanelState:
    return PanelState(recipe)


def wait_for(condition: Callable[[], Any], timeout_seconds: float = 20) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def areas(panel: Any) -> dict[str, Any]:
    command, texts = panel.children[:2]
    return {area.description: area for area in (command, *texts.children)}


def test_the_texts_follow_the_form(state: PanelState) -> None:
    shown = areas(export_panel(state))
    state.set("torch_compile", True)
    state.set("max_epochs", 3)
    wait_for(lambda: shown["Command"].value == state.recipe.to_command())
    assert "training_hyperparams.max_epochs=3" in shown["Command"].value
    assert shown["YAML"].value == state.recipe.to_yaml()
    assert shown["Python"].value == state.recipe.to_python()


def test_what_is_typed_into_a_text_is_put_back(state: PanelState) -> None:
    command = areas(export_panel(state))["Command"]
    wait_for(lambda: command.value)
    command.set_state({"value": "rm -rf /"})
    assert command.value == state.recipe.to_command()


def test_save_writes_a_recipe_that_loads_again(state: PanelState, tmp_path: Path) -> None:
    panel = export_panel(state)
    name, save = panel.children[2].children
    state.set("max_epochs", 3)
    name.value = str(tmp_path / "mine.yaml")
    save.click()
    assert str(tmp_path / "mine.yaml") in panel.children[3].value
    assert load_recipe(str(tmp_path / "mine.yaml")).training_hyperparams == state.training_hyperparams
    state.set("max_epochs", 4)
    save.click()
    assert load_recipe(str(tmp_path / "mine.yaml")).training_hyperparams.max_epochs == 4


def test_a_file_of_someone_else_is_not_replaced(state: PanelState, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("mine: true\n")
    with pytest.raises(ValueError) as caught:
        save_to(state, path, set())
    assert str(caught.value) == f"{path} exists already; choose another name, or remove it first"
    assert path.read_text() == "mine: true\n"


@pytest.mark.parametrize("name", ["", "recipe", "recipe.txt"])
def test_a_name_that_is_no_yaml_file_is_refused(state: PanelState, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        save_to(state, Path(name), set())
    assert str(caught.value) == f"expected a file name that ends in .yaml, got {str(Path(name))!r}"
