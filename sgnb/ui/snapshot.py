"""What remains of a panel where there is no kernel: pure functions from what it knows to HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sgnb.history import History, html_table
from sgnb.plots import curve_svg, timing_svg
from sgnb.ui.findings import findings_html
from sgnb.ui.state import label_of, show

if TYPE_CHECKING:
    from sgnb.bench import Comparison
    from sgnb.pitfalls import Finding
    from sgnb.recipes import Recipe

MAX_ROWS = 20


def heading(text: str, level: int = 3) -> str:
    """Return a heading that screen readers know as one, at the size of the interface's text."""
    size = {2: 18, 3: 14}.get(level, 13)
    style = f"font-size:{size}px;font-weight:600;margin:10px 0 4px;line-height:1.3"
    return f'<div role="heading" aria-level="{level}" style="{style}">{html.escape(text)}</div>'


def epochs_html(history: History) -> str:
    """Return the table of a run's epochs: seconds as the benchmark splits them, then losses and metrics."""
    rows = history.rows()
    metrics = [name for name in history.columns if name.startswith("valid/")]
    columns = {
        "epoch": "epoch",
        "train_seconds": "train s",
        "valid_seconds": "valid s",
        "train_loader_wait_seconds": "loader wait s",
        "compile_seconds": "compile s",
        "samples_per_second": "samples/s",
        "train_loss": "train loss",
        "valid_loss": "valid loss",
        **{name: name for name in metrics},
    }
    shown = [[row[name] for name in columns] for row in rows[-MAX_ROWS:]]
    caption = "Epochs" if len(rows) <= MAX_ROWS else f"The last {MAX_ROWS} of {len(rows)} epochs"
    return _scrolling(html_table(list(columns.values()), shown, caption=caption))


def arms_html(arms: Mapping[str, History]) -> str:
    """Return the table of a comparison that is going on: seconds of each epoch, arm beside arm."""
    seconds = {name: {row["epoch"]: row["epoch_seconds"] for row in history.rows()} for name, history in arms.items()}
    epochs = sorted({epoch for column in seconds.values() for epoch in column})
    rows = [[epoch, *(seconds[name].get(epoch) for name in arms)] for epoch in epochs[-MAX_ROWS:]]
    return _scrolling(html_table(["epoch", *(f"{name} s" for name in arms)], rows, caption="Seconds of each epoch"))


def verdict_html(comparison: Comparison) -> str:
    """Return what a comparison found: the sentence, then the numbers behind it."""
    header = ["arm", "median s", "improvement %", "95 % interval", "compile s", "repaid after epochs"]
    rows: list[list[object]] = [[comparison.baseline, comparison.median_seconds(comparison.baseline), *(["–"] * 4)]]
    for arm in comparison.others:
        interval = comparison.interval(arm)
        between = "too few epochs" if interval is None else f"{interval[0]:.1f} to {interval[1]:.1f}"
        epochs = comparison.break_even_epochs(arm)
        row = [arm, comparison.median_seconds(arm), f"{comparison.improvement_percent(arm):.1f}", between]
        rows.append([*row, comparison.compile_seconds(arm), "never" if epochs is None else math.ceil(epochs)])
    table = _scrolling(html_table(header, rows, caption="The comparison"))
    return f"<p><b>{html.escape(comparison.verdict)}</b></p>{table}"


def results_html(arms: Mapping[str, History], comparison: Comparison | None = None) -> str:
    """Return tables and charts of what has been measured so far; empty before the first epoch has ended."""
    ready = {name: history for name, history in arms.items() if len(history)}
    if not ready:
        return ""
    parts = [verdict_html(comparison)] if comparison else []
    parts.append(f'<div style="max-width:760px">{timing_svg(ready)}</div>')
    if len(ready) == 1 and len(arms) == 1:
        (history,) = ready.values()
        parts.append(epochs_html(history))
        losses = {name.replace("_", " "): history[name] for name in ("train_loss", "valid_loss")}
        parts.append(f'<div style="max-width:760px">{curve_svg(losses, "Loss")}</div>')
    else:
        parts.append(arms_html(ready))
    return "".join(parts)


def settings_html(recipe: Recipe) -> str:
    """Return the table of the values that differ from the defaults."""
    changed = recipe.training_hyperparams.changed()
    rows = [[name, show(value)] for name, value in changed.items()]
    table = html_table(["training_hyperparams", "value"], rows, caption="Settings other than the defaults")
    return table if rows else "<p>All settings are the defaults.</p>"


def snapshot_html(
    recipe: Recipe,
    findings: Sequence[Finding],
    arms: Mapping[str, History],
    *,
    status: str,
    comparison: Comparison | None = None,
) -> str:
    """Return the whole panel as a page to read."""
    parts = [heading(f"sgnb: recipe {label_of(recipe)}", 2)]
    if recipe.description:
        parts.append(f"<p>{html.escape(recipe.description)}</p>")
    parts += [settings_html(recipe), _code(recipe)]
    if findings:
        parts += [heading("Findings"), findings_html(findings)]
    results = results_html(arms, comparison)
    if results:
        parts += [heading(f"Last {'comparison' if len(arms) > 1 else 'run'}: {status}"), results]
    parts.append("<p><small>A picture of the panel. Run the cell for the one that works.</small></p>")
    return f'<div class="sgnb-snapshot">{"".join(parts)}</div>'


def _code(recipe: Recipe) -> str:
    return f'<pre style="white-space:pre-wrap">{html.escape(export_text(recipe.to_command))}</pre>'


def export_text(write: Any) -> str:
    """Return what `write()` gives, or its reason why this recipe cannot be written so."""
    try:
        return str(write())
    except ValueError as error:  # A Python object among the values: YAML and the command line cannot hold it.
        return "\n".join(f"# {line}" for line in str(error).splitlines())


def _scrolling(table: str) -> str:
    return f'<div style="overflow-x:auto">{table}</div>'
