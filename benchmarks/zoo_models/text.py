"""Language models: encoders, decoders, and both."""

import torch
from torch import Tensor
from zoo_models.entry import Entry, known, numbers, of_transformers

from support.tiny_models import VOCABULARY, Tiny

TOKENS, WIDTH, INNER, HEADS, BATCH = 48, 128, 512, 4, 2
BERT = {"hidden_size": WIDTH, "intermediate_size": INNER}


def mask(batch: int) -> Tensor:
    """Return a padding mask: each text but the first lacks its last words."""
    lengths = TOKENS - 5 * (torch.arange(batch) % 4)
    return (torch.arange(TOKENS) < lengths[:, None]).long()


WORDS = {"input_ids": numbers(VOCABULARY, TOKENS)}
PADDED = {**WORDS, "attention_mask": mask}
ALBERT = Tiny(
    "AlbertConfig",
    "AlbertForMaskedLM",
    dict,
    {
        "vocab_size": VOCABULARY,
        "embedding_size": 64,
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": 64,
    },
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"),
)
DISTILBERT = Tiny(
    "DistilBertConfig",
    "DistilBertForMaskedLM",
    dict,
    {
        "vocab_size": VOCABULARY,
        "dim": WIDTH,
        "n_layers": 2,
        "n_heads": HEADS,
        "hidden_dim": INNER,
        "max_position_embeddings": 64,
    },
    ("dropout", "attention_dropout"),
)
MODELS: dict[str, Entry] = {
    "bert": known("bert", PADDED, BATCH, **BERT),
    "gpt2": known("gpt2", WORDS, BATCH, n_embd=WIDTH),
    "t5": known(
        "t5",
        {**PADDED, "decoder_input_ids": numbers(VOCABULARY, 16)},
        BATCH,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=INNER,
        num_layers=1,
    ),
    "albert": of_transformers(ALBERT, PADDED, BATCH),
    "distilbert": of_transformers(DISTILBERT, PADDED, BATCH),
    "roberta": known("roberta", PADDED, BATCH, **BERT),
    "llama": known("llama", WORDS, BATCH, hidden_size=WIDTH, intermediate_size=INNER),
}
