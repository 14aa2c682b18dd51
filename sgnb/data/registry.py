"""Names in a recipe's `train_dataloader` and `val_dataloader` become loaders here.

Every real data set has a synthetic twin: the same shapes, dtypes and loader code, with labels that can be learnt. It is
taken with `dataset_params.synthetic: True` (on the command line: `dataset_params=synthetic`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sgnb.hyperparams import Count, HyperparamsError, PositiveCount, Problem, Record, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataloader:
    """A named source of batches. `build` makes the data set from its parameters, `twin` the synthetic one."""

    name: str
    num_classes: int
    shuffle: bool
    build: Callable[..., Dataset[Any]]
    twin: Callable[..., Dataset[Any]]


class LoaderParams(Record):
    """Arguments of `torch.utils.data.DataLoader` that a recipe may give."""

    batch_size: PositiveCount = Field(64, description="Samples in a batch.")
    num_workers: Count = Field(0, description="Processes that load; 0: the training process itself.")
    shuffle: bool | None = Field(None, description="None: training data is shuffled, validation data is not.")
    drop_last: bool = Field(False, description="Leave a last, smaller batch out.")
    pin_memory: bool = Field(False, description="Page-locked memory, for faster copies to a GPU.")
    persistent_workers: bool = Field(False, description="Keep the workers between epochs; needs num_workers > 0.")
    prefetch_factor: PositiveCount | None = Field(None, description="Batches ahead per worker; needs num_workers > 0.")

    def _contradictions(self) -> list[Problem]:
        wants_workers = (("persistent_workers", self.persistent_workers), ("prefetch_factor", self.prefetch_factor))
        return [
            Problem(where=name, message="needs num_workers of at least 1")
            for name, given in wants_workers
            if given and self.num_workers == 0
        ]


_DATALOADERS: dict[str, Dataloader] = {}


def register_dataloader(dataloader: Dataloader) -> None:
    """Make a loader known under its name.

    Raises:
        ValueError: when the name is taken.
    """
    if dataloader.name in _DATALOADERS:
        raise ValueError(f"a dataloader with the name {dataloader.name} is registered already")
    _DATALOADERS[dataloader.name] = dataloader


def list_dataloaders() -> list[str]:
    """Return the names, sorted."""
    return sorted(_DATALOADERS)


def find_dataloader(name: str, where: str) -> Dataloader:
    """Return the entry of a name.

    Raises:
        HyperparamsError: for an unknown one.
    """
    if name not in _DATALOADERS:
        known = ", ".join(list_dataloaders())
        message = f"expected one of {known}, got {name!r}{nearest(str(name), _DATALOADERS)}"
        raise HyperparamsError([Problem(where=where, message=message)])
    return _DATALOADERS[name]


def build_loader(
    entry: Dataloader,
    dataset_params: Mapping[str, Any],
    loader_params: Mapping[str, Any],
    *,
    where: str,
    synthetic: bool = False,
    seed: int = 0,
) -> DataLoader[Any]:
    """Return the loader of an entry; it shuffles with a generator of its own, seeded with `seed`.

    `where` is "train" or "val", for the names in errors.

    Raises:
        HyperparamsError: for parameters that the data set or the loader does not take.
    """
    params = check_loader_params(loader_params, where)
    try:
        dataset = (entry.twin if synthetic else entry.build)(**dataset_params)
    except (TypeError, ValueError) as error:
        message = f"{entry.name} does not take them: {error}"
        raise HyperparamsError([Problem(where=f"dataset_params.{where}_dataset_params", message=message)]) from error
    return DataLoader(
        dataset,
        batch_size=params.batch_size,
        shuffle=entry.shuffle if params.shuffle is None else params.shuffle,
        num_workers=params.num_workers,
        drop_last=params.drop_last,
        pin_memory=params.pin_memory,
        persistent_workers=params.persistent_workers,
        prefetch_factor=params.prefetch_factor,
        generator=torch.Generator().manual_seed(seed),
    )


def check_loader_params(values: Mapping[str, Any], where: str) -> LoaderParams:
    """Return the record of a mapping.

    Raises:
        HyperparamsError: with names below `dataset_params.<where>_dataloader_params`.
    """
    try:
        return LoaderParams(**values)
    except HyperparamsError as error:
        prefix = f"dataset_params.{where}_dataloader_params"
        problems = [Problem(where=f"{prefix}.{p.where}", message=p.message) for p in error.problems]
        raise HyperparamsError(problems) from None


def learnable_images(num_samples: int, *, num_classes: int, shape: tuple[int, int, int], seed: int) -> Dataset[Any]:
    """Return synthetic images: noise [C, H, W] float32 on a pattern that tells the class."""
    # The patterns are those of the twin in training and in validation; the noise differs by `seed`.
    pattern_KCHW = torch.randn(num_classes, *shape, generator=torch.Generator().manual_seed(0))  # noqa: N806
    generator = torch.Generator().manual_seed(seed)
    target_B: Tensor = torch.arange(num_samples) % num_classes  # noqa: N806
    image_BCHW = torch.randn(num_samples, *shape, generator=generator) + pattern_KCHW[target_B]  # noqa: N806
    return TensorDataset(image_BCHW, target_B)
