from typing import Any

import ipywidgets as widgets
import pytest
from pydantic import BaseModel

from sgnb.hyperparams import TrainingHyperparams
from sgnb.recipes import Recipe
from sgnb.ui.form import editor_for, hyperparams_panel, options
from sgnb.ui.state import PanelState


@pytest.fixture
def state(recipe: Recipe) -> PanelState:
    return PanelState(recipe)


def row(panel: Any, name: str) -> Any:
    """Return the row (editor, note) of the hyperparameter `name`."""
    found = [box for box in tree(panel) if isinstance(box, widgets.VBox) and is_row(box, name)]
    assert len(found) == 1, name
    return found[0].children


def is_row(box: Any, name: str) -> bool:
    return len(box.children) == 2 and getattr(box.children[0], "description", "").split(" (")[0] == name


def tree(widget: Any) -> list[Any]:
    return [widget, *(found for child in getattr(widget, "children", ()) for found in tree(child))]


def type_in(widget: Any, value: object) -> None:
    """Do what the browser does when a person edits."""
    if isinstance(widget, widgets.Dropdown):
        widget.set_state({"index": [item for _, item in widget.options].index(value)})
    else:
        widget.set_state({"value": value})


def test_every_field_of_the_record_has_exactly_one_row(state: PanelState) -> None:
    panel = hyperparams_panel(state)
    for name, field in TrainingHyperparams.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        inner: list[str] = list(field.annotation.model_fields) if nested else []  # type: ignore[union-attr]
        for dotted in [f"{name}.{part}" for part in inner] or [name]:
            editor, note = row(panel, dotted)
            assert editor.style.description_width == "initial"
            assert note.value


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("torch_compile", "Checkbox"),
        ("torch_compile_mode", "Dropdown"),
        ("greater_metric_to_watch_is_better", "Dropdown"),
        ("max_epochs", "IntText"),
        ("cosine_final_lr_ratio", "FloatText"),
        ("clip_grad_norm", "Text"),
        ("max_train_batches", "Text"),
        ("lr_updates", "Text"),
        ("optimizer_params", "Text"),
        ("initial_lr", "Text"),
        ("ckpt_best_name", "Text"),
        ("ema_params.decay_type", "Dropdown"),
        ("torch_compile_options.dynamic", "Dropdown"),
    ],
)
def test_the_type_alone_chooses_the_widget(name: str, kind: str) -> None:
    option = next(option for option in options() if option.name == name)
    assert type(editor_for(option).widget).__name__ == kind


def test_the_main_options_stand_open_and_the_rest_is_folded_by_group(state: PanelState) -> None:
    main, accordion = hyperparams_panel(state, None).children[:2]
    names = [option.name for option in options() if option.main]
    assert [box.children[0].description.split(" (")[0] for box in main.children] == names
    assert isinstance(accordion, widgets.Accordion)
    assert accordion.selected_index is None
    groups = dict.fromkeys(option.group for option in options() if not option.main)
    assert list(accordion.titles) == [f"More of {group}" for group in groups]


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("torch_compile", True, True),
        ("max_epochs", 7, 7),
        ("initial_lr", "1e-3", 0.001),
        ("initial_lr", "{default: 0.1, head: 1}", {"default": 0.1, "head": 1}),
        ("max_train_batches", "12", 12),
        ("max_train_batches", "", None),
        ("clip_grad_norm", "0.5", 0.5),
        ("optimizer", "AdamW", "AdamW"),
        ("optimizer_params", "{weight_decay: 0.1}", {"weight_decay": 0.1}),
        ("optimizer_params", "", {}),
        ("loss", "CrossEntropyLoss", "CrossEntropyLoss"),
        ("valid_metrics_list", "[Accuracy]", ("Accuracy",)),
        ("metric_to_watch", "loss", "loss"),
        ("greater_metric_to_watch_is_better", False, False),
        ("torch_compile_options.mode", "max-autotune", "max-autotune"),
        ("ema_params.decay", 0.5, 0.5),
    ],
)
def test_turning_a_widget_changes_the_hyperparameters(
    state: PanelState, name: str, typed: object, value: object
) -> None:
    type_in(row(hyperparams_panel(state), name)[0], typed)
    assert state.problems == ()
    assert state.in_force(name) == value


def test_a_change_of_the_state_turns_the_widget(state: PanelState) -> None:
    panel = hyperparams_panel(state)
    state.apply({"max_epochs": 9, "lr_warmup_epochs": 2})
    assert row(panel, "max_epochs")[0].value == 9
    assert row(panel, "lr_warmup_epochs")[0].value == 2


def test_bad_input_says_why_beside_the_option_and_what_is_in_force(state: PanelState) -> None:
    editor, note = row(hyperparams_panel(state), "max_epochs")
    in_force = state.training_hyperparams.max_epochs
    type_in(editor, 0)
    assert editor.value == 0
    assert f"<b>expected at least 1, got 0</b>. In force: {in_force}." in note.value
    type_in(editor, 3)
    assert "expected" not in note.value


def test_a_text_that_is_no_yaml_says_why(state: PanelState) -> None:
    editor, note = row(hyperparams_panel(state), "lr_updates")
    type_in(editor, "[1, <b>")
    assert editor.value == "[1, <b>"
    assert "expected YAML such as 0.1, [1, 2] or {a: 1}" in note.value
    assert "<b>&#x27;" not in note.value
    assert "&lt;b&gt;" in note.value


def test_changed_values_are_marked_there_and_on_the_fold(state: PanelState) -> None:
    panel = hyperparams_panel(state)
    editor, note = row(panel, "seed")
    assert "Changed" not in note.value
    type_in(editor, 7)
    assert "Changed; the recipe has 42." in note.value
    assert "More of run · 1 changed" in panel.children[1].titles


def test_hostile_text_of_a_value_is_escaped(state: PanelState) -> None:
    panel = hyperparams_panel(state)
    type_in(row(panel, "metric_to_watch")[0], "<img src=x onerror=alert(1)>")
    type_in(row(panel, "optimizer")[0], "<img src=x onerror=alert(1)>")
    assert "expected one of" in row(panel, "optimizer")[1].value
    assert not any("<img" in part.value for part in tree(panel) if isinstance(part, widgets.HTML))


def test_an_error_in_a_callback_is_shown_in_the_form(state: PanelState, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("out of order")

    panel = hyperparams_panel(state)
    monkeypatch.setattr(state, "set", broken)
    type_in(row(panel, "seed")[0], 8)
    assert "out of order" in panel.children[-1].value


def test_names_are_suggested_where_something_else_may_stand_as_well(state: PanelState) -> None:
    editor, _ = row(hyperparams_panel(state), "lr_mode")
    assert isinstance(editor, widgets.Combobox)
    assert "PolyLRScheduler" in editor.options
    assert not editor.ensure_option
    type_in(editor, "{StepLR: {step_size: 3}}")
    assert state.in_force("lr_mode") == {"StepLR": {"step_size": 3}}
    type_in(editor, "PolyLRScheduler")
    assert state.in_force("lr_mode") == "PolyLRScheduler"
