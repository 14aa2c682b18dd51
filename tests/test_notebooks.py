"""What is true of every notebook that is committed; nbval runs them and compares their outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
MAX_BYTES = 200_000


def outputs(path: Path) -> list[Any]:
    """Return all outputs of a notebook."""
    return [output for cell in read(path).cells if cell.cell_type == "code" for output in cell.outputs]


def read(path: Path) -> Any:
    """Return a notebook, checked against its format."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_names_its_language_and_holds_no_widget_state(path: Path) -> None:
    metadata = read(path).metadata
    assert metadata.language_info.name == "python"
    assert "widgets" not in metadata


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_was_run_and_nothing_in_it_failed(path: Path) -> None:
    code = [cell for cell in read(path).cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for output in outputs(path) if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_no_output_is_large(path: Path) -> None:
    assert [size for size in (len(json.dumps(output)) for output in outputs(path)) if size > MAX_BYTES] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_is_a_widget_can_also_be_read_without_a_kernel(path: Path) -> None:
    widgets = [output.data for output in outputs(path) if WIDGET_MIME in output.get("data", {})]
    assert all("text/html" in data for data in widgets)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_names_no_place_of_the_machine_that_ran_it(path: Path) -> None:
    text = path.read_text()
    assert "/home/" not in text
    assert str(Path(__file__).parents[1]) not in text
