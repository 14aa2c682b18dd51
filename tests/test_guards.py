"""What must stay true of the package as a whole."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sgnb
from sgnb.hyperparams import EmaParams, TorchCompileOptions, TrainingHyperparams

PACKAGE = Path(sgnb.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# The record refuses lr_warmup_steps without warmup_mode LinearBatchLRWarmup and the reverse, so one of them tells all.
# The record itself reads the two names of the compile mode, as compile_mode.
READ_THROUGH = {"warmup_mode": "lr_warmup_steps", "torch_compile_mode": "compile_mode"}
GROUPS = {
    "precision",
    "compile",
    "averaging",
    "processes",
    "optimisation",
    "schedule",
    "metrics",
    "run",
    "checkpoints",
}


def attributes_read(folder: Path) -> set[str]:
    """Return every name that stands after a dot, read and not assigned, in the files of a folder."""
    return {
        node.attr
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_hyperparameter_is_read_by_the_engine() -> None:
    fields = {name for record in (TrainingHyperparams, EmaParams) for name in record.model_fields}
    read = attributes_read(PACKAGE / "training")
    assert {READ_THROUGH.get(name, name) for name in fields} - read == set()


def test_every_hyperparameter_is_described_and_belongs_to_a_group() -> None:
    for name, field in TrainingHyperparams.model_fields.items():
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict), name
        assert field.json_schema_extra["group"] in GROUPS, name
    for record in (EmaParams, TorchCompileOptions):
        assert all(field.description for field in record.model_fields.values()), record.__name__


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_nothing_is_called_utils() -> None:
    assert [path.name for path in SOURCES if path.stem in ("utils", "helpers", "common", "misc")] == []


def test_files_of_the_package_name_no_path_of_a_developers_machine() -> None:
    assert [path for path in SOURCES if "/home/" in path.read_text() or "../shared" in path.read_text()] == []


def test_the_readme_has_a_line_for_every_file() -> None:
    tree = (PACKAGE.parent / "README.md").read_text(encoding="utf-8").partition("## Files")[2]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    assert {path.name for path in SOURCES if path.name != "__init__.py"} - named == set()
    existing = {path.name for path in SOURCES}
    assert {name for name in named if name.endswith(".py")} - existing == set()
