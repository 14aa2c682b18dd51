"""scikit-learn's 1,797 handwritten digits (UCI, 8x8), enlarged to 32x32 with three channels: real, always at hand."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from sgnb.data.registry import Dataloader, learnable_images, register_dataloader

_NUM_CLASSES = 10
_SHAPE = (3, 32, 32)
_NUM_SAMPLES = {"train": 1437, "val": 360}


def digits(split: str) -> Dataset[Any]:
    """Return images [3, 32, 32] float32 of mean 0 and deviation 1, and their digits; one fifth is for validation."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    train, val = train_test_split(range(len(bunch.target)), test_size=0.2, random_state=0, stratify=bunch.target)
    index = train if split == "train" else val
    image_BHW = torch.from_numpy(bunch.images[index]).float() / 16  # noqa: N806 (B = samples, H W = size)
    image_BCHW = F.interpolate(image_BHW.unsqueeze(1), size=_SHAPE[1:], mode="bilinear")  # noqa: N806
    image_BCHW = ((image_BCHW - 0.3054) / 0.3237).expand(-1, 3, -1, -1).contiguous()  # noqa: N806
    return TensorDataset(image_BCHW, torch.from_numpy(bunch.target[index]).long())


def synthetic_digits(split: str, num_samples: int | None = None) -> Dataset[Any]:
    """Return the twin, of the same length unless told otherwise."""
    count = _NUM_SAMPLES[split] if num_samples is None else num_samples
    return learnable_images(count, num_classes=_NUM_CLASSES, shape=_SHAPE, seed=1 if split == "train" else 2)


def _register(split: str) -> None:
    register_dataloader(
        Dataloader(
            name=f"digits_{split}",
            num_classes=_NUM_CLASSES,
            shuffle=split == "train",
            build=lambda: digits(split),
            twin=lambda num_samples=None: synthetic_digits(split, num_samples),
        )
    )


for _split in _NUM_SAMPLES:
    _register(_split)
