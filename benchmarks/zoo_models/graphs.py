"""Graph networks over lists of edges, which gather, weigh and add up messages."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_models.entry import Entry, classes

from support.tiny_models import LABELS

NODES, EDGES, FEATURES, WIDTH, RELATIONS = 24, 96, 32, 64, 8


def graph(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features of nodes, and the sources and targets of edges, of so many graphs."""
    firsts = torch.arange(batch).repeat_interleave(EDGES) * NODES
    source, target = (firsts + torch.randint(NODES, (batch * EDGES,)) for _ in range(2))
    return torch.randn(batch * NODES, FEATURES), source, target


def related(batch: int) -> tuple[Tensor, ...]:
    """Return the same with features of edges."""
    return *graph(batch), torch.randn(batch * EDGES, RELATIONS)


def added(messages: Tensor, target: Tensor, nodes: int) -> Tensor:
    """Return the sum of messages [edges, width] at each node."""
    return messages.new_zeros(nodes, messages.shape[1]).index_add(0, target, messages)


class Gcn(nn.Module):
    """Graph convolutions with symmetric normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, LABELS)])

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """x [nodes, FEATURES], source and target [edges] -> [nodes, LABELS]."""
        degree = added(x.new_ones(source.shape[0], 1), target, x.shape[0]) + 1
        root = degree.rsqrt()
        for number, layer in enumerate(self.layers):
            y = layer(x) * root
            x = (y + added(y[source], target, x.shape[0])) * root
            x = x if number else F.relu(x)
        return x


class Gat(nn.Module):
    """Graph attention: a softmax over the edges into each node."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.enter, self.leave = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, LABELS)
        self.sends = nn.Parameter(torch.randn(heads, WIDTH // heads))
        self.takes = nn.Parameter(torch.randn(heads, WIDTH // heads))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """x [nodes, FEATURES], source and target [edges] -> [nodes, LABELS]."""
        y = self.enter(x).unflatten(1, (self.heads, -1))
        sent, taken = (y * self.sends).sum(-1), (y * self.takes).sum(-1)
        scores = F.leaky_relu(sent[source] + taken[target], 0.2)
        place = target[:, None].expand(-1, self.heads)
        lowest = scores.new_full((x.shape[0], self.heads), -1e9)
        largest = lowest.scatter_reduce(0, place, scores.detach(), "amax")
        weights = (scores - largest[target]).exp()
        weights = weights / added(weights, target, x.shape[0])[target]
        messages = (y[source] * weights[..., None]).flatten(1)
        return self.leave(F.elu(added(messages, target, x.shape[0])))


class Gin(nn.Module):
    """Isomorphism networks: sums, perceptrons with batch norms, a sum of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
            )
            for width in (FEATURES, WIDTH)
        )
        self.own = nn.Parameter(torch.zeros(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, LABELS) for _ in range(2))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """x [nodes, FEATURES], source and target [edges] -> [nodes, LABELS]."""
        results = []
        for number, (layer, head) in enumerate(zip(self.layers, self.heads, strict=True)):
            neighbors = added(x[source], target, x.shape[0])
            x = F.relu(layer((1 + self.own[number]) * x + neighbors))
            results.append(head(x))
        return torch.stack(results).sum(0)


class Mpnn(nn.Module):
    """Message passing: messages of both ends and the edge, states updated by a GRU cell."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps, self.enter = steps, nn.Linear(FEATURES, WIDTH)
        self.message = nn.Sequential(
            nn.Linear(2 * WIDTH + RELATIONS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        )
        self.update, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, edges: Tensor) -> Tensor:
        """x [nodes, FEATURES], edges [edges, RELATIONS] -> [nodes, LABELS]."""
        state = self.enter(x)
        for _ in range(self.steps):
            ends = torch.cat([state[source], state[target], edges], 1)
            state = self.update(added(self.message(ends), target, x.shape[0]), state)
        return self.head(state)


class GraphSage(nn.Module):
    """Means of neighbors by `scatter_add`, beside a node's own state, normalised."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((FEATURES, WIDTH), (WIDTH, LABELS))
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in widths)
        self.others = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in widths)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """x [nodes, FEATURES], source and target [edges] -> [nodes, LABELS]."""
        count = x.new_zeros(x.shape[0]).scatter_add(0, target, x.new_ones(target.shape[0]))
        for number, (own, others) in enumerate(zip(self.own, self.others, strict=True)):
            place = target[:, None].expand(-1, x.shape[1])
            mean = torch.zeros_like(x).scatter_add(0, place, x[source])
            y = own(x) + others(mean / count.clamp(min=1)[:, None])
            x = F.normalize(y, dim=1) if number else F.relu(F.normalize(y, dim=1))
        return x


MODELS = {
    "gcn": Entry(Gcn, graph, 16, classes),
    "gat": Entry(Gat, graph, 16, classes),
    "gin": Entry(Gin, graph, 16, classes),
    "mpnn": Entry(Mpnn, related, 16, classes),
    "graphsage": Entry(GraphSage, graph, 16, classes),
}
