"""How long the compiler takes: repeated blocks against the whole model, and a cold cache against a warm one.

Each figure comes from a run in a process of its own: `vit`, 12 blocks of width 192 on 32x32 images. `regions` should be
at least 3 times shorter than `whole` with a cold cache, and a second process at least 5 times shorter than the first.
Run: `python tests/benchmarks/compile_time.py`.
"""

import subprocess
import sys
import tempfile

SCRIPT = """
import sys, torch, timm
from torch.utils.data import DataLoader, TensorDataset
from sgnb import Trainer
torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=10)
data = DataLoader(TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))), 32)
values = {"torch_compile": True, "torch_compile_regions": sys.argv[1], "max_epochs": 3, "silent_mode": True}
history = Trainer("t", ckpt_root_dir=sys.argv[2], device="cpu").train(model, values, data, data)
print(history.compiled, history.compile_seconds, min(history["train_seconds"]))
"""


def compile_seconds(regions, cache, runs):
    """Return seconds of compiling and of the fastest training epoch, in a new process."""
    import os

    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-c", SCRIPT, regions, runs]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert output[0] == "True", output
    return float(output[1]), float(output[2])


def main():
    """Print a line for each way of compiling."""
    cold = {}
    for regions in ("off", "auto"):
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as runs:
            cold[regions], epoch = compile_seconds(regions, cache, runs)
            warm, _ = compile_seconds(regions, cache, runs)
        name = "regions" if regions == "auto" else "whole"
        print(
            f"{name}: cold {cold[regions]:.1f} s, warm {warm:.1f} s (x {cold[regions] / warm:.1f} shorter), "
            f"epoch {epoch:.3f} s",
            flush=True,
        )
    print(f"regions against whole, both cold: x {cold['off'] / cold['auto']:.1f} shorter")


if __name__ == "__main__":
    main()
