"""Data sets and loaders by name: `build_loader("digits_train", ...)`."""

from sgnb.data import digits  # noqa: F401 (registers its loaders)
from sgnb.data.registry import Dataloader, build_loader, list_dataloaders, register_dataloader

__all__ = ["Dataloader", "build_loader", "list_dataloaders", "register_dataloader"]
