"""What the compiler does during a run, from torch's own log and metrics. What torch prints stays what it was."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch._dynamo import utils
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._logging._internal import getArtifactLogger, log_state

from sgnb.events import GraphBroke, Listener, RecompileLimitReached

_BREAK_LOG = getArtifactLogger("torch._dynamo.symbolic_convert", "graph_breaks")
_RECOMPILE_LOG = getArtifactLogger("torch._dynamo.guards", "recompiles")
_LIMIT_LOG = logging.getLogger("torch._dynamo.convert_frame")
# Two wordings: one that torch has logged before is a "Graph break (user stack suppressed due to …) in user code".
_BREAK = re.compile(r"Graph break.* in user code at (?P<file>.+):(?P<line>\d+)\nGraph Break Reason: (?P<rest>.*)", re.S)
_PREAMBLE = re.compile(r"Encountered graph break when attempting to trace .*\n\s*")
_EXPLANATION = re.compile(r"(?P<kind>.*)(?:\n\s*Explanation: *(?P<text>.*))?")
_PAGE = re.compile(r"https?://\S+/gb\d+\.html")
_FAILED = re.compile(r"^\s*- (\d+/\d+: .*)$", re.M)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # Of an object; it would make each break a new one.
_LIMIT = re.compile(r"torch\._dynamo hit config\..*\n\s*function: (?P<function>.*)\n\s*last reason: (?P<reason>.*)")
# "3/7: self.k == 12   # return x * self.k  # lib/model.py:30 in forward (HINT: …)", and the user's stack below.
_REASON = re.compile(r"(?:\d+/\d+: )?(?P<guard>.*?)(?:\s+# (?P<code>.*?)\s+# (?P<place>\S+:\d+ in \S+).*)?")


class _Listening(logging.Handler):
    """Hears a logger from `level` on while entered. The last listener that leaves gives it back as the first found it.

    They may leave in any order, as a run in another thread does.
    """

    _lock = threading.Lock()

    def __init__(self, logger: logging.Logger, level: int, hear: Callable[[str], None]) -> None:
        super().__init__(level)
        self._logger, self._hear = logger, hear
        self._found = logger.level, logger.propagate

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record.getMessage())

    def _others(self) -> list[_Listening]:
        return [handler for handler in self._logger.handlers if isinstance(handler, _Listening)]

    def __enter__(self) -> None:
        with self._lock:
            self._found = next((other._found for other in self._others()), self._found)
            if not self._logger.isEnabledFor(self.level):  # Else the user has asked for it, and goes on to see it.
                self._logger.setLevel(self.level)
                self._logger.propagate = False
            self._logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._logger.removeHandler(self)
            if not self._others():
                level, self._logger.propagate = self._found
                self._logger.setLevel(level)


class CompileWatcher:
    """Notes what the compiler does in this process while it is installed; breaks and limits are emitted when found."""

    def __init__(self, emit: Listener | None = None) -> None:
        self.seconds = 0.0  # Wall time in which the compiler worked.
        self.breaks: list[GraphBroke] = []
        self.limits: list[RecompileLimitReached] = []
        self._emit = emit or (lambda _: None)
        self._since: float | None = None
        self._records: list[Any] = []  # torch's CompilationMetrics, one for each frame and each later backward graph.
        self._recompiles: list[tuple[float, str]] = []  # When, and why.
        self._last: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> CompileWatcher:
        self._last = next(reversed(utils.get_compilation_metrics()), None)
        self._register()
        self._stack.enter_context(_Listening(_BREAK_LOG, logging.DEBUG, self._hear_break))
        self._stack.enter_context(_Listening(_LIMIT_LOG, logging.WARNING, self._hear_limit))
        self._stack.enter_context(_Listening(_RECOMPILE_LOG, logging.DEBUG, self._hear_recompile))
        if not log_state.is_artifact_enabled("recompiles"):  # torch asks this, not the logger.
            log_state.enable_artifact("recompiles")
            self._stack.callback(log_state.artifact_names.discard, "recompiles")
        return self

    def __exit__(self, *_: object) -> None:
        self._read()
        self._stack.close()
        if self._start in callback_handler.start_callbacks:  # torch._dynamo.reset() drops all callbacks, ours too.
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)

    def _register(self) -> None:
        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    def _start(self, _: CallbackArgs) -> None:
        self._read()  # torch appends a record after the end callback, so that there comes one at a time.
        self._since = time.perf_counter()

    def _end(self, _: CallbackArgs) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def _read(self, since: float = 0.0) -> list[Any]:
        """Take over torch's new records, of which it keeps the last 64 only, and return those since a mark."""
        records = utils.get_compilation_metrics()
        known = next((index for index, record in enumerate(records) if record is self._last), -1)
        self._records += records[known + 1 :]
        self._last = records[-1] if records else None
        return [record for record in self._records if _number(record, "start_time_us") >= since * 1e6]

    def counts(self) -> dict[str, int]:
        """Return totals of this process so far; take the difference of two calls."""
        inductor, aot = utils.counters["inductor"], utils.counters["aot_autograd"]
        return {
            "num_graphs": utils.counters["stats"]["unique_graphs"],
            "num_breaks": sum(utils.counters["graph_break"].values()),
            "cache_hits": max(inductor["fxgraph_cache_hit"], aot["autograd_cache_hit"]),
            "cache_misses": max(inductor["fxgraph_cache_miss"], aot["autograd_cache_miss"]),
        }

    def mark(self) -> float:
        """Return what `since` takes: the Unix time. After a `torch._dynamo.reset()`, the clock goes on from here."""
        self._register()
        return time.time()

    @property
    def recompile_reasons(self) -> list[str]:
        """For each recompilation what no longer held of the graph that was there, and where in the code."""
        return [reason for _, reason in self._recompiles]

    def last_reason(self, since: float = 0.0) -> str:
        """Return the compiler's own words for its latest recompilation since a mark, on one line."""
        reasons = [reason for when, reason in self._recompiles if when >= since]
        return _telling(reasons) or "the compiler gave no reason"

    def seconds_by_phase(self, since: float = 0.0) -> dict[str, float]:
        """Return what the compiler spent on what; torch's own times are nested, these are not."""
        phases = dict.fromkeys(("tracing", "autograd", "code generation", "kernels"), 0.0)
        for record in self._read(since):
            backward = _number(record, "backward_cumulative_compile_time_us")  # Made in its first pass: a record of it.
            whole = _number(record, "dynamo_cumulative_compile_time_us") + backward
            below = min(whole, _number(record, "aot_autograd_cumulative_compile_time_us") + backward)
            code = min(below, _number(record, "inductor_cumulative_compile_time_us"))
            kernels = min(code, _number(record, "triton_compile_time_us"))
            for phase, us in zip(phases, (whole - below, below - code, code - kernels, kernels), strict=True):
                phases[phase] += us / 1e6
        return {phase: seconds for phase, seconds in phases.items() if seconds or phase != "kernels"}

    def guard_us(self, since: float = 0.0) -> float:
        """Return the microseconds that checking the guards of all graphs takes once."""
        return sum(_number(record, "guard_latency_us") for record in self._read(since))

    def _hear_recompile(self, message: str) -> None:
        # A line for each graph that was there. torch's own record of the compilation has the first of them only.
        self._recompiles.append((time.time(), _telling([_reason(text) for text in _FAILED.findall(message)])))

    def _hear_break(self, message: str) -> None:
        if (found := _BREAK.match(message)) is None:
            return
        told, page = _EXPLANATION.match(_PREAMBLE.sub("", found["rest"], count=1)), _PAGE.search(found["rest"])
        reason = _one_line(_ADDRESS.sub("", (told["text"] or told["kind"]) if told else found["rest"]))
        place = (found["file"], int(found["line"]), reason)
        if place not in {(known.file, known.line, known.reason) for known in self.breaks}:
            self.breaks.append(GraphBroke(file=place[0], line=place[1], reason=reason, page=page[0] if page else ""))
            self._emit(self.breaks[-1])

    def _hear_limit(self, message: str) -> None:
        if (found := _LIMIT.match(message)) is not None:
            function = found["function"].replace("'", "")  # 'forward' (model.py:30)
            self.limits.append(RecompileLimitReached(function=function, reason=_reason(found["reason"])))
            self._emit(self.limits[-1])


def _number(record: Any, name: str) -> float:
    """Return a field that a version of torch may not have, or leave empty."""
    return float(getattr(record, name, None) or 0.0)


def _reason(text: str) -> str:
    found = _REASON.fullmatch(text.partition("\n")[0])
    if found is None:
        return _one_line(text)
    place = f", at {found['place']}" + (f": {found['code']}" if found["code"] else "") if found["place"] else ""
    return _one_line(found["guard"] + place)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _telling(reasons: list[str]) -> str:
    """Return the last reason that says something: training and validation always differ in grad mode."""
    return next(reversed([reason for reason in reasons if "grad_mode" not in reason] or reasons), "")
