"""What the compiler did, and what it would do: breaks, recompilations, limits, times."""

import inspect
import logging
import time

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler

from sgnb.events import GraphBroke, RecompileLimitReached, sentence
from sgnb.training.explanation import explain
from sgnb.training.watcher import CompileWatcher

# At a break torch asks tensors for .grad, and silences what it then says itself, unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

PAGES = "https://meta-pytorch.github.io/compile-graph-break-site/gb"
BREAK_LOG = "torch._dynamo.symbolic_convert.__graph_breaks"
LIMIT_LOG = "torch._dynamo.convert_frame"


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        print("between")
        return x * 2


class Reading(Breaking):
    def forward(self, x):
        x = self.linear(x)
        return x * 2 if x.sum().item() > 0 else x


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


def line_of(model, text):
    lines, first = inspect.getsourcelines(type(model).forward)
    return first + next(index for index, line in enumerate(lines) if text in line)


def run(model, *, backend="eager", batches=1):
    model.compile(backend=backend)
    for _ in range(batches):
        model(torch.ones(8, 4)).sum().backward()
    return model


def test_a_break_is_told_at_once_with_its_line_its_reason_and_its_page_and_nothing_is_printed(capfd):
    told, model = [], Breaking()
    with CompileWatcher(told.append) as watcher:
        run(model)
    line = line_of(model, "print")
    reason = "Dynamo does not know how to trace builtin operator `print` with argument types ['str'] (has_kwargs False)"
    assert watcher.breaks == told
    assert [sentence(event) for event in told] == [f"graph break at {__file__}:{line}: {reason} ({PAGES}/gb0059.html)"]
    assert capfd.readouterr() == ("between\n", "")


def test_a_value_that_is_read_on_the_host_is_a_break():
    model = Reading()
    with CompileWatcher() as watcher:
        run(model)
    (broke,) = watcher.breaks
    assert isinstance(broke, GraphBroke)
    assert (broke.file, broke.line, broke.page) == (__file__, line_of(model, "item"), f"{PAGES}/gb0124.html")
    assert broke.reason == "Dynamo does not support tracing `Tensor.item()` with config.capture_scalar_outputs=False."


def test_a_line_is_told_once_also_where_torch_words_it_differently():
    told = []
    with CompileWatcher(told.append) as watcher:
        run(Breaking())
        run(Breaking().eval())
        torch._dynamo.reset()  # torch then compiles and logs the same line again.
        run(Breaking())
    assert len(told) == len(watcher.breaks) == 1
    assert watcher.counts()["num_breaks"] >= 1


def test_a_second_watcher_hears_a_break_that_torch_has_logged_before():
    class Called(nn.Module):
        def forward(self, x):
            return helper(x)

    @torch.compiler.disable
    def helper(x):
        return x + 1

    model = Called()
    model.compile(backend="eager")
    heard = []
    for grad in (True, False):
        with CompileWatcher() as watcher, torch.set_grad_enabled(grad):
            model(torch.ones(2))
        heard.append([(broke.line, broke.reason) for broke in watcher.breaks])
    assert heard[0] == heard[1]
    assert heard[0][0][0] == line_of(model, "helper")
    assert " at 0x" not in heard[0][0][1]


def test_a_float_that_changes_is_named_as_the_reason():
    model = Scaled(0.5)
    with CompileWatcher() as watcher:
        model.compile(backend="eager")
        for scale in (0.5, 0.25, 0.75):
            model.scale = scale
            model(torch.ones(2))
    (reason,) = watcher.recompile_reasons  # From the second value on, torch takes a float as an input.
    assert reason.startswith("self.scale == 0.5, at ")
    assert reason.endswith(f":{line_of(model, 'return')} in forward: return x * self.scale")
    assert watcher.last_reason() == reason


