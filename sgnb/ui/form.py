"""The form of `training_hyperparams`, derived from the record: a field that is declared there stands here."""

from __future__ import annotations

import functools
import html
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import ipywidgets as widgets
import yaml
from pydantic import BaseModel

from sgnb.hyperparams import TrainingHyperparams
from sgnb.ui.findings import SEVERITY_COLORS
from sgnb.ui.guard import Guard
from sgnb.ui.state import PanelState, Unreadable, show

if TYPE_CHECKING:
    from sgnb.pitfalls import Finding

_MUTED = "color:var(--jp-ui-font-color2,#666);font-size:12px;line-height:1.35"
_WRONG = "color:var(--jp-error-color1,#c62828)"
_MARK = "color:var(--jp-brand-color1,#1976d2);font-weight:600"
_NONE = "(none)"  # A Dropdown shows nothing at all when its value is None.
_STYLE = {"description_width": "initial"}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One row of the form."""

    name: str  # Dotted, without `training_hyperparams.`.
    annotation: Any
    description: str
    group: str
    unit: str
    main: bool
    bounds: tuple[float | None, float | None]

    @property
    def label(self) -> str:
        """The name that people write in YAML, and the unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True, kw_only=True)
class Editor:
    """A widget, and how a value gets into it and out of it."""

    widget: Any
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def options() -> list[Option]:
    """Return the rows in the order of the record; a nested record gives one row for each of its fields."""
    found: list[Option] = []
    for name, field in TrainingHyperparams.model_fields.items():
        extra = typing.cast(dict[str, Any], field.json_schema_extra)
        group = str(extra["group"])
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for inner, spec in field.annotation.model_fields.items():
                found.append(_option(f"{name}.{inner}", spec, {"group": group}))
        else:
            found.append(_option(name, field, extra))
    return found


def _option(name: str, field: Any, extra: dict[str, Any]) -> Option:
    low = [getattr(bound, "ge", getattr(bound, "gt", None)) for bound in field.metadata]
    high = [getattr(bound, "le", getattr(bound, "lt", None)) for bound in field.metadata]
    return Option(
        name=name,
        annotation=field.annotation,
        description=field.description or "",
        group=extra["group"],
        unit=extra.get("unit", ""),
        main=extra.get("main", False),
        bounds=(next((b for b in low if b is not None), None), next((b for b in high if b is not None), None)),
    )


def hyperparams_panel(state: PanelState, guard: Guard | None = None) -> Any:
    """Draw the form of `state`. It keeps nothing of its own."""
    guard, own = guard or Guard(), guard is None
    rows = [_Row(option, state, guard) for option in options()]
    groups = list(dict.fromkeys(row.option.group for row in rows))
    folded = {group: [row for row in rows if row.option.group == group and not row.option.main] for group in groups}
    folded = {group: members for group, members in folded.items() if members}
    accordion = widgets.Accordion(
        [_grid(members) for members in folded.values()], layout=widgets.Layout(margin="14px 0 0")
    )

    def refresh(_change: object = None) -> None:
        for row in rows:
            row.refresh()
        for index, (group, members) in enumerate(folded.items()):
            changed = sum(state.is_changed(row.option.name) for row in members)
            wrong = sum(bool(row.problem) for row in members)
            marks = ([f"{changed} changed"] if changed else []) + ([f"{wrong} to correct"] if wrong else [])
            accordion.set_title(index, " · ".join([f"More of {group}", *marks]))

    state.observe(refresh, ["recipe", "pending", "problems", "findings"])
    refresh()
    box = [_grid([row for row in rows if row.option.main]), accordion, *([guard.notice] if own else [])]
    return widgets.VBox(box, layout=widgets.Layout(width="auto"))


def _grid(rows: list[_Row]) -> Any:
    layout = widgets.Layout(
        grid_template_columns="repeat(auto-fill, minmax(min(100%, 300px), 1fr))", grid_gap="8px 24px"
    )
    return widgets.GridBox([row.box for row in rows], layout=layout)


class _Row:
    """One option: its editor, and below it the help, the mark of a change and what is wrong."""

    def __init__(self, option: Option, state: PanelState, guard: Guard) -> None:
        self.option, self.state, self.problem = option, state, ""
        self.editor = editor_for(option)
        self.note = widgets.HTML(layout=widgets.Layout(margin="0"))
        self.box = widgets.VBox([self.editor.widget, self.note], layout=widgets.Layout(width="auto", overflow="hidden"))
        self._drawing = False
        self.editor.widget.observe(guard(self._edited), "value")

    def _edited(self, change: Any) -> None:
        if not self._drawing:
            self.state.set(self.option.name, self.editor.decode(change["new"]))

    def refresh(self) -> None:
        """Show the state; the widget's own observer is deaf meanwhile, so that nothing goes round."""
        with self.state.lock:
            name = self.option.name
            value = self.state.value(name)
            self._drawing = True
            try:
                if not (name in self.state.pending and isinstance(value, Unreadable)):
                    self.editor.widget.value = self.editor.encode(value)
            finally:
                self._drawing = False
            self.problem = self.state.problem_of(name)
            self.note.value = _note(self.option, self.state, self.problem)


