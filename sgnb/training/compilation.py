"""torch.compile, kept honest: whether it can work here, what it did, and whether the result is the same.

The inner module is compiled in place, as by `module.compile()`, so that its class and its state keys stay as they are.
Both graphs are made before the first epoch, and one batch must agree with eager execution before the run trusts them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from sgnb.events import CompileChecked, CompileEnded, CompileFailed, CompileStarted, Graph, Listener
from sgnb.hyperparams import CUDA_GRAPH_MODES, Problem, TrainingHyperparams
from sgnb.training.loaders import Batch, mark_batch_dynamic
from sgnb.training.randomness import preserved_rng
from sgnb.training.steps import StepResult
from sgnb.training.watcher import CompileWatcher

# Compiled code sums in another order, and keeps float32 where eager execution rounds to 16 bits in between.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_NUM_EAGER_RUNS = 3  # Enough to see that a model draws random numbers, as with dropout.
_MIN_COPIES = 3
_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # From torch 2.13 on.
_REPORT = "Please report the model to PyTorch; nothing is wrong with your settings."


def find_regions(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of `model`: modules of one class, with children, that lie in lists and sequences.

    Each kind is compiled once and serves all its copies, so that the compiler works on one block of a transformer
    instead of all of them. Fewer than three of a class are not worth the seams.
    """
    counts = Counter(type(block) for block in _blocks(model))
    return _outermost(model, {kind for kind, count in counts.items() if count >= _MIN_COPIES})


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for container in model.modules():
        if isinstance(container, nn.Sequential | nn.ModuleList):
            for child in container:
                if not isinstance(child, nn.Sequential | nn.ModuleList) and next(child.children(), None) is not None:
                    yield child


def _outermost(module: nn.Module, kinds: set[type[nn.Module]]) -> list[nn.Module]:
    found: list[nn.Module] = []
    inside = isinstance(module, nn.Sequential | nn.ModuleList)
    for child in module.children():
        found += [child] if inside and type(child) in kinds else _outermost(child, kinds)
    return found


def problems_on(hp: TrainingHyperparams, device: torch.device) -> list[Problem]:
    """Return what cannot work on this device. CUDA graphs overwrite the gradients of the batch before (pytorch#169545).

    On a CPU there are none, and the same settings do no harm.
    """
    if device.type != "cuda" or not hp.torch_compile or hp.compile_mode not in CUDA_GRAPH_MODES:
        return []
    way_out = "use mode default or max-autotune-no-cudagraphs"
    where = "training_hyperparams"
    problems = []
    if hp.batch_accumulate > 1:
        message = f"{hp.batch_accumulate} batches cannot be accumulated with the CUDA graphs of {hp.compile_mode}"
        problems.append(Problem(where=f"{where}.batch_accumulate", message=f"{message}; {way_out}"))
    if hp.on_out_of_memory == "halve":
        message = f"halve accumulates, which the CUDA graphs of {hp.compile_mode} cannot"
        problems.append(Problem(where=f"{where}.on_out_of_memory", message=f"{message}; {way_out}"))
    return problems


def compile_targets(model: nn.Module, criterion: nn.Module, hp: TrainingHyperparams) -> list[list[nn.Module]]:
    """Return the modules that `hp` wants compiled; those of one list share their graphs."""
    groups: list[list[nn.Module]] = []
    if hp.torch_compile:
        regions = find_regions(model) if hp.torch_compile_regions == "auto" else []
        groups.append(regions or [model])
    return [*groups, [criterion]] if hp.torch_compile_loss else groups


