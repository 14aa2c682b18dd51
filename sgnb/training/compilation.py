"""torch.compile, kept honest: whether it can work here, what it did, and whether the result is the same.

The inner module is compiled in place (`module.compile()`), so that its class and its state keys stay as they are. Both
graphs are made before the first epoch, and one batch must agree with eager execution before the run trusts them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import _compilation_metrics, counters

from sgnb.events import CompileChecked, CompileEnded, CompileFailed, CompileStarted, Graph, Listener
from sgnb.hyperparams import TrainingHyperparams
from sgnb.training.loaders import Batch, mark_batch_dynamic
from sgnb.training.steps import StepResult

# Compiled code sums in another order, and keeps float32 where eager execution rounds to 16 bits in between.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_NUM_EAGER_RUNS = 3  # Enough to see that a model draws random numbers, as with dropout.


class CompileWatcher:
    """Counts what the compiler does while it is installed: seconds, graphs, breaks, and cache hits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def __enter__(self) -> CompileWatcher:
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        # torch._dynamo.reset() drops all callbacks, ours too.
        if self._start in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)

    def _start(self, _: CallbackArgs) -> None:
        self._since = time.perf_counter()

    def _end(self, _: CallbackArgs) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def counts(self) -> dict[str, int]:
        """Return totals of this process so far; take the difference of two calls."""
        inductor, aot = counters["inductor"], counters["aot_autograd"]
        return {
            "num_graphs": counters["stats"]["unique_graphs"],
            "num_breaks": sum(counters["graph_break"].values()),
            "cache_hits": max(inductor["fxgraph_cache_hit"], aot["autograd_cache_hit"]),
            "cache_misses": max(inductor["fxgraph_cache_miss"], aot["autograd_cache_miss"]),
        }

    def last_reason(self) -> str:
        """Return the compiler's own words for its latest recompilation, on one line."""
        reasons = [metrics.recompile_reason for metrics in _compilation_metrics if metrics.recompile_reason]
        return " ".join(reasons[-1].split())[:300] if reasons else "the compiler gave no reason"


def compile_in_place(module: nn.Module, hp: TrainingHyperparams) -> None:
    """Compile `module` as `hp` says; the compiler begins at its first call."""
    options = hp.torch_compile_options
    mode = options.mode or hp.torch_compile_mode
    module.compile(
        fullgraph=options.fullgraph,
        dynamic=options.dynamic,
        backend=options.backend,
        # torch refuses a mode for every backend but inductor, and a mode together with options.
        **(
            {"options": options.options} if options.options else {"mode": mode} if options.backend == "inductor" else {}
        ),
        disable=options.disable,
    )


@contextmanager
def own_compiled_call(module: nn.Module) -> Iterator[None]:
    """Give `module` back as it was, eager unless the user had compiled it: a prediction must not start the compiler."""
    before = module._compiled_call_impl
    module._compiled_call_impl = None
    try:
        yield
    finally:
        module._compiled_call_impl = before


@dataclass(frozen=True, slots=True)
class _Outcome:
    loss: float
    grad_norm: float


class WarmUp:
    """Makes both graphs on real batches, leaves no trace in the model, and compares them with eager execution."""

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module,
        *,
        train_step: Callable[[Batch], StepResult],
        eval_step: Callable[[Batch], StepResult],
        watcher: CompileWatcher,
        emit: Listener,
    ) -> None:
        self.model = model
        self.criterion = criterion
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
        if hp.torch_compile_options.dynamic is None:
            for batch in (*train, *valid):
                mark_batch_dynamic(batch)
        with preserved_rng():
            before = self.watcher.counts()["num_graphs"]
            eager = [self._train(train[0]) for _ in range(_NUM_EAGER_RUNS)]
            eager_output = self._valid(valid[0]) if valid else None
            for module in self._compiled(hp):
                compile_in_place(module, hp)
            try:
                compiled = self._timed("train", lambda: [self._train(batch) for batch in train])[0]
                compiled_output = None
                if valid:
                    compiled_output = self._timed("valid", lambda: [self._valid(batch) for batch in valid])[0]
            except Exception as error:
                self._uncompile(hp)
                if hp.torch_compile_options.fullgraph:
                    raise
                torch._dynamo.reset()
                self.emit(CompileFailed(reason=_first_sentence(error), hint=_hint(error)))
                return False
        if self.watcher.counts()["num_graphs"] == before:
            self._uncompile(hp)
            reason = "the compiler made no graph of this model, which then runs eagerly in silence."
            self.emit(CompileFailed(reason=reason, hint="torch_compile_options: {fullgraph: True} makes it say why."))
            return False
        checked = _compare(eager, compiled, eager_output, compiled_output, _TOLERANCES[dtype])
        self.emit(checked)
        if not checked.agreed:
            self._uncompile(hp)
            reason = "compiled and eager execution of one batch disagree."
            self.emit(
                CompileFailed(
                    reason=reason, hint="Please report the model to PyTorch; nothing is wrong with your settings."
                )
            )
        return checked.agreed

    def _compiled(self, hp: TrainingHyperparams) -> list[nn.Module]:
        chosen = ((self.model, hp.torch_compile), (self.criterion, hp.torch_compile_loss))
        return [module for module, wanted in chosen if wanted]

    def _uncompile(self, hp: TrainingHyperparams) -> None:
        for module in self._compiled(hp):
            module._compiled_call_impl = None

    def _timed(self, graph: Graph, call: Callable[[], Any]) -> Any:
        self.emit(CompileStarted(graph=graph))
        before, start = self.watcher.counts(), time.perf_counter()
        result = call()
        after = self.watcher.counts()
        counts = {name: after[name] - before[name] for name in after}
        self.emit(CompileEnded(graph=graph, seconds=time.perf_counter() - start, **counts))
        return result

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
        largest = eager_output.abs().max().item()
        output = (compiled_output - eager_output).abs().max().item() / (largest or 1.0)
    return CompileChecked(
        # Written so that a NaN on one side alone disagrees.
        agreed=loss <= allowed and norm <= allowed and output <= tolerance,
        loss_difference=loss,
        grad_norm_difference=norm,
        output_difference=output,
        tolerance=allowed,
    )


def _relative(value: float, reference: float) -> float:
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    return abs(value - reference) / max(abs(reference), 1e-12)


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else "it gave no reason"
    return f"{type(error).__name__}: {text[:300]}"


def _hint(error: Exception) -> str:
    if "CUDA" in str(error):
        return "CUDA_LAUNCH_BLOCKING=1 shows the place of a CUDA error; a smaller batch helps when memory is short."
    return "torch_compile: False avoids the attempt; TORCH_LOGS=graph_breaks,recompiles tells more."


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put the states of all random generators back at the end: torch (all devices), numpy and random."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
