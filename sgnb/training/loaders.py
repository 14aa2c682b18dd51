"""Batches on their way from a loader to the device, and the time that the loop waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class DataError(ValueError):
    """A loader gave something that cannot be trained on."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step needs: inputs [B, ...], targets, and the number of samples B."""

    inputs: Any
    targets: Any
    num_samples: int

    def head(self, num_samples: int) -> Batch:
        """Return the first samples as a batch of their own."""
        inputs, targets = (_head(value, self.num_samples, num_samples) for value in (self.inputs, self.targets))
        return Batch(inputs, targets, num_samples)


def last_batch_size(loader: Any, limit: int) -> int | None:
    """Return the size of a last batch that is smaller than the others, or None where the loader does not tell."""
    size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    whole = not getattr(loader, "drop_last", True) and limit == len(loader)
    if not size or not whole or not isinstance(sampler, Sized):
        return None
    return len(sampler) % size or None


def num_batches(loader: Any, limit: int | None, where: str) -> int:
    """Return how many batches an epoch has.

    Raises:
        DataError: when the loader is empty, or has no length and there is no limit.
    """
    try:
        length = len(loader)
    except TypeError:
        if limit is None:
            option = f"max_{where.removesuffix('_loader')}_batches"
            raise DataError(f"{where}: has no length; give the length of an epoch with {option}") from None
        return limit
    if length == 0:
        raise DataError(
            f"{where}: yields no batch; with drop_last=True a batch size above the number of samples does that"
        )
    return length if limit is None else min(length, limit)


class Batches:
    """The batches of one epoch, moved to the device. `wait_seconds` adds up what the loop waited for the loader.

    The first batch is fetched when the object is made, so that it can be used to warm up before the clock starts.
    """

    def __init__(self, loader: Iterable[Any], limit: int, device: torch.device, where: str) -> None:
        self.wait_seconds = 0.0
        self.where = where
        self._device = device
        self._limit = limit
        self._iterator = iter(loader)
        self._first = next(self._iterator, None)
        if self._first is None:
            raise DataError(f"{where}: yields no batch")

    def first(self) -> Batch:
        """Return the first batch without taking it."""
        return to_device(self._first, self._device, self.where)

    def __iter__(self) -> Iterator[Batch]:
        raw, self._first = self._first, None
        for index in range(self._limit):
            if index:
                start = time.perf_counter()
                raw = next(self._iterator, None)
                self.wait_seconds += time.perf_counter() - start
            if raw is None:
                return  # Shorter than its length said, as an iterable data set may be.
            yield to_device(raw, self._device, self.where)


def to_device(raw: Any, device: torch.device, where: str) -> Batch:
    """Return a loader's `(inputs, targets, ...)` on the device.

    Raises:
        DataError: when it is no such sequence.
    """
    if not isinstance(raw, tuple | list) or len(raw) < 2:
        raise DataError(f"{where}: expected batches of (inputs, targets), got {type(raw).__name__}")
    inputs, targets = _move(raw[0], device), _move(raw[1], device)
    sample = next(_tensors(inputs), None)
    if sample is None or sample.ndim == 0:
        raise DataError(f"{where}: expected inputs to be tensors [B, ...], got {type(raw[0]).__name__}")
    return Batch(inputs, targets, sample.shape[0])


def mark_batch_dynamic(batch: Batch) -> None:
    """Tell the compiler that only the batch dimension varies: one graph then serves a smaller last batch as well."""
    if batch.num_samples == 1:  # torch specialises on sizes 0 and 1 in any case.
        return
    for tensor in _tensors((batch.inputs, batch.targets)):
        if tensor.ndim and tensor.shape[0] == batch.num_samples:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple | list):
        return type(value)(_move(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _move(item, device) for key, item in value.items()}
    return value


def _head(value: Any, batch_size: int, num_samples: int) -> Any:
    if isinstance(value, Tensor):
        # A copy: a view would have a graph of its own, which the run never uses.
        return value[:num_samples].clone() if value.ndim and value.shape[0] == batch_size else value
    if isinstance(value, tuple | list):
        return type(value)(_head(item, batch_size, num_samples) for item in value)
    if isinstance(value, dict):
        return {key: _head(item, batch_size, num_samples) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
