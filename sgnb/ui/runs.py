"""Run, Compare and Stop, and what is seen meanwhile: progress, timings, curves, the log."""

from __future__ import annotations

import html
import time
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from sgnb.hyperparams import HyperparamsError
from sgnb.ui.guard import Guard
from sgnb.ui.run_state import Kind, RunState
from sgnb.ui.snapshot import results_html
from sgnb.ui.state import PanelState

_WIDE = {"width": "auto"}
_LAST_WORDS = 15


def run_panel(state: PanelState, runs: RunState, guard: Guard | None = None) -> Any:
    """Draw the run that `runs` follows, with the buttons that start one from `state`."""
    guard, own = guard or runs.guard, guard is None
    return _RunView(state, runs, guard).box(guard.notice if own else None)


class _RunView:
    """The widgets of a run; all are written by `draw`, under one lock."""

    def __init__(self, state: PanelState, runs: RunState, guard: Guard) -> None:
        self.state, self.runs = state, runs
        self.run = _button("Run", "Train with these settings, in a process of its own", "success")
        self.compare = _button("Compare baseline and compile", "Train without and with torch.compile, in turns", "")
        self.stop = _button("Stop", "End after the current batch, with a checkpoint", "warning")
        self.status = widgets.HTML()
        self.line = widgets.HTML()
        self.epochs = _bar("Epochs")
        self.batches = _bar("Batches")
        self.results = widgets.HTML(layout=widgets.Layout(**_WIDE))
        self.log = widgets.HTML(layout=widgets.Layout(**_WIDE))
        self.log_fold = widgets.Accordion([self.log], titles=("Log",), layout=widgets.Layout(**_WIDE))
        self._drawn: tuple[Any, ...] = ()
        self.run.on_click(guard(lambda _button: self._start("run")))
        self.compare.on_click(guard(lambda _button: self._start("compare")))
        self.stop.on_click(guard(lambda _button: runs.stop()))
        runs.observe(self.draw, ["status", "revision"])
        self.draw()

    def box(self, notice: Any) -> Any:
        """Return the widgets in their order."""
        buttons = widgets.Box([self.run, self.compare, self.stop], layout=widgets.Layout(flex_flow="row wrap"))
        parts = [buttons, self.status, self.line, self.epochs, self.batches, self.results, self.log_fold]
        return widgets.VBox([*parts, *([notice] if notice else [])], layout=widgets.Layout(**_WIDE))

    def _start(self, kind: Kind) -> None:
        if self.state.problems:
            raise HyperparamsError(self.state.problems)
        errors = [finding for finding in self.state.findings if finding.severity == "error"]
        if errors:
            reasons = "\n".join(f"{finding.code}: {finding.title}. {finding.advice}" for finding in errors)
            raise ValueError(f"not started, because this run cannot succeed:\n{reasons}")
        self.runs.start(self.state.recipe, kind)

    def draw(self, _change: object = None) -> None:
        """Show what is new."""
        with self.runs.lock:
            active = self.runs.is_active
            self.run.disabled = self.compare.disabled = active
            self.stop.disabled = not active
            self.stop.description = "Kill (loses this epoch)" if self.runs.status == "stopping" else "Stop"
            self.status.value = status_html(self.runs)
            self.line.value = line_html(self.runs, time.time())
            self._draw_bars()
            ended = tuple((name, len(history)) for name, history in self.runs.arms.items())
            drawn = (id(self.runs.run), ended, self.runs.status)
            if drawn != self._drawn:  # The charts change with an epoch, not with a batch.
                self._drawn = drawn
                self.results.value = results_html(self.runs.arms, self.runs.comparison)
            self.log.value = log_html(self.runs.log)
            self.log_fold.layout.display = None if self.runs.log else "none"

    def _draw_bars(self) -> None:
        all_progress = [tail.progress for tail in self.runs.tails.values()]
        total = sum(progress.max_epochs for progress in all_progress)
        latest = max(all_progress, key=lambda p: (p.completed_epochs, p.batch), default=None)
        visible = None if total and self.runs.is_active else "none"
        self.epochs.layout.display = self.batches.layout.display = visible
        _fill(self.epochs, sum(progress.completed_epochs for progress in all_progress), total)
        if latest is not None:
            _fill(self.batches, latest.batch, latest.num_batches)


def _button(text: str, tooltip: str, style: str) -> Any:
    layout = widgets.Layout(width="auto", min_width="90px")
    return widgets.Button(description=text, tooltip=tooltip, button_style=style, layout=layout)


def _bar(name: str) -> Any:
    return widgets.IntProgress(description=name, style={"description_width": "70px"}, layout=widgets.Layout(**_WIDE))


def _fill(bar: Any, value: int, total: int) -> None:
    with bar.hold_sync():
        bar.max = max(total, 1)
        bar.value = min(value, bar.max)
        bar.description = bar.description.split(" ")[0]


_SENTENCES = {
    "idle": "No run yet.",
    "running": "Running.",
    "stopping": "Stopping after the current batch…",
    "finished": "Finished.",
    "stopped": "Stopped, with a checkpoint.",
    "failed": "Failed.",
    "died": "The process died without a word of its own.",
}


def status_html(runs: RunState) -> str:
    """Return the live region: the state of the run, its directory, and its last words if it ended badly."""
    where = f"<br><small>{html.escape(_near(Path(runs.run.run_dir)))}</small>" if runs.run else ""
    words = ""
    if runs.status in ("failed", "died"):
        last = "\n".join(runs.log.splitlines()[-_LAST_WORDS:]) or "It wrote nothing into its log."
        words = (
            '<div>Its last words:<pre style="color:var(--jp-error-color1,#c62828);white-space:pre-wrap;'
            f'max-height:240px;overflow:auto">{html.escape(last)}</pre></div>'
        )
    return (
        f'<div role="status" aria-live="polite" style="overflow-wrap:anywhere"><b>{_SENTENCES[runs.status]}</b>'
        f"{where}{words}</div>"
    )


def _near(path: Path) -> str:
    """Return a path as it is seen from the notebook's folder, where it lies below that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def line_html(runs: RunState, now: float) -> str:
    """Return what goes on now: one line for a run, one for each arm of a comparison."""
    if runs.status == "idle":
        return ""
    if runs.kind == "compare" and not runs.tails:
        return "starting the processes…" if runs.is_active else ""
    names = {name: f"{name}: " if runs.kind == "compare" else "" for name in runs.tails}
    lines = [html.escape(names[name] + tail.progress.line(now)) for name, tail in runs.tails.items()]
    return '<div style="overflow-wrap:anywhere">' + "<br>".join(lines) + "</div>"


def log_html(log: str) -> str:
    """Return the end of the log, escaped."""
    return (
        '<pre tabindex="0" aria-label="End of the log" style="max-height:260px;overflow:auto;white-space:pre-wrap;'
        f'font-size:12px;line-height:1.35">{html.escape(log)}</pre>'
    )
