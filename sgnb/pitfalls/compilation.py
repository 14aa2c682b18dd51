"""Pitfalls of torch.compile: machines that cannot compile, settings that undo it, runs too short for it."""

from __future__ import annotations

from sgnb.pitfalls.facts import Facts, version_of
from sgnb.pitfalls.record import Pitfall

_PAGE = "https://github.com/Deci-AI/super-gradients/blob/master/documentation/source/ImprovingTrainingTime.md"
_COMPILE_DOCS = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
_LARGEST_GAIN = 0.639  # cityscapes_stdc_seg75 on one GPU: the largest of the page's table.
_FEW_EPOCHS = 3
_FEW_BATCHES = 500  # Saving 50 ms a batch, these pay for 25 s of compilation.
_FIRST_PYTHON_WITHOUT_COMPILE = (3, 15)  # torch 2.14 raises from here on.


def _cannot_compile(facts: Facts) -> str | None:
    options = facts.training_hyperparams.torch_compile_options
    if not facts.compiles or options.disable or options.backend != "inductor":
        return None
    return None if facts.compiler_problem is None else facts.compiler_problem.rstrip(".")


def _runs_eagerly(facts: Facts) -> str | None:
    return None if facts.training_hyperparams.torch_compile_options.fullgraph else _cannot_compile(facts)


def _must_compile_and_cannot(facts: Facts) -> str | None:
    return _cannot_compile(facts) if facts.training_hyperparams.torch_compile_options.fullgraph else None


def _disabled_by_option(facts: Facts) -> str | None:
    disabled = facts.compiles and facts.training_hyperparams.torch_compile_options.disable
    return "torch_compile_options.disable is True" if disabled else None


def _disabled_by_environment(facts: Facts) -> str | None:
    fullgraph = facts.training_hyperparams.torch_compile_options.fullgraph
    return None if fullgraph else _compile_is_disabled_outside(facts)


def _must_compile_and_is_disabled(facts: Facts) -> str | None:
    fullgraph = facts.training_hyperparams.torch_compile_options.fullgraph
    return _compile_is_disabled_outside(facts) if fullgraph else None


def _compile_is_disabled_outside(facts: Facts) -> str | None:
    value = (facts.environment or {}).get("TORCH_COMPILE_DISABLE")
    if not facts.compiles or facts.training_hyperparams.torch_compile_options.disable or value != "1":
        return None
    return "TORCH_COMPILE_DISABLE is 1 in the environment"


def _python_is_too_new(facts: Facts) -> str | None:
    version = version_of(facts.python)
    too_new = version is not None and version >= _FIRST_PYTHON_WITHOUT_COMPILE
    return f"Python {facts.python}" if facts.compiles and too_new else None


def _cannot_repay(facts: Facts) -> str | None:
    seconds, cost, hp = facts.seconds_per_epoch, facts.compile_seconds, facts.training_hyperparams
    if not facts.compiles or seconds is None or cost is None or cost <= _LARGEST_GAIN * hp.max_epochs * seconds:
        return None
    return (
        f"compilation took {cost:.1f} s; {hp.max_epochs} epochs of {seconds:.2f} s are {hp.max_epochs * seconds:.1f} s"
    )


