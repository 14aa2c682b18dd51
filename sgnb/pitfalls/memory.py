"""Pitfalls of memory, and of the modes that trade it for speed."""

from __future__ import annotations

from sgnb.pitfalls.facts import Facts
from sgnb.pitfalls.record import Pitfall

_PAGE = "https://github.com/Deci-AI/super-gradients/blob/master/documentation/source/ImprovingTrainingTime.md"
_MODES = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def _uses_cuda_graphs(facts: Facts) -> bool:
    """Tell whether the mode in force would record CUDA graphs."""
    options = facts.training_hyperparams.torch_compile_options
    active = facts.training_hyperparams.torch_compile and options.backend == "inductor" and not options.disable
    return active and facts.compile_mode in _CUDA_GRAPH_MODES


def _on_gpu(facts: Facts) -> str:
    memory = f" with {facts.device_memory_gib:g} GiB" if facts.device_memory_gib else ""
    return f"{facts.device_name or 'a GPU'}{memory}"


def _batch_size(facts: Facts) -> str:
    return f", batch size {facts.batch_size}" if facts.batch_size else ""


def _more_memory(facts: Facts) -> str | None:
    if not facts.training_hyperparams.torch_compile or facts.device_type != "cuda" or _uses_cuda_graphs(facts):
        return None
    return f"{_on_gpu(facts)}{_batch_size(facts)}"


def _graphs_keep_memory(facts: Facts) -> str | None:
    if facts.device_type != "cuda" or not _uses_cuda_graphs(facts) or facts.training_hyperparams.batch_accumulate > 1:
        return None
    return f"mode {facts.compile_mode} on {_on_gpu(facts)}{_batch_size(facts)}"


def _accumulates(facts: Facts, mode: str) -> str | None:
    steps = facts.training_hyperparams.batch_accumulate
    if facts.device_type != "cuda" or not _uses_cuda_graphs(facts) or facts.compile_mode != mode or steps == 1:
        return None
    return f"mode {mode} and batch_accumulate {steps} on a GPU"


def _on_cpu(facts: Facts, mode: str) -> str | None:
    if facts.device_type != "cpu" or not _uses_cuda_graphs(facts) or facts.compile_mode != mode:
        return None
    return f"mode {mode}, and no GPU"


_OVERWRITTEN = (
    "CUDA graphs reuse the memory of the step before, where the gradients that are being summed still lie: torch "
    "raises 'accessing tensor output of CUDAGraphs that has been overwritten'. Cloning and marking steps do not help."
)

RULES = (
    Pitfall(
        code="MEM101",
        severity="information",
        title="torch.compile may need more GPU memory",
        field="torch_compile",
        evidence=_more_memory,
        reason=(
            "SuperGradients saw peaks that called for up to half the batch size, above all while compiling. Where the "
            "model fits well, there is nothing to do."
        ),
        advice="If the run ends with out of memory, halve the batch size and double batch_accumulate.",
        source=_PAGE,
    ),
    Pitfall(
        code="MEM102",
        severity="error",
        title="reduce-overhead and batch_accumulate do not go together",
        field="torch_compile_mode",
        evidence=lambda facts: _accumulates(facts, "reduce-overhead"),
        reason=_OVERWRITTEN,
        fix={"torch_compile_mode": "default", "torch_compile_options.mode": None},
        source="https://github.com/pytorch/pytorch/issues/169545",
    ),
    Pitfall(
        code="MEM103",
        severity="error",
        title="max-autotune and batch_accumulate do not go together",
        field="torch_compile_mode",
        evidence=lambda facts: _accumulates(facts, "max-autotune"),
        reason=_OVERWRITTEN,
        fix={"torch_compile_mode": "max-autotune-no-cudagraphs", "torch_compile_options.mode": None},
        source="https://github.com/pytorch/pytorch/issues/169545",
    ),
    Pitfall(
        code="MEM104",
        severity="warning",
        title="This mode keeps more GPU memory",
        field="torch_compile_mode",
        evidence=_graphs_keep_memory,
        reason=(
            "CUDA graphs hold memory of their own for each recorded graph, so the peak is higher than in mode default. "
            "They pay where kernels are small; with large batches there is little overhead to save."
        ),
        advice="If memory is short: mode default (or max-autotune-no-cudagraphs), or a smaller batch.",
        source=_PAGE,
    ),
    Pitfall(
        code="MEM105",
        severity="information",
        title="reduce-overhead does nothing without a GPU",
        field="torch_compile_mode",
        evidence=lambda facts: _on_cpu(facts, "reduce-overhead"),
        reason="Its one addition to mode default is CUDA graphs, and they need a GPU.",
        fix={"torch_compile_mode": "default", "torch_compile_options.mode": None},
        source=_MODES,
    ),
    Pitfall(
        code="MEM106",
        severity="information",
        title="max-autotune brings no CUDA graphs without a GPU",
        field="torch_compile_mode",
        evidence=lambda facts: _on_cpu(facts, "max-autotune"),
        reason=(
            "What is left on a CPU is the search for faster kernels, which makes compilation longer and may pay or not."
        ),
        advice="compare() tells whether it pays; mode default compiles fastest.",
        source=_MODES,
    ),
)
