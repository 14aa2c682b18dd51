import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pytest

from sgnb.pitfalls import gather_facts
from sgnb.recipes import Recipe, save_recipe
from sgnb.ui.state import Knowledge
from sgnb.ui.studio import Panel, machine_text, panel, widget_tree


@pytest.fixture(autouse=True)
def quick_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(recipe: Recipe) -> Knowledge:
        machine = {"cores": 2, "memory_gib": 8.0, "torch": "2.x"}
        return Knowledge(machine=machine, facts=gather_facts(recipe, machine=machine))

    monkeypatch.setattr("sgnb.ui.state.gather_all", gather)


@pytest.fixture
def opened(recipe: Recipe) -> Iterator[Panel]:
    made = panel(recipe)
    yield made
    made.close()


def part(panel_: Panel, kind: Any, description: str) -> Any:
    found = [w for w in widget_tree(panel_.widget) if isinstance(w, kind) and w.description == description]
    assert len(found) == 1, description
    return found[0]


def instances() -> int:
    return len(widgets.widget._instances)


def test_the_bundle_has_a_live_view_a_picture_and_a_short_text(opened: Panel) -> None:
    bundle = opened._repr_mimebundle_()
    assert bundle["text/plain"] == "<Panel 'main': recipe digits_dscnn>"
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == opened.widget.model_id
    assert "sgnb: recipe digits_dscnn" in bundle["text/html"]
    assert len(bundle["text/html"]) < 50_000


def test_ticking_a_box_reaches_the_recipe_the_findings_and_the_command(opened: Panel, one_rule: None) -> None:
    part(opened, widgets.Checkbox, "torch_compile").set_state({"value": True})
    assert opened.training_hyperparams.torch_compile
    assert [finding.code for finding in opened.state.findings] == ["XX101"]
    command = part(opened, widgets.Textarea, "Command")
    deadline = time.monotonic() + 20
    while "training_hyperparams.torch_compile=True" not in command.value:
        assert time.monotonic() < deadline, command.value
        time.sleep(0.02)
    assert not opened.guard.errors


def test_the_same_key_closes_the_earlier_panel_and_nothing_grows(recipe: Recipe) -> None:
    first = panel(recipe)
    count, threads = instances(), threading.active_count()
    for _ in range(5):
        last = panel(recipe)
    for thread in threading.enumerate():
        if thread.name.startswith("sgnb-"):
            thread.join(timeout=10)
    assert instances() <= count
    assert threading.active_count() <= threads + 1
    assert first.widget.comm is None
    assert first.runs.run is None
    last.close()


def test_two_keys_are_two_panels(recipe: Recipe) -> None:
    one, two = panel(recipe), panel(recipe, key="second")
    assert one.widget.comm is not None
    one.state.set("max_epochs", 3)
    assert two.training_hyperparams == recipe.training_hyperparams
    one.close()
    two.close()


def test_a_closed_panel_frees_all_its_widgets(recipe: Recipe) -> None:
    before = instances()
    panel(recipe).close()
    assert instances() == before


def test_a_recipe_that_is_not_there_leaves_the_open_panel(opened: Panel) -> None:
    with pytest.raises(ValueError, match="no_such_recipe"):
        panel("no_such_recipe")
    assert opened.widget.comm is not None


def test_an_override_that_fails_is_shown(opened: Panel) -> None:
    before = opened.recipe
    part(opened, widgets.Text, "Override").set_state({"value": "no_such_key=1"})
    assert opened.recipe == before
    assert "no_such_key" in opened.guard.notice.value


def test_an_override_is_applied_and_the_field_is_ready_for_the_next(opened: Panel) -> None:
    field = part(opened, widgets.Text, "Override")
    field.set_state({"value": "dataset_params.train_dataloader_params.batch_size=32"})
    assert opened.recipe.dataset_params["train_dataloader_params"]["batch_size"] == 32
    assert field.value == ""


def test_every_control_has_a_name(opened: Panel) -> None:
    controls = (widgets.Button, widgets.Checkbox, widgets.Text, widgets.Dropdown, widgets.Textarea, widgets.IntText)
    nameless = [w for w in widget_tree(opened.widget) if isinstance(w, controls) and not w.description]
    assert nameless == []


def test_the_machine_is_named_when_it_is_known() -> None:
    machine = {"cores": 2, "memory_gib": 7.7, "torch": "2.14.1", "devices": [{"name": "A <100>", "memory_gib": 40.0}]}
    assert machine_text(None) == "This machine: not known yet"
    assert machine_text(machine) == "This machine: 2 CPU cores, 8 GiB; A <100> (40 GiB); torch 2.14.1; can compile"


def test_the_user_interface_imports_no_torch_and_the_panel_shows_within_a_second(tmp_path: Path) -> None:
    code = (
        "import sys, time, threading, sgnb.ui.state as state\n"
        "state.gather_all = lambda recipe: state.Knowledge(machine={'cores': 1}, facts=state.gather_facts(recipe))\n"
        "import sgnb.ui\nstart = time.process_time()\nmade = sgnb.ui.panel()\nmade._repr_mimebundle_()\n"
        "seconds = time.process_time() - start\n"
        "heavy = {'torch', 'plotly', 'torchvision'} & set(sys.modules)\nassert not heavy, heavy\n"
        "assert seconds < 1, seconds\nmade.close()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_recipe_from_a_file_can_be_chosen_again(recipe: Recipe, tmp_path: Path) -> None:
    path = save_recipe(recipe.with_hyperparams(max_epochs=3), tmp_path / "mine.yaml")
    opened = panel(str(path))
    chooser = part(opened, widgets.Dropdown, "Recipe")
    chooser.value = "digits_dscnn"
    assert opened.training_hyperparams.max_epochs == 5
    chooser.value = "mine"
    assert opened.training_hyperparams.max_epochs == 3
    assert not opened.guard.errors
    opened.close()


def test_python_objects_among_the_hyperparameters_are_said_not_to_fit_into_yaml(recipe: Recipe) -> None:
    opened = panel(recipe.with_hyperparams(loss=len))
    assert opened.state.problems == ()
    yaml_text = part(opened, widgets.Textarea, "YAML")
    deadline = time.monotonic() + 20
    while "is a Python object, which YAML cannot hold" not in yaml_text.value:
        assert time.monotonic() < deadline, yaml_text.value
        time.sleep(0.02)
    part(opened, widgets.Button, "Run").click()
    assert "is a Python object, which YAML cannot hold" in opened.guard.notice.value
    assert opened.runs.status == "idle"
    opened.close()
