"""Compiled runs: two graphs and no more, repeated blocks, guards, and what is found when a model misbehaves."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sgnb.events import CompileChecked, CompileEnded, CompileFailed, EpochStarted, Noticed, Recompiled
from sgnb.hyperparams import TrainingHyperparams
from sgnb.training.compilation import compile_targets, find_regions, problems_on
from sgnb.training.flags import CACHE_VARIABLE, cache_dir, run_flags

AOT = {"torch_compile": True, "torch_compile_options": {"backend": "aot_eager"}}
REGIONS = {**AOT, "torch_compile_regions": "auto"}


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


class Blocks(nn.Module):
    """A transformer's shape: [B, 3, 8, 8] in, 4 classes out."""

    def __init__(self, copies=12, container=nn.Sequential):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.position = nn.Parameter(torch.zeros(4, 8))
        blocks = [Block() for _ in range(copies)]
        self.blocks = nn.Sequential(*blocks) if container is nn.Sequential else nn.ModuleList(blocks)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def of_kind(history, kind):
    return [event for event in history.events if isinstance(event, kind)]


def graphs_of(history):
    assert not of_kind(history, CompileFailed)
    return {event.graph: event.num_graphs for event in of_kind(history, CompileEnded)}


def with_larger_batches(setup):
    """Have 70 samples in batches of 40 and 30: a convolution on the CPU has another path below 16 samples."""
    data = TensorDataset(setup.inputs, setup.targets)
    setup.loaders = lambda: (DataLoader(data, 40, shuffle=True), DataLoader(data, 48))


def test_a_run_with_an_uneven_last_batch_validation_and_averaging_has_exactly_two_graphs(setup):
    with_larger_batches(setup)
    history = setup.train(max_epochs=3, ema=True, **AOT)
    assert graphs_of(history) == {"train": 1, "valid": 1}
    assert history.recompiles == []
    assert history["compile_seconds"] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("container", [nn.Sequential, nn.ModuleList])
def test_repeated_blocks_share_their_two_graphs(setup, container):
    with_larger_batches(setup)
    reference = setup.train(Blocks(container=container), max_epochs=2)
    history = setup.train(Blocks(container=container), max_epochs=2, ema=True, **REGIONS)
    assert graphs_of(history) == {"train": 1, "valid": 1}
    assert history.recompiles == []
    assert history["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-5)
    assert "torch_compile_regions: auto compiles 12 repeated blocks." in history.notices
    assert list(setup.model.state_dict()) == list(Blocks().state_dict())
    assert all(module._compiled_call_impl is None for module in setup.model.modules())


def test_a_first_block_whose_input_is_a_view_has_a_graph_of_its_own_before_epoch_1(setup):
    with_larger_batches(setup)

    class View(Blocks):
        def forward(self, x):
            return self.head(self.blocks(self.embed(x).flatten(2).transpose(1, 2)).mean(1))

    history = setup.train(View(), max_epochs=2, **REGIONS)
    assert max(graphs_of(history).values()) == 2
    assert history.recompiles == []


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole(setup):
    history = setup.train(max_epochs=1, **REGIONS)
    assert "torch_compile_regions: auto found no repeated blocks: compiles the whole." in history.notices
    assert history.compiled


def test_regions_are_the_outermost_repeated_modules_with_children():
    model = nn.Sequential(
        nn.Sequential(*[nn.Sequential(Block(), nn.ReLU()) for _ in range(3)]),
        nn.ModuleList([Blocks(copies=3) for _ in range(2)]),
    )
    assert find_regions(model) == [module for module in model.modules() if isinstance(module, Block)]
    assert find_regions(Blocks(copies=2)) == []
    assert find_regions(nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])) == []


