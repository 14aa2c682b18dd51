"""What this machine is: one plain mapping that runs record, reports show and pitfalls judge by."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

_GIB = 2**30


def describe_machine() -> dict[str, Any]:
    """Return the facts of this machine, ready for JSON. Memory in GiB."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "memory_gib": round(psutil.virtual_memory().total / _GIB, 1),
        "devices": [_describe_gpu(index) for index in range(torch.cuda.device_count())],
        "cpu_bf16": cpu_computes_bf16(),
        "compiler_problem": compile_problem(device_type),
        "cache_dir": _cache_dir(),
    }


def compile_problem(device_type: str) -> str | None:
    """Return why nothing can be compiled for this kind of device here and how to mend it, or None."""
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except (InvalidCxxCompiler, RuntimeError, OSError):
            return (
                "torch.compile needs a C++ compiler, and there is none on the PATH. Install one: "
                "apt-get install g++ (Debian, Ubuntu), xcode-select --install (macOS), conda install gxx (conda)."
            )
        return None
    from torch.utils._triton import has_triton

    if not has_triton():
        return "torch.compile needs Triton and a GPU of compute capability 7.0 or more; one of them is missing here."
    return None


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_computes_bf16() -> bool:
    """Tell whether the CPU has bfloat16 arithmetic (AVX512-BF16, AMX or Arm's BF16), without which it is emulated."""
    flags = set(_cpu_info("flags").split()) | set(_cpu_info("Features").split())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def gpu_computes_bf16(device: torch.device) -> bool:
    """Tell whether a GPU computes in bfloat16. `is_bf16_supported()` alone also says yes to emulation."""
    capable = torch.cuda.get_device_capability(device)[0] >= 8
    return bool(capable and torch.cuda.is_bf16_supported(including_emulation=False))


def _describe_gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / _GIB, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "bf16": gpu_computes_bf16(torch.device("cuda", index)),
    }


def _cpu_name() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(key: str) -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():  # Not Linux.
        return ""
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


def _cache_dir() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()
