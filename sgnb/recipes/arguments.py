"""The arguments with which every command names a recipe: those of Hydra's commands."""

from __future__ import annotations

import argparse

from sgnb.recipes.compose import list_recipes, load_recipe
from sgnb.recipes.recipe import Recipe


def add_recipe_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add `--config-name`, `--config-dir` and the overrides."""
    names = ", ".join(list_recipes())
    parser.add_argument(
        "--config-name", "-cn", required=required, metavar="NAME", help=f"the recipe: {names}, or your own"
    )
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder of your own recipes and groups")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="in Hydra's grammar: training_hyperparams.torch_compile=True"
    )


def recipe_from(arguments: argparse.Namespace) -> Recipe:
    """Return the recipe that parsed arguments name."""
    return load_recipe(arguments.config_name, arguments.overrides, arguments.config_dir)
