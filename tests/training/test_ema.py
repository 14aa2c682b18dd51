"""The moving average against one kept by hand."""

import math

import pytest
import torch
from torch import nn

from sgnb.hyperparams import EmaParams
from sgnb.training.ema import Ema


def a_model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def change(model):
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn_like(tensor) if tensor.is_floating_point() else tensor + 1)


def test_the_average_is_that_kept_by_hand_and_integers_are_copied():
    model = a_model()
    ema = Ema(model, EmaParams(decay=0.9, decay_type="constant"), total_updates=10)
    by_hand = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(5):
        change(model)
        ema.update()
        for name, tensor in model.state_dict().items():
            by_hand[name] = 0.9 * by_hand[name] + 0.1 * tensor if tensor.is_floating_point() else tensor.clone()
    found = ema.state_dict()
    assert found.keys() == by_hand.keys()
    for name, tensor in by_hand.items():
        assert torch.allclose(found[name], tensor, atol=1e-6)
    assert found["1.num_batches_tracked"] == 5


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"decay": 0.99, "decay_type": "constant"}, 0.99),
        ({"decay": 0.99, "decay_type": "threshold"}, 4 / 13),
        ({"decay": 0.99, "decay_type": "exp", "beta": 15.0}, 0.99 * (1 - math.exp(-15 * 3 / 100))),
    ],
)
def test_the_decay_is_supergradients(params, expected):
    assert Ema(a_model(), EmaParams(**params), total_updates=100).decay(3) == pytest.approx(expected)


def test_a_swap_is_undone_even_after_an_error():
    model = a_model()
    ema = Ema(model, EmaParams(decay=0.5, decay_type="constant"), total_updates=10)
    change(model)
    ema.update()
    live, averaged = {k: v.clone() for k, v in model.state_dict().items()}, ema.state_dict()
    seen = {}

    def validate():
        with ema.swapped():
            seen.update({k: v.clone() for k, v in model.state_dict().items()})
            raise RuntimeError("in validation")

    with pytest.raises(RuntimeError, match="in validation"):
        validate()
    assert all(torch.equal(seen[name], averaged[name]) for name in averaged)
    assert all(torch.equal(model.state_dict()[name], live[name]) for name in live)
