"""Compare inference of vision models on one GPU: eager, Inductor and backend `ipex`.

    python -m benchmarks vision [--batch 1 128] [--models resnet50 timm:convnext_base ...]
        [--peers NAME ...] [--tune SECONDS] [--database FOLDER] [--json FILE] [--contiguous]

Models of torchvision or, after `timm:`, of timm, with random weights and batch-norm statistics from
a few forward passes; channels-last, or contiguous with `--contiguous`. `unet` is defined below.
`common/gpu_peers.py` describes the peers, the checks and the clock. `python -m benchmarks
model_means` makes a table of the results.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from common.gpu_peers import Case, describe_run, make_parser, run_cases

LAST: dict[str, Any] = {"memory_format": torch.channels_last}
CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
FEW = 4  # images that are computed in fp64
PIXELS = 224


class UNet(nn.Module):
    """Ronneberger et al. 2015 (arXiv:1505.04597) with batch norms and padded windows, 31 M weights.

    (N, 3, H, W) to (N, 2, H, W); H and W are multiples of 16.
    """

    def __init__(self, width: int = 64, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            self.twice(*pair) for pair in zip([3, *widths], widths, strict=False)
        )
        steps = [*zip(widths[:0:-1], widths[-2::-1], strict=True)]
        self.up = nn.ModuleList(nn.ConvTranspose2d(*step, 2, stride=2) for step in steps)
        self.joined = nn.ModuleList(self.twice(*step) for step in steps)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def twice(inputs: int, outputs: int) -> nn.Module:
        """Two convolutions."""
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Down, keeping what each level made, and up beside it."""
        kept = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            kept.append(x)
        for up, joined, beside in zip(self.up, self.joined, kept[-2::-1], strict=True):
            x = joined(torch.cat([beside, up(x)], 1))
        result: Tensor = self.head(x)
        return result


def load_model(name: str) -> nn.Module:
    """Return the model as its library makes it."""
    found: nn.Module
    if name == "unet":
        found = UNet()
    elif name.startswith("timm:"):
        import timm

        found = timm.create_model(name.removeprefix("timm:"), pretrained=False)
    else:
        found = getattr(torchvision.models, name)(weights=None)
    return found


def millions(name: str) -> float:
    """Return the number of parameters, in millions."""
    with torch.device("meta"):
        return round(sum(p.numel() for p in load_model(name).parameters()) / 1e6, 2)


def model_of(name: str, layout: dict[str, Any]) -> nn.Module:
    """Return the model in fp32 on the GPU, with batch-norm statistics of its own activations."""
    torch.manual_seed(0)
    model: nn.Module = load_model(name).cuda().to(**layout)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean of all batches
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(32, 3, PIXELS, PIXELS, device="cuda").to(**layout))
    return model.eval()


def cases(models: list[str], batches: list[int], contiguous: bool) -> Iterator[Case]:
    """Yield each model at each size."""
    layout = CONTIGUOUS if contiguous else LAST
    about = {"layout": "contiguous"} if contiguous else {}
    for name in models:
        model = model_of(name, layout)
        for batch in batches:
            x = torch.randn(batch, 3, PIXELS, PIXELS, device="cuda").to(**layout)
            yield Case(name, model, x, FEW, about)


def main() -> None:
    """See the top of the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--models", nargs="+", default=["resnet50"])
    parser.add_argument("--contiguous", action="store_true", help="neither is channels-last")
    options = parser.parse_args()
    about = describe_run("torchvision")
    run_cases(parser, options, cases(options.models, options.batch, options.contiguous), about)


if __name__ == "__main__":
    main()