def test_what_is_compiled_follows_from_the_hyperparameters():
    model, criterion = Blocks(), nn.MSELoss()

    def targets(**values):
        return compile_targets(model, criterion, TrainingHyperparams(**values))

    assert targets() == []
    assert targets(torch_compile=True) == [[model]]
    assert targets(torch_compile_loss=True) == [[criterion]]
    assert targets(torch_compile=True, torch_compile_regions="auto", torch_compile_loss=True) == [
        list(model.blocks),
        [criterion],
    ]


def test_a_cell_may_be_run_again_and_again(setup):
    for _ in range(10):  # The limit of one forward() is 8 graphs.
        assert setup.train(max_epochs=1, **AOT).compiled


@pytest.mark.skipif("isolate_recompiles" not in torch.compile.__code__.co_varnames, reason="needs torch 2.13")
def test_graphs_that_the_user_has_made_stay(setup):
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    mine = torch.compile(lambda x: x.sin() + 1, backend=backend)
    mine(torch.ones(3))
    setup.train(max_epochs=1, **AOT)
    mine(torch.ones(3))
    assert len(made) == 1


class Island(nn.Module):
    """Computes its last layer in float32 on purpose."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(192, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.body(x.flatten(1))
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x.float())


def test_what_a_model_computes_in_float32_on_purpose_stays_so_in_the_compiled_backward_pass(setup):
    history = setup.train(
        Island(), max_epochs=1, mixed_precision=True, mixed_precision_dtype="bfloat16", clip_grad_norm=1.0, **AOT
    )
    (checked,) = of_kind(history, CompileChecked)
    assert checked.agreed
    assert checked.grad_norm_difference < 1e-6  # 3e-3 with autocast in the backward pass.
    assert torch._functorch.config.backward_pass_autocast == "same_as_forward"


class Frozen(nn.Module):
    """Its validation graph keeps the weights that it was made with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(192, 4)
        self.register_buffer("kept", self.head.weight.detach().clone())

    def forward(self, x):
        frozen = torch.compiler.is_compiling() and not self.training
        return F.linear(x.flatten(1), self.kept if frozen else self.head.weight, self.head.bias)


def test_averaged_weights_that_a_graph_does_not_see_are_noticed(setup):
    values = {"ema": True, "ema_params": {"decay": 0.5, "decay_type": "constant"}, "initial_lr": 0.1}
    reference = setup.train(Frozen(), **values)
    history = setup.train(Frozen(), **values, **AOT)
    (failed,) = of_kind(history, CompileFailed)
    assert failed.reason.startswith("with averaged weights, compiled and eager execution disagree (by ")
    assert history["valid_loss"] == pytest.approx(reference["valid_loss"], rel=1e-5)


def test_batchnorm_that_cannot_be_compiled_is_named(setup):
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192, momentum=None), nn.Linear(192, 4))
    (failed,) = of_kind(setup.train(model, max_epochs=1, **AOT), CompileFailed)
    assert failed.reason == "the compiler made no training graph of this model, which then runs eagerly in silence."
    assert failed.hint == "BatchNorm with momentum=None cannot be compiled: 1. Set momentum=0.1."


def test_hooks_that_come_too_late_are_named(setup):
    def listener(event):
        if isinstance(event, EpochStarted) and event.epoch == 2:
            setup.model[0].register_forward_hook(lambda *_: None)

    setup.listeners = [listener]
    assert (
        "hooks of 0 were registered or removed after it was compiled; compiled code does not call new ones. Register "
        "hooks before training." in setup.train(max_epochs=3, **AOT).notices
    )


