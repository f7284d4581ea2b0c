"""Tiny models of the kinds that people compile: random weights, a few layers, seconds to compile.

Most are classes of `transformers`, and `sizes` shrinks their configurations. Its ResNet has no
groups, so ResNeXt is written out here, and timm's stands beside it for where timm is installed; a
recommender like DLRM is written out too.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.cli.demo.models import _fill_batch_norms

VOCABULARY, LABELS = 97, 10


@dataclass(frozen=True)
class Tiny:
    """A model of `transformers` by the names of its classes; `dropout` names its probabilities."""

    config: str
    model: str
    inputs: Callable[[], dict[str, Tensor]]
    sizes: Mapping[str, Any]
    dropout: tuple[str, ...] = ()

    def __call__(self, dropout: float, **sizes: Any) -> nn.Module:
        import transformers

        words = {**self.sizes, **sizes, **dict.fromkeys(self.dropout, dropout)}
        return getattr(transformers, self.model)(getattr(transformers, self.config)(**words))


@dataclass(frozen=True)
class Own:
    """A model of this file, without dropout."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]

    def __call__(self, dropout: float) -> nn.Module:
        return self.make()


def build(name: str, dropout: float = 0.1, **sizes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model `name` in fp32, and its inputs by name: the same ones in every process.

    `sizes` changes those of one of `transformers`.
    """
    torch.manual_seed(0)
    model = MODELS[name](dropout, **sizes)
    fill(model)
    return model, MODELS[name].inputs()


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Weights of which each moves the result: as initialised, some layers are all but the identity.

    Independent of the version of `transformers`, too.
    """
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.normal_(0, math.sqrt(p.shape[0] / p.numel()))
        elif name.endswith("bias"):
            p.normal_(0, 0.3)
        else:
            p.uniform_(0.5, 1.5)
    _fill_batch_norms(model)


def _image(batch: int = 2) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def _tokens(batch: int = 2, tokens: int = 16) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, tokens))}


