"""`panel()`: the whole of sgnb with the mouse. A panel is no widget, so it can also be read where no kernel is."""

from __future__ import annotations

import html
import uuid
from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets
from IPython.display import display, update_display

from sgnb.hyperparams import TrainingHyperparams
from sgnb.recipes import Recipe, list_recipes
from sgnb.ui.export import export_panel
from sgnb.ui.findings import pitfalls_panel
from sgnb.ui.form import hyperparams_panel
from sgnb.ui.guard import Guard
from sgnb.ui.run_state import RunState
from sgnb.ui.runs import run_panel
from sgnb.ui.snapshot import heading, snapshot_html
from sgnb.ui.state import PanelState, label_of
from sgnb.ui.worker import Worker

_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
_PANELS: dict[str, Panel] = {}
_CARD = {
    "border": "1px solid var(--jp-border-color2,#ddd)",
    "padding": "4px 14px 12px",
    "margin": "0",
    "width": "auto",
    "overflow": "hidden",
}


def panel(recipe: str | Recipe = "digits_dscnn", key: str = "main") -> Panel:
    """Return a panel for `recipe`. Another one of the same `key` is closed; its run is found again and goes on.

    Raises:
        ValueError: when there is no such recipe, or it is not valid.
    """
    state = PanelState(recipe)
    earlier = _PANELS.pop(key, None)
    if earlier is not None:
        earlier.close()
    _PANELS[key] = opened = Panel(state, key)
    return opened


class Panel:
    """Settings, findings, runs and exports of one recipe, drawn from `state` and `runs`."""

    def __init__(self, state: PanelState, key: str = "main") -> None:
        self.key, self.state, self.guard = key, state, Guard()
        self.runs = RunState(key, self.guard)
        self.display_id = uuid.uuid4().hex
        self._displayed = False
        self.widget = self._draw()
        self.runs.on_end = self.refresh_snapshot
        self.guard(lambda: self.runs.find(state.recipe.ckpt_root_dir))()
        self.facts = Worker(self.guard(self._learn, user_action=False), f"sgnb-facts-{key}")
        self.facts.ask()
        state.observe(self.facts.ask, "recipe")

    @property
    def recipe(self) -> Recipe:
        """The recipe in force."""
        recipe: Recipe = self.state.recipe
        return recipe

    @property
    def training_hyperparams(self) -> TrainingHyperparams:
        """The hyperparameters in force."""
        return self.state.training_hyperparams

    def close(self) -> None:
        """Take the panel down: its threads end, its widgets are freed. A run goes on, for the next panel to find."""
        self.facts.close()
        self.runs.close()
        self.state.unobserve_all()
        self.runs.unobserve_all()
        for part in widget_tree(self.widget):
            part.close()
        if _PANELS.get(self.key) is self:
            del _PANELS[self.key]

    def snapshot(self) -> str:
        """Return the panel as HTML that needs no kernel."""
        state, runs = self.state, self.runs
        return snapshot_html(state.recipe, state.findings, runs.arms, status=runs.status, comparison=runs.comparison)

    def refresh_snapshot(self) -> None:
        """Replace what the notebook keeps of the panel."""
        if self._displayed:
            update_display(self._repr_mimebundle_(), display_id=self.display_id, raw=True)

    def __repr__(self) -> str:
        return f"<Panel {self.key!r}: recipe {label_of(self.state.base)}>"

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self.snapshot()}
        if self.widget.comm is None:  # Closed: there is nothing alive to show.
            return bundle
        return {**bundle, _WIDGET_MIME: {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}}

    def _ipython_display_(self) -> None:
        self._displayed = True
        display(self._repr_mimebundle_(), display_id=self.display_id, raw=True)

    def _learn(self) -> None:
        if not self.state.facts_are_current:
            self.state.learn()

    def _draw(self) -> Any:
        state, guard = self.state, self.guard
        settings = _card("Settings", [hyperparams_panel(state, guard)])
        findings = _card("Findings", [pitfalls_panel(state, guard)])
        run = _card("Run", [run_panel(state, self.runs, guard)])
        export = _card("Take away", [export_panel(state, guard)])
        right = widgets.VBox([findings, run], layout=widgets.Layout(width="auto", grid_gap="10px", display="grid"))
        right.layout.align_content = "flex-start"
        columns = widgets.GridBox(
            [settings, right],
            layout=widgets.Layout(
                grid_template_columns="repeat(auto-fit, minmax(min(100%, 480px), 1fr))", grid_gap="10px", width="auto"
            ),
        )
        parts = [_chooser(state, guard), guard.notice, columns, export]
        return widgets.VBox(parts, layout=widgets.Layout(width="auto", display="grid", grid_gap="10px"))


def _card(title: str, children: list[Any]) -> Any:
    return widgets.VBox([widgets.HTML(heading(title)), *children], layout=widgets.Layout(**_CARD))


def _chooser(state: PanelState, guard: Guard) -> Any:
    """Return the row that chooses a recipe and says what this machine is."""
    names = list(dict.fromkeys([label_of(state.base), *list_recipes()]))
    style = {"description_width": "initial"}
    recipe = widgets.Dropdown(options=names, value=label_of(state.base), description="Recipe", style=style)
    override = widgets.Text(
        description="Override",
        placeholder="name=value, as on the command line",
        continuous_update=False,
        style=style,
        layout=widgets.Layout(width="min(100%, 380px)"),
    )
    about = widgets.HTML(layout=widgets.Layout(width="auto"))
    drawing = False

    def chosen(change: Any) -> None:
        if not drawing:
            try:
                state.choose(change["new"])
            finally:
                refresh()

    def overridden(change: Any) -> None:
        if change["new"].strip():
            state.override(change["new"])
            override.value = ""

    def refresh(_change: object = None) -> None:
        nonlocal drawing
        drawing = True
        try:
            recipe.value = label_of(state.base)
        finally:
            drawing = False
        about.value = about_html(state)

    recipe.observe(guard(chosen), "value")
    override.observe(guard(overridden), "value")
    state.observe(refresh, ["base", "machine"])
    refresh()
    row = widgets.Box([recipe, override], layout=widgets.Layout(flex_flow="row wrap"))
    return widgets.VBox([row, about], layout=widgets.Layout(**_CARD))


def about_html(state: PanelState) -> str:
    """Return what the recipe is and what this machine has."""
    text = f"{html.escape(state.base.description)}<br>" if state.base.description else ""
    muted = "color:var(--jp-ui-font-color2,#666);font-size:12px"
    machine = html.escape(machine_text(state.machine))
    return f'<div style="line-height:1.4">{text}<span style="{muted}">{machine}</span></div>'


def machine_text(machine: dict[str, Any] | None) -> str:
    """Return one line on the machine."""
    if machine is None:
        return "This machine: not known yet"
    devices = ", ".join(f"{device['name']} ({device['memory_gib']:.0f} GiB)" for device in machine.get("devices", []))
    parts = [
        f"{machine.get('cores')} CPU cores, {machine.get('memory_gib', 0):.0f} GiB",
        devices or "no GPU",
        f"torch {machine.get('torch')}",
        machine.get("compiler_problem") or "can compile",
    ]
    return "This machine: " + "; ".join(parts)


def widget_tree(root: Any) -> Iterator[Any]:
    """Yield `root` and everything below it, layouts and styles too: closing a box closes none of them."""
    for child in getattr(root, "children", ()):
        yield from widget_tree(child)
    for name in ("layout", "style"):
        part = getattr(root, name, None)
        if isinstance(part, widgets.Widget):
            yield part
    yield root
