"""What a panel knows of the settings: the recipe in force, what was typed, what is wrong with it, what it risks."""

from __future__ import annotations

import dataclasses
import shlex
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import traitlets
import yaml
from pydantic import BaseModel

from sgnb.hyperparams import HyperparamsError, Problem, Record, TrainingHyperparams
from sgnb.pitfalls import Facts, gather_facts, judge
from sgnb.recipes import Recipe, load_recipe

if TYPE_CHECKING:
    from sgnb.pitfalls import Finding

_PREFIX = "training_hyperparams."
_MAX_UNDO = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Unreadable:
    """A text that is not even a value: `message` says why."""

    text: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Knowledge:
    """What was found out of a machine and a recipe, and what could not be."""

    machine: dict[str, Any]
    facts: Facts
    ignorance: str = ""


class PanelState(traitlets.HasTraits):
    """The settings behind a panel; views are drawn from it, and nothing else changes them.

    A value that is not acceptable is kept in `pending` with its reason in `problems`, while `recipe` stays as it was.
    All changes are made under one lock: callbacks may come from any thread.
    """

    recipe = traitlets.Any()  # The Recipe in force: always valid.
    base = traitlets.Any()  # The Recipe as it was chosen.
    pending = traitlets.Dict()  # Dotted name: what was typed and is not acceptable.
    problems = traitlets.Tuple()  # Of Problem.
    findings = traitlets.Tuple()  # Of Finding.
    machine = traitlets.Any(None)  # What describe_machine says; None while it is not known.
    ignorance = traitlets.Unicode("")  # Why the facts could not be found out.
    undo_label = traitlets.Unicode("")  # What undo() would take back.

    def __init__(self, recipe: str | Recipe = "digits_dscnn") -> None:
        super().__init__()
        self.lock = threading.RLock()
        self._history: list[tuple[str, Recipe, Recipe]] = []
        self._facts: Facts | None = None
        self._facts_of: tuple[Any, ...] | None = None
        chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
        self._own = {label_of(chosen): chosen}  # It may come from a file or from Python: no name finds it again.
        self._enforce(chosen, base=chosen, pending={})

    @property
    def training_hyperparams(self) -> TrainingHyperparams:
        """The hyperparameters in force."""
        hyperparams: TrainingHyperparams = self.recipe.training_hyperparams
        return hyperparams

    def value(self, name: str) -> Any:
        """Return what the form shows for `name`: what was typed, else what is in force."""
        return self.pending[name] if name in self.pending else self.in_force(name)

    def in_force(self, name: str, recipe: Recipe | None = None) -> Any:
        """Return the value of the (dotted) hyperparameter `name` in the recipe in force, or in another."""
        value: Any = (recipe or self.recipe).training_hyperparams
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def is_changed(self, name: str) -> bool:
        """Return whether the value in force is another one than the chosen recipe's."""
        return bool(self.in_force(name) != self.in_force(name, self.base))

    def problem_of(self, name: str) -> str:
        """Return what is wrong with the value that was typed for `name`, or an empty string."""
        return "; ".join(p.message for p in self.problems if p.where.removeprefix(_PREFIX) == name)

    def set(self, name: str, value: object) -> None:
        """Change one value. It comes into force when the whole record is valid with it; else `problems` says why."""
        with self.lock:
            typed = {**self.pending, name: value}
            self._try(typed, label=f"{name} = {show(value)}", alone=name)

    def apply(self, fix: Mapping[str, Any]) -> None:
        """Change several values at once, as one step for `undo`."""
        with self.lock:
            kept = {name: value for name, value in self.pending.items() if name not in fix}
            recipe = self.recipe.with_hyperparams(**_nested(self.training_hyperparams, fix))
            self._remember("; ".join(f"{name} = {show(value)}" for name, value in fix.items()))
            self._enforce(recipe, base=self.base, pending=kept)

    def undo(self) -> None:
        """Take back the last change that came into force."""
        with self.lock:
            if self._history:
                _, recipe, base = self._history.pop()
                self._enforce(recipe, base=base, pending={})

    def choose(self, name: str) -> None:
        """Take another recipe. What was changed in this one is dropped; `undo` brings it back.

        Raises:
            ValueError: when there is no such recipe, or it is not valid; the present one stays.
        """
        with self.lock:
            recipe = self._own.get(name) or load_recipe(name)
            self._remember(f"recipe = {name}")
            self._enforce(recipe, base=recipe, pending={})

    def override(self, text: str) -> None:
        """Apply overrides as they are written on the command line, such as `architecture=dscnn`.

        Raises:
            ValueError: when one is not acceptable; the recipe stays as it was.
        """
        with self.lock:
            words = shlex.split(text)
            if words:
                recipe = self.recipe.override(words)
                self._remember(" ".join(words))
                self._enforce(recipe, base=self.base, pending=dict(self.pending))

    def learn(self, gather: Callable[[Recipe], Knowledge] | None = None) -> None:
        """Find out what is true of this machine and this recipe's model; slow, for a thread of its own.

        What goes wrong there is kept in `ignorance` and raised; the rules then judge by the settings alone.
        """
        with self.lock:
            recipe = self.recipe
        try:
            known = (gather or gather_all)(recipe)
        except Exception as error:
            with self.lock, self.hold_trait_notifications():
                self._facts, self._facts_of = None, _subject(recipe)
                self.ignorance = f"{type(error).__name__}: {error}"
                self._judge()
            raise
        with self.lock, self.hold_trait_notifications():
            self._facts, self._facts_of = known.facts, _subject(recipe)
            self.machine, self.ignorance = known.machine, known.ignorance
            self._judge()

    @property
    def facts_are_current(self) -> bool:
        """Whether `learn` has seen the model and the data of the recipe in force."""
        with self.lock:
            return self._facts_of == _subject(self.recipe)

    def _try(self, typed: dict[str, Any], *, label: str, alone: str) -> None:
        for candidate in (typed, {alone: typed[alone]}):
            recipe, problems = self._validated(candidate)
            if recipe is not None:
                rest = {name: value for name, value in typed.items() if name not in candidate}
                if recipe.training_hyperparams != self.training_hyperparams:
                    self._remember(label)
                self._enforce(recipe, base=self.base, pending=rest)
                return
        _, problems = self._validated(typed)
        with self.hold_trait_notifications():
            self.pending = typed
            self.problems = tuple(problems)

    def _validated(self, typed: Mapping[str, Any]) -> tuple[Recipe | None, list[Problem]]:
        unreadable = {name: value for name, value in typed.items() if isinstance(value, Unreadable)}
        problems = [Problem(where=_PREFIX + name, message=value.message) for name, value in unreadable.items()]
        good = {name: value for name, value in typed.items() if name not in unreadable}
        try:
            recipe = self.recipe.with_hyperparams(**_nested(self.training_hyperparams, good))
        except HyperparamsError as error:
            return None, [*problems, *error.problems]
        return (None, problems) if problems else (recipe, [])

    def _remember(self, label: str) -> None:
        self._history = [*self._history[-_MAX_UNDO:], (label, self.recipe, self.base)]

    def _enforce(self, recipe: Recipe, *, base: Recipe, pending: dict[str, Any]) -> None:
        with self.hold_trait_notifications():
            self.recipe, self.base, self.pending = recipe, base, pending
            self.problems = tuple(self._validated(pending)[1]) if pending else ()
            self.undo_label = self._history[-1][0] if self._history else ""
            self._judge()

    def _judge(self) -> None:
        if self._facts is not None and self._facts_of == _subject(self.recipe):
            facts = dataclasses.replace(self._facts, training_hyperparams=self.training_hyperparams)
        else:
            facts = gather_facts(self.recipe)  # What the settings say by themselves; the machine is not known yet.
        findings: tuple[Finding, ...] = tuple(judge(facts))
        self.findings = findings


