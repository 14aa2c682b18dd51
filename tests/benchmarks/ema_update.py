"""What an update of the average costs over one bare `_foreach_lerp_` of the same tensors. The promise is 1.3 times.

Both sides are taken in turn; the median of each counts. Run: `python tests/benchmarks/ema_update.py`.
"""

import statistics
import time
from functools import partial

import torch
import torchvision

from sgnb.hyperparams import EmaParams
from sgnb.models import create_model
from sgnb.training.ema import Ema

ROUNDS = 60


def seconds(call):
    """Return the wall time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main():
    """Print a line for each model."""
    models = {"dscnn": create_model("dscnn", num_classes=10), "resnet50": torchvision.models.resnet50()}
    for name, model in models.items():
        ema = Ema(model, EmaParams(), total_updates=1000)
        live = [tensor.detach() for tensor in model.state_dict().values() if tensor.is_floating_point()]
        average = [tensor.clone() for tensor in live]
        bare, ours = [], []
        for _ in range(ROUNDS):
            bare.append(seconds(partial(torch._foreach_lerp_, average, live, 0.1)))
            ours.append(seconds(ema.update))
        ratio = statistics.median(ours) / statistics.median(bare)
        print(
            f"{name}: bare {statistics.median(bare) * 1e3:.3f} ms, update {statistics.median(ours) * 1e3:.3f} ms: "
            f"{ratio:.2f} times"
        )


if __name__ == "__main__":
    main()
