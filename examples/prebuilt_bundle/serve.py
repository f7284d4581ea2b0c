"""Serve the model from its bundle: nothing is compiled, and no compiler is needed.

The Dockerfile beside this file runs it in an image without g++. A service would read its weights
from a checkpoint; here they are random, from the same seed as in `model.make`.
"""

import os
import shutil
import sys
import time

import torch
from model import make

import ipex_inductor


def main() -> None:
    """Load the bundle, answer one request, and compare the answer with eager mode."""
    eager, (images,) = make()
    start = time.perf_counter()
    model = ipex_inductor.load(os.environ["MODEL_BUNDLE"], weights=eager.state_dict())
    with torch.no_grad():
        logits = model(images)
        seconds = time.perf_counter() - start
        error = (logits - eager(images)).abs().max().item()
    print("compilers:", [name for name in ("g++", "gcc", "clang++", "c++") if shutil.which(name)])
    print("Inductor imported:", "torch._inductor.compile_fx" in sys.modules)
    print(f"largest difference from eager mode: {error:.1e}")
    print(f"first answer after {seconds:.2f} s")


if __name__ == "__main__":
    main()
