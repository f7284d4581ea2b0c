"""Models of sound: recognition and separation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_models.entry import (
    Entry,
    classes,
    filled,
    known,
    normal,
    numbers,
    of_transformers,
    together,
)

from support.tiny_models import VOCABULARY, Tiny

FRAMES, MEL = 64, 40


class GlobalNorm(nn.Module):
    """Layer norm over channels and time together, with a gain and a bias for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, T] and the same back."""
        mean = x.mean((1, 2), keepdim=True)
        variance = (x - mean).square().mean((1, 2), keepdim=True)
        return self.weight * (x - mean) * torch.rsqrt(variance + 1e-5) + self.bias


class Separable(nn.Module):
    """A dilated depthwise convolution between two of one sample, with residual and skip."""

    def __init__(self, channels: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(channels, hidden, 1),
            nn.PReLU(),
            GlobalNorm(hidden),
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden),
            nn.PReLU(),
            GlobalNorm(hidden),
        )
        self.residual = nn.Conv1d(hidden, channels, 1)
        self.skip = nn.Conv1d(hidden, channels, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, channels, T] -> the next layer's input, and the skip of this one."""
        y = self.body(x)
        return x + self.residual(y), self.skip(y)


class ConvTasNet(nn.Module):
    """Separates two speakers by masks over a learned basis (arXiv 1809.07454, small)."""

    def __init__(self, basis: int = 64, channels: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, basis, 16, stride=8, bias=False)
        self.norm, self.narrow = GlobalNorm(basis), nn.Conv1d(basis, channels, 1)
        self.layers = nn.ModuleList(Separable(channels, hidden, 2**i) for i in range(4))
        self.masks = nn.Sequential(nn.PReLU(), nn.Conv1d(channels, 2 * basis, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(basis, 1, 16, stride=8, bias=False)

    def forward(self, sound: Tensor) -> Tensor:
        """sound [B, 1, T] -> [B, 2, T]."""
        code = F.relu(self.encoder(sound))
        x, total = self.narrow(self.norm(code)), torch.zeros((), device=sound.device)
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        masked = self.masks(total).unflatten(1, (2, -1)) * code[:, None]
        return self.decoder(masked.flatten(0, 1)).unflatten(0, (-1, 2)).squeeze(2)


class Acoustic(nn.Module):
    """Convolutions over a spectrogram, a recurrent network, log probabilities of letters."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int = 64) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.Hardtanh(0, 20),
            nn.Conv2d(8, 8, 3, stride=(1, 2), padding=1),
            nn.Hardtanh(0, 20),
        )
        self.sequence = kind(8 * (MEL // 4), width, 2, batch_first=True, bidirectional=True)
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, VOCABULARY)

    def forward(self, frames: Tensor) -> Tensor:
        """frames [B, T, MEL] -> [B, T / 2, VOCABULARY]."""
        x = self.front(frames.unsqueeze(1)).transpose(1, 2).flatten(2)
        return self.head(self.norm(self.sequence(x)[0])).log_softmax(-1)


WAV2VEC2 = Tiny(
    "Wav2Vec2Config",
    "Wav2Vec2ForCTC",
    dict,
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 192,
        "conv_dim": [32, 32, 32],
        "conv_kernel": [10, 3, 3],
        "conv_stride": [5, 2, 2],
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "mask_time_prob": 0.0,
        "layerdrop": 0.0,
    },
    (
        "hidden_dropout",
        "attention_dropout",
        "activation_dropout",
        "feat_proj_dropout",
        "final_dropout",
    ),
)
MODELS = {
    "wav2vec2": of_transformers(WAV2VEC2, {"input_values": normal(1600)}, 2),
    "whisper": known(
        "whisper",
        {"input_features": normal(MEL, 32), "decoder_input_ids": numbers(VOCABULARY, 12)},
        2,
        num_mel_bins=MEL,
        d_model=96,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
    ),
    "conv_tasnet": Entry(filled(ConvTasNet), together(normal(1, 1600)), 2),
    "lstm": Entry(lambda: Acoustic(nn.LSTM), together(normal(FRAMES, MEL)), 2, classes),
    "gru": Entry(lambda: Acoustic(nn.GRU), together(normal(FRAMES, MEL)), 2, classes),
}
