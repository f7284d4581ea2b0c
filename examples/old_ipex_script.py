"""Run a script of the IPEX era as it is: it imports `intel_extension_for_pytorch`.

    python -m ipex_inductor.as_ipex examples/old_ipex_script.py [--quick]

Nothing below this text uses a name of `ipex_inductor`. The names that IPEX had, and where each of
them went, are in docs/guides/migrating.md.
"""

import argparse

import intel_extension_for_pytorch as ipex
import torch
import torch.nn as nn


class Net(nn.Module):
    """A small image classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, kernel_size=3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of 10 classes."""
        x = torch.relu(self.bn(self.conv(x)))
        x = nn.functional.adaptive_avg_pool2d(x, 8)
        return self.fc(torch.flatten(x, 1))


parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
args = parser.parse_args()
print("version of the extension:", ipex.__version__)

# Training in bfloat16
torch.manual_seed(0)
model = Net(8 if args.quick else 64).to(memory_format=torch.channels_last)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model.train()
model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
data, target = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
data = data.to(memory_format=torch.channels_last)
losses = []
for _ in range(8 if args.quick else 50):
    optimizer.zero_grad()
    with torch.cpu.amp.autocast():
        loss = criterion(model(data), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss fell from {losses[0]:.3f} to {losses[-1]:.3f}")

# Inference in bfloat16, by TorchScript
model = Net(8 if args.quick else 64).to(memory_format=torch.channels_last).eval()
with torch.no_grad():
    expected = model(data)
model = ipex.optimize(model, dtype=torch.bfloat16)
with torch.no_grad(), torch.cpu.amp.autocast():
    model = torch.jit.freeze(torch.jit.trace(model, data))
    output = model(data)
error = (output.float() - expected).abs().max().item()
print(f"largest difference from float32: {error:.1e}")
