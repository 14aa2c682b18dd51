"""The way out: YAML, Python and a command that repeat what the form says, and a file to keep."""

from __future__ import annotations

import html
import threading
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from sgnb.recipes import save_recipe
from sgnb.ui.guard import Guard
from sgnb.ui.snapshot import export_text
from sgnb.ui.state import PanelState, label_of
from sgnb.ui.worker import Worker


def export_panel(state: PanelState, guard: Guard | None = None) -> Any:
    """Draw the three texts, always in step with `state`, and Save recipe."""
    guard, own = guard or Guard(), guard is None
    writers = {"Command": "to_command", "YAML": "to_yaml", "Python": "to_python"}
    areas = {title: _area(title, 3 if title == "Command" else 9) for title in writers}
    name = widgets.Text(description="File", style={"description_width": "initial"}, continuous_update=False)
    save = widgets.Button(
        description="Save recipe", tooltip="Write the recipe as a YAML file", layout={"width": "auto"}
    )
    said = widgets.HTML()
    saved: set[Path] = set()
    texts: dict[str, str] = {}
    lock = threading.RLock()

    def put_back(_change: object = None) -> None:
        with lock:
            for title, text in texts.items():
                areas[title].value = text

    def write() -> None:
        # Composing the base recipe takes a tenth of a second or more, which no click should wait for.
        recipe = state.recipe
        written = {title: export_text(getattr(recipe, method)) for title, method in writers.items()}
        with lock:
            texts.update(written)
        put_back()

    def renamed(_change: object = None) -> None:
        name.value = f"{label_of(state.base)}_edited.yaml"

    def save_file(_button: object) -> None:
        path = Path(name.value.strip()).expanduser()
        said.value = ""
        said.value = _saved(save_to(state, path, saved))

    for area in areas.values():
        # There is no read-only Textarea, and a disabled one can be neither focused nor copied from with the keyboard.
        area.observe(guard(put_back), "value")
    save.on_click(guard(save_file))
    worker = Worker(guard(write, user_action=False), "sgnb-export")
    state.observe(worker.ask, "recipe")
    state.observe(renamed, "base")
    renamed()
    worker.ask()
    row = widgets.Box([name, save], layout=widgets.Layout(flex_flow="row wrap"))
    grid = widgets.GridBox(
        [areas["YAML"], areas["Python"]],
        layout=widgets.Layout(grid_template_columns="repeat(auto-fit, minmax(min(100%, 300px), 1fr))", grid_gap="10px"),
    )
    return widgets.VBox(
        [areas["Command"], grid, row, said, *([guard.notice] if own else [])], layout=widgets.Layout(width="auto")
    )


def save_to(state: PanelState, path: Path, written: set[Path]) -> Path:
    """Write the recipe in force to `path`. A file that is not one of `written` is not replaced.

    Raises:
        ValueError: when there is no file name, or the file exists already.
    """
    if path.name in ("", ".") or path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"expected a file name that ends in .yaml, got {str(path)!r}")
    whole = path.resolve()
    if whole.exists() and whole not in written:
        raise ValueError(f"{path} exists already; choose another name, or remove it first")
    save_recipe(state.recipe, path)
    written.add(whole)
    return whole


def _saved(path: Path) -> str:
    return f'<div role="status" aria-live="polite">Saved as {html.escape(str(path))}</div>'


def _area(title: str, rows: int) -> Any:
    return widgets.Textarea(
        description=title,
        rows=rows,
        continuous_update=False,
        style={"description_width": "initial"},
        layout=widgets.Layout(width="auto"),
    )
