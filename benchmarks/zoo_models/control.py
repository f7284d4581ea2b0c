"""Reinforcement learning: values, policies, models of the world."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_models.entry import Entry, normal, numbers, together, total

from support.tiny_models import mlp

STATE, ACTIONS, BATCH, STEPS = 17, 6, 64, 8


def pictures(channels: int = 4, side: int = 44) -> nn.Sequential:
    """Return the convolutions of a DQN (Nature 2015, small), flattened."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
    )


class Dqn(nn.Module):
    """Values of actions from the last four frames, in bytes scaled to one."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes, self.head = pictures(), mlp(128, 128, ACTIONS, last=nn.Identity())

    def forward(self, frames: Tensor) -> Tensor:
        """frames [B, 4, 44, 44] -> [B, ACTIONS]."""
        return self.head(self.eyes(frames / 255.0))


class Dueling(nn.Module):
    """Values of the state and advantages of actions apart."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = pictures()
        self.value = mlp(128, 64, 1, last=nn.Identity())
        self.advantage = mlp(128, 64, ACTIONS, last=nn.Identity())

    def forward(self, frames: Tensor) -> Tensor:
        """frames [B, 4, 44, 44] -> [B, ACTIONS]."""
        seen = self.eyes(frames / 255.0)
        advantage = self.advantage(seen)
        return self.value(seen) + advantage - advantage.mean(1, keepdim=True)


class Ppo(nn.Module):
    """Actor and critic on one trunk; the clipped loss of actions that were taken."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(STATE, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.actor, self.critic = nn.Linear(width, ACTIONS), nn.Linear(width, 1)

    def forward(
        self, state: Tensor, action: Tensor, before: Tensor, gain: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """state [B, STATE], the rest [B] -> losses of policy and value, and the entropy, [B]."""
        x = self.trunk(state)
        logs = self.actor(x).log_softmax(-1)
        ratio = (logs.gather(1, action[:, None])[:, 0] - before).exp()
        policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return policy, (self.critic(x)[:, 0] - gain).square(), -(logs.exp() * logs).sum(1)


class Sac(nn.Module):
    """A squashed Gaussian policy, and two critics of what it does; its noise is an input."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.actor = mlp(STATE, width, width, 2 * ACTIONS, last=nn.Identity())
        sizes = (STATE + ACTIONS, width, width, 1)
        self.critics = nn.ModuleList(mlp(*sizes, last=nn.Identity()) for _ in range(2))

    def forward(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """state [B, STATE], noise [B, ACTIONS] -> values [B], log probabilities [B]."""
        mean, log_std = self.actor(state).chunk(2, 1)
        log_std = -5 + 3.5 * (log_std.tanh() + 1)
        free = mean + noise * log_std.exp()
        action = free.tanh()
        logs = -0.5 * noise.square() - log_std - 2 * (0.6931 - free - F.softplus(-2 * free))
        both = torch.cat([state, action], 1)
        values = torch.minimum(*(critic(both) for critic in self.critics))
        return values[:, 0], logs.sum(1)


class Rssm(nn.Module):
    """Dreamer's world model: a GRU cell over steps, categorical states, a decoded observation.

    Samples are taken by Gumbel noise that is an input; their gradient goes straight through.
    """

    def __init__(self, width: int = 64, groups: int = 8, kinds: int = 8) -> None:
        super().__init__()
        self.groups, self.kinds, self.width = groups, kinds, width
        latent = groups * kinds
        self.embed = mlp(STATE, width, width, last=nn.ELU())
        self.mix, self.cell = nn.Linear(latent + ACTIONS, width), nn.GRUCell(width, width)
        self.norm = nn.LayerNorm(width)
        self.prior, self.posterior = nn.Linear(width, latent), nn.Linear(2 * width, latent)
        self.decode = mlp(width + latent, width, STATE, last=nn.Identity())

    def forward(self, seen: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """seen [B, STEPS, STATE], actions [B, STEPS, ACTIONS] -> error and divergence, [B]."""
        embedded = self.embed(seen)
        state = seen.new_zeros(seen.shape[0], self.width)
        sample = seen.new_zeros(seen.shape[0], self.groups * self.kinds)
        errors, divergences = [], []
        for step in range(STEPS):
            mixed = F.elu(self.mix(torch.cat([sample, actions[:, step]], 1)))
            state = self.cell(mixed, state)
            normed = self.norm(state)
            prior = self._logs(self.prior(normed))
            logs = self._logs(self.posterior(torch.cat([normed, embedded[:, step]], 1)))
            chosen = (logs + noise[:, step]).argmax(-1)
            hard = F.one_hot(chosen, self.kinds).to(logs.dtype)
            sample = (hard + logs.exp() - logs.exp().detach()).flatten(1)
            decoded = self.decode(torch.cat([normed, sample], 1))
            errors.append((decoded - seen[:, step]).square().sum(1))
            divergences.append((logs.exp() * (logs - prior)).sum((1, 2)))
        return torch.stack(errors).sum(0), torch.stack(divergences).sum(0)

    def _logs(self, logits: Tensor) -> Tensor:
        return logits.unflatten(1, (self.groups, self.kinds)).log_softmax(-1)


class DecisionTransformer(nn.Module):
    """Returns, states and actions as one causal sequence (arXiv 2106.01345, small)."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        sizes = (1, STATE, ACTIONS)
        self.embeds = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.times, self.norm = nn.Embedding(100, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, ACTIONS)

    def forward(self, gains: Tensor, states: Tensor, actions: Tensor, times: Tensor) -> Tensor:
        """gains [B, STEPS, 1], the others [B, STEPS, ...], times [B, STEPS] -> next actions."""
        parts = zip(self.embeds, (gains, states, actions), strict=True)
        when = self.times(times)
        x = self.norm(torch.stack([embed(part) + when for embed, part in parts], 2).flatten(1, 2))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x.unflatten(1, (-1, 3))[:, :, 1]).tanh()


def gumbel(batch: int) -> Tensor:
    """Return Gumbel noise of all steps."""
    return -torch.rand(batch, STEPS, 8, 8).clamp(1e-6).log().neg().log()


MODELS = {
    "dqn": Entry(Dqn, together(lambda b: torch.rand(b, 4, 44, 44) * 255), 16),
    "dueling": Entry(Dueling, together(lambda b: torch.rand(b, 4, 44, 44) * 255), 16),
    "ppo": Entry(
        Ppo,
        together(normal(STATE), numbers(ACTIONS), lambda b: -torch.rand(b) - 1, normal()),
        BATCH,
        total,
    ),
    "sac": Entry(Sac, together(normal(STATE), normal(ACTIONS)), BATCH, total),
    "decision_transformer": Entry(
        DecisionTransformer,
        together(
            normal(STEPS, 1), normal(STEPS, STATE), normal(STEPS, ACTIONS), numbers(100, STEPS)
        ),
        8,
    ),
    "rssm": Entry(Rssm, together(normal(STEPS, STATE), normal(STEPS, ACTIONS), gumbel), 16, total),
}
