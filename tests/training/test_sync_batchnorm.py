"""SyncBN over two and three processes equals BatchNorm in one process on the whole batch, and does not break graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sgnb.training.sync_batchnorm import SyncNorm, synced_batchnorm
from tests.training.ranks import run_ranks

SIZES = {
    "1d": (nn.BatchNorm1d, (8, 6)),
    "1d with length": (nn.BatchNorm1d, (8, 6, 5)),
    "2d": (nn.BatchNorm2d, (8, 6, 4, 4)),
    "3d": (nn.BatchNorm3d, (8, 6, 2, 3, 3)),
}
PARTS = {"equal": (4, 4), "unequal": (5, 3), "an empty rank": (8, 0)}
OPTIONS = {
    "momentum None": {"momentum": None},
    "affine off": {"affine": False},
    "no running statistics": {"track_running_stats": False},
}


class Shifting(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input) + 1


class Direct(nn.BatchNorm2d):
    def forward(self, input):
        return F.batch_norm(input, None, None, training=True)


def new_model(kind, options, like):
    torch.manual_seed(1)
    channels = like.shape[1]
    layer = kind(channels, **options)
    if layer.affine:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.normal_(layer.bias)
    return nn.Sequential(layer)


def inputs_for(shape, scale=1.0, shift=0.0):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, *shape, generator=generator) * scale + shift


def steps(model, batches, part=None):
    """Return outputs, gradients and buffers of a few steps; `part` is what of each batch this process has."""
    found = {"output": [], "input grad": []}
    for batch in batches:
        x = (batch if part is None else batch[part]).clone().requires_grad_()
        output = model(x)
        # Differs from sample to sample, so that the gradients through the statistics are not zero.
        whole = torch.linspace(-1, 1, batch.numel()).to(batch.dtype).view_as(batch).sin()
        (output * (whole if part is None else whole[part])).sum().backward()
        found["output"].append(output.detach())
        found["input grad"].append(x.grad)
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters()}
    model.eval()
    found["eval"] = model(batches[0])
    return found | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


def cases():
    yield from ((name, kind, shape, (4, 4), {}) for name, (kind, shape) in SIZES.items())
    yield from ((name, nn.BatchNorm2d, (8, 6, 4, 4), parts, {}) for name, parts in PARTS.items())
    yield from ((name, nn.BatchNorm2d, (8, 6, 4, 4), (5, 3), options) for name, options in OPTIONS.items())
    yield "a subclass", Shifting, (8, 6, 4, 4), (5, 3), {}
    yield "three processes", nn.BatchNorm2d, (8, 6, 4, 4), (3, 3, 2), {}


def on_each_rank(rank, world_size):
    return {name: one_case(rank, *case) for name, *case in cases() if len(case[2]) == world_size} | (
        {"large mean": large_mean(rank), "graphs": graphs(rank), "timm": timm_layer(rank), "bfloat16": half(rank)}
        if world_size == 2
        else {}
    )


def one_case(rank, kind, shape, parts, options):
    batches = inputs_for(shape)
    part = slice(sum(parts[:rank]), sum(parts[: rank + 1]))
    model = new_model(kind, options, batches[0])
    with synced_batchnorm(model):
        return steps(model, batches, part)


def large_mean(rank):
    batches = inputs_for((8, 6, 4, 4), scale=0.01, shift=10.0)
    model = new_model(nn.BatchNorm2d, {}, batches[0])
    with synced_batchnorm(model):
        return steps(model, batches, slice(4 * rank, 4 * rank + 4))


def graphs(rank):
    counted = {}
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        x = inputs_for((12, 6, 4, 4))[0]
        model, eager = (new_model(nn.BatchNorm2d, {"momentum": None}, x) for _ in range(2))
        with synced_batchnorm(model), synced_batchnorm(eager):
            compiled = torch.compile(model, fullgraph=True, backend=backend)
            difference = 0.0
            for size in (6, 4, 5):
                part = x[6 * rank : 6 * rank + size].clone()
                torch._dynamo.maybe_mark_dynamic(part, 0)
                results = []
                for each in (compiled, eager):
                    each.zero_grad()
                    output = each(part)
                    output.square().sin().sum().backward()
                    module = getattr(each, "_orig_mod", each)
                    results.append([output.detach(), *(p.grad.clone() for p in module.parameters())])
                    results[-1] += [buffer.clone() for buffer in module.buffers()]
                difference = max(difference, *(relative(a, b) for a, b in zip(*results, strict=True)))
        stats = torch._dynamo.utils.counters
        counted[backend] = (stats["stats"]["unique_graphs"], sum(stats["graph_break"].values()), difference)
    return counted


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()


def timm_layer(rank):
    from timm.layers import BatchNormAct2d

    x = inputs_for((8, 6, 4, 4))[0]
    model = BatchNormAct2d(6)
    with synced_batchnorm(model):
        return model(x[4 * rank : 4 * rank + 4]).detach()


def half(rank):
    x = inputs_for((8, 6, 4, 4))[0]
    model = new_model(nn.BatchNorm2d, {}, x)
    with synced_batchnorm(model), torch.autocast("cpu", torch.bfloat16):
        output = model(x[4 * rank : 4 * rank + 4].bfloat16())
    return output.detach()


@pytest.fixture(scope="module")
def results():
    return {2: run_ranks(on_each_rank, 2), 3: run_ranks(on_each_rank, 3)}


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0])
def test_equals_one_process_on_the_whole_batch(results, case):
    name, kind, shape, parts, options = case
    batches = inputs_for(shape)
    expected = steps(new_model(kind, options, batches[0]), batches)
    ranks = [rank[name] for rank in results[len(parts)]]
    for key in ("output", "input grad"):
        for step, whole in enumerate(expected[key]):
            torch.testing.assert_close(torch.cat([rank[key][step] for rank in ranks]), whole, rtol=1e-5, atol=2e-6)
    for key in expected.keys() - {"output", "input grad"}:
        if key.startswith("grad"):
            torch.testing.assert_close(sum(rank[key] for rank in ranks), expected[key], rtol=1e-5, atol=1e-5)
            continue
        for rank in ranks:
            torch.testing.assert_close(rank[key], expected[key], rtol=1e-5, atol=1e-6)
            if key.startswith("buffer"):
                assert torch.equal(rank[key], ranks[0][key]), key


def test_a_mean_of_a_thousand_deviations_loses_nothing(results):
    batches = inputs_for((8, 6, 4, 4), scale=0.01, shift=10.0)
    exact = steps(new_model(nn.BatchNorm2d, {}, batches[0]).double(), batches.double())
    for rank, found in enumerate(each["large mean"] for each in results[2]):
        for step, whole in enumerate(exact["output"]):
            # The input itself is known to 1e-6 of 10 only, a ten-thousandth of the deviation.
            part = whole[4 * rank : 4 * rank + 4]
            torch.testing.assert_close(found["output"][step].double(), part, rtol=0, atol=1e-3)
        variance, wanted = found["buffer 0.running_var"].double(), exact["buffer 0.running_var"]
        torch.testing.assert_close(variance, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_whole_graph_serves_all_batch_sizes(results, backend):
    for rank in results[2]:
        num_graphs, num_breaks, difference = rank["graphs"][backend]
        assert (num_graphs, num_breaks) == (1, 0)
        assert difference < 1e-5


def test_timms_layer_keeps_its_activation(results):
    from timm.layers import BatchNormAct2d

    x = inputs_for((8, 6, 4, 4))[0]
    found = torch.cat([rank["timm"] for rank in results[2]])
    torch.testing.assert_close(found, BatchNormAct2d(6)(x).detach(), rtol=1e-5, atol=1e-6)
    assert found.min() == 0  # ReLU.


def test_keeps_the_inputs_dtype_and_computes_in_float32(results):
    x = inputs_for((8, 6, 4, 4))[0]
    expected = new_model(nn.BatchNorm2d, {}, x)(x.bfloat16().float()).detach()
    found = torch.cat([rank["bfloat16"] for rank in results[2]])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def test_changes_nothing_but_the_classes_and_puts_them_back():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Shifting(3)), nn.SyncBatchNorm(3), nn.Linear(3, 3))
    before = [type(module) for module in model.modules()]
    keys, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    with synced_batchnorm(model) as count:
        assert count == 3
        assert all(isinstance(model.get_submodule(name), SyncNorm) for name in ("0", "1.0", "2"))
        assert isinstance(model[0], nn.BatchNorm2d)
        assert isinstance(model[1][0], Shifting)
        assert list(model.state_dict()) == keys
        assert [id(p) for p in model.parameters()] == parameters
    assert [type(module) for module in model.modules()] == before
    with pytest.raises(KeyError), synced_batchnorm(model):
        raise KeyError
    assert [type(module) for module in model.modules()] == before


def test_a_layer_that_normalises_by_itself_is_refused_before_anything_changes():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Direct(3)))
    with pytest.raises(ValueError) as caught, synced_batchnorm(model):
        pass
    assert str(caught.value) == (
        "training_hyperparams.sync_bn: 1.0 (Direct) calls batch_norm in a forward of its own, where it cannot be "
        "synchronised. Let it call super().forward(x), or set sync_bn: False."
    )
    assert type(model[0]) is nn.BatchNorm2d
