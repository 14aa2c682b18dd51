"""Recognising a shortage of memory, advice, and letting go of what a failure holds."""

from __future__ import annotations

import weakref

import psutil
import pytest
import torch

from sgnb.hyperparams import TrainingHyperparams
from sgnb.training.memory import advice, is_out_of_memory, memory_mib, release


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."),
    ],
    ids=str,
)
def test_what_means_that_memory_was_not_enough(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDNN_STATUS_NOT_SUPPORTED"),
        ValueError("CUDA out of memory"),
        KeyboardInterrupt(),
    ],
    ids=str,
)
def test_other_errors_are_no_shortage_of_memory(error):
    assert not is_out_of_memory(error)


def test_the_allocator_of_the_cpu_says_what_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_the_memory_of_a_cpu_is_that_of_the_process_and_the_machine():
    used, total = memory_mib(torch.device("cpu"))
    assert 10 < used < total == psutil.virtual_memory().total / 2**20


@pytest.mark.parametrize(
    ("hp", "batch_size", "text"),
    [
        (
            {},
            64,
            "Try batch size 32 with batch_accumulate: 2, which gives the same update; on_out_of_memory: halve does that"
            " by itself; find_batch_size measures what fits. It may also help to set mixed_precision: True.",
        ),
        (
            {"on_out_of_memory": "halve", "mixed_precision": True, "batch_accumulate": 3},
            9,
            "Try batch size 4 with batch_accumulate: 6, which gives nearly the same update; find_batch_size measures"
            " what fits.",
        ),
        (
            {"torch_compile": True, "torch_compile_mode": "reduce-overhead", "mixed_precision": True},
            64,
            "Try batch size 32; find_batch_size measures what fits. It may also help to set torch_compile_mode: default"
            " (the CUDA graphs of reduce-overhead keep memory pools of their own) or torch_compile: False (compiling"
            " may need up to twice the memory of steady training).",
        ),
        (
            {"torch_compile": True},
            1,
            "The batch is a single sample already, so smaller inputs or a smaller model are left. It may also help to"
            " set mixed_precision: True or torch_compile: False (compiling may need up to twice the memory of steady"
            " training).",
        ),
    ],
)
def test_the_advice_depends_on_the_settings(hp, batch_size, text):
    assert advice(TrainingHyperparams.from_dict(hp), batch_size) == text


def fail_with_tensors(references):
    inner = torch.zeros(3)
    references.append(weakref.ref(inner))
    try:
        deeper(references)
    except torch.OutOfMemoryError as error:
        raise RuntimeError("while training") from error


def deeper(references):
    local = torch.zeros(3, requires_grad=True).exp()
    references.append(weakref.ref(local))
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_the_tensors_of_failed_frames_die_while_the_error_is_still_held():
    references = []
    try:
        fail_with_tensors(references)
    except RuntimeError as error:
        held = error
    assert all(reference() is not None for reference in references)
    release(held)
    assert [reference() for reference in references] == [None, None]
    assert str(held.__cause__) == "CUDA out of memory."


def test_errors_that_point_at_each_other_are_released_once():
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, first
    release(first)