def compile_in_place(modules: Sequence[nn.Module], hp: TrainingHyperparams) -> None:
    """Compile `modules` as `hp` says, their graphs shared; the compiler begins at the first call.

    Classes, state keys and hooks stay as they are: only `module(...)` takes another way.
    """
    options = hp.torch_compile_options
    arguments: dict[str, Any] = {
        "fullgraph": options.fullgraph,
        "dynamic": options.dynamic,
        "backend": options.backend,
        "disable": options.disable,
    }
    # torch refuses a mode for every backend but inductor, and a mode together with options.
    if options.options:
        arguments["options"] = options.options
    elif options.backend == "inductor":
        arguments["mode"] = hp.compile_mode
    if _ISOLATES:
        arguments["isolate_recompiles"] = True
    # As module.compile() does, but through a function of ours: the graphs of copies can be shared, and torch 2.11 makes
    # none where the module is one of its own classes, such as nn.Sequential.
    # All graphs of one code object count against torch's limits, over the life of the process; a copy begins at zero.
    call = FunctionType(_call_eagerly.__code__.replace(), globals(), _call_eagerly.__name__)
    shared = torch.compile(call, **arguments)
    for module in modules:
        module._compiled_call_impl = functools.partial(shared, module)


def _call_eagerly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def start_afresh() -> None:
    """Make room for a run's graphs. The rest of a `forward` behind a graph break has a limit, also over many runs.

    A cell that is run again and again would get there, and run eagerly. torch 2.14 gives each compilation a limit of
    its own; the versions before it can only forget everything, the user's own graphs too.
    """
    if not _ISOLATES:
        torch._dynamo.reset()


@contextmanager
def own_compiled_call(model: nn.Module) -> Iterator[None]:
    """Give `model` back as it was, eager unless the user had compiled it: a prediction must not start the compiler."""
    before = [(module, module._compiled_call_impl) for module in model.modules()]
    uncompile([module for module, _ in before])
    try:
        yield
    finally:
        for module, call in before:
            module._compiled_call_impl = call


def uncompile(modules: Iterable[nn.Module]) -> None:
    """Make `modules` eager again."""
    for module in modules:
        module._compiled_call_impl = None


@contextmanager
def _marking_batches(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Tell the compiler at the border of each region that the first dimension varies, as at the model's own.

    Only while the graphs are made: afterwards they are taken by tensors without the mark as well.
    """
    calls: list[Any] = [module._compiled_call_impl for module in modules]

    def marking(call: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.ndim and value.shape[0] > 1:
                    torch._dynamo.maybe_mark_dynamic(value, 0)
            return call(*args, **kwargs)

        return marked

    for module, call in zip(modules, calls, strict=True):
        module._compiled_call_impl = marking(call)
    try:
        yield
    finally:
        for module, call in zip(modules, calls, strict=True):
            module._compiled_call_impl = call


@contextmanager
def _preserved_attributes(model: nn.Module) -> Iterator[None]:
    """Put plain attributes back at the end: a model that counts its calls has not been called."""
    before = [(vars(module), _outside_of_graphs(module)) for module in model.modules()]
    try:
        yield
    finally:
        for table, values in before:
            table.update({name: value for name, value in values.items() if name != "hooks"})


class ModelWatch:
    """Finds what changes in a compiled model although its graphs were made for what it was."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._said: set[str] = set()
        self._before = self._look()

    def _look(self) -> dict[str, dict[str, Any]]:
        return {name or "the model": _outside_of_graphs(module) for name, module in self._model.named_modules()}

    def changes(self) -> list[str]:
        """Return one sentence for each new kind of change since the last call."""
        now, sentences = self._look(), []
        for name, values in now.items():
            before = self._before.get(name, values)
            for key, value in values.items():
                where = f"{name}.{key}" if key != "hooks" else f"hooks of {name}"
                if key not in before or value == before[key] or where in self._said:
                    continue
                self._said.add(where)
                if key == "hooks":
                    sentences.append(
                        f"{where} were registered or removed after it was compiled; compiled code does not call new "
                        "ones. Register hooks before training."
                    )
                else:
                    sentences.append(
                        f"{where} changed from {before[key]!r} to {value!r}: the compiler makes a new graph for "
                        "another value, and gives up after some. Keep it in a tensor (register_buffer)."
                    )
        self._before = now
        return sentences


def _outside_of_graphs(module: nn.Module) -> dict[str, Any]:
    """Return what compiled code takes as a constant: plain public attributes, and which hooks there are."""
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, int | float | str)
        and not key.startswith("_")
        and key not in ("training", "call_super_init")
    }
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return {**plain, "hooks": tuple(key for hooks in tables for key in hooks)}


