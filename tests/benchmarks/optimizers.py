"""How fast optimizers step in each implementation on this machine: for-loop, foreach and fused, in milliseconds.

Run: `python tests/benchmarks/optimizers.py`.
"""

import time

import torch
import torchvision

from sgnb.models import create_model

ROUNDS, STEPS = 5, 10
KINDS = {
    torch.optim.SGD: {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4},
    torch.optim.AdamW: {"lr": 1e-3},
}
IMPLEMENTATIONS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def main():
    """Print a line for each model and optimizer: the shortest of rounds taken in turn."""
    models = {
        "dscnn": create_model("dscnn", num_classes=10),
        "mobilenet_v3_small": torchvision.models.mobilenet_v3_small(),
        "resnet18": torchvision.models.resnet18(),
    }
    for name, model in models.items():
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = 1e-3 * torch.randn_like(parameter)
        for kind, arguments in KINDS.items():
            optimizers = {how: kind(parameters, **arguments, **extra) for how, extra in IMPLEMENTATIONS.items()}
            shortest = dict.fromkeys(optimizers, float("inf"))
            for _ in range(ROUNDS):
                for how, optimizer in optimizers.items():
                    start = time.perf_counter()
                    for _ in range(STEPS):
                        optimizer.step()
                    shortest[how] = min(shortest[how], (time.perf_counter() - start) / STEPS * 1e3)
            figures = ", ".join(f"{how} {milliseconds:.2f}" for how, milliseconds in shortest.items())
            print(f"{name}, {len(parameters)} tensors, {kind.__name__}: {figures} ms")


if __name__ == "__main__":
    main()
