"""Pitfalls of mixed precision: off where it pays, on where it does not."""

from __future__ import annotations

from sgnb.pitfalls.facts import Facts
from sgnb.pitfalls.record import Pitfall

_PAGE = "https://github.com/Deci-AI/super-gradients/blob/master/documentation/source/ImprovingTrainingTime.md"


def _gpu(facts: Facts) -> str:
    capability = ".".join(map(str, facts.device_capability)) if facts.device_capability else "unknown"
    return f"{facts.device_name or 'a GPU'}, compute capability {capability}"


def _float32_with_compile(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    return _gpu(facts) if hp.torch_compile and not hp.mixed_precision and facts.gains_from_amp else None


def _float32_on_gpu(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    return _gpu(facts) if not hp.torch_compile and not hp.mixed_precision and facts.gains_from_amp else None


def _nothing_to_gain_on_cpu(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    asked = hp.mixed_precision and hp.mixed_precision_dtype == "auto"
    return _CPU_WITHOUT_BF16 if asked and _cpu_without_bf16(facts) else None


def _bfloat16_emulated_on_cpu(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    asked = hp.mixed_precision and hp.mixed_precision_dtype == "bfloat16"
    return _CPU_WITHOUT_BF16 if asked and _cpu_without_bf16(facts) else None


def _float16_on_cpu(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    asked = hp.mixed_precision and hp.mixed_precision_dtype == "float16"
    return "no GPU, and mixed_precision_dtype float16" if asked and facts.device_type == "cpu" else None


def _bfloat16_emulated_on_gpu(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    asked = hp.mixed_precision and hp.mixed_precision_dtype == "bfloat16"
    return _gpu(facts) if asked and facts.device_type == "cuda" and facts.device_bf16 is False else None


def _float16_gives_nan(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    is_float16 = hp.mixed_precision_dtype == "float16" or (
        hp.mixed_precision_dtype == "auto" and facts.device_bf16 is False
    )
    asked = hp.mixed_precision and is_float16 and facts.device_type == "cuda"
    return facts.device_name if asked and facts.fails_in_float16 else None


def _cpu_without_bf16(facts: Facts) -> bool:
    return facts.device_type == "cpu" and facts.cpu_bf16 is False


_CPU_WITHOUT_BF16 = "no GPU, and a CPU without bfloat16 arithmetic (AVX512-BF16, AMX, Arm BF16)"

RULES = (
    Pitfall(
        code="AMP101",
        severity="warning",
        title="float32 gives torch.compile little to work with",
        field="mixed_precision",
        evidence=_float32_with_compile,
        reason=(
            "The largest gains of torch.compile on GPUs were measured together with mixed precision; in float32 there "
            "may be none. This GPU computes faster in 16 bits."
        ),
        fix={"mixed_precision": True},
        source=_PAGE,
    ),
    Pitfall(
        code="AMP102",
        severity="information",
        title="This GPU computes faster in 16 bits",
        field="mixed_precision",
        evidence=_float32_on_gpu,
        reason=(
            "Mixed precision runs convolutions and matrix products on the GPU's tensor cores and stores activations in "
            "half the memory. The weights stay in float32."
        ),
        fix={"mixed_precision": True},
        source=_PAGE,
    ),
    Pitfall(
        code="AMP103",
        severity="warning",
        title="Mixed precision has no effect here: the run trains in float32",
        field="mixed_precision",
        evidence=_nothing_to_gain_on_cpu,
        reason=(
            "This CPU would only emulate bfloat16, which is slower than float32, so the engine stays in float32. A "
            "timing of this run says nothing about mixed precision."
        ),
        fix={"mixed_precision": False},
        source="https://docs.pytorch.org/docs/stable/amp.html",
    ),
    Pitfall(
        code="AMP104",
        severity="warning",
        title="bfloat16 is emulated on this CPU, which is slower than float32",
        field="mixed_precision_dtype",
        evidence=_bfloat16_emulated_on_cpu,
        reason="Each operation converts to float32 and back, because this CPU has no bfloat16 arithmetic.",
        fix={"mixed_precision": False},
        source="https://docs.pytorch.org/docs/stable/amp.html",
    ),
    Pitfall(
        code="AMP105",
        severity="warning",
        title="float16 on a CPU is slow and overflows",
        field="mixed_precision_dtype",
        evidence=_float16_on_cpu,
        reason=(
            "Few CPUs compute in float16, and its small range costs updates that overflow. auto takes bfloat16 where "
            "the CPU computes in it, else float32."
        ),
        fix={"mixed_precision_dtype": "auto"},
        source="https://docs.pytorch.org/docs/stable/amp.html",
    ),
    Pitfall(
        code="AMP106",
        severity="warning",
        title="bfloat16 is emulated on this GPU",
        field="mixed_precision_dtype",
        evidence=_bfloat16_emulated_on_gpu,
        reason=(
            "GPUs before compute capability 8.0 have no bfloat16 arithmetic: some operations are slow, others fail. "
            "auto takes float16 with a loss scale here."
        ),
        fix={"mixed_precision_dtype": "auto"},
        source="https://github.com/pytorch/pytorch/issues/148322",
    ),
    Pitfall(
        code="AMP107",
        severity="warning",
        title="float16 is known to give NaN on this GPU",
        field="mixed_precision",
        evidence=_float16_gives_nan,
        reason=(
            "GPUs of this kind have no tensor cores, and users report NaN losses and empty metrics in float16. "
            "There is little speed to lose."
        ),
        fix={"mixed_precision": False},
        source="https://github.com/ultralytics/ultralytics/blob/main/ultralytics/utils/checks.py",
    ),
)
