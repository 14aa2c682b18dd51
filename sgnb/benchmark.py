"""Measure a recipe with and without torch.compile: `python -m sgnb.benchmark --config-name=digits_dscnn`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from sgnb.bench import BenchmarkError, BenchmarkStopped, Comparison, compare
from sgnb.events import EVENTS_FILE, EventWriter, RunEnded, Status
from sgnb.hyperparams import HyperparamsError
from sgnb.recipes import Recipe, RecipeError, load_recipe
from sgnb.recipes.arguments import add_recipe_arguments, recipe_from


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 after a measurement, 1 when an arm failed or it was stopped, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m sgnb.benchmark", description=__doc__)
    add_recipe_arguments(parser, required=False)
    parser.add_argument("--epochs", type=int, default=5, help="timed epochs of each arm (default: 5)")
    parser.add_argument("--out", metavar="DIR", help="where everything is written (default: benchmarks/RECIPE/TIME)")
    parser.add_argument("--run-dir", metavar="DIR", help=argparse.SUPPRESS)  # The process of Run.start_comparison.
    arguments = parser.parse_intermixed_args(argv)
    if arguments.run_dir is not None:
        return _in_run_dir(Path(arguments.run_dir))
    if arguments.config_name is None:
        parser.error("--config-name is required: the recipe to measure")
    try:
        recipe = recipe_from(arguments)
        stamp = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
        out = Path(arguments.out) if arguments.out else Path("benchmarks") / recipe.run_name / stamp
        comparison = compare(recipe, epochs=arguments.epochs, out_dir=out)
    except (RecipeError, HyperparamsError, ValueError, FileExistsError) as error:
        print(error, file=sys.stderr)
        return 2
    except (BenchmarkError, KeyboardInterrupt) as error:
        print(error or "interrupted; both arms were ended", file=sys.stderr)
        return 1
    _print(comparison, out)
    return 0


def _print(comparison: Comparison, out: Path) -> None:
    print(f"\n{comparison.table()}\n\n{comparison.verdict}\n\n{out / 'report.html'}")


def _in_run_dir(run_dir: Path) -> int:
    """Measure the recipe of a run directory, hear its stop file, and always leave an end."""
    start, writer = time.monotonic(), EventWriter(run_dir / EVENTS_FILE)
    status: Status = "failed"
    reason = ""
    try:
        recipe: Recipe = load_recipe(run_dir / "recipe.yaml")
        epochs = recipe.training_hyperparams.max_epochs
        _print(compare(recipe, epochs=epochs, out_dir=run_dir, should_stop=(run_dir / "stop").exists), run_dir)
        status = "finished"
    except BenchmarkStopped as error:
        status, reason = "stopped", str(error)
    except BaseException as error:  # noqa: BLE001 (a process without an end would seem to have died)
        reason = f"{type(error).__name__}: {error}"
        print(reason, file=sys.stderr)
    writer(RunEnded(status=status, seconds=time.monotonic() - start, reason=reason))
    writer.close()
    return 0 if status == "finished" else 1


if __name__ == "__main__":
    raise SystemExit(main())
