"""The record of a recipe, what it builds, and the three forms in which it leaves: YAML, Python, a shell command."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field

from sgnb.events import Listener
from sgnb.hyperparams import (
    FileName,
    HyperparamsError,
    PositiveCount,
    Problem,
    Record,
    TrainingHyperparams,
    nearest,
    objects_in,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from sgnb.history import History
    from sgnb.training import Trainer

_DATASET_KEYS = (
    "synthetic",
    "train_dataset_params",
    "val_dataset_params",
    "train_dataloader_params",
    "val_dataloader_params",
)


class RecipeError(ValueError):
    """A recipe cannot be found or composed, and what to write instead."""


class Recipe(Record):
    """All that a run needs, by name. `name` is the recipe it was composed from, to which `to_command` refers."""

    name: str = Field("", description="The recipe that this one was composed from.")
    config_dir: str | None = Field(None, description="The folder of that recipe when it is not one of the package's.")
    description: str = Field("", description="What a reader should know.")
    architecture: str = Field(description="A name of sgnb.models.")
    arch_params: dict[str, Any] = Field({}, description="Arguments of the model.")
    train_dataloader: str = Field(description="A name of sgnb.data.")
    val_dataloader: str | None = Field(None, description="A name of sgnb.data; none: no validation.")
    dataset_params: dict[str, Any] = Field({}, description="Arguments of the data sets and the loaders.")
    training_hyperparams: TrainingHyperparams = Field(TrainingHyperparams(), description="How it is trained.")
    multi_gpu: Literal["Off", "DDP", "AUTO"] = Field("Off", description="How several processes share the work.")
    num_gpus: PositiveCount = Field(1, description="Processes of a run.")
    experiment_name: FileName = Field("", description="Folder of its runs; the recipe's name when it is empty.")
    ckpt_root_dir: str = Field("checkpoints", description="Folder of all experiments.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Return the record of a composed recipe.

        Raises:
            HyperparamsError: with all problems at once; hyperparameters by their full dotted names.
        """
        values, problems = dict(values), list[Problem]()
        if "training_params" in values:
            if "training_hyperparams" in values:
                message = "is another word for training_hyperparams; give one of them"
                problems.append(Problem(where="training_params", message=message))
            values["training_hyperparams"] = values.pop("training_params")
        if values.get("multi_gpu") is False:
            values["multi_gpu"] = "Off"  # YAML 1.1 reads Off as False.
        problems += [
            Problem(where=where, message="a recipe cannot run code; use a registered name")
            for where in _targets(values, "")
        ]
        try:
            values["training_hyperparams"] = TrainingHyperparams.from_dict(values.get("training_hyperparams"))
        except HyperparamsError as error:
            problems += error.problems
            values["training_hyperparams"] = TrainingHyperparams()
        try:
            recipe = cls(**values)
        except HyperparamsError as error:
            raise HyperparamsError([*problems, *error.problems]) from None
        if problems:
            raise HyperparamsError(problems)
        return recipe

    def _contradictions(self) -> list[Problem]:
        problems = []
        for key, value in self.dataset_params.items():
            where = f"dataset_params.{key}"
            if key not in _DATASET_KEYS:
                problems.append(Problem(where=where, message=f"no such key{nearest(str(key), _DATASET_KEYS)}"))
            elif key == "synthetic" and not isinstance(value, bool):
                problems.append(Problem(where=where, message=f"expected True or False, got {value!r}"))
            elif key != "synthetic" and not isinstance(value, Mapping):
                problems.append(Problem(where=where, message=f"expected a mapping, got {value!r}"))
        return problems

    def with_hyperparams(self, **changes: Any) -> Recipe:
        """Return a copy with other hyperparameters, validated as a whole."""
        values = {**self.training_hyperparams.changed(), **changes}
        return self.replace(training_hyperparams=TrainingHyperparams.from_dict(values))

    def override(self, overrides: Sequence[str]) -> Recipe:
        """Return a copy with overrides as on the command line: `["training_hyperparams.ema=True"]`.

        Raises:
            RecipeError: when an override cannot be read, or swaps a group of a recipe that was not loaded by name.
        """
        from sgnb.recipes.compose import apply_overrides, load_recipe, swaps_a_group

        if self.name and any(swaps_a_group(override, self.config_dir) for override in overrides):
            return load_recipe(self.name, [*self.overrides_from_base(), *overrides], self.config_dir)
        values = apply_overrides(self.to_dict(), overrides)
        return Recipe.from_dict({**values, "name": self.name, "config_dir": self.config_dir})

    def to_dict(self) -> dict[str, Any]:
        """Return what the YAML holds: plain values, without defaults."""
        values = {name: value for name, value in self.changed().items() if name not in ("name", "config_dir")}
        values["training_hyperparams"] = self.training_hyperparams.changed()
        return values

    def to_yaml(self) -> str:
        """Return a self-contained YAML text, without a defaults list.

        Raises:
            HyperparamsError: when a value is a Python object, which YAML cannot hold.
        """
        values = self.to_dict()
        problems = [
            Problem(
                where=where.lstrip("."),
                message=f"{value!r} is a Python object, which YAML cannot hold; use a name instead",
            )
            for where, value in objects_in(values, "")
        ]
        if problems:
            raise HyperparamsError(problems)
        return dump_yaml(values)

    def to_command(self) -> str:
        """Return the shell command that repeats this recipe."""
        parts = ["python", "-m", "sgnb.train_from_recipe", f"--config-name={self.name}"]
        parts += [f"--config-dir={self.config_dir}"] if self.config_dir else []
        return shlex.join([*parts, *self.overrides_from_base()])

    def overrides_from_base(self) -> list[str]:
        """Return the overrides that lead from the recipe `name` to this one.

        Raises:
            RecipeError: when it was not composed from a named recipe.
        """
        from sgnb.recipes.compose import differences, load_recipe, packaged_recipe

        if not self.name:
            raise RecipeError(
                "this recipe was not loaded by name, so no command can refer to it; save it with save_recipe"
            )
        own = self.config_dir is not None  # Its file may change; one of the package's does not.
        base = load_recipe(self.name, config_dir=self.config_dir) if own else packaged_recipe(self.name)
        return differences(base.to_dict(), self.to_dict())

    def to_python(self) -> str:
        """Return the Python code that repeats this recipe."""
        directory = f", config_dir={self.config_dir!r}" if self.config_dir else ""
        overrides = "".join(f"    {override!r},\n" for override in self.overrides_from_base())
        changes = f", overrides=[\n{overrides}]" if overrides else ""
        return (
            "from sgnb import Trainer, load_recipe\n\n"
            f"recipe = load_recipe({self.name!r}{changes}{directory})\n"
            "model = recipe.build_model()\n"
            "train_loader, valid_loader = recipe.build_loaders()\n"
            "trainer = Trainer(recipe.run_name, ckpt_root_dir=recipe.ckpt_root_dir)\n"
            "history = trainer.train(\n"
            "    model=model,\n"
            "    training_hyperparams=recipe.training_hyperparams,\n"
            "    train_loader=train_loader,\n"
            "    valid_loader=valid_loader,\n"
            ")\n"
        )

    @property
    def run_name(self) -> str:
        """Name of the experiment's folder."""
        return self.experiment_name or self.name or self.architecture

    def build_model(self) -> nn.Module:
        """Return a new model; its first weights follow from `training_hyperparams.seed`."""
        import torch

        from sgnb.data.registry import find_dataloader
        from sgnb.models import create_model

        torch.manual_seed(self.training_hyperparams.seed)
        arguments = {"num_classes": find_dataloader(self.train_dataloader, "train_dataloader").num_classes}
        return create_model(self.architecture, **{**arguments, **self.arch_params})

    def build_loaders(self) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
        """Return the loaders of training and validation; the order of the data follows from the seed."""
        from sgnb.data.registry import build_loader, find_dataloader

        def build(name: str, where: str, prefix: str) -> DataLoader[Any]:
            return build_loader(
                find_dataloader(name, where),
                self.dataset_params.get(f"{prefix}_dataset_params", {}),
                self.dataset_params.get(f"{prefix}_dataloader_params", {}),
                where=prefix,
                synthetic=self.dataset_params.get("synthetic", False),
                seed=self.training_hyperparams.seed,
            )

        train_loader = build(self.train_dataloader, "train_dataloader", "train")
        return train_loader, None if self.val_dataloader is None else build(
            self.val_dataloader, "val_dataloader", "val"
        )

    def train(self, run_dir: str | Path | None = None, listeners: Sequence[Listener] = ()) -> History:
        """Build everything, train, and return the history."""
        trainer = self.build_trainer(run_dir, listeners)
        train_loader, valid_loader = self.build_loaders()
        return trainer.train(self.build_model(), self.training_hyperparams, train_loader, valid_loader)

    def build_trainer(self, run_dir: str | Path | None = None, listeners: Sequence[Listener] = ()) -> Trainer:
        """Return the trainer of this recipe.

        Raises:
            RecipeError: when it asks for several processes.
        """
        from sgnb.training import Trainer

        if self.num_gpus > 1 or self.multi_gpu == "DDP":
            raise RecipeError(
                f"num_gpus: {self.num_gpus} and multi_gpu: {self.multi_gpu} ask for several processes, and this "
                "version trains in one process; set num_gpus=1 multi_gpu=Off"
            )
        return Trainer(self.run_name, ckpt_root_dir=self.ckpt_root_dir, run_dir=run_dir, listeners=listeners)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes`, validated as a whole."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return YAML that OmegaConf reads back to equal values: a text that looks like a number stays a text."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(escape_interpolations(dict(values))))


def escape_interpolations(value: Any) -> Any:
    """Return `value` with each `${` of its texts escaped, which OmegaConf would otherwise replace."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    if isinstance(value, Mapping):
        return {key: escape_interpolations(item) for key, item in value.items()}
    return [escape_interpolations(item) for item in value] if isinstance(value, list | tuple) else value


def save_recipe(recipe: Recipe, path: str | Path) -> Path:
    """Write a self-contained YAML file, whole or not at all, and return its path."""
    path, text = Path(path), recipe.to_yaml()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _targets(value: object, where: str) -> list[str]:
    if isinstance(value, list | tuple):
        return [found for item in value for found in _targets(item, where)]
    if not isinstance(value, Mapping):
        return []
    here = [f"{where}_target_"] if "_target_" in value else []
    return here + [found for key, item in value.items() for found in _targets(item, f"{where}{key}.")]
