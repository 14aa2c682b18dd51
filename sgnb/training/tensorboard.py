"""What happened in a run, for TensorBoard; it needs the extra `sgnb[tensorboard]`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from sgnb.events import CompileEnded, CompileFailed, EpochEnded, Event, RunEnded, RunStarted, sentence

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_NO_NOTICE = ("StepEnded", "EpochStarted", "EpochEnded", "CheckpointSaved", "CompileStarted", "RunStarted")


class TensorBoard:
    """A listener that writes a run's scalars, settings and notices as `tensorboard --logdir` reads them.

    Args:
        log_dir: Where to write; None: the folder of each run.

    Raises:
        ImportError: when the package tensorboard is not there.
    """

    def __init__(self, log_dir: str | Path | None = None) -> None:
        if importlib.util.find_spec("tensorboard") is None:  # Better now than when the run starts.
            raise ImportError('TensorBoard needs the package tensorboard: pip install "sgnb[tensorboard]"')
        self.log_dir = log_dir
        self._writer: SummaryWriter | None = None
        self._epoch = 0  # The last that is complete.

    def __call__(self, event: Event) -> None:
        """Write what is to be seen of the event."""
        if isinstance(event, RunStarted):
            self._start(event)
        writer = self._writer
        if writer is None:  # Another run's tail.
            return
        if isinstance(event, EpochEnded):
            self._epoch = event.epoch
            for name, value in _scalars(event).items():
                writer.add_scalar(name, value, event.epoch)
            writer.flush()
        elif isinstance(event, CompileEnded):
            writer.add_scalar(f"Seconds/compile_{event.graph}_graph", event.seconds, self._epoch)
        text = None if type(event).__name__ in _NO_NOTICE else sentence(event)
        if text is not None:
            writer.add_text("Compile_failed" if isinstance(event, CompileFailed) else "Notices", text, self._epoch)
        if isinstance(event, RunEnded):
            writer.close()
            self._writer = None

    def _start(self, event: RunStarted) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        self._epoch = event.start_epoch - 1
        # A resumed run replaces what one that was cut off had written beyond its checkpoint.
        self._writer = SummaryWriter(
            self.log_dir or event.run_dir, purge_step=event.start_epoch if self._epoch else None
        )
        values = {"device": event.device, "dtype": event.dtype, **event.training_hyperparams}
        text = json.dumps(values, indent=4, ensure_ascii=False)
        self._writer.add_text("Hyperparameters", f"```\n{text}\n```", self._epoch)


def _scalars(event: EpochEnded) -> dict[str, float]:
    values = dataclasses.asdict(event)
    scalars = {"Samples_per_second": event.samples_per_second, "LR": event.lr, "Peak_MiB": event.peak_mib}
    scalars |= {
        f"Seconds/{name.removesuffix('_seconds')}": values[name] for name in values if name.endswith("_seconds")
    }
    for phase in ("train", "valid", "raw_valid"):
        parts = {"loss": values[f"{phase}_loss"], **values.get(f"{phase}_losses", {}), **values[f"{phase}_metrics"]}
        scalars |= {f"{phase.capitalize()}_{name}": value for name, value in parts.items() if value is not None}
    return scalars