def label_of(recipe: Recipe) -> str:
    """Return what a recipe is called where recipes are chosen; one that was made in Python may have no name."""
    return recipe.name or recipe.run_name


def _subject(recipe: Recipe) -> tuple[Any, ...]:
    """Return what facts depend on besides the hyperparameters."""
    values = recipe.model_dump(exclude={"training_hyperparams", "experiment_name", "ckpt_root_dir", "description"})
    return tuple(sorted((name, repr(value)) for name, value in values.items()))


def gather_all(recipe: Recipe) -> Knowledge:
    """Return what is true of the machine, and of the recipe's model and data on it. Imports torch."""
    from sgnb.training.machine import describe_machine

    found: dict[str, Any] = {}
    missing: list[str] = []
    for name, build in (("model", recipe.build_model), ("train_loader", lambda: recipe.build_loaders()[0])):
        try:
            found[name] = build()
        except Exception as error:  # noqa: BLE001 - whatever a model or a data set raises, the rest is still true.
            missing.append(f"the {name.replace('_', ' ')} cannot be built ({type(error).__name__}: {error})")
    machine = describe_machine()
    return Knowledge(
        machine=machine, facts=gather_facts(recipe, machine=machine, **found), ignorance="; ".join(missing)
    )


def _nested(hyperparams: TrainingHyperparams, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return `typed` with its dotted names as mappings, filled with what else is in force there."""
    changes: dict[str, Any] = {}
    for dotted, value in typed.items():
        name, _, inner = dotted.partition(".")
        if not inner:
            changes[name] = value
            continue
        record = getattr(hyperparams, name)
        changes.setdefault(name, record.changed() if isinstance(record, Record) else {})[inner] = value
    return changes


def show(value: object) -> str:
    """Return a value as it is written in YAML on one line; a Python object as its repr."""
    if isinstance(value, Unreadable):
        return value.text
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, tuple):
        value = list(value)
    try:
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    except yaml.YAMLError:
        return repr(value)
    return text.strip().removesuffix("\n...").strip()
