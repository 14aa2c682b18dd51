"""What the rules judge by: settings, machine, model, data and measurements. The only file here that touches torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgnb.hyperparams import TrainingHyperparams

_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "WORLD_SIZE")
# float16 gives NaN on these (Turing without tensor cores, and Kepler); the list is that of Ultralytics' check_amp.
_NO_AMP = ("GTX 16", "Quadro T400", "T400", "T550", "T600", "T1000", "T1200", "T2000", "K40m")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a run before it starts. None: not known, and no rule may guess it."""

    training_hyperparams: TrainingHyperparams
    # The machine
    device_type: str | None = None  # "cpu" or "cuda".
    device_name: str | None = None
    device_memory_gib: float | None = None
    device_capability: tuple[int, int] | None = None
    device_bf16: bool | None = None  # Computes in bfloat16, not by emulation.
    cpu_bf16: bool | None = None
    compiler_problem: str | None = None  # Why nothing can be compiled here.
    python: str | None = None
    torch: str | None = None
    environment: Mapping[str, str] | None = None  # The variables that rules ask for, as far as they are set.
    # The processes
    num_gpus: int | None = None  # As the recipe asks for.
    multi_gpu: str | None = None
    # The model
    num_parameters: int | None = None
    num_batchnorm: int | None = None  # BatchNorm layers of any kind.
    num_batchnorm_1d: int | None = None
    # The data
    num_train_samples: int | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    num_train_batches: int | None = None  # Of the loader, before max_train_batches.
    # Measurements, with these settings on this machine
    seconds_per_epoch: float | None = None  # Without torch.compile.
    compile_seconds: float | None = None

    @property
    def compiles(self) -> bool:
        """Whether something is asked to be compiled."""
        hp = self.training_hyperparams
        return hp.torch_compile or hp.torch_compile_loss

    @property
    def compile_mode(self) -> str:
        """The mode in force; torch_compile_options.mode is another place to give it."""
        hp = self.training_hyperparams
        return hp.torch_compile_options.mode or hp.torch_compile_mode

    @property
    def gains_from_amp(self) -> bool:
        """Whether the device is known to be a GPU that computes faster in 16 bits."""
        has_tensor_cores = self.device_capability is not None and self.device_capability >= (7, 0)
        return self.device_type == "cuda" and has_tensor_cores and not self.fails_in_float16

    @property
    def fails_in_float16(self) -> bool:
        """Whether the device is known to give NaN in float16."""
        words = (self.device_name or "").replace("GeForce ", "").split()
        text = " ".join(words)
        return any(name in text if " " in name else name in words for name in _NO_AMP)

    @property
    def batches_per_epoch(self) -> int | None:
        """Training batches of an epoch as it will run, or None."""
        limit = self.training_hyperparams.max_train_batches
        return limit if self.num_train_batches is None else min(self.num_train_batches, limit or self.num_train_batches)

    @property
    def num_updates(self) -> int | None:
        """Updates of the whole run, or None. A limit alone does not tell: the loader may be shorter."""
        if self.num_train_batches is None or self.batches_per_epoch is None:
            return None
        hp = self.training_hyperparams
        return hp.max_epochs * math.ceil(self.batches_per_epoch / hp.batch_accumulate)

    @property
    def last_batch_size(self) -> int | None:
        """Samples in the last training batch of an epoch as it will run, or None."""
        if self.batch_size is None or self.num_train_samples is None or self.drop_last is None:
            return None
        full, tail = divmod(self.num_train_samples, self.batch_size)
        limit = self.training_hyperparams.max_train_batches
        is_seen = tail > 0 and not self.drop_last and (limit is None or limit > full)
        return tail if is_seen else self.batch_size if full else None


def gather_facts(
    subject: Any, *, machine: Mapping[str, Any] | None = None, model: Any = None, train_loader: Any = None
) -> Facts:
    """Return what is known of `subject`: a recipe, hyperparameters, or a mapping of them.

    Args:
        subject: Anything with `training_hyperparams`, or the hyperparameters themselves.
        machine: What `describe_machine` returned; a key that is missing is not known. None: nothing is known of it.
        model: The module to train. It is looked at, not run.
        train_loader: Its loader. Its lengths are read, no sample is.

    Raises:
        HyperparamsError: when the hyperparameters are not acceptable.
    """
    return Facts(
        training_hyperparams=_hyperparams_of(subject),
        environment={name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
        num_gpus=_whole(getattr(subject, "num_gpus", None)),
        multi_gpu=_text(getattr(subject, "multi_gpu", None)),
        **_of_machine(machine or {}),
        **_of_model(model),
        **_of_loader(train_loader, getattr(subject, "dataset_params", None)),
    )


def _hyperparams_of(subject: Any) -> TrainingHyperparams:
    found = getattr(subject, "training_hyperparams", subject)
    if isinstance(found, Mapping) and set(found) in ({"training_hyperparams"}, {"training_params"}):
        (found,) = found.values()
    return TrainingHyperparams.from_dict(found)


def _of_machine(machine: Mapping[str, Any]) -> dict[str, Any]:
    devices = machine.get("devices")
    gpu = devices[0] if devices else {}
    return {
        "device_type": None if devices is None else "cuda" if devices else "cpu",
        "device_name": gpu.get("name"),
        "device_memory_gib": gpu.get("memory_gib"),
        "device_capability": version_of(gpu.get("capability")),
        "device_bf16": gpu.get("bf16"),
        "cpu_bf16": machine.get("cpu_bf16"),
        "compiler_problem": machine.get("compiler_problem"),
        "python": machine.get("python"),
        "torch": machine.get("torch"),
    }


def version_of(text: object) -> tuple[int, int] | None:
    """Return the first two numbers of a version such as "3.11.7" or "8.0", or None."""
    if not isinstance(text, str):
        return None
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _of_model(model: Any) -> dict[str, Any]:
    if model is None:
        return {}
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    modules = list(model.modules())
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_batchnorm": sum(isinstance(module, _BatchNorm) for module in modules),
        "num_batchnorm_1d": sum(isinstance(module, nn.BatchNorm1d) for module in modules),
    }


def _of_loader(loader: Any, dataset_params: Any) -> dict[str, Any]:
    if loader is None:
        return _of_dataset_params(dataset_params)
    return {
        "batch_size": _whole(getattr(loader, "batch_size", None)),
        "drop_last": getattr(loader, "drop_last", None),
        "num_train_samples": _length(getattr(loader, "sampler", None)),
        "num_train_batches": _length(loader),
    }


def _of_dataset_params(dataset_params: Any) -> dict[str, Any]:
    """Read what a recipe says of its training data; only a synthetic data set tells its length there."""
    loader_params = _part(dataset_params, "train_dataloader_params")
    data_params = _part(dataset_params, "train_dataset_params")
    size, samples = _whole(loader_params.get("batch_size")), _whole(data_params.get("num_samples"))
    drop_last = bool(loader_params.get("drop_last", False)) if size else None
    batches = None
    if size and samples:
        batches = samples // size if drop_last else math.ceil(samples / size)
    return {"batch_size": size, "drop_last": drop_last, "num_train_samples": samples, "num_train_batches": batches}


def _part(values: Any, name: str) -> Mapping[str, Any]:
    part = values.get(name) if isinstance(values, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # An iterable data set has none.
        return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
