"""Models by name."""

import pytest
import torch

from sgnb.hyperparams import HyperparamsError
from sgnb.models import create_model, list_models


@pytest.mark.parametrize("name", list_models())
def test_each_model_compiles_in_one_graph_in_both_modes_for_any_batch(name):
    model = create_model(name, num_classes=10)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for mode in (True, False):
        model.train(mode)
        assert compiled(torch.randn(4, 3, 32, 32)).shape == (4, 10)
        assert compiled(torch.randn(3, 3, 32, 32)).shape == (3, 10)
    torch._dynamo.reset()


def test_the_size_is_known():
    assert sum(p.numel() for p in create_model("dscnn", num_classes=10).parameters()) == 38_314


def test_unknown_names_and_arguments_are_named():
    with pytest.raises(HyperparamsError) as caught:
        create_model("dscn", num_classes=10)
    assert str(caught.value) == "architecture: expected one of dscnn, got 'dscn'; did you mean dscnn?"
    with pytest.raises(HyperparamsError, match=r"^arch_params: dscnn does not take them: .*'widht'"):
        create_model("dscnn", num_classes=10, widht=3)
