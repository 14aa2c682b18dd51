"""The dtype that is chosen, and the order unscale, clip, step."""

import pytest
import torch
from torch import nn

from sgnb.hyperparams import TrainingHyperparams
from sgnb.training import precision
from sgnb.training.precision import Precision, choose_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "has_bf16", "dtype", "notice"),
    [
        ({}, False, torch.float32, None),
        ({"mixed_precision": True}, True, torch.bfloat16, None),
        (
            {"mixed_precision": True},
            False,
            torch.float32,
            "no bfloat16 arithmetic to gain from, so the run is in float32",
        ),
        (
            {"mixed_precision": True, "mixed_precision_dtype": "bfloat16"},
            False,
            torch.bfloat16,
            "is emulated on this cpu",
        ),
        ({"mixed_precision": True, "mixed_precision_dtype": "float16"}, True, torch.float16, "is emulated on this cpu"),
    ],
)
def test_the_dtype_is_one_that_the_device_computes_in_or_a_notice_says_so(values, has_bf16, dtype, notice, monkeypatch):
    monkeypatch.setattr(precision, "cpu_computes_bf16", lambda: has_bf16)
    found, said = choose_dtype(TrainingHyperparams(**values), CPU)
    assert found == dtype
    assert (notice is None and said is None) or (notice is not None and notice in said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_bounds_the_update_that_is_made(dtype):
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    rules = Precision(dtype, CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(20):  # float16 begins with a scale that overflows, and halves it until it fits.
        with rules.autocast():
            loss = model(torch.ones(2, 4)).sum().float()
        rules.backward(loss)
        if rules.update(list(model.parameters()), optimizer, max_norm=0.5):
            break
    assert (model.weight - before).norm().item() == pytest.approx(0.5, rel=1e-3)


def test_an_overflow_changes_nothing_and_says_so():
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    rules = Precision(torch.float16, CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rules.backward((model(torch.ones(1, 2)) * float("inf")).sum())
    assert rules.update(list(model.parameters()), optimizer) is False
    assert torch.equal(model.weight, before)
    assert all(p.grad is None for p in model.parameters())
