"""What torch.compile would make of a model, found without a run and without a change to the model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from sgnb.events import GraphBroke, RecompileLimitReached
from sgnb.history import html_table
from sgnb.hyperparams import TorchCompileOptions, TrainingHyperparams
from sgnb.training.compilation import compile_in_place, own_compiled_call
from sgnb.training.loaders import Batch, map_tensors, mark_batch_dynamic, tensors_in
from sgnb.training.precision import Precision, choose_dtype
from sgnb.training.randomness import preserved_rng
from sgnb.training.watcher import CompileWatcher

_COUNTING = "BatchNorm with momentum=None reads its counter on the host, which no graph can hold. Set momentum=0.1."
_FORWARD_HOOKS = "its forward hooks become part of the graphs; compiled code does not call any that come later."
_BACKWARD_HOOKS = "its backward hooks break the graph: torch has them in compiled autograd only."
_NOTHING = (
    "No graph for training or validation, and no break either: torch.compile is switched off (TORCHDYNAMO_DISABLE, "
    "set_stance), or reuses what it made of the same code before, be it nothing; torch._dynamo.reset() forgets that."
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the compiler made of one batch and of half of it, in training and in validation."""

    num_graphs: int  # 2 is the best: one for training and one for validation, each for all batch sizes.
    breaks: tuple[GraphBroke, ...]
    recompile_reasons: tuple[str, ...]
    limits: tuple[RecompileLimitReached, ...]
    remarks: tuple[str, ...]
    seconds: float  # That it took to find out; a run takes longer, as it also generates code.

    @property
    def fullgraph_possible(self) -> bool:
        """Whether all of the model goes into graphs, as `torch_compile_options: {fullgraph: True}` demands."""
        return self.num_graphs > 0 and not self.breaks and not self.limits

    def _rows(self) -> list[tuple[str, str]]:
        broke = [f"{b.file}:{b.line}: {b.reason}" + (f" ({b.page})" if b.page else "") for b in self.breaks]
        rows = [("graph break", text) for text in broke] + [("recompiled", text) for text in self.recompile_reasons]
        rows += [("given up", f"{limit.function}; {limit.reason}") for limit in self.limits]
        return rows + [("remark", text) for text in self.remarks]

    def _title(self) -> str:
        numbers = ((self.num_graphs, "graph"), (len(self.breaks), "break"), (len(self.recompile_reasons), "recompile"))
        counts = ", ".join(f"{number} {name}{'' if number == 1 else 's'}" for number, name in numbers)
        return f"torch.compile: {counts}; fullgraph is {'' if self.fullgraph_possible else 'not '}possible"

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {kind}: {text}" for kind, text in self._rows())])

    def _repr_html_(self) -> str:
        return html_table(["what", "where and why"], self._rows(), caption=self._title())


def explain(
    model: nn.Module, batch: Any, *, training_hyperparams: TrainingHyperparams | Mapping[str, Any] | None = None
) -> Explanation:
    """Return what torch.compile would make of `model`: graphs, breaks, recompilations, and what is known to hinder it.

    Args:
        model: It stays as it is: weights, buffers, gradients, attributes, mode, hooks and its own compilation.
        batch: The inputs, or `(inputs, targets)` as a loader yields them.
        training_hyperparams: Their dtype and `dynamic` are used; else the defaults.

    Raises:
        Exception: what the model raises of itself; it runs eagerly first.
    """
    start, hp = time.perf_counter(), TrainingHyperparams.from_dict(training_hyperparams)
    options = TorchCompileOptions(backend="eager", dynamic=hp.torch_compile_options.dynamic)  # No code is generated.
    hp = hp.model_copy(update={"torch_compile_options": options})
    model = getattr(model, "_orig_mod", model)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    precision, watcher, remarks = Precision(choose_dtype(hp, device)[0], device), CompileWatcher(), _remarks(model)
    inputs = map_tensors(lambda tensor: tensor.to(device), batch[0] if isinstance(batch, tuple | list) else batch)
    with preserved_rng(), own_compiled_call(model), _preserved(model), watcher:
        for training in (True, False):
            _step(model, inputs, precision, training=training)
        graphs, reasons = [watcher.counts()["num_graphs"]], list[str]()
        compile_in_place([model], hp)
        try:
            for training in (True, False):
                for index, part in enumerate(_sizes(inputs)):
                    known = len(watcher.recompile_reasons)
                    _step(model, part, precision, training=training, mark=options.dynamic is None)
                    if training or index:  # The first of validation has to be another graph.
                        reasons += watcher.recompile_reasons[known:]
                graphs.append(watcher.counts()["num_graphs"])
        except TorchDynamoException as error:
            remarks.append(f"The compiler failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        num_graphs = watcher.counts()["num_graphs"] - graphs[0]
    if not watcher.breaks and len(set(graphs)) < len(graphs):
        remarks.append(_NOTHING)
    found = tuple(watcher.breaks), tuple(reasons), tuple(watcher.limits), tuple(remarks)
    return Explanation(num_graphs, *found, seconds=time.perf_counter() - start)


def _sizes(inputs: Any) -> list[Any]:
    """Return the batch, and half of it where that is more than one sample, of which torch makes a graph of its own."""
    size = next((tensor.shape[0] for tensor in tensors_in(inputs) if tensor.ndim), 0)
    halve = partial(map_tensors, lambda tensor: tensor[: size // 2] if tensor.shape[:1] == (size,) else tensor)
    return [inputs, halve(inputs)] if size >= 4 else [inputs]


def _step(model: nn.Module, inputs: Any, precision: Precision, *, training: bool, mark: bool = False) -> None:
    inputs = map_tensors(lambda tensor: tensor.detach().clone(), inputs)  # A model may write to them.
    if mark:
        mark_batch_dynamic(Batch(inputs, (), next((t.shape[0] for t in tensors_in(inputs) if t.ndim), 1)))
    with precision.autocast(), torch.set_grad_enabled(training):
        output = model.train(training)(inputs)
    differentiable = [tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad]
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if differentiable and weights:  # Without .backward(), which adds to the gradients and calls their hooks.
        torch.autograd.grad(differentiable, weights, allow_unused=True)


@contextmanager
def _preserved(model: nn.Module) -> Iterator[None]:
    values = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    tables = [table for m in model.modules() for table in (vars(m), m._parameters, m._buffers)]
    entries = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, before in entries:
            for name in table.keys() - before.keys():
                del table[name]
            table.update({name: value for name, value in before.items() if table.get(name) is not value})
        for tensor, value in values:
            tensor.data.copy_(value)  # Past the version counter: a graph of the user's stays valid.


def _remarks(model: nn.Module) -> list[str]:
    remarks = []
    for path, module in model.named_modules():
        name = path or "the model"
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            remarks.append(f"{name}: {_COUNTING}")
        if module._forward_hooks or module._forward_pre_hooks:
            remarks.append(f"{name}: {_FORWARD_HOOKS}")
        if module._backward_hooks or module._backward_pre_hooks:
            remarks.append(f"{name}: {_BACKWARD_HOOKS}")
    return remarks
