"""The core engine: trains any module on any loader. It knows torch, the records and the losses' names, nothing else."""

from sgnb.training.batch_size import BatchSize, find_batch_size
from sgnb.training.checkpoint import CheckpointError
from sgnb.training.explanation import Explanation, explain
from sgnb.training.loaders import DataError
from sgnb.training.loop import DivergedError
from sgnb.training.sync_batchnorm import synced_batchnorm
from sgnb.training.trainer import Trainer

__all__ = [
    "BatchSize",
    "CheckpointError",
    "DataError",
    "DivergedError",
    "Explanation",
    "Trainer",
    "explain",
    "find_batch_size",
    "synced_batchnorm",
]
