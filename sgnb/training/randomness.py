"""Random generators: seeded from one number, kept over a detour, and written into checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, numpy and random."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the states of all generators as tensors and plain values, fit for `torch.load(weights_only=True)`."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "random": random.getstate(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Take over what `rng_state` returned. GPUs that are not here are left out."""
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_initialized():
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state.cpu(), index)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["random"]
    random.setstate((version, tuple(internal), gauss))


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put the states of all generators back at the end."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def generators_of(*loaders: Any) -> list[torch.Generator]:
    """Return the generators that belong to loaders and their samplers, each once."""
    owners = [owner for loader in loaders for owner in (loader, getattr(loader, "sampler", None))]
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


@contextmanager
def preserved_generators(*loaders: Any) -> Iterator[None]:
    """Put the loaders' own generators back at the end."""
    states = [(generator, generator.get_state()) for generator in generators_of(*loaders)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
