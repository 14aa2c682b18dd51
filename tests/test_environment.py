"""environment.yml and pyproject.toml name the same packages with the same bounds."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import yaml

import sgnb

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"pytorch": "torch"}


def split(requirement: str) -> tuple[str, frozenset[str]]:
    """Return the name and the bounds of a requirement."""
    name, bounds = re.fullmatch(r"([\w.-]+)(.*)", requirement.replace(" ", "")).groups()  # type: ignore[union-attr]
    return CONDA_NAMES.get(name, name).lower(), frozenset(filter(None, bounds.split(",")))


def conda() -> dict[str, frozenset[str]]:
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    flat = [name for entry in listed for name in (entry["pip"] if isinstance(entry, dict) else [entry])]
    assert len(flat) == len({split(name)[0] for name in flat}), "a package is named twice"
    return dict(map(split, flat))


def test_conda_and_pip_install_the_same() -> None:
    extras = [name for group in PROJECT["optional-dependencies"].values() for name in group]
    pip = dict(map(split, [*PROJECT["dependencies"], *extras]))
    assert conda() == {**pip, "python": frozenset([PROJECT["requires-python"]]), "pip": frozenset()}


def test_every_dependency_has_a_line_of_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("[tool.")[0]
    lines = [line for line in text.splitlines() if re.match(r'  "', line)]
    assert len(lines) > 20
    assert [line for line in lines if not re.search(r'",\s+# \w', line)] == []


def test_the_installed_version_is_that_of_the_source() -> None:
    assert importlib.metadata.version("sgnb") == sgnb.__version__
