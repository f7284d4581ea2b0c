"""FP8 training of two linear layers, written out: scales and histories as lists of numbers."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
GREATEST = torch.finfo(torch.float32).max


def fp32(value: float) -> float:
    """Return a number rounded to fp32."""
    return torch.tensor(value, dtype=torch.float32).item()


@dataclass
class Column:
    """Scale and history of one tensor, newest first, updated as Transformer Engine does."""

    dtype: torch.dtype
    length: int
    margin: int = 0
    interval: int = 1
    algorithm: str = "max"
    scale: float = 1.0
    updates: int = 0
    history: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.history = [0.0] * self.length

    def record(self, x: Tensor) -> None:
        """Note the largest magnitude of x; NaN stays NaN."""
        values = [self.history[0], *x.detach().float().abs().flatten().tolist()]
        self.history[0] = math.nan if any(map(math.isnan, values)) else max(values)

    def quantize(self, x: Tensor) -> tuple[Tensor, float]:
        """Return x in FP8 as fp32 numbers, and the reciprocal of the scale."""
        limit = LARGEST[self.dtype]
        scaled = (x.detach().float() * fp32(self.scale)).clamp(-limit, limit)
        return scaled.to(self.dtype).float(), self.scale_inv

    @property
    def scale_inv(self) -> float:
        return fp32(1 / self.scale)

    def update(self) -> None:
        """End a pass."""
        window = self.history if self.algorithm == "max" else self.history[:1]
        amax = math.nan if any(map(math.isnan, window)) else max(window)
        if self.updates % self.interval == 0 and math.isfinite(amax) and amax > 0:
            scale = LARGEST[self.dtype] * 2.0**-self.margin / amax
            self.scale = min(fp32(scale), GREATEST)
        self.updates += 1
        self.history = [*self.history[1:], self.history[0]]
        self.history[0] = 0.0


class Layer:
    """One linear layer."""

    def __init__(self, linear, forward=torch.float8_e4m3fn, gradient=torch.float8_e5m2, **settings):
        self.linear = linear
        self.input, self.weight = Column(forward, **settings), Column(forward, **settings)
        self.gradient = Column(gradient, **settings)

    def forward(self, x: Tensor, *, counts: bool = True) -> Tensor:
        """Return the output, and keep what the gradients need."""
        if counts:
            self.input.record(x)
            self.weight.record(self.linear.weight)
        self.x, self.x_inv = self.input.quantize(x)
        self.w, self.w_inv = self.weight.quantize(self.linear.weight)
        scale = torch.tensor(self.x_inv) * torch.tensor(self.w_inv)
        return (self.x @ self.w.t()) * scale + self.linear.bias.detach()

    def backward(self, gradient: Tensor) -> Tensor:
        """Add to the gradients of weight and bias, and return that of the input."""
        self.gradient.record(gradient)
        g, g_inv = self.gradient.quantize(gradient)
        of_x = (g @ self.w) * (torch.tensor(g_inv) * torch.tensor(self.w_inv))
        of_weight = (g.t() @ self.x) * (torch.tensor(g_inv) * torch.tensor(self.x_inv))
        accumulate(self.linear.weight, of_weight)
        accumulate(self.linear.bias, gradient.sum(0))
        return of_x


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a parameter."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class Reference:
    """`Sequential(Linear, ReLU, Linear)` under a loss of half the sum of squares."""

    def __init__(self, model, **settings):
        self.first, self.second = Layer(model[0], **settings), Layer(model[2], **settings)

    def step(self, x: Tensor) -> Tensor:
        """Run one pass and its backward, each followed by its update."""
        hidden = self.first.forward(x)
        active = hidden.relu()
        y = self.second.forward(active)
        for layer in (self.first, self.second):
            layer.input.update()
            layer.weight.update()
        of_active = self.second.backward(y)
        self.first.backward(torch.where(active <= 0, 0.0, of_active))
        for layer in (self.first, self.second):
            layer.gradient.update()
        return y

    def states(self) -> tuple[Tensor, Tensor]:
        """Return the states as a prepared model has them; columns of outputs stay empty."""
        forward = []
        for layer in (self.first, self.second):
            empty = Column(layer.input.dtype, layer.input.length)
            empty.updates, empty.interval = layer.input.updates, layer.input.interval
            forward += [layer.input, layer.weight, empty]
        return stack(forward), stack([self.first.gradient, self.second.gradient])


def stack(columns: list[Column]) -> Tensor:
    """Return columns as the tensor of a scaling state."""
    rows = [[c.scale, c.scale_inv, c.updates % c.interval, *c.history] for c in columns]
    return torch.tensor(rows).t()
