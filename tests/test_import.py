from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

import sgnb

HEAVY = ("torch", "torchvision", "plotly", "IPython", "hydra", "omegaconf", "ipywidgets", "traitlets", "pydantic")
# What `panel()` imports before it shows.
LIGHT_MODULES = (
    "sgnb.ui",
    "sgnb.recipes",
    "sgnb.hyperparams",
    "sgnb.events",
    "sgnb.history",
    "sgnb.run",
    "sgnb.pitfalls",
)


def python(code: str) -> tuple[str, float]:
    """Return what a fresh interpreter prints, and its wall seconds."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, time.perf_counter() - started


def modules_after(code: str) -> set[str]:
    return set(json.loads(python(f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))")[0]))


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not modules_after("import sgnb") & set(HEAVY)


def test_importing_the_package_takes_less_than_a_fifth_of_a_second() -> None:
    # The best of several on both sides: the machine may be busy with something else.
    bare = min(python("pass")[1] for _ in range(5))
    package = min(python("import sgnb")[1] for _ in range(5))
    assert package - bare < 0.2


def test_what_the_panel_needs_comes_without_torch() -> None:
    found = modules_after("\n".join(f"import {name}" for name in LIGHT_MODULES))
    assert "torch" not in found


def test_every_public_name_can_be_had() -> None:
    assert [name for name in sgnb.__all__ if getattr(sgnb, name) is None] == []
    assert dir(sgnb) == sorted(sgnb.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(sgnb, "trainer")  # noqa: B009
    assert str(caught.value) == "module 'sgnb' has no attribute 'trainer'"
