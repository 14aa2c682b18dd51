"""A comparison as text and as a page that needs no network, no kernel and no sgnb."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

from sgnb.history import html_table, shorten
from sgnb.plots import timing_svg

if TYPE_CHECKING:
    from sgnb.bench.comparison import Comparison

_STYLE = """
:root { color-scheme: light dark; }
body { font-family: system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.5; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; }
td { border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
pre { overflow-x: auto; padding: .6rem; background: color-mix(in srgb, currentColor 7%, transparent); }
.rows { overflow-x: auto; }
"""
_METHOD = (
    "An epoch is the wall time of its training and validation loops: loader, transfer, forward, loss, backward, "
    "update, metrics. Compiling is not in it. Improvement % = 100 · (median of the baseline − median of the arm) / "
    "median of the baseline. The interval is Student’s t over the logarithms of the ratios of paired epochs; “within "
    "noise” means that it holds 0. Break-even = compile seconds / seconds saved per epoch. Each arm ran in a process "
    "of its own with the same seed and data order, epoch by epoch in turn, in alternating order."
)


def text_table(comparison: Comparison) -> str:
    """Return seconds of each epoch, arms side by side, then the medians and what follows from them."""
    names = list(comparison.arms)
    width = max(10, *(len(name) + 2 for name in names))
    lines = ["epoch" + "".join(f"{name:>{width}}" for name in names) + "   seconds: training and validation loops"]
    for index in range(comparison.num_epochs):
        seconds = [comparison.arms[name]["epoch_seconds"][index] for name in names]
        lines.append(f"{index + 1:>5}" + "".join(f"{value:>{width}.3f}" for value in seconds))
    lines.append("median" + "".join(f"{comparison.median_seconds(name):>{width}.3f}" for name in names)[1:])
    summary = [[label, *values] for label, values in _summary(comparison)]
    for label, *values in summary:
        lines.append(f"{label}: " + ", ".join(f"{n} {v}" for n, v in zip(names, values, strict=True) if v))
    return "\n".join(lines)


def _summary(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return (label, one text an arm); empty where there is nothing to say."""
    arms = comparison.arms

    def of_others(text: dict[str, str]) -> list[str]:
        return [text.get(name, "") for name in arms]

    intervals = {name: comparison.interval(name) for name in comparison.others}
    epochs = {name: comparison.break_even_epochs(name) for name in comparison.others}
    return [
        (
            "improvement",
            of_others({name: f"{comparison.improvement_percent(name):.1f} %" for name in comparison.others}),
        ),
        (
            "95 % interval",
            of_others({n: f"{i[0]:.1f} to {i[1]:.1f} %" if i else "needs two epochs" for n, i in intervals.items()}),
        ),
        ("compiling", [_compiling(comparison, name) for name in arms]),
        (
            "break-even",
            of_others({n: "never" if e is None else f"after {math.ceil(e)} epochs" for n, e in epochs.items()}),
        ),
        ("samples/s", [shorten(_mean(h["samples_per_second"])) for h in arms.values()]),
        ("waiting for data", [f"{100 * _waiting(h.rows()):.1f} %" for h in arms.values()]),
        ("peak memory", [f"{max(h['peak_mib']):,.0f} MiB" for h in arms.values()]),
        ("last train loss", [shorten(h["train_loss"][-1]) for h in arms.values()]),
    ]


def _compiling(comparison: Comparison, arm: str) -> str:
    seconds, cache = comparison.compile_seconds(arm), comparison.cache_state(arm)
    return f"{seconds:.1f} s{f', {cache}' if cache else ''}" if seconds else ""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _waiting(rows: list[dict[str, float]]) -> float:
    """Return the share of the epochs in which the loops waited for a loader."""
    wait = sum(row["train_loader_wait_seconds"] + row["valid_loader_wait_seconds"] for row in rows)
    return wait / sum(row["epoch_seconds"] for row in rows)


def html_fragment(comparison: Comparison) -> str:
    """Return verdict, picture and figures."""
    names = list(comparison.arms)
    figures = [[label, *values] for label, values in _summary(comparison)]
    medians = ["median epoch", *(f"{comparison.median_seconds(name):.3f} s" for name in names)]
    return (
        f"<p><strong>{html.escape(comparison.verdict)}</strong></p>{timing_svg(comparison.arms)}"
        f"{html_table(['', *names], [medians, *figures])}"
    )


def html_report(comparison: Comparison) -> str:
    """Return the whole page, with the raw rows, the machine, the recipe and how each figure is computed."""
    rows = comparison.rows()
    columns = [name for name in rows[0] if any(row.get(name) not in (None, 0, 0.0) for row in rows)]
    started = comparison.arms[comparison.baseline].started
    machine = dict(started.machine) if started else {}
    recipe = comparison.recipe
    title = html.escape(f"{recipe.run_name if recipe else 'comparison'}: {' against '.join(comparison.arms)}")
    parts = [
        f"<h1>{title}</h1>",
        html_fragment(comparison),
        "<h2>How the figures are computed</h2>",
        f"<p>{_METHOD}</p>",
        "<h2>Raw rows</h2>",
        f'<div class="rows">{html_table(columns, [[row.get(name) for name in columns] for row in rows])}</div>',
        "<h2>Machine</h2>",
        html_table(["", "value"], [[name, str(value)] for name, value in machine.items() if value not in (None, [])]),
    ]
    if recipe is not None:
        parts += ["<h2>Recipe</h2>", f"<pre>{html.escape(recipe.to_yaml())}</pre>"]
        if recipe.name:
            parts.append(f"<pre>{html.escape(_command(recipe.name, recipe.overrides_from_base()))}</pre>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _command(name: str, overrides: list[str]) -> str:
    import shlex

    return shlex.join(["python", "-m", "sgnb.benchmark", f"--config-name={name}", *overrides])
