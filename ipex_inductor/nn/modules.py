"""`ipex.nn.modules`: every module of `ipex.nn`, under one name."""

from ipex_inductor.nn.boxes import RoIAlign
from ipex_inductor.nn.frozen_batch_norm import FrozenBatchNorm2d
from ipex_inductor.nn.merged_embedding_bag import (
    EmbeddingSpec,
    MergedEmbeddingBag,
    MergedEmbeddingBagWithAdaGrad,
    MergedEmbeddingBagWithCat,
    MergedEmbeddingBagWithSGD,
)

__all__ = [
    "EmbeddingSpec",
    "FrozenBatchNorm2d",
    "MergedEmbeddingBag",
    "MergedEmbeddingBagWithAdaGrad",
    "MergedEmbeddingBagWithCat",
    "MergedEmbeddingBagWithSGD",
    "RoIAlign",
]
