"""torch's process-wide switches that a run sets, and what they were before at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from sgnb.hyperparams import TrainingHyperparams

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_RECOMPILE_LIMIT = 64  # Kinds of repeated blocks share one function; torch's limit of 8 is meant for one kind.


@contextmanager
def run_flags(hp: TrainingHyperparams, device: torch.device) -> Iterator[list[str]]:
    """Set the switches of a run. Yields what the user should know of them."""
    notices: list[str] = []
    with ExitStack() as stack:
        if hp.torch_compile or hp.torch_compile_loss:
            notices += stack.enter_context(_compile_flags(hp))
        if hp.matmul_precision is not None and device.type == "cuda":
            # Only the newer of torch's two interfaces: reading the older one afterwards is an error (pytorch#166387).
            cudnn: Any = torch.backends.cudnn
            for backend in (torch.backends.cuda.matmul, cudnn.conv):
                stack.enter_context(_set(backend, "fp32_precision", hp.matmul_precision))
        elif hp.matmul_precision == "tf32":
            notices.append(f"matmul_precision: tf32 is for GPUs; on this {device.type} float32 stays exact.")
        if hp.deterministic:
            stack.enter_context(_deterministic())
        yield notices


def cache_dir() -> Path:
    """Return where compiled graphs are kept: TORCHINDUCTOR_CACHE_DIR, or a folder of the user's, a torch version each.

    torch's own default lies in the folder for temporary files, which is lost at a reboot.
    """
    if CACHE_VARIABLE in os.environ:
        return Path(os.environ[CACHE_VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sgnb" / f"inductor-{torch.__version__}"


@contextmanager
def _compile_flags(hp: TrainingHyperparams) -> Iterator[list[str]]:
    notices: list[str] = []
    with ExitStack() as stack:
        # Else the compiled backward pass runs under autocast, unlike the eager one, and what a model computes in
        # float32 on purpose loses its precision there (pytorch#153044).
        stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))
        if hp.torch_compile_regions == "auto":
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT))
        if CACHE_VARIABLE not in os.environ:
            folder = cache_dir()
            try:
                folder.mkdir(parents=True, exist_ok=True)
                writable = os.access(folder, os.W_OK)
            except OSError:
                writable = False
            if writable:
                os.environ[CACHE_VARIABLE] = str(folder)
                stack.callback(os.environ.pop, CACHE_VARIABLE, None)
            else:
                notices.append(f"{folder} cannot be written, so compiled graphs are kept in a temporary folder only.")
        yield notices


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with _set(torch.backends.cudnn, "benchmark", False), _set(torch.backends.cudnn, "deterministic", True):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
