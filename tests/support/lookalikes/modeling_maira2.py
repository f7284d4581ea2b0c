"""Maira2: Llava with another projector behind the encoder of pictures."""

from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

__all__ = ["LlavaConfig"]


class Projector(nn.Module):
    """Four linear layers with GELUs between them."""

    def __init__(self, config):
        super().__init__()
        width = config.text_config.hidden_size
        layers = [nn.Linear(config.vision_config.hidden_size, width)]
        for _ in range(3):
            layers += [nn.GELU(), nn.Linear(width, width)]
        self.layers = nn.Sequential(*layers)

    def forward(self, features):
        return self.layers(features)


class Maira2ForConditionalGeneration(LlavaForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        self.model.multi_modal_projector = Projector(config)
