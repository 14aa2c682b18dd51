"""STUB of mine until the helper's file is here; replace it as a whole."""

from __future__ import annotations
import time
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import _compilation_metrics, counters


class CompileWatcher:
    def __init__(self, emit=None):
        self.seconds = 0.0
        self._since = None

    def __enter__(self):
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_):
        if self._start in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)

    def _start(self, _):
        self._since = time.perf_counter()

    def _end(self, _):
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def counts(self):
        inductor, aot = counters["inductor"], counters["aot_autograd"]
        return {
            "num_graphs": counters["stats"]["unique_graphs"],
            "num_breaks": sum(counters["graph_break"].values()),
            "cache_hits": max(inductor["fxgraph_cache_hit"], aot["autograd_cache_hit"]),
            "cache_misses": max(inductor["fxgraph_cache_miss"], aot["autograd_cache_miss"]),
        }

    def mark(self):
        return 0

    def seconds_by_phase(self, since=0):
        return {}

    def guard_us(self, since=0):
        return 0.0

    def last_reason(self):
        reasons = [m.recompile_reason for m in _compilation_metrics if m.recompile_reason]
        return " ".join(reasons[-1].split())[:300] if reasons else "the compiler gave no reason"
