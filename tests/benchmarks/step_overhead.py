"""What a training step costs over a hand-written loop with the same logging, in microseconds.

Both sides train the same model on the same batches, epoch by epoch in turn, in one process; the smallest epoch of each
counts, as everything that disturbs an epoch makes it longer. The promise is 50 µs or 1 %, whichever is larger. glibc is
told to keep its memory: whether it gives some back in each step depends on where a gradient happens to lie,
and costs up to 300 µs on one side or the other.
Run: `python tests/benchmarks/step_overhead.py`.
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

from sgnb.hyperparams import TrainingHyperparams
from sgnb.training.epoch import Epoch
from sgnb.training.loop import Loop
from sgnb.training.metrics import Accuracy

STEPS, ROUNDS = 200, 30


def a_model(width):
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(192, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class Batches(list):
    """Ready batches, so that no loader's time counts."""

    batch_size = 64


def by_hand(model, batches):
    """One epoch as one would write it: loss and accuracy summed on the device, read at the end."""
    criterion, metric = nn.CrossEntropyLoss(), Accuracy()
    optimizer = by_hand.optimizer
    device = torch.device("cpu")
    start = time.perf_counter()
    model.train()
    total, count = torch.zeros(()), 0
    for raw in batches:
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in raw)
        output = model(inputs)
        loss = criterion(output, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach() * len(inputs)
        count += len(inputs)
        metric.update(output.detach(), targets)
    assert total.item() / count > 0
    assert metric.compute() >= 0
    return time.perf_counter() - start


def main():
    """Print a line for each width."""
    torch.set_num_threads(1)  # What is measured is Python's; a second thread's start and end would be noise.
    for width in (16, 256, 1024):
        batches = Batches((torch.randn(64, 3, 8, 8), torch.randint(0, 10, (64,))) for _ in range(STEPS))
        plain, trained = a_model(width), a_model(width)
        by_hand.optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=True)
        hp = TrainingHyperparams(initial_lr=1e-3, max_epochs=1000, silent_mode=True, save_model=False)
        loop = Loop(trained, hp, batches, None, torch.device("cpu"), lambda _: None, threading.Event(), Path())
        ours, theirs = [], []
        for number in range(1, ROUNDS + 1):
            theirs.append(by_hand(plain, batches))
            epoch = Epoch(number, loop._tally(loop.train_metrics, "train"))
            start = time.perf_counter()
            loop._train(epoch, None)
            epoch.tally.compute()
            ours.append(time.perf_counter() - start)
        theirs_us, ours_us = min(theirs) / STEPS * 1e6, min(ours) / STEPS * 1e6
        more, allowed = ours_us - theirs_us, max(50.0, 0.01 * theirs_us)
        print(
            f"width {width}: by hand {theirs_us:.0f} µs a step, sgnb {ours_us:.0f} µs: "
            f"{more:+.0f} µs, {allowed:.0f} allowed"
        )


if __name__ == "__main__":
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**31), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
        os.execv(sys.executable, [sys.executable, *sys.argv])  # glibc reads them when a process starts.
    main()
