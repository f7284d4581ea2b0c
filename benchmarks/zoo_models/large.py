"""Whole networks at the sizes that people run on a GPU.

No record and no rule of the package was made for one of them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAST: dict[str, Any] = {"memory_format": torch.channels_last}


@dataclass(frozen=True)
class Large:
    """A network and its inputs.

    Attributes:
        make: Builds the network in fp32 with random weights.
        inputs: Makes the inputs for a batch size, which scales their first dimension; floating
            point in fp32.
        batch: The batch size that is timed.
        dtype: The dtype of weights and of floating-point inputs.
        last: Weights and images are channels-last.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    batch: int
    dtype: torch.dtype = torch.bfloat16
    last: bool = False


class Results(nn.Module):
    """A model of `transformers` or `torchvision` whose inputs come by position.

    Args:
        model: The model.
        names: Keywords of the inputs, or none for positional ones.
        keys: Of the results that count.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], *keys: str) -> None:
        super().__init__()
        self.model, self.names, self.keys = model, names, keys

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the results of the keys."""
        if self.names:
            results = self.model(**dict(zip(self.names, inputs, strict=True)))
        else:
            results = self.model(*inputs)
        return tuple(results[key] for key in self.keys)


def conv_layer(inputs: int, outputs: int, window: int = 3, stride: int = 1) -> nn.Module:
    """Return a convolution, its norm and SiLU."""
    conv = nn.Conv2d(inputs, outputs, window, stride, window // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU(inplace=True))


class Block(nn.Module):
    """A half goes through `depth` residual pairs; all that was made is read side by side."""

    def __init__(self, inputs: int, outputs: int, depth: int) -> None:
        super().__init__()
        half = outputs // 2
        self.split = conv_layer(inputs, outputs, 1)
        pairs = (
            nn.Sequential(conv_layer(half, half), conv_layer(half, half)) for _ in range(depth)
        )
        self.pairs = nn.ModuleList(pairs)
        self.join = conv_layer((2 + depth) * half, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H, W)."""
        parts = [*self.split(x).chunk(2, 1)]
        for pair in self.pairs:
            parts.append(parts[-1] + pair(parts[-1]))
        joined: Tensor = self.join(torch.cat(parts, 1))
        return joined


class Yolo(nn.Module):
    """A detector of the form of YOLOv8 (medium): a backbone, a path up, three heads."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        one, two, four, eight, twelve = (width * n for n in (1, 2, 4, 8, 12))
        self.stem = nn.Sequential(
            conv_layer(3, one, 3, 2), conv_layer(one, two, 3, 2), Block(two, two, 2)
        )
        self.down = nn.ModuleList(
            nn.Sequential(conv_layer(i, o, 3, 2), Block(o, o, depth))
            for i, o, depth in ((two, four, 4), (four, eight, 4), (eight, twelve, 2))
        )
        self.up = nn.ModuleList((Block(twelve + eight, eight, 2), Block(eight + four, four, 2)))
        self.heads = nn.ModuleList(
            nn.Sequential(conv_layer(n, n), nn.Conv2d(n, 144, 1)) for n in (four, eight, twelve)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W), of multiples of 32, to (N, 144, places)."""
        fine = self.down[0](self.stem(x))
        middle = self.down[1](fine)
        coarse = self.down[2](middle)
        coarse = coarse + F.max_pool2d(coarse, 5, 1, 2)
        middle = self.up[0](torch.cat([F.interpolate(coarse, scale_factor=2.0), middle], 1))
        fine = self.up[1](torch.cat([F.interpolate(middle, scale_factor=2.0), fine], 1))
        levels = zip(self.heads, (fine, middle, coarse), strict=True)
        return torch.cat([head(level).flatten(2) for head, level in levels], 2)


class NormedConvs(nn.Module):
    """Two convolutions behind group norm and SiLU, the time step added between them."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(times, outputs))
        self.second = nn.Sequential(
            nn.GroupNorm(32, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(N, inputs, H, W) and (N, times) to (N, outputs, H, W)."""
        inner = self.first(x) + self.time(time)[:, :, None, None]
        summed: Tensor = self.skip(x) + self.second(inner)
        return summed


class HeadsAttention(nn.Module):
    """Attention of `x` to itself, or to a context of another width."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(context, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """(N, pixels, width) and (N, keys, context) to (N, pixels, width)."""
        parts = (self.query(x), self.key(context), self.value(context))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class PixelTransformer(nn.Module):
    """Self attention of pixels, cross attention to a text, and a gated feed-forward layer."""

    def __init__(self, width: int, context: int, heads: int = 8) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width, eps=1e-6)
        self.into, self.out = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself = HeadsAttention(width, width, heads)
        self.text = HeadsAttention(width, context, heads)
        self.gate, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """(N, width, H, W) and (N, keys, context) to (N, width, H, W)."""
        pixels = self.into(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norms[0](pixels)
        pixels = pixels + self.itself(normed, normed)
        pixels = pixels + self.text(self.norms[1](pixels), text)
        values, gates = self.gate(self.norms[2](pixels)).chunk(2, -1)
        pixels = pixels + self.narrow(values * F.gelu(gates))
        result: Tensor = x + self.out(pixels.transpose(1, 2).unflatten(2, x.shape[2:]))
        return result


class DiffusionUNet(nn.Module):
    """The denoiser of latent diffusion (Rombach et al. 2022, arXiv:2112.10752), version 1's sizes.

    (N, 4, H, W), times (N, 320) and a text (N, keys, 768) to (N, 4, H, W).
    """

    def __init__(self, width: int = 320, context: int = 768) -> None:
        super().__init__()
        times = 4 * width
        widths = (width, 2 * width, 4 * width, 4 * width)
        self.embed = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.begin = nn.Conv2d(4, width, 3, padding=1)
        self.down, self.shrink, kept = nn.ModuleList(), nn.ModuleList(), [width]
        current = width
        for level, outputs in enumerate(widths):
            for _ in range(2):
                self.down.append(self.layer(current, outputs, times, context, level < 3))
                kept.append(current := outputs)
            if level < 3:
                self.shrink.append(nn.Conv2d(outputs, outputs, 3, 2, 1))
                kept.append(outputs)
        self.middle = nn.ModuleList(
            (
                self.layer(current, current, times, context, True),
                self.layer(current, current, times, context, False),
            )
        )
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, outputs in reversed([*enumerate(widths)]):
            for _ in range(3):
                self.up.append(self.layer(current + kept.pop(), outputs, times, context, level < 3))
                current = outputs
            if level:
                self.grow.append(nn.Conv2d(outputs, outputs, 3, padding=1))
        self.end = nn.Sequential(
            nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1)
        )

    @staticmethod
    def layer(inputs: int, outputs: int, times: int, context: int, attends: bool) -> nn.ModuleList:
        """Return two convolutions, and a transformer where the level has one."""
        parts: list[nn.Module] = [NormedConvs(inputs, outputs, times)]
        return nn.ModuleList(parts + [PixelTransformer(outputs, context)] * attends)

    @staticmethod
    def run(layer: nn.Module, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Apply one layer."""
        convs, *transformer = layer.children()
        x = convs(x, time)
        for attention in transformer:
            x = attention(x, text)
        return x

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Down, keeping what each level made, and up beside it."""
        time = self.embed(time)
        kept = [x := self.begin(x)]
        for number, layer in enumerate(self.down):
            kept.append(x := self.run(layer, x, time, text))
            if number % 2 and number < 6:
                kept.append(x := self.shrink[number // 2](x))
        for layer in self.middle:
            x = self.run(layer, x, time, text)
        for number, layer in enumerate(self.up):
            x = self.run(layer, torch.cat([x, kept.pop()], 1), time, text)
            if number % 3 == 2 and number < 9:
                x = self.grow[number // 3](F.interpolate(x, scale_factor=2.0))
        result: Tensor = self.end(x)
        return result


class Dlrm(nn.Module):
    """Naumov et al. 2019 (arXiv:1906.00091): 26 embedding bags beside dense features."""

    def __init__(self, tables: int = 26, rows: int = 100_000, width: int = 128) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = self.layers(13, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.top = self.layers(pairs + width, 1024, 1024, 512, 256)
        self.click = nn.Linear(256, 1)
        places = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("places", places, persistent=False)

    @staticmethod
    def layers(*widths: int) -> nn.Sequential:
        """Return linear layers with ReLU."""
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairs))

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """(N, 13) and (N, tables, lookups) to (N, 1)."""
        dense = self.bottom(dense)
        bags = [bag(rows[:, number]) for number, bag in enumerate(self.bags)]
        features = torch.stack([dense, *bags], 1)
        products = features @ features.mT
        lower = products[:, self.places[0], self.places[1]]
        result: Tensor = self.click(self.top(torch.cat([dense, lower], 1)))
        return result


def images(size: int, channels: int = 3) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a maker of square images."""
    return lambda batch: (torch.randn(batch, channels, size, size),)


def of_torchvision(name: str, *keys: str, **arguments: Any) -> Callable[[], nn.Module]:
    """Return a maker of a model of torchvision."""

    def make() -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name, weights=None, **arguments)
        return Results(model, (), *keys) if keys else model

    return make


def of_timm(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    """Return a maker of a model of timm."""

    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
        return model

    return make


def of_transformers(
    name: str, names: tuple[str, ...], keys: tuple[str, ...], **config: Any
) -> Callable[[], nn.Module]:
    """Return a maker of a model of transformers, of its default configuration with `config`."""

    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        return Results(kind(kind.config_class(**config)), names, *keys)

    return make


def make_whisper_encoder() -> nn.Module:
    """Return the encoder of Whisper (small)."""
    import transformers

    sizes = {"d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12}
    config = transformers.WhisperConfig(**sizes, encoder_ffn_dim=3072, decoder_layers=1)
    model: nn.Module = transformers.WhisperModel(config).get_encoder()
    return Results(model, ("input_features",), "last_hidden_state")


def make_tokens(vocabulary: int, *shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a maker of token ids (batch, *shape)."""
    return lambda batch: (torch.randint(vocabulary, (batch, *shape)),)


def _make_pairs(batch: int) -> tuple[Tensor, ...]:
    texts = torch.randint(49000, (batch, 77))
    texts[:, -1] = 49407  # the end of a text, which CLIP looks for
    return texts, *images(224)(batch)


SEGFORMER: dict[str, Any] = {
    "depths": [3, 4, 6, 3],
    "hidden_sizes": [64, 128, 320, 512],
    "decoder_hidden_size": 768,
    "num_labels": 150,
}
LARGE = {
    "modernbert": Large(
        of_transformers("ModernBertModel", ("input_ids",), ("last_hidden_state",)),
        make_tokens(50000, 512),
        32,
    ),
    "efficientnet_v2_s": Large(of_torchvision("efficientnet_v2_s"), images(384), 64, last=True),
    "yolo": Large(Yolo, images(640), 16, last=True),
    "clip": Large(
        of_transformers(
            "CLIPModel", ("input_ids", "pixel_values"), ("text_embeds", "image_embeds")
        ),
        _make_pairs,
        64,
    ),
    "whisper_encoder": Large(make_whisper_encoder, lambda n: (torch.randn(n, 80, 3000),), 8),
    "deeplab": Large(
        of_torchvision("deeplabv3_resnet50", "out", weights_backbone=None), images(513), 4
    ),
    "diffusion_unet": Large(
        DiffusionUNet,
        lambda n: (torch.randn(n, 4, 64, 64), torch.randn(n, 320), torch.randn(n, 77, 768)),
        4,
    ),
    "dinov2": Large(of_timm("vit_base_patch14_dinov2", img_size=224), images(224), 32),
    "wide_resnet50_2": Large(of_torchvision("wide_resnet50_2"), images(224), 64, torch.float32),
    "segformer": Large(
        of_transformers(
            "SegformerForSemanticSegmentation", ("pixel_values",), ("logits",), **SEGFORMER
        ),
        images(512),
        8,
    ),
    "convnext_s": Large(of_torchvision("convnext_small"), images(224), 1, torch.float32),
    "dlrm": Large(Dlrm, lambda n: (torch.randn(n, 13), torch.randint(100_000, (n, 26, 8))), 2048),
    "r3d_18": Large(of_torchvision("r3d_18"), lambda n: (torch.randn(n, 3, 16, 112, 112),), 8),
    "yolo_fp16": Large(Yolo, images(640), 16, torch.float16),
}
