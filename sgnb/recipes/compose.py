"""Hydra composes a recipe from YAML groups and overrides; nothing else of it is used, and nothing in YAML runs code."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from sgnb.hyperparams import nearest
from sgnb.recipes.recipe import Recipe, RecipeError, dump_yaml, escape_interpolations

_PACKAGED = "pkg://sgnb.recipes"
_LOCK = threading.Lock()  # Hydra's state is global.
_PLAIN = re.compile(r"^(?P<key>[A-Za-z_][\w.]*)=")


def list_recipes(config_dir: str | Path | None = None) -> list[str]:
    """Return the names of the packaged recipes, and of those in `config_dir`."""
    packaged = {entry.name for entry in files("sgnb.recipes").iterdir()}
    own = {path.name for path in Path(config_dir).iterdir()} if config_dir is not None else set()
    return sorted(name.removesuffix(".yaml") for name in packaged | own if name.endswith(".yaml"))


def load_recipe(name: str | Path, overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> Recipe:
    """Return a recipe by name, or from a YAML file.

    Args:
        name: A packaged recipe, one in `config_dir`, or the path of a `.yaml` file.
        overrides: In Hydra's grammar: `training_hyperparams.ema=True`, `dataset_params=synthetic`, `~arch_params`.
        config_dir: A folder of your own recipes and groups; the package's groups can be used in them.

    Raises:
        RecipeError: when there is no such recipe or group, or an override cannot be read.
        HyperparamsError: when values are wrong; all of them at once, by their dotted names.
    """
    if isinstance(overrides, str):
        raise RecipeError(f"overrides: expected a list of texts, got the text {overrides!r}; write [{overrides!r}]")
    if str(name).endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise RecipeError(f"{path}: no such file")
        name, config_dir = path.stem, path.parent
    name = str(name)
    directory = None if config_dir is None else Path(config_dir).resolve()
    if directory is not None and not directory.is_dir():
        raise RecipeError(f"config_dir: {config_dir} is no folder")
    known = list_recipes(directory)
    if name not in known:
        raise RecipeError(f"no recipe has the name {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    own = directory is not None and (directory / f"{name}.yaml").exists()
    composed = _compose(name, [_add_or_override(o, _groups(directory)) for o in overrides], directory)
    values = {"experiment_name": name, **composed, "name": name, "config_dir": str(directory) if own else None}
    return Recipe.from_dict({key: value for key, value in values.items() if key != "config_dir" or value is not None})


@functools.lru_cache
def packaged_recipe(name: str) -> Recipe:
    """Return a recipe of the package as it is; composed once, because Hydra needs half a second."""
    return load_recipe(name)


def swaps_a_group(override: str, config_dir: str | Path | None) -> bool:
    """Tell whether an override such as `dataset_params=synthetic` takes another file of a group."""
    match = _PLAIN.match(override)
    return match is not None and match["key"] in _groups(None if config_dir is None else Path(config_dir))


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a composed recipe with overrides of values (`a.b=c`, `+a.b=c`, `~a.b`) applied to it; no groups."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "recipe.yaml").write_text(dump_yaml(values))
        return _compose("recipe", [_add_or_override(override, {}) for override in overrides], Path(folder))


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the cartesian product of overrides such as `a=1,2`, as `-m` runs it.

    Raises:
        RecipeError: when an override cannot be read.
    """
    import itertools

    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        choices = [
            [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            if override.is_sweep_override()
            else [str(override.input_line)]
            for override in parsed
        ]
    except HydraException as error:
        raise RecipeError(_explain(error, {})) from None
    return [list(combination) for combination in itertools.product(*choices)]


def differences(base: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return overrides in Hydra's grammar that turn `base` into `values`."""
    return list(_differences(base, values, ""))


def _differences(base: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in base:
        if key not in values:
            yield f"~{prefix}{key}"
    for key, value in values.items():
        before = base.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and all(map(_is_word, value)):
            yield from _differences(before, value, f"{prefix}{key}.")
        elif key not in base or type(before) is not type(value) or before != value:
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                yield f"~{prefix}{key}"  # An override of a mapping would merge with it.
            if isinstance(value, Mapping) and prefix == "" and all(map(_is_word, value)):
                yield from _differences({}, value, f"{key}.")
            else:
                yield f"{prefix}{key}={_quote(value)}"


def _is_word(key: object) -> bool:
    return isinstance(key, str) and re.fullmatch(r"[A-Za-z_]\w*", key) is not None


def _quote(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_quote_key(key)}:{_quote(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_quote, value)) + "]"
    text = str(escape_interpolations(value))
    reads_as_itself = re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text.lower() not in (
        "null",
        "true",
        "false",
        "nan",
        "inf",
    )
    if reads_as_itself:
        return text
    # In Hydra's quoted strings only a backslash before a quote, and those right before it, are escapes.
    escaped = re.sub(r"(\\*)'", lambda match: match.group(1) * 2 + "\\'", text)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * trailing}'"


def _quote_key(key: object) -> str:
    if not _is_word(key):  # Hydra's grammar has no quoted keys.
        raise RecipeError(f"the key {key!r} cannot stand on a command line; use save_recipe, and the file in its place")
    return str(key)


def _groups(directory: Path | None) -> dict[str, list[str]]:
    """Return the options of each group: the folders of YAML files in the package, and in the user's folder."""
    found: dict[str, list[str]] = {}
    roots = [files("sgnb.recipes"), *([directory] if directory is not None else [])]
    for root in roots:
        for group in root.iterdir():
            if group.is_dir():
                options = [
                    entry.name.removesuffix(".yaml") for entry in group.iterdir() if entry.name.endswith(".yaml")
                ]
                if options:
                    found.setdefault(group.name, []).extend(options)
    return found


def _add_or_override(override: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Let a plain `a.b=c` add the key as well, so that our own records judge it, and know the nearest name."""
    match = _PLAIN.match(override)
    return override if match is None or match["key"] in groups else f"++{override}"


def _compose(name: str, overrides: list[str], directory: Path | None) -> dict[str, Any]:
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with _LOCK:
            outer = GlobalHydra.instance().hydra  # A program of the user's that runs under Hydra keeps its state.
            GlobalHydra.instance().clear()
            try:
                home, also = _initialize(name, directory)
                with home:
                    search = [f"hydra.searchpath=[{_quote(also)}]"] if directory is not None else []
                    config = compose(name, [*overrides, *search])
            finally:
                GlobalHydra.instance().hydra = outer
        values = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{name}: {_explain(error, _groups(directory))}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{name}: expected a mapping, got {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def _initialize(name: str, directory: Path | None) -> tuple[AbstractContextManager[Any], str]:
    """Return Hydra in the home of a recipe, and the place that adds further groups."""
    from hydra import initialize_config_dir, initialize_config_module

    if directory is not None and (directory / f"{name}.yaml").exists():
        return initialize_config_dir(str(directory), version_base="1.3"), _PACKAGED
    return initialize_config_module("sgnb.recipes", version_base="1.3"), f"file://{directory}"


def _explain(error: Exception, groups: Mapping[str, Sequence[str]]) -> str:
    from hydra.errors import OverrideParseException

    if isinstance(error, OverrideParseException):
        override = error.override.removeprefix("++")
        return (
            f"the override {override!r} cannot be read; expected key=value, with quotes round what is more than a word"
        )
    missing = re.search(r"Could not find '(?:[^']*/)?(?P<group>\w+)/(?P<option>[^'/]+)'", str(error))
    if missing and missing["group"] in groups:
        options = sorted(set(groups[missing["group"]]))
        option = missing["option"].removesuffix(".yaml")
        return f"{missing['group']}: expected one of {', '.join(options)}, got {option!r}{nearest(option, options)}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
