"""How long the compiler takes: repeated blocks against the whole model, and a cold cache against a warm one.

Each figure comes from a run in a process of its own: a ViT of 12 blocks of width 192 on 32x32 images. `regions` should
be at least 3 times shorter than `whole` with a cold cache, and a second process at least 5 times shorter than a first.
What the first compilation of any model pays (imports, the C++ compiler's checks and precompiled headers) is told apart:
a function of one line pays it before the clock starts.
Run: `python tests/benchmarks/compile_time.py`.
"""

import os
import subprocess
import sys
import tempfile

SCRIPT = """
import sys, time, torch, timm
from torch.utils.data import DataLoader, TensorDataset
from sgnb import Trainer
start = time.perf_counter()
torch.compile(lambda x: (x.sin() + 1).sum(), dynamic=False)(torch.ones(64, requires_grad=True)).backward()
first = time.perf_counter() - start
torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=10)
data = DataLoader(TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))), 32)
values = {"torch_compile": True, "torch_compile_regions": sys.argv[1], "max_epochs": 3, "silent_mode": True}
history = Trainer("t", ckpt_root_dir=sys.argv[2], device="cpu").train(model, values, data, data)
print(history.compiled, history.compile_seconds, min(history["train_seconds"]), first)
"""


def compile_seconds(regions, cache, runs):
    """Return seconds of compiling, of the fastest training epoch, and of a first line, in a new process."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-c", SCRIPT, regions, runs]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert output[0] == "True", output
    return float(output[1]), float(output[2]), float(output[3])


def main():
    """Print a line for each way of compiling."""
    cold = {}
    for regions in ("off", "auto"):
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as runs:
            cold[regions], epoch, first = compile_seconds(regions, cache, runs)
            warm, *_ = compile_seconds(regions, cache, runs)
        name = "regions" if regions == "auto" else "whole"
        print(
            f"{name}: cold {cold[regions]:.1f} s, warm {warm:.1f} s (x {cold[regions] / warm:.1f} shorter), "
            f"epoch {epoch:.3f} s, a first line before them {first:.1f} s",
            flush=True,
        )
    print(f"regions against whole, both cold: x {cold['off'] / cold['auto']:.1f} shorter")


if __name__ == "__main__":
    main()
