"""Does it pay? `compare(recipe)` measures arms against a baseline, epoch by epoch, and says what can be said."""

from sgnb.bench.comparison import Comparison
from sgnb.bench.protocol import BenchmarkError, BenchmarkStopped, compare

__all__ = ["BenchmarkError", "BenchmarkStopped", "Comparison", "compare"]
