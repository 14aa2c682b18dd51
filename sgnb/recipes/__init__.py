"""Recipes: a model, data and hyperparameters by name. YAML composed by Hydra, validated here, built by registries."""

from sgnb.recipes.compose import list_recipes, load_recipe
from sgnb.recipes.recipe import Recipe, RecipeError, save_recipe

__all__ = ["Recipe", "RecipeError", "list_recipes", "load_recipe", "save_recipe"]
