"""Train a recipe from the shell: `python -m sgnb.train_from_recipe --config-name=digits_dscnn key=value ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sgnb.hyperparams import HyperparamsError
from sgnb.recipes import Recipe, RecipeError, load_recipe
from sgnb.recipes.arguments import add_recipe_arguments
from sgnb.recipes.compose import expand_sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when all runs finished, 1 when one failed or was stopped, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m sgnb.train_from_recipe", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--multirun", "-m", action="store_true", help="one run for each combination of a=1,2 b=3,4")
    parser.add_argument("--cfg", choices=["job"], help="print the composed recipe and do not train")
    # Intermixed, so that options may stand between the overrides, as with Hydra.
    arguments = parser.parse_intermixed_args(argv)
    try:
        sweep = expand_sweep(arguments.overrides) if arguments.multirun else [arguments.overrides]
        recipes = [load_recipe(arguments.config_name, overrides, arguments.config_dir) for overrides in sweep]
        if arguments.cfg:
            print("---\n".join(recipe.to_yaml() for recipe in recipes), end="")
            return 0
    except (RecipeError, HyperparamsError) as error:
        print(error, file=sys.stderr)
        return 2
    return max(_train(recipe) for recipe in recipes)


def _train(recipe: Recipe) -> int:
    from sgnb.training import CheckpointError, DataError

    print(recipe.to_command(), file=sys.stderr)
    try:
        history = recipe.train()
    except (RecipeError, HyperparamsError, CheckpointError, DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1
    assert history.started is not None  # It was trained.
    print(history.started.run_dir)
    return 0 if history.status == "finished" else 1


if __name__ == "__main__":
    raise SystemExit(main())
