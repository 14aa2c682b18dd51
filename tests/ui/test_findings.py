from typing import Any

import pytest

from sgnb.pitfalls import Finding
from sgnb.recipes import Recipe
from sgnb.ui.findings import findings_html, pitfalls_panel
from sgnb.ui.state import PanelState


@pytest.fixture
def state(recipe: Recipe) -> PanelState:
    return PanelState(recipe)


def buttons(panel: Any) -> list[Any]:
    """Return the fix buttons, then Undo."""
    fixes, undo = panel.children[1].children
    return [*fixes.children, undo]


def test_a_finding_appears_with_its_fix_and_both_vanish_with_its_cause(state: PanelState, one_rule: None) -> None:
    panel = pitfalls_panel(state)
    state.set("torch_compile", True)
    assert "Warning XX101: A rule of this test" in panel.children[0].value
    assert [button.description for button in buttons(panel)] == [
        "Fix XX101: torch_compile = false",
        "Undo: torch_compile = true",
    ]
    state.set("torch_compile", False)
    assert "XX101" not in panel.children[0].value
    assert len(buttons(panel)) == 1


def test_fix_applies_and_undo_takes_it_back(state: PanelState, one_rule: None) -> None:
    panel = pitfalls_panel(state)
    state.set("torch_compile", True)
    buttons(panel)[0].click()
    assert not state.training_hyperparams.torch_compile
    buttons(panel)[-1].click()
    assert state.training_hyperparams.torch_compile
    assert "XX101" in panel.children[0].value


def test_the_findings_are_a_live_region(state: PanelState) -> None:
    assert pitfalls_panel(state).children[0].value.startswith('<div role="status" aria-live="polite"')


def test_the_panel_says_that_it_does_not_know_the_machine_yet(state: PanelState) -> None:
    panel = pitfalls_panel(state)
    assert "Looking at this machine and this model…" in panel.children[0].value
    state.machine = {"cores": 2}
    assert "Looking" not in panel.children[0].value


def test_input_to_correct_is_announced(state: PanelState) -> None:
    panel = pitfalls_panel(state)
    state.set("max_epochs", 0)
    assert "training_hyperparams.max_epochs: expected at least 1, got 0" in panel.children[0].value


def test_texts_of_a_finding_are_escaped_and_only_web_addresses_are_links() -> None:
    evil = "<script>alert(1)</script>"
    finding = Finding(
        code="XX102",
        severity="warning",
        title=evil,
        reason=evil,
        evidence=evil,
        fix=None,
        advice=evil,
        source="javascript:alert(1)",
        field="ema",
    )
    text = findings_html([finding])
    assert "<script>" not in text
    assert "href" not in text


def test_undo_is_disabled_when_there_is_nothing_to_undo(state: PanelState) -> None:
    undo = buttons(pitfalls_panel(state))[-1]
    assert (undo.disabled, undo.description) == (True, "Undo")
