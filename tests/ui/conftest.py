"""A real JupyterLab in a real Chromium: one session for the whole module, because starting one takes ten seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgnb.events import EpochEnded, RunStarted
from sgnb.pitfalls import Facts, Finding
from sgnb.recipes import Recipe, load_recipe
from sgnb.run import Run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "test-results"
CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
IDLE = "() => /\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText || '')"


def chromium() -> str | None:
    """Return the path of Chromium, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Lab:
    """A page of JupyterLab and what a test does with it."""

    def __init__(self, url: str, page: Any) -> None:
        self.url, self.page = url, page
        self.console_errors: list[str] = []
        page.on("pageerror", lambda error: self.console_errors.append(str(error)))

    def open(self, notebook: str) -> None:
        """Open a notebook and wait until its kernel can be used."""
        self.page.goto(f"{self.url}/lab/tree/{notebook}?reset")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=90_000)
        # The cells' own indicator says idle before the kernel's socket is up; the status bar does not.
        self.page.wait_for_function(IDLE, timeout=90_000)

    def command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Execute a command of JupyterLab."""
        script = "([name, args]) => { window.jupyterapp.commands.execute(name, args); }"
        self.page.evaluate(script, [name, arguments or {}])

    def run_all(self) -> None:
        """Run all cells and wait for their end."""
        self.command("notebook:run-all-cells")
        done = (
            "() => { const c = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];"
            " return c.length && c.every(x => /\\[\\d+\\]/.test(x.textContent)); }"
        )
        self.page.wait_for_function(done, timeout=120_000)

    def theme(self, name: str) -> None:
        """Change the theme: Light or Dark."""
        self.command("apputils:change-theme", {"theme": f"JupyterLab {name}"})
        dark = "true" if name == "Light" else "false"
        self.page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{dark}'", timeout=20_000)

    def screenshot(self, name: str, width: int = 1600, height: int = 1400) -> Path:
        """Write a picture of the window into test-results/."""
        RESULTS.mkdir(exist_ok=True)
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.wait_for_timeout(400)
        path = RESULTS / f"{name}.png"
        self.page.screenshot(path=str(path))
        return path


def start_server(folder: Path, private: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start JupyterLab on `folder`, with all of its own files below `private`, and wait until it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    labconfig = private / "config" / "labconfig"
    labconfig.mkdir(parents=True)
    quiet = {
        "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
        "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    }
    (labconfig / "default_setting_overrides.json").write_text(json.dumps(quiet))
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    environment = {**os.environ, **{name: str(private / place) for name, place in places.items()}}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}", "--ServerApp.port_retries=0"]
    command += ["--LabApp.expose_app_in_browser=True"]
    with (private / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"{url}/api/status", timeout=2):
                return server, url
        except OSError:
            time.sleep(0.2)
    os.killpg(server.pid, signal.SIGKILL)
    raise TimeoutError((private / "log").read_text())


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """The default recipe, writing below the test's own folder."""
    return load_recipe("digits_dscnn", overrides=[f"ckpt_root_dir={tmp_path}"])


@pytest.fixture
def one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one rule, which hits while torch_compile is on: these tests are of the panel, not of the rules."""
    finding = Finding(
        code="XX101",
        severity="warning",
        title="A rule of this test",
        reason="It is on.",
        evidence="seen in this test",
        fix={"torch_compile": False},
        advice="Turn it off.",
        source="https://example.org/rule",
        field="torch_compile",
    )

    def judge(facts: Facts) -> tuple[Finding, ...]:
        return (finding,) if facts.training_hyperparams.torch_compile else ()

    monkeypatch.setattr("sgnb.ui.state.judge", judge)


@pytest.fixture
def started() -> RunStarted:
    """The first event of a run of two epochs."""
    return RunStarted(
        experiment_name="digits",
        run_dir="run",
        device="cpu",
        dtype="float32",
        start_epoch=1,
        max_epochs=2,
        train_batches=20,
        valid_batches=5,
        batch_size=64,
        num_parameters=1000,
        training_hyperparams={},
        machine={},
    )


@pytest.fixture
def epoch_ended() -> Callable[..., EpochEnded]:
    """A maker of the last event of an epoch, with a hostile metric."""
    return make_epoch_ended


def make_epoch_ended(epoch: int, seconds: float = 0.8) -> EpochEnded:
    """Return an epoch of `seconds`."""
    return EpochEnded(
        epoch=epoch,
        train_seconds=seconds,
        valid_seconds=0.1,
        train_loader_wait_seconds=0.05,
        valid_loader_wait_seconds=0.01,
        compile_seconds=0.0,
        checkpoint_seconds=0.01,
        train_loss=1.25,
        valid_loss=1.5,
        train_metrics={"Accuracy": 0.5},
        valid_metrics={"Accuracy<b>": 0.625},
        lr=0.1,
        num_samples=1280,
        num_updates=20,
        skipped_updates=0,
        peak_mib=100.0,
    )


@pytest.fixture(scope="module")
def lab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that JupyterLab shows."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def lab(lab_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on an empty folder, in Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser tests")
    program = chromium()
    if program is None:
        pytest.skip("no chromium on PATH: the browser tests need one (apt-get install chromium)")
    private = tmp_path_factory.mktemp("jupyter")
    server, url = start_server(lab_folder, private)
    try:
        with playwright.sync_playwright() as pw:
            context = pw.chromium.launch_persistent_context(
                str(private / "chromium"), executable_path=program, headless=True, args=CHROMIUM_ARGUMENTS
            )
            page = context.pages[0]
            page.set_default_timeout(30_000)
            page.set_viewport_size({"width": 1600, "height": 1400})
            yield Lab(url, page)
            context.close()
    finally:
        for run in Run.find(lab_folder):  # A test that failed may have left one at work.
            run.kill()
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(timeout=5)
