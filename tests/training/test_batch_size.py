"""The batch size that fits, with a shortage of memory that a model makes up."""

from __future__ import annotations

import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sgnb.hyperparams import TrainingHyperparams
from sgnb.training import DataError, batch_size
from sgnb.training.batch_size import BatchSize, find_batch_size
from sgnb.training.memory import advice

CPU_REMARK = "On a cpu the limit is what the machine's other programs leave."


class Hungry(nn.Module):
    """A classifier whose device has memory for `limit` samples."""

    def __init__(self, limit, *, norm=False):
        super().__init__()
        self.limit, self.sizes = limit, []
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {len(x)} samples")
        return self.linear(self.dropout(self.norm(x)))


def loader(samples=1000, batch_size=8, **arguments):
    data = TensorDataset(torch.randn(samples, 4), torch.randint(0, 3, (samples,)))
    return DataLoader(data, batch_size, shuffle=True, **arguments)


def find(model, train_loader=None, hp=None, **arguments):
    return find_batch_size(model, loader() if train_loader is None else train_loader, hp, device="cpu", **arguments)


def sizes(found):
    return [size for size, _ in found.tried], [size for size, peak in found.tried if peak is None]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 16, 37, 100, 333])
def test_the_size_found_fits_and_an_eighth_more_does_not(limit):
    model = Hungry(limit)
    found = find(model)
    assert found.batch_size <= limit < found.batch_size + max(1, found.batch_size // 8) + 8
    assert found.batch_size in [size for size, peak in found.tried if peak is not None]
    assert all((peak is None) == (size > limit) for size, peak in found.tried)


def test_sizes_double_and_then_close_in_by_eights():
    assert sizes(find(Hungry(100))) == ([1, 2, 4, 8, 16, 32, 64, 128, 96, 112, 104], [128, 112, 104])


def test_each_size_makes_whole_steps():
    model = Hungry(4)
    find(model, max_batch_size=4, steps=3)
    assert model.sizes == [1] * 3 + [2] * 3 + [4] * 3


def test_the_limit_is_the_number_of_samples_or_what_was_asked_for():
    assert find(Hungry(10**6), loader(70)).batch_size == 70
    found = find(Hungry(10**6), max_batch_size=20)
    assert sizes(found) == ([1, 2, 4, 8, 16, 20], [])
    assert found.remark == f"That is the largest size that was asked for; more may fit. {CPU_REMARK}"


def test_a_data_set_of_unknown_length_has_a_limit_as_well():
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.zeros(4), 1

    assert find(Hungry(10**6), DataLoader(Endless(), 2), steps=1).batch_size == 4096


def test_batchnorm_starts_with_two_samples():
    assert sizes(find(Hungry(5, norm=True))) == ([2, 4, 8, 6, 5], [8, 6])


def test_a_batch_may_be_nested_and_hold_what_has_no_batch_dimension():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, inputs):
            assert inputs["scale"].shape == (7,)
            assert inputs["name"] == "n"
            return self.linear(inputs["pair"][0] + inputs["pair"][1])

    class Loss(nn.Module):
        def forward(self, output, targets):
            assert len(output) == len(targets[0])
            return nn.functional.cross_entropy(output, targets[0])

    inputs = {"pair": [torch.randn(2, 4), torch.randn(2, 4)], "scale": torch.ones(7), "name": "n"}
    batches = [(inputs, (torch.tensor([0, 1]),))]
    assert find(Nested(), batches, {"loss": Loss()}, max_batch_size=5).batch_size == 5


def test_the_callback_of_the_run_sees_the_batches():
    seen = []

    def callback(inputs, targets, index):
        seen.append((len(inputs), len(targets), index))
        return inputs, targets

    find(Hungry(10), hp={"pre_prediction_callback": callback}, max_batch_size=2)
    assert seen == [(1, 1, 0), (2, 2, 0)]


def state_of(model, train_loader):
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        torch.get_rng_state(),
        train_loader.generator.get_state(),
        np.random.get_state()[1].copy(),
        random.getstate(),
    )