def test_a_function_that_is_given_up_is_named_with_its_last_reason():
    told, model = [], Scaled(2)
    with CompileWatcher(told.append) as watcher:
        model.compile(backend="eager")
        for scale in range(2, 14):
            model.scale = scale
            model(torch.ones(2))
    assert watcher.limits == told
    (given_up,) = told
    assert isinstance(given_up, RecompileLimitReached)
    assert given_up.function == f"forward ({__file__}:{line_of(model, 'def')})"
    assert given_up.reason.startswith("self.scale == 9, at ")
    assert len(watcher.recompile_reasons) == 8
    assert all(len(reason) <= 300 and "\n" not in reason for reason in watcher.recompile_reasons)


def test_without_a_recompilation_there_is_no_reason():
    with CompileWatcher() as watcher:
        run(nn.Linear(4, 4))
    assert watcher.last_reason() == "the compiler gave no reason"


def test_graphs_are_counted():
    with CompileWatcher() as watcher:
        before = watcher.counts()
        run(nn.Linear(4, 4), batches=2)
        after = watcher.counts()
    assert {name: after[name] - before[name] for name in after} == {
        "num_graphs": 1,
        "num_breaks": 0,
        "cache_hits": 0,
        "cache_misses": 0,
    }


def test_phases_are_disjoint_and_belong_to_what_came_after_the_mark():
    with CompileWatcher() as watcher:
        run(nn.Linear(4, 4), backend="aot_eager")
        mark, start = watcher.mark(), time.perf_counter()
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        run(model, backend="aot_eager")
        wall = time.perf_counter() - start
    phases = watcher.seconds_by_phase(mark)
    assert list(phases) == ["tracing", "autograd", "code generation"]
    assert phases["tracing"] > 0
    assert phases["autograd"] > 0
    assert 0 < sum(phases.values()) <= wall
    assert sum(phases.values()) < sum(watcher.seconds_by_phase().values())
    assert 0 < watcher.guard_us(mark) < watcher.guard_us()
    assert watcher.seconds > 0


def test_records_that_torch_throws_away_are_kept():
    with CompileWatcher() as watcher:
        run(nn.Linear(4, 4))
        before = watcher.seconds_by_phase()
        torch._dynamo.utils.clear_compilation_metrics()
        assert watcher.seconds_by_phase() == before
        run(Breaking())
        assert watcher.seconds_by_phase()["tracing"] > before["tracing"]


def test_a_reset_of_torch_does_not_stop_the_clock_for_long():
    with CompileWatcher() as watcher:
        run(nn.Linear(4, 4))
        torch._dynamo.reset()
        before = watcher.seconds
        watcher.mark()
        run(nn.Linear(4, 4))
        assert watcher.seconds > before


def state_of_logs():
    logs = [logging.getLogger(name) for name in (BREAK_LOG, LIMIT_LOG)]
    callbacks = callback_handler.start_callbacks, callback_handler.end_callbacks
    return [(log.level, log.propagate, list(log.handlers)) for log in logs], [list(each) for each in callbacks]


def test_loggers_and_callbacks_are_as_before_also_after_an_error_and_in_any_order():
    before = state_of_logs()
    with pytest.raises(ZeroDivisionError), CompileWatcher(), CompileWatcher():
        raise ZeroDivisionError
    assert state_of_logs() == before
    first, second = CompileWatcher(), CompileWatcher()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    run(Breaking())
    second.__exit__()
    assert (len(first.breaks), len(second.breaks)) == (0, 1)
    assert state_of_logs() == before


def test_who_asked_torch_for_breaks_goes_on_to_see_them():
    log = logging.getLogger(BREAK_LOG)
    before, lines = log.level, []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.parent.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        with CompileWatcher():
            assert log.propagate
            run(Breaking())
    finally:
        log.setLevel(before)
        log.parent.removeHandler(handler)
    assert [line.splitlines()[0] for line in lines if line.startswith("Graph break")]


