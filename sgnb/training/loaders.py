"""Batches on their way from a loader to the device, and the time that the loop waits for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sized
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
        # A copy: a view would have a graph of its own, which the run never uses.
        return self._part(0, num_samples, copy=True)

    def split(self, pieces: int) -> list[Batch]:
        """Return the samples in at most `pieces` batches of nearly the same size."""
        if pieces == 1:
            return [self]
        size = math.ceil(self.num_samples / pieces)
        starts = range(0, self.num_samples, size)
        return [self._part(start, min(start + size, self.num_samples), copy=False) for start in starts]

    def _part(self, start: int, end: int, *, copy: bool) -> Batch:
        def cut(value: Tensor) -> Tensor:
            if not value.ndim or value.shape[0] != self.num_samples:
                return value
            return value[start:end].clone() if copy else value[start:end]

        inputs, targets = map_tensors(cut, (self.inputs, self.targets))
        return Batch(inputs, targets, end - start)


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

    The first batch is fetched when the object is made, so that it can be used to warm up before the clock starts. A
    resumed epoch fetches `skip` batches before it, so that sampler and workers are where they were, and then has
    `before_first` put the random states back.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        limit: int,
        where: str,
        move: Mover,
        *,
        skip: int = 0,
        before_first: Callable[[], None] | None = None,
    ) -> None:
        self.wait_seconds = 0.0
        self.where = where
        self._move = move
        self._left = limit - skip
        self._iterator = iter(loader)
        for _ in range(skip):
            next(self._iterator, None)
        if before_first is not None:
            before_first()
        self._first = next(self._iterator, None)
        if self._first is None:
            raise DataError(f"{where}: yields no batch")

    def first(self) -> Batch:
        """Return the first batch without taking it."""
        return self._move(self._first, self.where)

    def __iter__(self) -> Iterator[Batch]:
        raw, self._first = self._first, None
        for index in range(self._left):
            if index:
                start = time.perf_counter()
                raw = next(self._iterator, None)
                self.wait_seconds += time.perf_counter() - start
            if raw is None:
                return  # Shorter than its length said, as an iterable data set may be.
            yield self._move(raw, self.where)


class Mover:
    """Brings what a loader yields to the device. On a GPU the copy goes beside the computation, on a stream of its own.

    The copy of pinned memory (`DataLoader(pin_memory=True)`) then takes no time of the steps before.
    """

    def __init__(self, device: torch.device, *, channels_last: bool = False) -> None:
        self.device = device
        self._channels_last = channels_last
        self._stays = not channels_last  # What is there already needs no call that does nothing.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, raw: Any, where: str) -> Batch:
        """Return a loader's `(inputs, targets, ...)` on the device.

        Raises:
            DataError: when it is no such sequence.
        """
        if not isinstance(raw, tuple | list) or len(raw) < 2:
            raise DataError(f"{where}: expected batches of (inputs, targets), got {type(raw).__name__}")
        if self._stream is None:
            inputs, targets = map_tensors(self._move, (raw[0], raw[1]))
        else:
            with torch.cuda.stream(self._stream):
                inputs, targets = map_tensors(self._move, (raw[0], raw[1]))
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for tensor in tensors_in((inputs, targets)):
                tensor.record_stream(current)  # Else its memory would be given away while steps still read it.
        sample = next(tensors_in(inputs), None)
        if sample is None or sample.ndim == 0:
            raise DataError(f"{where}: expected inputs to be tensors [B, ...], got {type(raw[0]).__name__}")
        return Batch(inputs, targets, sample.shape[0])

    def _move(self, value: Tensor) -> Tensor:
        if self._stays and value.device == self.device:
            return value
        if self._channels_last and value.ndim == 4:
            return value.to(self.device, non_blocking=True, memory_format=torch.channels_last)
        return value.to(self.device, non_blocking=True)


def mark_batch_dynamic(batch: Batch) -> None:
    """Tell the compiler that only the batch dimension varies: one graph then serves a smaller last batch as well."""
    if batch.num_samples == 1:  # torch specialises on sizes 0 and 1 in any case.
        return
    for tensor in tensors_in((batch.inputs, batch.targets)):
        if tensor.ndim and tensor.shape[0] == batch.num_samples:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `function` applied to each tensor in its tuples, lists and mappings."""
    # torch's own tree_map takes ten times as long, which a small model's step would feel.
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the tuples, lists and mappings of `value`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
