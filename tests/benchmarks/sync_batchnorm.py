"""What SyncBN costs: a training step of two processes (or one per GPU), eager and compiled, beside plain BatchNorm.

Processes share nothing but the statistics, so that no gradient exchange hides the difference. The sides take turns;
the median of each counts. On GPUs, `nn.SyncBatchNorm` is a side as well.

Run: `python tests/benchmarks/sync_batchnorm.py`.
"""

import contextlib
import itertools
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from sgnb.training import synced_batchnorm

ROUNDS, BATCH, SIZE, WIDTHS = 30, 16, 32, (3, 16, 32, 64, 64, 64, 64)


def new_model(device):
    """Return six convolutions, a BatchNorm behind each."""
    torch.manual_seed(0)
    pairs = itertools.pairwise(WIDTHS)
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairs]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 10)).to(device)


def counted():
    """Return how many graphs and graph breaks this process has seen."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


class Side:
    """One way to train; `seconds` of its steps."""

    def __init__(self, name, device, *, compiled):
        self.name, self.seconds = name, []
        self.model = new_model(device)
        if name == "nn.SyncBatchNorm":
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.synced = name == "sgnb"
        self.call = torch.compile(self.model) if compiled else self.model
        graphs, breaks = counted()
        self.device, self.x = device, torch.randn(BATCH, 3, SIZE, SIZE, device=device)
        self.step()
        self.graphs, self.breaks = counted()[0] - graphs, counted()[1] - breaks
        self.name += ", compiled" if compiled else ", eager"

    def step(self):
        """Train on one batch and note how long it took."""
        with synced_batchnorm(self.model) if self.synced else contextlib.nullcontext():
            dist.barrier()
            start = time.perf_counter()
            self.call(self.x).square().sum().backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - start)
        self.model.zero_grad()


def run(rank, world_size, folder):
    """Measure in one process; rank 0 prints."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size)
    names = ["plain", "sgnb", *(["nn.SyncBatchNorm"] if device.type == "cuda" else [])]
    sides = [Side(name, device, compiled=compiled) for compiled in (False, True) for name in names]
    for _ in range(ROUNDS):
        for side in sides:
            side.step()
    plain = {}
    for side in sides if rank == 0 else []:
        median = statistics.median(side.seconds[3:])
        kind = side.name.rpartition(", ")[2]
        ratio = median / plain.setdefault(kind, median)
        graphs = f", {side.graphs} graphs, {side.breaks} breaks" if kind == "compiled" else ""
        print(f"{side.name}: {median * 1e3:.2f} ms a step, {ratio:.2f} times plain BatchNorm{graphs}", flush=True)
    if device.type == "cuda":
        memory_of(names, device, rank)
    dist.destroy_process_group()


def memory_of(names, device, rank):
    """Print the peak of each side alone."""
    for compiled in (False, True):
        for name in names:
            side = Side(name, device, compiled=compiled)
            torch.cuda.reset_peak_memory_stats()
            side.step()
            if rank == 0:
                print(f"{side.name}: {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB at the peak", flush=True)
            del side


if __name__ == "__main__":
    world = max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 2
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (world, directory), nprocs=world)
