"""The ratio of eager and compiled epochs of `digits_dscnn`, measured by a loop that shares no code with sgnb's.

Only the model and the data are sgnb's; loop, timing and statistics are written out here, for comparison with what
`python -m sgnb.benchmark --config-name=digits_dscnn` prints. Run: `python tests/benchmarks/independent_digits.py`.
"""

import statistics
import time

import torch
from torch.nn import functional as F

from sgnb.data.digits import digits
from sgnb.models import create_model

EPOCHS, BATCH = 5, 64


def epoch_seconds(model, optimizer, train, valid, seed):
    """Return the wall seconds of one epoch of training and validation."""
    images, targets = train
    start = time.perf_counter()
    model.train()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    correct = 0
    for index in order.split(BATCH):
        if len(index) < BATCH:
            break
        logits = model(images[index])
        loss = F.cross_entropy(logits, targets[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        correct += (logits.argmax(1) == targets[index]).sum()
    model.eval()
    with torch.no_grad():
        for batch, target in zip(valid[0].split(BATCH), valid[1].split(BATCH), strict=True):
            correct += (model(batch).argmax(1) == target).sum()
    return time.perf_counter() - start


def an_arm(compiled, train, valid):
    """Return model and optimizer, after one untimed epoch in which the compiled one is compiled."""
    torch.manual_seed(0)
    model = create_model("dscnn", num_classes=10)
    if compiled:
        model.compile(dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    epoch_seconds(model, optimizer, train, valid, seed=0)
    return model, optimizer


def main():
    """Print the seconds of each epoch, the medians and the improvement."""
    train, valid = (digits(split).tensors for split in ("train", "val"))
    arms = {"baseline": an_arm(False, train, valid), "compile": an_arm(True, train, valid)}
    seconds = {name: [] for name in arms}
    for epoch in range(1, EPOCHS + 1):
        for name in arms if epoch % 2 else reversed(arms):
            seconds[name].append(epoch_seconds(*arms[name], train, valid, seed=epoch))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name}: {', '.join(f'{value:.3f}' for value in values)} s, median {medians[name]:.3f} s")
    print(f"improvement: {100 * (medians['baseline'] - medians['compile']) / medians['baseline']:.1f} %")


if __name__ == "__main__":
    main()