HPS = [
    {},
    {"optimizer": "AdamW", "ema": True, "clip_grad_norm": 1.0, "batch_accumulate": 2},
    {"mixed_precision": True, "mixed_precision_dtype": "bfloat16"},
    {"mixed_precision": True, "mixed_precision_dtype": "float16", "optimizer": "Adam"},
    {"initial_lr": {"norm": 0, "default": 0.1}},
]


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("hp", HPS, ids=str)
def test_everything_is_as_it_was_afterwards(hp, broken):
    model = Hungry(24, norm=True)
    model.norm.eval()
    model.linear(torch.ones(4)).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = model.linear.weight.grad.clone()
    if broken:
        model.linear.register_forward_hook(lambda _, inputs, __: 1 / 0 if len(inputs[0]) > 4 else None)
    train_loader = loader(generator=torch.Generator().manual_seed(1))
    model.register_buffer("count", torch.zeros(1))
    buffer, before = model.count, state_of(model, train_loader)

    def change(module, inputs):
        model.linear.weight.data += 1
        model.count = model.count + 1

    hook = model.register_forward_pre_hook(change)
    if broken:
        with pytest.raises(ZeroDivisionError):
            find(model, train_loader, hp)
    else:
        assert find(model, train_loader, hp).batch_size == 24
    hook.remove()
    assert model.count is buffer
    torch.testing.assert_close(state_of(model, train_loader), before, rtol=0, atol=0)
    assert {name: parameter.grad for name, parameter in model.named_parameters()}.keys() == grads.keys()
    assert all(parameter.grad is grads[name] for name, parameter in model.named_parameters())
    assert torch.equal(model.linear.weight.grad, values)
    assert (model.training, model.norm.training) == (True, False)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_optimizer_given_as_an_instance_keeps_its_state_and_settings():
    model = Hungry(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model.linear(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    momentum = {p: values["momentum_buffer"].clone() for p, values in optimizer.state.items()}
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    assert find(model, hp={"optimizer": optimizer, "initial_lr": None}).batch_size == 4
    assert {p: values["momentum_buffer"].tolist() for p, values in optimizer.state.items()} == {
        p: value.tolist() for p, value in momentum.items()
    }
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == group


def test_the_state_of_the_optimizer_is_there_in_the_trial():
    seen = []

    class Watched(torch.optim.Adam):
        def step(self, closure=None):
            seen.append(len(self.state))
            return super().step(closure)

    find(Hungry(10), hp={"optimizer": Watched}, max_batch_size=1)
    assert seen == [0, 2, 2]


def test_a_compiled_model_is_tried_eagerly_and_stays_compiled():
    model = Hungry(4)
    model.compile(backend="eager")
    before = model._compiled_call_impl
    assert find(model).batch_size == 4
    assert model.sizes[:2] == [1, 1]
    assert model._compiled_call_impl is before


def test_compiling_raises_the_reserve_and_the_result_says_so():
    found = find(Hungry(4), hp={"torch_compile": True})
    assert found.reserve == 0.25
    why = "The trial was eager; compiling may need up to twice the memory, hence the larger reserve."
    assert found.remark == f"{why} {CPU_REMARK}"


def test_a_failure_of_the_smallest_size_is_raised_with_advice():
    model = Hungry(1, norm=True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        find(model)
    assert str(caught.value) == "CUDA out of memory: 2 samples"
    assert caught.value.__notes__ == [advice(TrainingHyperparams(), 2)]
    assert model.norm.num_batches_tracked == 0


def test_a_failure_keeps_no_tensor_of_the_trial_alive():
    seen = []

    class Greedy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            activation = self.linear(x)
            seen.extend([weakref.ref(x), weakref.ref(activation)])
            raise torch.OutOfMemoryError("CUDA out of memory.")

    class Remembered(torch.optim.Adam):
        def step(self, closure=None):
            super().step(closure)
            seen.extend(weakref.ref(values["exp_avg"]) for values in self.state.values())

    with pytest.raises(torch.OutOfMemoryError) as caught:
        find(Greedy(), hp={"optimizer": Remembered})
    assert len(seen) == 4
    assert [reference() for reference in seen] == [None] * 4
    assert caught.value.__traceback__ is not None


def test_errors_other_than_a_shortage_are_not_swallowed():
    with pytest.raises(RuntimeError) as caught:
        find(nn.Linear(5, 3))
    assert not hasattr(caught.value, "__notes__")


def test_on_a_cpu_a_size_that_eats_into_the_reserve_is_refused(monkeypatch):
    """A machine of 1000 MiB, of which 800 are free; a sample takes 10, while the model holds 100."""
    used = 0

    def rss():
        return SimpleNamespace(rss=(100 + used) * 2**20)

    monkeypatch.setattr(batch_size.psutil, "Process", lambda: SimpleNamespace(memory_info=rss))
    machine = lambda: SimpleNamespace(available=(800 - used) * 2**20, total=1000 * 2**20)  # noqa: E731
    monkeypatch.setattr(batch_size.psutil, "virtual_memory", machine)
    model = Hungry(10**6)

    def take(module, inputs):
        nonlocal used
        used = 10 * len(inputs[0])

    model.linear.register_forward_pre_hook(take)
    found = find(model)
    assert found.batch_size == 64
    assert found.tried == (
        (1, 110.0), (2, 120.0), (4, 140.0), (8, 180.0), (16, 260.0), (32, 420.0), (64, 740.0),
        (128, None), (96, None), (80, None), (72, None),
    )  # fmt: skip
    assert max(model.sizes) == 64  # What cannot fit is not even tried.


def test_what_failed_says_nothing_of_what_a_sample_takes():
    gauge = batch_size._Gauge(torch.device("cpu"), 0.0)
    gauge.start(4)
    gauge.look()
    gauge.end(4)
    expected = gauge.per_sample
    gauge.start(8)
    gauge.look()
    assert gauge.per_sample == expected
    gauge.start(6)


def test_on_a_gpu_other_programs_and_the_reserve_count(monkeypatch):
    """1000 MiB: 50 for CUDA and others, and the trial takes what `peak` says."""
    peak, resets = 0, []
    fakes = {
        "empty_cache": lambda: None,
        "synchronize": lambda device: None,
        "mem_get_info": lambda device: (850 * 2**20, 1000 * 2**20),
        "memory_reserved": lambda device: 100 * 2**20,
        "max_memory_reserved": lambda device: peak * 2**20,
        "reset_peak_memory_stats": resets.append,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(batch_size.torch.cuda, name, fake)
    gauge = batch_size._Gauge(torch.device("cuda"), 0.1)
    peak = 850
    gauge.start(8)
    gauge.look()
    assert gauge.end(8) == 850.0
    peak = 851
    gauge.start(9)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        gauge.end(9)
    assert str(caught.value) == "a batch of 9 samples leaves 99 MiB of 1,000 MiB free; expected at least 10%"
    assert len(resets) == 4


def test_the_result_reads_as_a_sentence():
    found = BatchSize(3, ((2, 1100.0), (4, None), (3, 1200.4)), 0.1, "A remark.")
    assert str(found) == (
        "batch size 3: 1,200 MiB at peak, with 10% of the memory kept free; tried 2, 4 (too large), 3. A remark."
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"max_batch_size": 1},
            "max_batch_size: expected at least 2, as BatchNorm needs more than one sample, got 1",
        ),
        ({"reserve": 1.0}, "expected a reserve from 0 to below 1 and steps from 1, got 1.0 and 2"),
        ({"steps": 0}, "expected a reserve from 0 to below 1 and steps from 1, got 0.1 and 0"),
    ],
)
def test_arguments_that_make_no_sense(arguments, text):
    with pytest.raises(ValueError) as caught:
        find(Hungry(4, norm=True), **arguments)
    assert str(caught.value) == text


def test_an_iterator_is_refused_before_it_loses_a_batch():
    batches = iter([(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))])
    with pytest.raises(DataError) as caught:
        find(Hungry(4), batches)
    assert str(caught.value) == (
        "train_loader: is an iterator, which cannot take a batch back; expected a loader that can"
    )
    assert len(list(batches)) == 1


def test_workers_are_gone_afterwards():  # conftest looks for processes.
    assert find(Hungry(4), loader(num_workers=1)).batch_size == 4
