"""The digits and their synthetic twin."""

import pytest
import torch

from sgnb.data.digits import digits, synthetic_digits


@pytest.mark.parametrize(("split", "count"), [("train", 1437), ("val", 360)])
def test_real_and_synthetic_are_alike(split, count):
    for dataset in (digits(split), synthetic_digits(split)):
        images, targets = dataset.tensors
        assert images.shape == (count, 3, 32, 32)
        assert (images.dtype, targets.dtype) == (torch.float32, torch.int64)
        assert set(targets.tolist()) == set(range(10))


def test_the_digits_are_normalised_and_split_into_strata():
    images, targets = digits("train").tensors
    assert images.mean().item() == pytest.approx(0, abs=0.01)
    assert images.std().item() == pytest.approx(1, abs=0.01)
    counts = torch.bincount(digits("val").tensors[1])
    assert counts.min() >= 34
    assert counts.max() <= 38
    assert torch.equal(targets, digits("train").tensors[1])
