"""Pictures of a history: plotly figures to work with, and small SVGs that can be read anywhere, light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sgnb.history import History, shorten

if TYPE_CHECKING:
    import plotly.graph_objects as go

# (name, opacity): parts of a bar differ in strength, arms in colour; both are told apart without either by the legend.
_PARTS = (("training", 0.9), ("waiting for data", 0.3), ("validation", 0.55))
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Paul Tol's, safe for colour-blind eyes.
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 260, 56, 28, 44
_MAX_POINTS = 200


def timing_svg(arms: Mapping[str, History]) -> str:
    """Return the seconds of each epoch as stacked bars, one bar an arm: training, waiting for data, validation."""
    epochs = sorted({epoch for history in arms.values() for epoch in history["epoch"]})[-_MAX_POINTS:]
    bars = {name: {row["epoch"]: _parts(row) for row in history.rows()} for name, history in arms.items()}
    top = max((sum(parts) for column in bars.values() for parts in column.values()), default=0.0) or 1.0
    slot = (_WIDTH - _LEFT) / max(1, len(epochs))
    width = 0.8 * slot / max(1, len(arms))
    shapes = [_axis(top, "s")]
    for index, epoch in enumerate(epochs):
        left = _LEFT + index * slot
        if index % math.ceil(len(epochs) / 20) == 0:
            shapes.append(_text(left + slot / 2, _HEIGHT - _BOTTOM + 16, str(epoch), anchor="middle"))
        for position, name in enumerate(arms):
            bottom = float(_HEIGHT - _BOTTOM)
            for (part, opacity), seconds in zip(_PARTS, bars[name].get(epoch, ()), strict=False):
                height = _scaled(seconds, top)
                bottom -= height
                title = html.escape(f"{name}, epoch {epoch}, {part}: {seconds:.3f} s")
                shapes.append(
                    f'<rect x="{left + 0.1 * slot + position * width:.1f}" y="{bottom:.1f}" width="{width:.1f}" '
                    f'height="{height:.1f}" fill="{_colour(position)}" fill-opacity="{opacity}">'
                    f"<title>{title}</title></rect>"
                )
    medians = ", ".join(f"{name} {_median(history):.2f} s" for name, history in arms.items() if len(history))
    shapes += _legend([(name, _colour(i), 0.9) for i, name in enumerate(arms)], _HEIGHT - 10)
    shapes += _legend([(part, "currentColor", opacity) for part, opacity in _PARTS], 12)
    return _svg("Seconds of each epoch", f"Median of an epoch: {medians or 'none yet'}.", shapes)


def curve_svg(columns: Mapping[str, Sequence[float | None]], title: str) -> str:
    """Return columns with one value an epoch as lines; missing and non-finite values leave a gap."""
    values = [v for column in columns.values() for v in column if v is not None and math.isfinite(v)]
    low, top = min(values, default=0.0), max(values, default=1.0)
    low, span = (low, top - low) if top > low else (low - 0.5, 1.0)
    length = max((len(column) for column in columns.values()), default=0)
    shapes = [_axis(low + span, "", low)]
    for index, column in enumerate(columns.values()):
        step = math.ceil(max(1, len(column)) / _MAX_POINTS)
        path, pen = [], "M"
        for number in range(0, len(column), step):
            value = column[number]
            if value is None or not math.isfinite(value):
                pen = "M"
                continue
            x = _LEFT + (_WIDTH - _LEFT - 8) * number / max(1, length - 1)
            path.append(f"{pen}{x:.1f} {_HEIGHT - _BOTTOM - _scaled(value - low, span):.1f}")
            pen = "L"
        dash = ' stroke-dasharray="6 3"' if index % 2 else ""
        shapes.append(
            f'<path d="{"".join(path)}" fill="none" stroke="{_colour(index)}" stroke-width="2" '
            f'stroke-linecap="round"{dash}/>'
        )
    shapes.append(_text((_WIDTH + _LEFT) / 2, _HEIGHT - _BOTTOM + 16, f"epochs 1 to {length}", anchor="middle"))
    shapes += _legend([(name, _colour(i), 0.9) for i, name in enumerate(columns)], _HEIGHT - 10)
    last = ", ".join(f"{name} {shorten(column[-1])}" for name, column in columns.items() if column)
    return _svg(title, f"Last values: {last or 'none yet'}.", shapes)


def timing_figure(arms: Mapping[str, History]) -> go.Figure:
    """Return the picture of `timing_svg` as a plotly figure."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for position, (name, history) in enumerate(arms.items()):
        rows = history.rows()
        for index, (part, opacity) in enumerate(_PARTS):
            figure.add_bar(
                x=[row["epoch"] for row in rows],
                y=[_parts(row)[index] for row in rows],
                name=f"{name}: {part}",
                marker={"color": _colour(position), "opacity": opacity},
                offsetgroup=name,
            )
    figure.update_layout(barmode="stack", title="Seconds of each epoch", **_theme("epoch", "seconds"))
    return figure


def history_figure(history: History) -> go.Figure:
    """Return losses and metrics over the epochs as a plotly figure."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name in history.columns:
        if name in ("train_loss", "valid_loss") or "/" in name:
            figure.add_scatter(x=history["epoch"], y=history[name], name=name, mode="lines+markers")
    figure.update_layout(title="Losses and metrics", **_theme("epoch", ""))
    return figure


def _theme(x: str, y: str) -> dict[str, Any]:
    clear, grey = "rgba(0,0,0,0)", "#888888"  # Readable on white and on black.
    return {
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "font": {"color": grey},
        "xaxis": {"title": x, "gridcolor": "rgba(128,128,128,0.2)"},
        "yaxis": {"title": y, "gridcolor": "rgba(128,128,128,0.2)"},
    }


def _parts(row: Mapping[str, Any]) -> tuple[float, float, float]:
    wait = row["train_loader_wait_seconds"]
    return row["train_seconds"] - wait, wait, row["valid_seconds"]


def _median(history: History) -> float:
    import statistics

    seconds: list[float] = history["epoch_seconds"]
    return statistics.median(seconds)


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _scaled(value: float, top: float) -> float:
    return max(0.0, value / top * (_HEIGHT - _BOTTOM - _TOP))


def _axis(top: float, unit: str, low: float = 0.0) -> str:
    shapes = []
    for share in (0.0, 0.5, 1.0):
        y = _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)
        shapes.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-opacity="0.2"/>'
        )
        shapes.append(_text(_LEFT - 6, y + 4, f"{shorten(low + share * (top - low))} {unit}".strip(), anchor="end"))
    return "".join(shapes)


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _legend(entries: Sequence[tuple[str, str, float]], y: float) -> list[str]:
    shapes, x = [], float(_LEFT)
    for name, colour, opacity in entries:
        shapes.append(
            f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{colour}" fill-opacity="{opacity}"/>'
        )
        shapes.append(_text(x + 14, y, name))
        x += 30 + 7 * len(name)
    return shapes


def _svg(title: str, description: str, shapes: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">'
        f"<title>{html.escape(title)}</title><desc>{html.escape(description)}</desc>{''.join(shapes)}</svg>"
    )
