"""What the compiler does during a run, as torch tells it to its own log and metrics: seconds, graphs, breaks, reasons.

Nothing here changes what is compiled, and what torch prints stays what it was.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch._dynamo import utils
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._logging import getArtifactLogger

from sgnb.events import GraphBroke, Listener, RecompileLimitReached

_NO_REASON = "the compiler gave no reason"
_MAX_LENGTH = 300
_BREAK_LOG = getArtifactLogger("torch._dynamo.symbolic_convert", "graph_breaks")
_LIMIT_LOG = logging.getLogger("torch._dynamo.convert_frame")
# Both wordings: a break that torch has seen before is logged as "Graph break (user stack suppressed …) in user code".
_BREAK = re.compile(
    r"Graph break.* in user code at (?P<file>.+):(?P<line>\d+)\nGraph Break Reason: (?P<reason>.*)", re.S
)
_PREAMBLE = re.compile(r"Encountered graph break when attempting to trace [^\n]*\n\s*")
_EXPLANATION = re.compile(r"(?P<kind>[^\n]*)\n\s*Explanation: (?P<text>[^\n]*)")
_PAGE = re.compile(r"https?://\S+/gb\d+\.html")
_LIMIT = re.compile(
    r"torch\._dynamo hit config\.\S+ .*?function: (?P<function>.*?)\n\s*last reason: (?P<reason>.*)", re.S
)
_FUNCTION = re.compile(r"'(?P<name>.*)' \((?P<place>.*)\)")
# "3/7: self.k == 12   # return x * self.k  # lib/model.py:30 in forward (HINT: …)", and a stack trace below.
_REASON = re.compile(r"(?:\d+/\d+: )?(?P<guard>.*?)(?:\s+# (?P<code>.*?)\s+# (?P<place>\S+:\d+ in \S+).*)?$")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class _Frame(NamedTuple):
    reason: str
    seconds: dict[str, float]
    guard_us: float


class _Listening(logging.Handler):
    """Hears a logger at `level` while it is entered. Only what the user hears anyway goes on to his own handlers.

    Several may listen to one logger, also from threads whose ends are in any order: the last one puts it back.
    """

    _lock = threading.Lock()
    _before: dict[str, tuple[int, int, bool]] = {}  # noqa: RUF012 - shared: listeners, level, propagate.

    def __init__(self, logger: logging.Logger, level: int, hear: Callable[[str], None]) -> None:
        super().__init__(level)
        self.logger = logger
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record.getMessage())

    def __enter__(self) -> _Listening:
        with self._lock:
            logger = self.logger
            count, level, propagate = self._before.get(logger.name, (0, logger.level, logger.propagate))
            self._before[logger.name] = (count + 1, level, propagate)
            if not logger.isEnabledFor(self.level):
                logger.setLevel(self.level)
                logger.propagate = False
            logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.logger.removeHandler(self)
            count, level, propagate = self._before.pop(self.logger.name)
            if count > 1:
                self._before[self.logger.name] = (count - 1, level, propagate)
                return
            self.logger.setLevel(level)
            self.logger.propagate = propagate


class CompileWatcher:
    """Notes what the compiler does in this process while it is installed; breaks and limits are emitted when found."""

    def __init__(self, emit: Listener | None = None) -> None:
        self.seconds = 0.0  # Wall time in which the compiler worked.
        self.breaks: list[GraphBroke] = []
        self.limits: list[RecompileLimitReached] = []
        self._emit = emit or (lambda _: None)
        self._since: float | None = None
        self._seen: Any = None  # The last of torch's records that was read.
        self._frames: list[_Frame] = []
        self._stack = ExitStack()

    def __enter__(self) -> CompileWatcher:
        self._seen = next(reversed(utils.get_compilation_metrics()), None)
        self._register()
        self._stack.enter_context(_Listening(_BREAK_LOG, logging.DEBUG, self._hear_break))
        self._stack.enter_context(_Listening(_LIMIT_LOG, logging.WARNING, self._hear_limit))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._read()
        for callbacks, own in self._callbacks():
            if own in callbacks:
                callbacks.remove(own)

    def _callbacks(self) -> list[tuple[list[Callable[[CallbackArgs], None]], Callable[[CallbackArgs], None]]]:
        return [(callback_handler.start_callbacks, self._start), (callback_handler.end_callbacks, self._end)]

    def _register(self) -> None:
        for callbacks, own in self._callbacks():
            if own not in callbacks:
                callbacks.append(own)

    def _start(self, _: CallbackArgs) -> None:
        self._read()  # torch writes a record only after the end callback, so each is read before the next.
        self._since = time.perf_counter()

    def _end(self, _: CallbackArgs) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def _read(self) -> None:
        """Take over torch's new records: it keeps the last 64 only, and forgets them all when asked to."""
        records = utils.get_compilation_metrics()
        known = next((index for index, record in enumerate(records) if record is self._seen), -1)
        self._frames += [_frame(record) for record in records[known + 1 :]]
        self._seen = records[-1] if records else None

    def counts(self) -> dict[str, int]:
        """Return totals of this process so far; take the difference of two calls."""
        inductor, aot = utils.counters["inductor"], utils.counters["aot_autograd"]
        return {
            "num_graphs": utils.counters["stats"]["unique_graphs"],
            "num_breaks": sum(utils.counters["graph_break"].values()),
            "cache_hits": max(inductor["fxgraph_cache_hit"], aot["autograd_cache_hit"]),
            "cache_misses": max(inductor["fxgraph_cache_miss"], aot["autograd_cache_miss"]),
        }

    @property
    def recompile_reasons(self) -> list[str]:
        """Return why it compiled again what it had compiled: for each time the condition that no longer held."""
        self._read()
        return [frame.reason for frame in self._frames if frame.reason]

    def last_reason(self) -> str:
        """Return the compiler's own words for its latest recompilation, on one line."""
        return next(reversed(self.recompile_reasons), _NO_REASON)

    def mark(self) -> int:
        """Return a place in time for `since`. `torch._dynamo.reset()` drops all callbacks; ours come back here."""
        self._register()
        self._read()
        return len(self._frames)

    def seconds_by_phase(self, since: int = 0) -> dict[str, float]:
        """Return what the compiler spent on what, without overlap; all of it on the wall clock, and in `seconds`."""
        self._read()
        total = {"tracing": 0.0, "autograd": 0.0, "code generation": 0.0, "kernels": 0.0}
        for frame in self._frames[since:]:
            for phase, seconds in frame.seconds.items():
                total[phase] += seconds
        return {phase: seconds for phase, seconds in total.items() if seconds or phase != "kernels"}

    def guard_us(self, since: int = 0) -> float:
        """Return the microseconds that checking all guards of the graphs takes once."""
        self._read()
        return sum(frame.guard_us for frame in self._frames[since:])

    def _hear_break(self, message: str) -> None:
        found = _BREAK.match(message)
        if found is None:
            return
        reason, page = _PREAMBLE.sub("", found["reason"], count=1), _PAGE.search(found["reason"])
        told = _EXPLANATION.match(reason)
        reason = (told["text"] or told["kind"]) if told else reason.partition("\n")[0]
        key = (found["file"], int(found["line"]), _shorten(_ADDRESS.sub("", reason)))
        if key not in {(known.file, known.line, known.reason) for known in self.breaks}:
            self.breaks.append(GraphBroke(file=key[0], line=key[1], reason=key[2], page=page[0] if page else ""))
            self._emit(self.breaks[-1])

    def _hear_limit(self, message: str) -> None:
        found = _LIMIT.match(message)
        if found is None:
            return
        function = _FUNCTION.sub(r"\g<name> (\g<place>)", found["function"])
        self.limits.append(RecompileLimitReached(function=function, reason=_reason(found["reason"])))
        self._emit(self.limits[-1])


def _frame(record: Any) -> _Frame:
    def seconds(name: str) -> float:
        return (getattr(record, name, None) or 0) / 1e6

    whole = seconds("dynamo_cumulative_compile_time_us") + seconds("backward_cumulative_compile_time_us")
    # torch's times are nested; a backward graph that is made later, in its first backward pass, has no time of autograd.
    inductor = min(seconds("inductor_cumulative_compile_time_us"), whole)
    autograd = min(max(seconds("aot_autograd_cumulative_compile_time_us"), inductor), whole)
    kernels = min(seconds("triton_compile_time_us"), inductor)
    phases = {
        "tracing": whole - autograd,
        "autograd": autograd - inductor,
        "code generation": inductor - kernels,
        "kernels": kernels,
    }
    return _Frame(_reason(getattr(record, "recompile_reason", None) or ""), phases, _guard_us(record))


def _guard_us(record: Any) -> float:
    return float(getattr(record, "guard_latency_us", None) or 0.0)


def _reason(text: str) -> str:
    found = _REASON.match(text.partition("\n")[0])
    if found is None or not found["guard"]:
        return ""
    return _shorten(f"{found['guard']}, at {found['place']}: {found['code']}" if found["place"] else found["guard"])


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_MAX_LENGTH]
