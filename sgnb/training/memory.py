"""Running out of memory: how to recognise it, what to try, and how to get over it."""

from __future__ import annotations

import gc
import traceback

import psutil
import torch

from sgnb.hyperparams import CUDA_GRAPH_MODES, TrainingHyperparams

MIB = 2**20
_MESSAGES = (
    "CUDA out of memory",  # Wrapped by the compiler.
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory was not enough, that of a GPU or that of the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def memory_mib(device: torch.device) -> tuple[float, float]:
    """Return the MiB that tensors took at their peak, of how many; on the CPU, what the process has now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB, torch.cuda.mem_get_info(device)[1] / MIB
    return psutil.Process().memory_info().rss / MIB, psutil.virtual_memory().total / MIB


def advice(hp: TrainingHyperparams, batch_size: int) -> str:
    """Return what to try when batches of this size do not fit, in a sentence or two."""
    graphs = hp.torch_compile and hp.compile_mode in CUDA_GRAPH_MODES  # They cannot accumulate.
    if batch_size < 2:
        first = "The batch is a single sample already, so smaller inputs or a smaller model are left"
    else:
        first = f"Try batch size {batch_size // 2}"
        if not graphs:
            alike = "nearly " if batch_size % 2 else ""
            first += f" with batch_accumulate: {2 * hp.batch_accumulate}, which gives {alike}the same update"
            first += "; on_out_of_memory: halve does that by itself" if hp.on_out_of_memory == "raise" else ""
        first += "; find_batch_size measures what fits"
    more = [] if hp.mixed_precision else ["mixed_precision: True"]
    if graphs:
        more.append(
            f"torch_compile_mode: default (the CUDA graphs of {hp.compile_mode} keep memory pools of their own)"
        )
    if hp.torch_compile:
        more.append("torch_compile: False (compiling may need up to twice the memory of steady training)")
    return f"{first}. It may also help to set {' or '.join(more)}." if more else f"{first}."


def release(error: BaseException) -> None:
    """Free what an error keeps alive while somebody, such as IPython, holds it: the variables of the frames it left."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            chain += [link.__cause__, link.__context__]
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
