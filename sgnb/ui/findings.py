"""What the settings risk on this machine: the findings, read out when they change, with a button for each fix."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from sgnb.ui.guard import Guard
from sgnb.ui.state import PanelState, show

if TYPE_CHECKING:
    from sgnb.pitfalls import Finding

SEVERITY_COLORS = {
    "error": "var(--jp-error-color1,#c62828)",
    "warning": "var(--jp-warn-color1,#ef6c00)",
    "information": "var(--jp-info-color1,#0288d1)",
}


def pitfalls_panel(state: PanelState, guard: Guard | None = None) -> Any:
    """Draw the findings of `state`, a button for each fix, and Undo."""
    guard, own = guard or Guard(), guard is None
    listing = widgets.HTML(layout=widgets.Layout(width="auto"))
    fixes = widgets.Box(layout=widgets.Layout(flex_flow="row wrap", width="auto"))
    undo = widgets.Button(description="Undo", layout=widgets.Layout(width="auto", max_width="100%"))
    row = widgets.Box([fixes, undo], layout=widgets.Layout(flex_flow="row wrap", width="auto"))
    undo.on_click(guard(lambda _button: state.undo()))

    def refresh(_change: object = None) -> None:
        with state.lock:
            listing.value = status_html(state)
            wanted = [finding for finding in state.findings if finding.fix]
            labels = [fix_label(finding) for finding in wanted]
            if labels != [button.description for button in fixes.children]:
                old, fixes.children = fixes.children, [_fix_button(finding, state, guard) for finding in wanted]
                for button in old:
                    button.layout.close()
                    button.style.close()
                    button.close()
            undo.description = f"Undo: {_short(state.undo_label)}" if state.undo_label else "Undo"
            undo.disabled = not state.undo_label

    state.observe(refresh, ["findings", "problems", "machine", "ignorance", "undo_label"])
    refresh()
    return widgets.VBox([listing, row, *([guard.notice] if own else [])], layout=widgets.Layout(width="auto"))


def _fix_button(finding: Finding, state: PanelState, guard: Guard) -> Any:
    fix = dict(finding.fix or {})
    layout = widgets.Layout(width="auto", max_width="100%")
    button = widgets.Button(description=fix_label(finding), tooltip=finding.title, layout=layout)
    button.on_click(guard(lambda _button: state.apply(fix)))
    return button


def fix_label(finding: Finding) -> str:
    """Return the text of a fix button: the values that it sets."""
    return f"Fix {finding.code}: {patch_text(finding.fix or {})}"


def patch_text(fix: Mapping[str, Any]) -> str:
    """Return a fix as `name = value`."""
    return _short(", ".join(f"{name} = {show(value) or 'None'}" for name, value in fix.items()))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "…"


def status_html(state: PanelState) -> str:
    """Return the live region: input to correct, then the findings, then what is not known yet."""
    problems = "".join(
        f'<li style="color:{SEVERITY_COLORS["error"]}"><b>Not in force</b>: {html.escape(str(problem))}</li>'
        for problem in state.problems
    )
    waiting = "" if state.machine else "<p>Looking at this machine and this model…</p>"
    if state.ignorance:
        waiting = f"<p>Judged without all the facts: {html.escape(state.ignorance)}</p>"
    parts = f"<ul>{problems}</ul>" if problems else ""
    parts += findings_html(state.findings) or ("" if waiting else "<p>Nothing to warn of.</p>")
    return f'<div role="status" aria-live="polite" style="line-height:1.45">{parts}{waiting}</div>'


def findings_html(findings: Sequence[Finding]) -> str:
    """Return a list of findings: severity in words, reason, evidence, advice and source."""
    return "".join(_finding_html(finding) for finding in findings)


def _finding_html(finding: Finding) -> str:
    color = SEVERITY_COLORS.get(finding.severity, "currentColor")
    head = html.escape(f"{finding.severity.capitalize()} {finding.code}: {finding.title}")
    texts = [html.escape(text) for text in (finding.reason, finding.advice) if text]
    evidence = f"<br><small>Seen here: {html.escape(finding.evidence)}</small>" if finding.evidence else ""
    return (
        f'<div style="border-left:3px solid {color};padding:2px 0 2px 10px;margin:8px 0;overflow-wrap:anywhere">'
        f"<b>{head}</b><br>{' '.join(texts)}{evidence}{_source(finding.source)}</div>"
    )


def _source(source: str) -> str:
    text = html.escape(source)
    if source.startswith(("https://", "http://")):
        link = (
            f'<a href="{text}" target="_blank" rel="noopener noreferrer" style="text-decoration:underline">{text}</a>'
        )
        return f"<br><small>Source: {link}</small>"
    return f"<br><small>Source: {text}</small>" if source else ""
