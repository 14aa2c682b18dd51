import threading
from typing import Any

import pytest

from sgnb.hyperparams import HyperparamsError
from sgnb.pitfalls import gather_facts
from sgnb.recipes import Recipe
from sgnb.ui.state import Knowledge, PanelState, Unreadable, gather_all, show


@pytest.fixture
def state(recipe: Recipe) -> PanelState:
    return PanelState(recipe)


def test_a_good_value_comes_into_force(state: PanelState) -> None:
    state.set("max_epochs", 7)
    assert state.training_hyperparams.max_epochs == 7
    assert state.is_changed("max_epochs")
    assert state.problems == ()


def test_a_bad_value_says_why_and_the_old_one_stays_in_force(state: PanelState) -> None:
    before = state.training_hyperparams
    state.set("max_epochs", -3)
    assert [str(p) for p in state.problems] == ["training_hyperparams.max_epochs: expected at least 1, got -3"]
    assert state.problem_of("max_epochs") == "expected at least 1, got -3"
    assert state.training_hyperparams == before
    assert state.value("max_epochs") == -3


def test_a_bad_value_does_not_keep_others_from_coming_into_force(state: PanelState) -> None:
    state.set("max_epochs", -3)
    state.set("ema", True)
    assert state.training_hyperparams.ema
    assert set(state.pending) == {"max_epochs"}
    state.set("max_epochs", 4)
    assert (state.pending, state.problems, state.training_hyperparams.max_epochs) == ({}, (), 4)


def test_values_that_need_each_other_come_into_force_together(state: PanelState) -> None:
    state.set("lr_mode", "StepLRScheduler")
    assert state.in_force("lr_mode") == "CosineLRScheduler"
    assert state.problem_of("lr_decay_factor") == "is required by StepLRScheduler"
    state.set("lr_decay_factor", 0.1)
    state.set("lr_updates", [2, 3])
    assert state.problems == ()
    assert state.in_force("lr_mode") == "StepLRScheduler"
    assert state.training_hyperparams.lr_updates == (2, 3)


def test_a_nested_value_keeps_its_neighbours(state: PanelState) -> None:
    state.set("ema_params.beta", 20.0)
    state.set("ema_params.decay", 0.99)
    assert (state.in_force("ema_params.beta"), state.in_force("ema_params.decay")) == (20.0, 0.99)


def test_a_bad_nested_value_is_named_by_its_whole_name(state: PanelState) -> None:
    state.set("ema_params.decay", 2.0)
    assert [str(p) for p in state.problems] == ["training_hyperparams.ema_params.decay: expected at most 1, got 2.0"]


def test_a_text_that_is_no_value_is_a_problem_too(state: PanelState) -> None:
    state.set("lr_updates", Unreadable("[1,", "expected YAML"))
    assert state.problem_of("lr_updates") == "expected YAML"


def test_a_fix_is_one_step_that_can_be_undone(state: PanelState) -> None:
    before = state.recipe
    state.apply({"max_epochs": 60, "ema": True})
    assert (state.training_hyperparams.max_epochs, state.training_hyperparams.ema) == (60, True)
    assert state.undo_label == "max_epochs = 60; ema = true"
    state.undo()
    assert state.recipe == before
    assert state.undo_label == ""


def test_undo_with_nothing_to_undo_changes_nothing(state: PanelState) -> None:
    before = state.recipe
    state.undo()
    assert state.recipe == before


def test_a_fix_that_is_not_acceptable_changes_nothing(state: PanelState) -> None:
    before = state.recipe
    with pytest.raises(HyperparamsError):
        state.apply({"max_epochs": 0})
    assert (state.recipe, state.undo_label) == (before, "")


def test_findings_follow_each_change(state: PanelState, one_rule: None) -> None:
    state.set("torch_compile", True)
    assert [finding.code for finding in state.findings] == ["XX101"]
    state.set("torch_compile", False)
    assert state.findings == ()


def test_facts_from_a_thread_refine_the_findings(state: PanelState, one_rule: None) -> None:
    state.set("torch_compile", True)
    seen: list[Any] = []
    state.observe(lambda change: seen.append(change["new"]), "machine")
    gather = lambda recipe: Knowledge(machine={"cores": 2}, facts=gather_facts(recipe))  # noqa: E731
    thread = threading.Thread(target=state.learn, args=(gather,))
    thread.start()
    thread.join()
    assert seen == [{"cores": 2}]
    assert state.facts_are_current


def test_facts_that_cannot_be_found_out_are_named_and_the_rules_go_on(state: PanelState, one_rule: None) -> None:
    def gather(_recipe: Recipe) -> Any:
        raise OSError("no such disk")

    with pytest.raises(OSError, match="no such disk"):
        state.learn(gather)
    assert state.ignorance == "OSError: no such disk"
    state.set("torch_compile", True)
    assert [finding.code for finding in state.findings] == ["XX101"]


def test_an_override_reaches_what_the_form_does_not(state: PanelState) -> None:
    state.override("dataset_params.train_dataloader_params.batch_size=32 training_hyperparams.ema=True")
    assert state.recipe.dataset_params["train_dataloader_params"]["batch_size"] == 32
    assert state.training_hyperparams.ema
    state.undo()
    assert not state.training_hyperparams.ema


def test_another_recipe_can_be_chosen_and_undone(state: PanelState, recipe: Recipe) -> None:
    state.set("max_epochs", 3)
    state.choose("digits_dscnn")
    assert state.recipe == recipe
    state.undo()
    assert state.training_hyperparams.max_epochs == 3


def test_a_recipe_that_is_not_there_leaves_the_present_one(state: PanelState) -> None:
    before = state.recipe
    with pytest.raises(ValueError, match="no_such_recipe"):
        state.choose("no_such_recipe")
    assert state.recipe == before


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1, "0.1"), ((1, 2), "[1, 2]"), ({"a": 1}, "{a: 1}"), ("SGD", "SGD"), (None, "null"), (True, "true")],
)
def test_values_are_shown_as_yaml(value: object, text: str) -> None:
    assert show(value) == text


def test_a_fix_of_a_nested_value_keeps_its_neighbours(state: PanelState) -> None:
    state.set("ema_params.beta", 20.0)
    state.apply({"ema_params.decay_type": "threshold"})
    assert (state.in_force("ema_params.beta"), state.in_force("ema_params.decay_type")) == (20.0, "threshold")


def test_a_model_that_cannot_be_built_hides_no_other_fact(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_model(_recipe: Recipe) -> Any:
        raise ValueError("no such model")

    monkeypatch.setattr(Recipe, "build_model", build_model)
    known = gather_all(recipe)
    assert known.ignorance == "the model cannot be built (ValueError: no such model)"
    assert known.machine["cores"] >= 1
    assert known.facts.device_type is not None