def test_attributes_that_change_are_named_with_what_to_do(setup):
    class Scheduled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.rate = setup.new_model(), 0.0

        def forward(self, x):
            return self.body(x) * (1.0 - self.rate)

    def listener(event):
        if isinstance(event, EpochStarted):
            setup.model.rate = 0.1 * event.epoch

    setup.listeners = [listener]
    with_larger_batches(setup)
    history = setup.train(Scheduled(), max_epochs=3, **AOT)
    told = [event.message for event in of_kind(history, Noticed) if event.level == "warning"]
    assert told == [
        "the model.rate changed from 0.0 to 0.1: the compiler makes a new graph for another value, and gives up after "
        "some. Keep it in a tensor (register_buffer)."
    ]
    recompiled = of_kind(history, Recompiled)
    assert recompiled[0].epoch == 1  # torch 2.14 then takes the number for one that varies, 2.11 does not.
    assert "rate == 0.0" in recompiled[0].reason
    assert history["compile_seconds"][0] > 0


def test_making_the_graphs_leaves_no_trace_in_the_models_own_attributes(setup):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = setup.new_model(), 0

        def forward(self, x):
            self.calls += 1
            return self.body(x)

    setup.train(Counts(), max_epochs=1)
    eager = setup.model.calls
    setup.train(Counts(), max_epochs=1, **AOT)
    assert setup.model.calls == eager == 8  # 5 training batches, 3 of validation.


def test_a_break_is_reported_with_its_line_and_page(setup):
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = setup.new_model()

        def forward(self, x):
            x = self.body(x)
            torch._dynamo.graph_break()
            return x + 1

    history = setup.train(Breaks(), max_epochs=1, **AOT)
    (broken,) = history.graph_breaks
    assert broken.file == __file__
    assert "graph_break()" in Path(__file__).read_text(encoding="utf-8").splitlines()[broken.line - 1]
    assert broken.page.startswith("https://")
    assert history.compiled


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_do_not_accumulate(mode):
    hp = TrainingHyperparams(torch_compile=True, torch_compile_mode=mode, batch_accumulate=4, on_out_of_memory="halve")
    assert [str(problem) for problem in problems_on(hp, torch.device("cuda"))] == [
        f"training_hyperparams.batch_accumulate: 4 batches cannot be accumulated with the CUDA graphs of {mode}; "
        "use mode default or max-autotune-no-cudagraphs",
        f"training_hyperparams.on_out_of_memory: halve accumulates, which the CUDA graphs of {mode} cannot; "
        "use mode default or max-autotune-no-cudagraphs",
    ]
    assert problems_on(hp, torch.device("cpu")) == []
    assert problems_on(hp.replace(torch_compile=False), torch.device("cuda")) == []


def test_the_cache_is_the_users_own_and_survives_a_reboot(tmp_path, monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = tmp_path / "sgnb" / f"inductor-{torch.__version__}"
    assert cache_dir() == expected
    with run_flags(TrainingHyperparams(torch_compile=True), torch.device("cpu")) as notices:
        assert os.environ[CACHE_VARIABLE] == str(expected)
        assert expected.is_dir()
    assert notices == []
    assert CACHE_VARIABLE not in os.environ
    monkeypatch.setenv(CACHE_VARIABLE, "elsewhere")
    with run_flags(TrainingHyperparams(torch_compile=True), torch.device("cpu")):
        assert os.environ[CACHE_VARIABLE] == "elsewhere"


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    (tmp_path / "sgnb").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with run_flags(TrainingHyperparams(torch_compile=True), torch.device("cpu")) as notices:
        assert CACHE_VARIABLE not in os.environ
    assert notices == [f"{cache_dir()} cannot be written, so compiled graphs are kept in a temporary folder only."]


def test_a_last_batch_of_one_sample_is_announced(setup):
    setup.batch_size = 23  # 70 = 3 x 23 + 1.
    history = setup.train(max_epochs=1)
    assert history.notices == [
        "The last training batch of each epoch has one sample. BatchNorm fails where it then has one value per "
        "channel, and the compiler needs a graph of its own; drop_last=True in the loader leaves it out."
    ]


def test_graphs_of_many_runs_do_not_add_up_to_a_limit(setup):
    with torch._dynamo.config.patch(accumulated_recompile_limit=6):
        for _ in range(5):
            assert setup.train(max_epochs=1, **AOT).compiled
