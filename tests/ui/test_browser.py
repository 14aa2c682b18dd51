"""The panel in a real JupyterLab in Chromium. The tests go on from one another: they are one sitting of one person."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

NOTEBOOK = "panel.ipynb"
RUN_SECONDS = 60_000  # A process imports torch first; on two busy cores this takes its time.


@pytest.fixture(scope="module")
def page(lab: Any, lab_folder: Path) -> Page:
    """A page whose notebook has run `panel()`."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("from sgnb import panel\npanel()")],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, lab_folder / NOTEBOOK)
    lab.open(NOTEBOOK)
    lab.command("application:toggle-left-area")
    lab.run_all()
    lab.page.wait_for_selector(".widget-checkbox input")
    shown: Page = lab.page
    return shown


def status(page: Page, text: str | re.Pattern[str]) -> Locator:
    """Return the live region that contains `text`."""
    return page.get_by_role("status").filter(has_text=text)


def write(field: Locator, value: str) -> None:
    """Type a value and leave the field, as a person does."""
    field.fill(value)
    field.press("Tab")


def shows(page: Page, field: Locator, text: str, *, not_any_more: bool = False) -> None:
    """Wait until a text field holds `text`, or does not."""
    script = "([element, text, absent]) => element.value.includes(text) !== absent"
    page.wait_for_function(script, arg=[field.element_handle(), text, not_any_more])


def test_the_panel_shows_and_gets_to_know_the_machine(page: Page) -> None:
    for heading in ("Settings", "Findings", "Run", "Take away"):
        page.get_by_role("heading", name=heading, exact=True).wait_for()
    page.get_by_text("This machine:").filter(has_text="CPU cores").wait_for(timeout=RUN_SECONDS)
    assert page.locator("[role=alert]").count() == 0


def test_a_ticked_option_shows_its_finding_and_unticked_it_is_gone(page: Page) -> None:
    box = page.get_by_label("sync_bn", exact=True)
    box.check()
    finding = status(page, "SyncBN has nothing to synchronise in one process").first
    finding.wait_for()
    box.uncheck()
    finding.wait_for(state="detached")


def test_fix_changes_the_settings_and_undo_takes_it_back(page: Page) -> None:
    command = page.get_by_label("Command", exact=True)
    page.get_by_label("sync_bn", exact=True).check()
    fix = page.get_by_role("button", name=re.compile("^Fix .*sync_bn = false"))
    fix.wait_for()
    shows(page, command, "training_hyperparams.sync_bn=True")
    fix.click()
    shows(page, command, "training_hyperparams.sync_bn=True", not_any_more=True)
    page.get_by_role("button", name=re.compile("^Undo: ")).click()
    shows(page, command, "training_hyperparams.sync_bn=True")
    page.get_by_label("sync_bn", exact=True).uncheck()
    shows(page, command, "training_hyperparams.sync_bn=True", not_any_more=True)


def test_bad_input_says_why_and_the_command_keeps_the_old_value(page: Page) -> None:
    command = page.get_by_label("Command", exact=True)
    epochs = page.get_by_label("max_epochs (epochs)", exact=True)
    before = command.input_value()
    write(epochs, "-3")
    page.get_by_text("expected at least 1, got -3").first.wait_for()
    assert command.input_value() == before
    write(epochs, "40")
    shows(page, command, "training_hyperparams.max_epochs=40")
    shows(page, page.get_by_label("YAML", exact=True), "max_epochs: 40")
    page.get_by_text("expected at least 1").first.wait_for(state="detached")


def test_run_shows_timings_while_it_goes_on(page: Page, lab: Any) -> None:
    page.get_by_text("More of run", exact=False).first.click()
    write(page.get_by_label("max_train_batches (batches)", exact=True), "8")
    write(page.get_by_label("max_valid_batches (batches)", exact=True), "2")
    page.get_by_text("More of run", exact=False).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    status(page, "Running.").wait_for()
    page.locator(".jp-OutputArea svg[role=img], .widget-html svg").first.wait_for(timeout=RUN_SECONDS)
    page.get_by_text(re.compile("epoch [0-9]+ of 40")).first.wait_for()
    lab.screenshot("run-light-1600")


def test_after_a_reload_the_panel_is_back_and_still_streaming(page: Page, lab: Any) -> None:
    lab.command("docmanager:save")
    page.wait_for_timeout(1000)
    page.reload()
    page.wait_for_selector(".widget-checkbox input", timeout=RUN_SECONDS)
    assert page.get_by_label("max_epochs (epochs)", exact=True).input_value() == "40"
    rows = page.locator(".widget-html table tbody tr")
    rows.first.wait_for()
    seen = rows.count()
    page.wait_for_function(
        "(seen) => document.querySelectorAll('.widget-html table tbody tr').length > seen"
        " || document.body.innerText.includes('Finished.')",
        arg=seen,
        timeout=RUN_SECONDS,
    )


def test_stop_ends_the_run_with_a_checkpoint(page: Page, lab_folder: Path) -> None:
    stop = page.get_by_role("button", name="Stop", exact=True)
    if stop.is_enabled():
        stop.click()
    status(page, re.compile(r"Stopped, with a checkpoint\.|Finished\.")).wait_for(timeout=RUN_SECONDS)
    assert list(lab_folder.rglob("ckpt_latest.pth"))


def test_running_the_cell_again_closes_the_old_panel_and_finds_the_run(page: Page, lab: Any) -> None:
    lab.run_all()
    status(page, re.compile(r"Stopped, with a checkpoint\.|Finished\.")).wait_for()
    page.locator(".widget-html table tbody tr").first.wait_for()
    assert page.get_by_label("torch_compile", exact=True).count() == 1
    assert page.get_by_role("button", name="Run", exact=True).count() == 1


@pytest.mark.parametrize("theme", ["Light", "Dark"])
@pytest.mark.parametrize("width", [1000, 1600])
def test_it_can_be_looked_at(page: Page, lab: Any, theme: str, width: int) -> None:
    lab.theme(theme)
    path = lab.screenshot(f"panel-{theme.lower()}-{width}", width, 2400 if width == 1000 else 1700)
    assert path.stat().st_size > 20_000
    overflow = (
        "() => { const o = document.querySelector('.jp-OutputArea-output'); return o.scrollWidth - o.clientWidth; }"
    )
    assert page.evaluate(overflow) <= 1


def test_the_accessibility_tree_has_no_nameless_control(page: Page) -> None:
    tree = page.locator(".jp-OutputArea").first.aria_snapshot()
    nameless = re.findall(r"(?m)^\s*- (?:button|checkbox|textbox|combobox|spinbutton)(?::| \[.*\])?\s*$", tree)
    assert nameless == []


def test_the_saved_notebook_shows_the_result_without_a_kernel(page: Page, lab: Any, lab_folder: Path) -> None:
    lab.command("docmanager:save")
    page.wait_for_timeout(1500)
    notebook = nbformat.read(lab_folder / NOTEBOOK, as_version=4)
    (output,) = notebook.cells[0].outputs
    assert "widgets" not in notebook.metadata
    assert "<svg" in output["data"]["text/html"]
    assert len(output["data"]["text/html"]) < 200_000
    assert output["data"]["text/plain"] == "<Panel 'main': recipe digits_dscnn>"


def test_the_page_had_no_script_errors(lab: Any) -> None:
    assert lab.console_errors == []