def _note(option: Option, state: PanelState, problem: str) -> str:
    parts = [html.escape(option.description)]
    if state.is_changed(option.name):
        parts.append(f'<span style="{_MARK}">Changed; the recipe has {html.escape(_text(state, option))}.</span>')
    if problem:
        force = html.escape(show(state.in_force(option.name)) or "nothing")
        parts.append(f'<span role="alert" style="{_WRONG}"><b>{html.escape(problem)}</b>. In force: {force}.</span>')
    parts += [_warning(finding) for finding in state.findings if finding.field == option.name]
    return f'<div style="{_MUTED};overflow-wrap:anywhere">{"<br>".join(filter(None, parts))}</div>'


def _warning(finding: Finding) -> str:
    if finding.severity == "information":  # It is told in the list of findings, which is enough.
        return ""
    text = html.escape(f"{finding.severity.capitalize()} {finding.code}: {finding.title}")
    return f'<span style="color:{SEVERITY_COLORS[finding.severity]};font-weight:600">{text}</span>'


def _text(state: PanelState, option: Option) -> str:
    return show(state.in_force(option.name, state.base)) or "nothing"


def editor_for(option: Option) -> Editor:
    """Return the editor of an option, chosen by its type alone."""
    members, optional = _members(option.annotation)
    kind = members[0] if len(members) == 1 else None
    layout = widgets.Layout(width="auto")
    common = {"description": option.label, "style": _STYLE, "layout": layout}
    if kind is bool and not optional:
        return Editor(widget=widgets.Checkbox(indent=False, **common), encode=bool, decode=_same)
    if kind is bool or typing.get_origin(kind) is Literal:
        choices = [("True", True), ("False", False)] if kind is bool else [(v, v) for v in typing.get_args(kind)]
        choices = [("None", _NONE), *choices] if optional else choices
        widget = widgets.Dropdown(options=choices, value=choices[0][1], **common)
        return Editor(widget=widget, encode=_none_as_choice, decode=_choice_as_none)
    if kind in (int, float) and not optional:
        return Editor(widget=_number_widget(option, kind, common), encode=_same, decode=_same)
    names = [name for member in members if typing.get_origin(member) is Literal for name in typing.get_args(member)]
    if names:  # Or something else, such as a mapping.
        widget = widgets.Combobox(options=names, continuous_update=False, **common)
    else:
        widget = widgets.Text(continuous_update=False, **common)
    if kind is str:
        return Editor(widget=widget, encode=_text_or_empty, decode=functools.partial(_plain, optional))
    if kind is not Any and _is_callable(kind):
        widget.disabled, widget.placeholder = True, "a function: set it in Python"
        return Editor(widget=widget, encode=lambda value: "" if value is None else repr(value), decode=_same)
    empty = None if optional or not members else next((v for t, v in _EMPTY if t in map(_bare, members)), None)
    widget.placeholder = "None" if optional else ""
    return Editor(widget=widget, encode=_as_yaml, decode=functools.partial(_from_yaml, empty))


_EMPTY: list[tuple[Any, Any]] = [(dict, {}), (tuple, ())]


def _number_widget(option: Option, kind: Any, common: dict[str, Any]) -> Any:
    low, high = option.bounds
    if kind is int and low is not None and high is not None:
        return widgets.BoundedIntText(min=int(low), max=int(high), value=int(low), **common)
    # A bounded widget with one bound would silently change what was typed; here the record says why it is wrong.
    return widgets.IntText(**common) if kind is int else widgets.FloatText(**common)


def _members(annotation: Any) -> tuple[list[Any], bool]:
    """Return the members of a union without their metadata, and whether None is one of them."""
    if typing.get_origin(annotation) is Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [_members(part) for part in typing.get_args(annotation)]
        flat = [member for members, _ in parts for member in members]
        return [member for member in flat if member is not type(None)], type(None) in flat
    return [annotation], False


def _bare(annotation: Any) -> Any:
    return typing.get_origin(annotation) or annotation


def _is_callable(kind: Any) -> bool:
    return _bare(kind) is typing.get_origin(Callable[..., Any])


def _none_as_choice(value: Any) -> Any:
    return _NONE if value is None else value


def _choice_as_none(value: Any) -> Any:
    return None if value == _NONE else value


def _same(value: Any) -> Any:
    return value


def _text_or_empty(value: Any) -> str:
    return "" if value is None else str(value)


def _plain(optional: bool, text: str) -> str | None:
    return None if optional and not text.strip() else text.strip()


def _as_yaml(value: Any) -> str:
    return "" if value is None or value in ((), {}, []) else show(value)


def _from_yaml(empty: Any, text: str) -> Any:
    if not text.strip():
        return empty
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at character {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "cannot be read"
        return Unreadable(text, f"expected YAML such as 0.1, [1, 2] or {{a: 1}}, got {text!r} ({reason}{where})")