def _padded() -> dict[str, Tensor]:
    """Two texts, of which the second is shorter."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 11:] = 0
    return {**_tokens(), "attention_mask": mask}


def _two_texts() -> dict[str, Tensor]:
    return {**_padded(), "decoder_input_ids": _tokens(2, 8)["input_ids"]}


def _speech() -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(2, 8, 32),
        "decoder_input_ids": _tokens(2, 8)["input_ids"],
    }


def _clicks() -> dict[str, Tensor]:
    """Eight users: numbers, and in each of three tables one to three rows."""
    bags = torch.randint(1, 4, (3, 8))
    return {
        "dense": torch.randn(8, 13),
        "rows": torch.randint(0, 50, (3, 24)),
        "offsets": F.pad(bags.cumsum(1), (1, -1)),
    }


class ResNext(nn.Module):
    """Stem, two grouped bottlenecks, classifier (arXiv 1611.05431, small)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = normalised(3, 16, 3, stride=2)
        self.blocks = nn.Sequential(Bottleneck(16, 32, 1), Bottleneck(32, 64, 2))
        self.head = nn.Linear(64, LABELS)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(pixel_values)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Bottleneck(nn.Module):
    """1x1, 3x3 in four groups, 1x1, and a projected shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            normalised(channels, out // 2, 1),
            nn.ReLU(inplace=True),
            normalised(out // 2, out // 2, 3, stride=stride, groups=4),
            nn.ReLU(inplace=True),
            normalised(out // 2, out, 1),
        )
        self.shortcut = normalised(channels, out, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def normalised(channels: int, out: int, kernel: int, **window: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False, **window)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


def _timm_resnext() -> nn.Module:
    from timm.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=LABELS, cardinality=4, base_width=4)


class Dlrm(nn.Module):
    """Bags of embeddings and a bottom MLP, their dot products, a top MLP (arXiv 1906.00091)."""

    def __init__(self, width: int = 16, tables: int = 3) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, width, mode="sum") for _ in range(tables))
        self.bottom = mlp(13, 32, width, last=nn.ReLU())
        self.top = mlp(width + tables * (tables + 1) // 2, 32, 1, last=nn.Sigmoid())

    def forward(self, dense: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        x = self.bottom(dense)
        bags = [bag(*where) for bag, *where in zip(self.bags, rows, offsets, strict=True)]
        vectors = torch.stack([x, *bags], 1)
        products = vectors @ vectors.transpose(1, 2)
        row, column = torch.tril_indices(*products.shape[1:], offset=-1)
        return self.top(torch.cat([x, products[:, row, column]], 1))


def mlp(*widths: int, last: nn.Module) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain(*layers[:-1]), layers[-1][0], last)


_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_BY_HAND = {"attn_implementation": "eager"}  # attention written out, each model in its own way
_BERT_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
MODELS: dict[str, Tiny | Own] = {
    "resnet": Tiny(
        "ResNetConfig",
        "ResNetForImageClassification",
        _image,
        {
            "embedding_size": 8,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "num_labels": LABELS,
        },
    ),
    "resnext": Own(ResNext, _image),
    "timm_resnext": Own(_timm_resnext, lambda: {"x": torch.randn(2, 3, 64, 64)}),
    "mobilenet_v2": Tiny(
        "MobileNetV2Config",
        "MobileNetV2ForImageClassification",
        lambda: _image(8),  # the last batch norms see one pixel of each
        {"image_size": 32, "depth_multiplier": 0.25, "num_labels": LABELS},
        ("classifier_dropout_prob",),
    ),
    "efficientnet": Tiny(
        "EfficientNetConfig",
        "EfficientNetForImageClassification",
        _image,
        {
            "image_size": 32,
            "width_coefficient": 0.5,
            "depth_coefficient": 1.0,
            "kernel_sizes": [3, 5, 3],
            "in_channels": [32, 16, 24],
            "out_channels": [16, 24, 40],
            "strides": [1, 2, 2],
            "num_block_repeats": [1, 2, 1],
            "expand_ratios": [1, 6, 6],
            "hidden_dim": 640,
            "num_labels": LABELS,
        },
        ("dropout_rate", "drop_connect_rate"),
    ),
    "convnext": Tiny(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        _image,
        {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": LABELS},
        ("drop_path_rate",),
    ),
    "vit": Tiny(
        "ViTConfig",
        "ViTForImageClassification",
        _image,
        {
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "num_labels": LABELS,
        },
        _BERT_DROPOUT,
    ),
    "swin": Tiny(
        "SwinConfig",
        "SwinForImageClassification",
        _image,
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 1],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": LABELS,
            **_BY_HAND,
        },
        (*_BERT_DROPOUT, "drop_path_rate"),
    ),
    "bert": Tiny("BertConfig", "BertForMaskedLM", _padded, _BERT, _BERT_DROPOUT),
    "roberta": Tiny(
        "RobertaConfig",
        "RobertaForMaskedLM",
        _padded,
        {**_BERT, **_BY_HAND},
        _BERT_DROPOUT,
    ),
    "gpt2": Tiny(
        "GPT2Config",
        "GPT2LMHeadModel",
        _tokens,
        {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_cache": False,
            **_BY_HAND,
        },
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "t5": Tiny(
        "T5Config",
        "T5ForConditionalGeneration",
        _two_texts,
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 1,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",  # as since T5 1.1
            "use_cache": False,
            **_BY_HAND,
        },
        ("dropout_rate",),
    ),
    "llama": Tiny(
        "LlamaConfig",
        "LlamaForCausalLM",
        lambda: _tokens(1, 16),
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "use_cache": False,
        },
        ("attention_dropout",),
    ),
    "whisper": Tiny(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        _speech,
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "use_cache": False,
        },
        ("dropout", "attention_dropout", "activation_dropout"),
    ),
    "dlrm": Own(Dlrm, _clicks),
}
