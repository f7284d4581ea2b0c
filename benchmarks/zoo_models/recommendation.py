"""Recommenders: embeddings of categories, dot products and small dense networks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_models.entry import Entry, at_least_single, normal, numbers, together

from support.tiny_models import Dlrm, mlp

USERS, FIELDS, ROWS, WIDTH, DENSE = 64, 8, 500, 16, 13


def clicked(scores: Tensor) -> Tensor:
    """Return the binary cross entropy of scores; every third row was clicked."""
    scores = at_least_single(scores.flatten())
    label = torch.arange(len(scores), device=scores.device) % 3 == 0
    return F.binary_cross_entropy_with_logits(scores, label.to(scores.dtype))


class DlrmOfBags(nn.Module):
    """DLRM whose bags of rows all have the same length."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Dlrm(WIDTH, FIELDS)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """dense [B, DENSE], rows [B, FIELDS, bag] -> [B, 1]."""
        users, fields, bag = rows.shape
        offsets = torch.arange(0, users * bag, bag, device=rows.device).expand(fields, users)
        return self.model(dense, rows.transpose(0, 1).flatten(1), offsets)


class DeepFm(nn.Module):
    """Factorisation machine and a deep network on the same embeddings (arXiv 1703.04247)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(FIELDS * ROWS, 1), nn.Embedding(FIELDS * ROWS, WIDTH)
        self.deep = mlp(FIELDS * WIDTH, 128, 64, 1, last=nn.Identity())
        self.register_buffer("offsets", torch.arange(FIELDS) * ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        """rows [B, FIELDS] -> [B, 1]."""
        rows = rows + self.offsets
        vectors = self.second(rows)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        return self.first(rows).sum(1) + pairs + self.deep(vectors.flatten(1))


class Ncf(nn.Module):
    """Neural collaborative filtering: generalised factorisation beside a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(2))
        self.items = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(2))
        self.deep = mlp(2 * WIDTH, 64, 32, WIDTH, last=nn.ReLU())
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """users and items [B] -> [B, 1]."""
        product = self.users[0](users) * self.items[0](items)
        deep = self.deep(torch.cat([self.users[1](users), self.items[1](items)], 1))
        return self.head(torch.cat([product, deep], 1))


class TwoTower(nn.Module):
    """Two normalised towers, whose products are scored within the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, 32) for _ in range(2))
        self.towers = nn.ModuleList(mlp(32 + DENSE, 128, 64, last=nn.Identity()) for _ in range(2))

    def forward(self, seen: Tensor, user: Tensor, words: Tensor, item: Tensor) -> Tensor:
        """seen and words [B, bag], user and item [B, DENSE] -> scores [B, B]."""
        sides = zip(self.bags, self.towers, (seen, words), (user, item), strict=True)
        left, right = (
            F.normalize(tower(torch.cat([bag(rows), dense], 1)), dim=1)
            for bag, tower, rows, dense in sides
        )
        return left @ right.t() / 0.1


class WideDeep(nn.Module):
    """A linear model over crossed features beside a deep one (arXiv 1606.07792)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(4 * ROWS, 1, mode="sum")
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(FIELDS))
        self.deep = nn.Sequential(
            nn.BatchNorm1d(FIELDS * WIDTH + DENSE),
            mlp(FIELDS * WIDTH + DENSE, 128, 64, 1, last=nn.Identity()),
        )

    def forward(self, rows: Tensor, dense: Tensor) -> Tensor:
        """rows [B, FIELDS], dense [B, DENSE] -> [B, 1]."""
        crossed = (rows[:, 1:] * 31 + rows[:, :-1]) % (4 * ROWS)
        vectors = [table(rows[:, field]) for field, table in enumerate(self.tables)]
        return self.wide(crossed) + self.deep(torch.cat([*vectors, dense], 1))


MODELS = {
    "dlrm": Entry(DlrmOfBags, together(normal(DENSE), numbers(50, FIELDS, 3)), USERS),
    "deepfm": Entry(DeepFm, together(numbers(ROWS, FIELDS)), USERS, clicked),
    "ncf": Entry(Ncf, together(numbers(ROWS), numbers(ROWS)), USERS, clicked),
    "two_tower": Entry(
        TwoTower,
        together(numbers(ROWS, 6), normal(DENSE), numbers(ROWS, 4), normal(DENSE)),
        USERS,
    ),
    "wide_deep": Entry(WideDeep, together(numbers(ROWS, FIELDS), normal(DENSE)), USERS, clicked),
}
