"""The core engine: trains any module on any loader. It knows torch, the records and the losses' names, nothing else."""

from sgnb.training.checkpoint import CheckpointError
from sgnb.training.loaders import DataError
from sgnb.training.trainer import Trainer

__all__ = ["CheckpointError", "DataError", "Trainer"]