@dataclass(frozen=True, slots=True)
class _Outcome:
    loss: float
    grad_norm: float


class WarmUp:
    """Makes both graphs on real batches, leaves no trace in the model, and compares them with eager execution.

    `targets` are groups of modules as from `compile_targets`.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[Sequence[nn.Module]],
        *,
        train_step: Callable[[Batch], StepResult],
        eval_step: Callable[[Batch], StepResult],
        watcher: CompileWatcher,
        emit: Listener,
    ) -> None:
        self.model = model
        self.targets = targets
        self.train_step = train_step
        self.eval_step = eval_step
        self.watcher = watcher
        self.emit = emit

    def run(
        self, hp: TrainingHyperparams, train: Sequence[Batch], valid: Sequence[Batch], *, dtype: torch.dtype
    ) -> bool:
        """Compile, check, and return whether the run may go on compiled; if not, the model is eager again.

        `train` and `valid` are batches of each size that will come (`valid` may be empty): the first is compared, the
        others bring out the graphs that a smaller batch needs (a convolution on the CPU has another below 16 samples).

        Raises:
            Exception: what the compiler raised, when `fullgraph` asks for all or nothing.
        """
        with preserved_rng(), _preserved_attributes(self.model):
            eager = [self._train(train[0]) for _ in range(_NUM_EAGER_RUNS)]
            eager_output = self._valid(valid[0]) if valid else None
            for group in self.targets:
                compile_in_place(group, hp)
            try:
                graphs, compiled, compiled_output = self._make_graphs(
                    train, valid, mark=hp.torch_compile_options.dynamic is None
                )
            except Exception as error:
                self._uncompile()
                if hp.torch_compile_options.fullgraph:
                    raise
                self.emit(CompileFailed(reason=_first_sentence(error), hint=_hint(error)))
                return False
        if not all(graphs.values()):
            self._uncompile()
            which = "" if not any(graphs.values()) else "training " if graphs["train"] == 0 else "validation "
            reason = f"the compiler made no {which}graph of this model, which then runs eagerly in silence."
            self.emit(CompileFailed(reason=reason, hint=_hint_without_graphs(self.model)))
            return False
        checked = _compare(eager, compiled, eager_output, compiled_output, _TOLERANCES[dtype])
        self.emit(checked)
        if not checked.agreed:
            self._uncompile()
            self.emit(CompileFailed(reason="compiled and eager execution of one batch disagree.", hint=_REPORT))
        return checked.agreed

    def agrees(self, batch: Batch, compiled: Tensor, *, dtype: torch.dtype) -> bool:
        """Return whether eager execution of `batch` gives the `compiled` output too; if not, the model is eager again.

        For weights that were swapped in: a graph that had kept the old ones would go unnoticed.
        """
        with preserved_rng(), torch.compiler.set_stance("force_eager"):
            difference = _output_difference(self._valid(batch), compiled.float())
        if difference <= _TOLERANCES[dtype]:
            return True
        self._uncompile()
        reason = f"with averaged weights, compiled and eager execution disagree (by {difference:.1e})."
        self.emit(CompileFailed(reason=reason, hint=_REPORT))
        return False

    def _make_graphs(
        self, train: Sequence[Batch], valid: Sequence[Batch], *, mark: bool
    ) -> tuple[dict[Graph, int], _Outcome, Tensor | None]:
        """Return how many graphs there are of each kind, and what the first batches gave."""
        regions = [module for group in self.targets if len(group) > 1 for module in group]
        with warnings.catch_warnings(), _marking_batches(regions) if mark else contextlib.nullcontext():
            # Dynamo looks at .grad of every input, also where one comes out of an eager part of the model.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            for batch in (*train, *valid) if mark else ():
                mark_batch_dynamic(batch)
            num_graphs, (compiled, *_) = self._timed("train", lambda: [self._train(batch) for batch in train])
            if not valid:
                return {"train": num_graphs}, compiled, None
            num_valid_graphs, (output, *_) = self._timed("valid", lambda: [self._valid(batch) for batch in valid])
            return {"train": num_graphs, "valid": num_valid_graphs}, compiled, output

    def _uncompile(self) -> None:
        uncompile(module for group in self.targets for module in group)

    def _timed(self, graph: Graph, call: Callable[[], Any]) -> tuple[int, Any]:
        self.emit(CompileStarted(graph=graph))
        before, since, start = self.watcher.counts(), self.watcher.mark(), time.perf_counter()
        result = call()
        after = self.watcher.counts()
        counts = {name: after[name] - before[name] for name in after}
        self.emit(
            CompileEnded(
                graph=graph,
                seconds=time.perf_counter() - start,
                seconds_by_phase=self.watcher.seconds_by_phase(since),
                guard_us=self.watcher.guard_us(since),
                **counts,
            )
        )
        return counts["num_graphs"], result

    def _train(self, batch: Batch) -> _Outcome:
        buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        self.model.train()
        try:
            loss = self.train_step(batch).loss.item()
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            grad_norm = nn.utils.get_total_norm(grads).item() if grads else 0.0
        finally:
            self.model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])
        return _Outcome(loss, grad_norm)

    def _valid(self, batch: Batch) -> Tensor:
        self.model.eval()
        return self.eval_step(batch).output.float().clone()


def _compare(
    eager: list[_Outcome],
    compiled: _Outcome,
    eager_output: Tensor | None,
    compiled_output: Tensor | None,
    tolerance: float,
) -> CompileChecked:
    losses, norms = [outcome.loss for outcome in eager], [outcome.grad_norm for outcome in eager]
    # A model with dropout differs from itself; compiled code draws other numbers, so its own spread is the measure.
    spread = max(_relative(max(values), min(values)) for values in (losses, norms))
    allowed = tolerance if spread < tolerance / 10 else max(tolerance, 10 * spread)
    loss, norm = _relative(compiled.loss, losses[0]), _relative(compiled.grad_norm, norms[0])
    output = 0.0
    if eager_output is not None and compiled_output is not None:
        output = _output_difference(eager_output, compiled_output)
    return CompileChecked(
        # Written so that a NaN on one side alone disagrees.
        agreed=loss <= allowed and norm <= allowed and output <= tolerance,
        loss_difference=loss,
        grad_norm_difference=norm,
        output_difference=output,
        tolerance=allowed,
    )


def _output_difference(eager: Tensor, compiled: Tensor) -> float:
    return (compiled - eager).abs().max().item() / (eager.abs().max().item() or 1.0)


def _relative(value: float, reference: float) -> float:
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    return abs(value - reference) / max(abs(reference), 1e-12)


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else "it gave no reason"
    return f"{type(error).__name__}: {text[:300]}"


def _hint_without_graphs(model: nn.Module) -> str:
    counting = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None
    ]
    if counting:  # It reads its counter on the host, which no graph can hold (pytorch#194504).
        more = f" and {len(counting) - 3} more" if len(counting) > 3 else ""
        return f"BatchNorm with momentum=None cannot be compiled: {', '.join(counting[:3])}{more}. Set momentum=0.1."
    return "torch_compile_options: {fullgraph: True} makes it say why."


def _hint(error: Exception) -> str:
    if "CUDA" in str(error):
        return "CUDA_LAUNCH_BLOCKING=1 shows the place of a CUDA error; a smaller batch helps when memory is short."
    return "torch_compile: False avoids the attempt; TORCH_LOGS=graph_breaks,recompiles tells more."
