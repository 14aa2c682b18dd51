"""What arms of a comparison say, in numbers that can be recomputed from the rows saved beside them.

The improvement is that of SuperGradients' table: 100 * (baseline - arm) / baseline, of the medians of whole epochs.
The interval is another view of the same rows: Student's t over the logarithms of the paired epochs' ratios, so it need
not be centred on the median's figure.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgnb.events import EVENTS_FILE, CompileEnded, CompileFailed, cache_state, to_json
from sgnb.history import History
from sgnb.recipes import Recipe, load_recipe, save_recipe

if TYPE_CHECKING:
    import plotly.graph_objects as go

RESULT_FILE, ROWS_FILE, REPORT_FILE, RECIPE_FILE = "comparison.json", "rows.csv", "report.html", "recipe.yaml"
_SCHEMA_VERSION = 1
_LOSS_TOLERANCE = 0.05  # Of the loss at the end; above it the verdict says so.


class Comparison:
    """Histories of arms by name; the first is the baseline."""

    def __init__(self, arms: Mapping[str, History], recipe: Recipe | None = None) -> None:
        if len(arms) < 2 or any(not len(history) for history in arms.values()):
            raise ValueError("a comparison needs two arms or more, each with an epoch or more")
        self.arms = dict(arms)
        self.recipe = recipe
        self.baseline = next(iter(self.arms))

    @property
    def others(self) -> list[str]:
        """The arms that are compared with the baseline."""
        return [name for name in self.arms if name != self.baseline]

    @property
    def num_epochs(self) -> int:
        """Epochs that all arms have."""
        return min(len(history) for history in self.arms.values())

    def rows(self) -> list[dict[str, Any]]:
        """Return the raw rows: one an arm and epoch, everything that was measured."""
        return [{"arm": name, **row} for name, history in self.arms.items() for row in history.rows()]

    def median_seconds(self, arm: str) -> float:
        """Return the median of an arm's epochs: training and validation loops."""
        seconds: list[float] = self.arms[arm]["epoch_seconds"]
        return statistics.median(seconds)

    def improvement_percent(self, arm: str = "compile") -> float:
        """Return 100 * (baseline - arm) / baseline of the medians."""
        baseline = self.median_seconds(self.baseline)
        return 100 * (baseline - self.median_seconds(arm)) / baseline

    def interval(self, arm: str = "compile") -> tuple[float, float] | None:
        """Return the paired 95 % interval of the improvement in per cent, or None with fewer than two pairs."""
        pairs = zip(self.arms[self.baseline]["epoch_seconds"], self.arms[arm]["epoch_seconds"], strict=False)
        logs = [math.log(seconds / baseline) for baseline, seconds in pairs]
        if len(logs) < 2:
            return None
        from scipy.stats import t

        half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
        centre = statistics.fmean(logs)
        return 100 * (1 - math.exp(centre + half)), 100 * (1 - math.exp(centre - half))

    def within_noise(self, arm: str = "compile") -> bool:
        """Tell whether these rows cannot show a difference: the interval holds zero, or there is none."""
        interval = self.interval(arm)
        return interval is None or interval[0] <= 0 <= interval[1]

    def compile_seconds(self, arm: str = "compile") -> float:
        """Return the seconds that an arm spent compiling, which no epoch contains."""
        return self.arms[arm].compile_seconds

    def cache_state(self, arm: str = "compile") -> str | None:
        """Return what the compiler's cache was like, or None where the compiler has none or did nothing."""
        events = [event for event in self.arms[arm].events if isinstance(event, CompileEnded)]
        hits, misses = sum(e.cache_hits for e in events), sum(e.cache_misses for e in events)
        return cache_state(hits, misses) if hits or misses else None

    def break_even_epochs(self, arm: str = "compile") -> float | None:
        """Return after how many epochs the compile time is repaid; None: never, as far as these rows can show."""
        saved = self.median_seconds(self.baseline) - self.median_seconds(arm)
        if self.within_noise(arm) or saved <= 0:
            return None
        return self.compile_seconds(arm) / saved

    def loss_difference(self, arm: str = "compile") -> float:
        """Return by how much the last training loss differs from the baseline's, relative to that."""
        baseline: float = self.arms[self.baseline]["train_loss"][-1]
        loss: float = self.arms[arm]["train_loss"][-1]
        return abs(loss - baseline) / max(abs(baseline), 1e-12)

    def fallback(self, arm: str = "compile") -> str | None:
        """Return why an arm that was to be compiled ran eagerly, or None."""
        failed = [event for event in self.arms[arm].events if isinstance(event, CompileFailed)]
        return f"{failed[-1].reason} {failed[-1].hint}".strip() if failed else None

    @property
    def verdict(self) -> str:
        """The answer: one sentence for each arm."""
        return " ".join(self.verdict_of(arm) for arm in self.others)

    def verdict_of(self, arm: str) -> str:
        """Return what can be said of one arm, in words that do not oversell."""
        reason = self.fallback(arm)
        if reason is not None:
            return f"Nothing was compared: the arm {arm} ran eagerly like the baseline. {reason}"
        before, after = self.median_seconds(self.baseline), self.median_seconds(arm)
        medians = f"{after:.2f} s against {before:.2f} s, the medians of {self.num_epochs} epochs"
        interval = self.interval(arm)
        if interval is None:
            return f"Nothing can be said of {arm} after {self.num_epochs} epoch: {medians}.{self._remarks(arm)}"
        between = f"95 % interval {interval[0]:.1f} to {interval[1]:.1f} %"
        change = self.improvement_percent(arm)
        kind = f"{change:.1f} % less" if change >= 0 else f"{-change:.1f} % more"
        if self.within_noise(arm):
            return f"Within noise: {arm} took {medians} ({kind}; {between}).{self._remarks(arm)}"
        return f"An epoch of {arm} took {kind} time: {medians} ({between}).{self._remarks(arm)}"

    def _remarks(self, arm: str) -> str:
        remarks = ""
        seconds = self.compile_seconds(arm)
        if seconds:
            cache = self.cache_state(arm)
            epochs = self.break_even_epochs(arm)
            repaid = "is never repaid" if epochs is None else f"is repaid after {math.ceil(epochs)} epochs"
            remarks += f" Compiling took {seconds:.1f} s{f' ({cache})' if cache else ''}, which {repaid}."
        if not self.loss_difference(arm) <= _LOSS_TOLERANCE:  # So that NaN is a difference.
            remarks += f" Mind that the last training losses differ by {100 * self.loss_difference(arm):.0f} %."
        return remarks

    def table(self) -> str:
        """Return the epochs of all arms side by side, as text."""
        from sgnb.bench.report import text_table

        return text_table(self)

    def figure(self) -> go.Figure:
        """Return the seconds of each epoch as a plotly figure."""
        from sgnb.plots import timing_figure

        return timing_figure(self.arms)

    def save(self, out_dir: str | Path) -> Path:
        """Write events, rows, figures and report to a directory, and return the path of the report."""
        from sgnb.bench.report import html_report

        out = Path(out_dir)
        for name, history in self.arms.items():
            events = out / name / EVENTS_FILE
            if not events.exists():
                events.parent.mkdir(parents=True, exist_ok=True)
                events.write_text("".join(f"{to_json(event)}\n" for event in history.events))
        if self.recipe is not None:
            save_recipe(self.recipe, out / RECIPE_FILE)
        (out / ROWS_FILE).write_text(self.to_csv())
        (out / REPORT_FILE).write_text(html_report(self))
        (out / RESULT_FILE).write_text(json.dumps(self.to_dict(), indent=2))
        return out / REPORT_FILE

    @classmethod
    def load(cls, out_dir: str | Path) -> Comparison:
        """Return a saved comparison; all its figures are computed anew from the arms' events.

        Raises:
            FileNotFoundError: when there is none.
        """
        out = Path(out_dir)
        if not (out / RESULT_FILE).is_file():
            raise FileNotFoundError(f"{out}: no comparison; expected a directory that holds {RESULT_FILE}")
        result = json.loads((out / RESULT_FILE).read_text())
        recipe = load_recipe(out / RECIPE_FILE) if (out / RECIPE_FILE).exists() else None
        return cls({name: History.load(out / name) for name in result["arms"]}, recipe=recipe)

    def to_csv(self) -> str:
        """Return the raw rows as CSV."""
        rows = self.rows()
        columns = list(dict.fromkeys(column for row in rows for column in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, ready for JSON."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "verdict": self.verdict,
            "arms": {
                name: {
                    "median_epoch_seconds": self.median_seconds(name),
                    "compile_seconds": self.compile_seconds(name),
                    "cache": self.cache_state(name),
                    **({} if name == self.baseline else self._figures(name)),
                }
                for name in self.arms
            },
        }

    def _figures(self, arm: str) -> dict[str, Any]:
        difference = self.loss_difference(arm)
        return {
            "improvement_percent": self.improvement_percent(arm),
            "interval_percent": self.interval(arm),
            "within_noise": self.within_noise(arm),
            "break_even_epochs": self.break_even_epochs(arm),
            "loss_difference": difference if math.isfinite(difference) else None,
            "ran_eagerly_because": self.fallback(arm),
        }

    def __repr__(self) -> str:
        return f"<Comparison: {self.verdict}>"

    def _repr_html_(self) -> str:
        from sgnb.bench.report import html_fragment

        return html_fragment(self)