def _is_short(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    measured = facts.seconds_per_epoch is not None and facts.compile_seconds is not None
    if not facts.compiles or measured:
        return None
    if hp.max_train_batches is not None and hp.max_epochs * hp.max_train_batches < _FEW_BATCHES:
        return f"max_epochs {hp.max_epochs} and max_train_batches {hp.max_train_batches}"
    return f"max_epochs {hp.max_epochs}" if hp.max_epochs < _FEW_EPOCHS else None


def _mode_is_dropped(facts: Facts) -> str | None:
    backend = facts.training_hyperparams.torch_compile_options.backend
    dropped = facts.compiles and backend != "inductor" and facts.compile_mode != "default"
    return f"backend {backend}, mode {facts.compile_mode}" if dropped else None


def _launches_block(facts: Facts) -> str | None:
    value = (facts.environment or {}).get("CUDA_LAUNCH_BLOCKING")
    return "CUDA_LAUNCH_BLOCKING is 1 in the environment" if value == "1" and facts.device_type == "cuda" else None


def _cuda_errors_are_vague(facts: Facts) -> str | None:
    if not facts.training_hyperparams.torch_compile or facts.device_type != "cuda" or _launches_block(facts):
        return None
    return f"torch_compile on {facts.device_name or 'a GPU'}"


RULES = (
    Pitfall(
        code="TC101",
        severity="warning",
        title="This machine cannot compile: the run goes on without",
        field="torch_compile",
        evidence=_runs_eagerly,
        reason=(
            "The engine notices this before the first epoch, says so and trains eagerly. Nothing is compiled, nothing "
            "gets faster."
        ),
        fix={"torch_compile": False, "torch_compile_loss": False},
        advice="Or install what is missing and look again.",
        source=_COMPILE_DOCS,
    ),
    Pitfall(
        code="TC102",
        severity="error",
        title="fullgraph asks for compilation or nothing, and this machine cannot compile",
        field="torch_compile_options.fullgraph",
        evidence=_must_compile_and_cannot,
        reason="With fullgraph the run fails at its first batch, where it would otherwise go on eagerly.",
        fix={"torch_compile": False, "torch_compile_loss": False},
        advice="Or install what is missing and look again.",
        source=_COMPILE_DOCS,
    ),
    Pitfall(
        code="TC103",
        severity="warning",
        title="torch.compile is asked for and disabled at once",
        field="torch_compile_options.disable",
        evidence=_disabled_by_option,
        reason="With disable, torch.compile returns the model as it is. The run is an eager one.",
        fix={"torch_compile_options.disable": False},
        source=_COMPILE_DOCS,
    ),
    Pitfall(
        code="TC104",
        severity="warning",
        title="The environment disables torch.compile",
        field="torch_compile",
        evidence=_disabled_by_environment,
        reason="With this variable torch.compile returns the model as it is. The run is an eager one.",
        advice="Unset TORCH_COMPILE_DISABLE and start Python (or the notebook's kernel) again.",
        source="https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
    ),
    Pitfall(
        code="TC105",
        severity="error",
        title="fullgraph asks for compilation or nothing, and the environment disables it",
        field="torch_compile_options.fullgraph",
        evidence=_must_compile_and_is_disabled,
        reason="torch raises at the first batch: fullgraph=True found no compiled frames.",
        fix={"torch_compile_options.fullgraph": False},
        advice="Or unset TORCH_COMPILE_DISABLE and start Python (or the notebook's kernel) again.",
        source="https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
    ),
    Pitfall(
        code="TC106",
        severity="error",
        title="torch.compile does not know this Python yet",
        field="torch_compile",
        evidence=_python_is_too_new,
        reason="torch 2.14 raises an error for Python 3.15 and later, because the compiler reads Python's bytecode.",
        fix={"torch_compile": False, "torch_compile_loss": False},
        advice="Or use Python 3.14 or earlier.",
        source="https://github.com/pytorch/pytorch/blob/main/torch/__init__.py",
    ),
    Pitfall(
        code="TC107",
        severity="warning",
        title="Compilation costs more than this run can win back",
        field="torch_compile",
        evidence=_cannot_repay,
        reason=(
            "Even the largest improvement that SuperGradients measured, 63.9 % of an epoch, would save less time in "
            "this run than the compiler takes."
        ),
        fix={"torch_compile": False, "torch_compile_loss": False},
        advice="Or train for more epochs.",
        source=_PAGE,
    ),
    Pitfall(
        code="TC108",
        severity="information",
        title="A short run may not win back the time of compilation",
        field="torch_compile",
        evidence=_is_short,
        reason=(
            "Compiling takes from seconds to minutes, once, before the first epoch. compare() measures both and says "
            "after how many epochs it has paid for itself."
        ),
        source="https://github.com/pytorch/pytorch/issues/97783",
    ),
    Pitfall(
        code="TC109",
        severity="information",
        title="This backend takes no mode",
        field="torch_compile_mode",
        evidence=_mode_is_dropped,
        reason=(
            "Modes are presets of the inductor backend; torch refuses them for others, so the engine leaves the mode "
            "out."
        ),
        fix={"torch_compile_mode": "default", "torch_compile_options.mode": None},
        source=_COMPILE_DOCS,
    ),
    Pitfall(
        code="TC110",
        severity="warning",
        title="Timings are not those of a normal run",
        field="",
        evidence=_launches_block,
        reason=(
            "With CUDA_LAUNCH_BLOCKING=1 Python waits for every kernel, so that errors point at the right line. "
            "Training is slower, and most so where kernels are small."
        ),
        advice="Unset CUDA_LAUNCH_BLOCKING and start Python (or the notebook's kernel) again before you measure.",
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution",
    ),
    Pitfall(
        code="TC111",
        severity="information",
        title="CUDA errors of compiled code point at the wrong line",
        field="torch_compile",
        evidence=_cuda_errors_are_vague,
        reason="Kernels run behind Python's back, so an error shows up later than it happened.",
        advice=(
            "If a CUDA error comes up, start Python with CUDA_LAUNCH_BLOCKING=1 once to see where; if it goes away "
            "with a smaller batch, it was memory."
        ),
        source=_PAGE,
    ),
)