class Counting(nn.Module):
    """Changes all that a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3, max_norm=0.1)
        self.norm = nn.BatchNorm1d(3)
        self.calls = 0
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        self.calls += 1
        y = nn.functional.dropout(self.norm(self.embedding(x)), training=self.training)
        self.last = y.detach().mean(0)
        return y


def test_an_explained_model_and_the_random_numbers_are_as_before():
    model = Counting().eval()
    model.norm.train()
    model.embedding.weight.grad = torch.ones(4, 3)
    model.compile(backend="eager")
    call, buffer, grad = model._compiled_call_impl, model.last, model.embedding.weight.grad
    state, rng = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    batch = torch.arange(8) % 4, torch.zeros(8)
    explanation = explain(model, batch, training_hyperparams={"mixed_precision": False})
    assert explanation.num_graphs >= 2
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert (model.training, model.norm.training, model.calls) == (False, True, 0)
    assert model._compiled_call_impl is call
    assert model.last is buffer
    assert model.embedding.weight.grad is grad
    assert torch.equal(grad, torch.ones(4, 3))
    assert not hasattr(batch[0], "_dynamo_weak_dynamic_indices")


def test_a_clean_model_is_two_graphs():
    explanation = explain(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.randn(8, 4))
    assert str(explanation) == "torch.compile: 2 graphs, 0 breaks, 0 recompiles; fullgraph is possible"
    assert explanation.fullgraph_possible
    assert explanation.seconds > 0


def test_what_hinders_the_compiler_is_named_with_its_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    model[0].register_forward_hook(lambda *_: None)
    explanation = explain(model, torch.randn(8, 4))
    assert explanation.remarks == (
        "0: its forward hooks become part of the graphs; compiled code does not call any that come later.",
        "1: BatchNorm with momentum=None reads its counter on the host, which no graph can hold. Set momentum=0.1.",
    )
    assert not explanation.fullgraph_possible
    assert "batchnorm.py" in explanation.breaks[0].file
    assert "<td>remark</td><td>1: BatchNorm with momentum=None" in explanation._repr_html_()
    assert explain(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4)).num_graphs == 2  # It has not spoilt others.


def test_breaks_and_recompilations_are_shown():
    class Choosing(Breaking):
        def forward(self, x):
            return self.linear(x + 1 if x.shape[0] > 5 else x)

    explanation = explain(Choosing(), torch.randn(8, 4))
    place = f"test_watcher.py:{line_of(Choosing(), 'return')} in forward"
    assert explanation.num_graphs == 4
    assert [reason.partition(", at ")[0] for reason in explanation.recompile_reasons] == ["6 <= args[0].size()[0]"] * 2
    assert all(place in reason for reason in explanation.recompile_reasons)
    text = str(explain(Breaking(), torch.randn(8, 4)))
    assert text.splitlines()[0].endswith("fullgraph is not possible")
    assert f"  graph break: {__file__}:{line_of(Breaking(), 'print')}: Dynamo does not know" in text


def test_a_model_that_fails_fails_with_its_own_error_and_is_as_before():
    model = nn.Linear(5, 4).eval()
    with pytest.raises(RuntimeError) as caught:
        explain(model, torch.randn(8, 4))
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == "mat1 and mat2 shapes cannot be multiplied (8x4 and 5x4)"
    assert not model.training
    assert model._compiled_call_impl is None


def test_explaining_often_takes_nothing_from_the_limit_of_a_compiled_model():
    model = Breaking()
    for _ in range(6):
        graphs = explain(model, torch.randn(8, 4)).num_graphs
    with CompileWatcher() as watcher:
        run(model)
    assert graphs >= 2
    assert watcher.limits == []
    assert watcher.recompile_reasons == []


def test_silence_of_the_compiler_is_remarked():
    with torch.compiler.set_stance("force_eager"):
        explanation = explain(nn.Linear(4, 4), torch.ones(8, 4))
    assert str(explanation) == (
        "torch.compile: 0 graphs, 0 breaks, 0 recompiles; fullgraph is not possible\n"
        "  remark: No graph for training or validation, and no break either: torch.compile is switched off "
        "(TORCHDYNAMO_DISABLE, set_stance), or reuses what it made of the same code before, be it nothing; "
        "torch._dynamo.reset() forgets that."
    )
