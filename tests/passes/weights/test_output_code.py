"""Weights that are read packed alone are no inputs of the generated code."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor import compat
from ipex_inductor.passes.weights.output_code import PrologueCode


class Two(nn.Module):
    """Two layers; the code reads the second's weight as it is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 32] -> [N, 32]."""
        return self.second(F.relu(self.first(x))) + self.second.weight[0]


def compiled(model: nn.Module) -> "torch._dynamo.eval_frame.OptimizedModule":
    return torch.compile(model, backend="ipex", options={"strict": True})  # type: ignore[return-value]


@torch.no_grad()
def test_the_code_is_handed_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PrologueCode] = []
    begin = PrologueCode.__post_init__
    monkeypatch.setattr(PrologueCode, "__post_init__", lambda c: made.append(c) or begin(c))
    model, x = Two().eval(), torch.randn(4, 32)
    fn = compiled(model)
    for _ in range(2):
        # packed products add in another order
        torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=1e-5)
        model.first.weight.mul_(2)
        model.second.weight.mul_(2)
    (code, *_) = made
    packed = {i for program in code.programs for i in program.inputs}
    assert len(packed - {*code.reads}) == 1  # the first layer's
    assert len(packed & {*code.reads}) == 1  # the second's


def test_a_graph_may_be_loaded_without_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what torch saves with its guards."""
    monkeypatch.setattr(compat, "reload_graph", lambda graph, constants: graph)
    code = PrologueCode(Mock(), (), (0, 1), captured=False)
    code.post_compile([], {}, {})
    code.inner.post_compile.assert_called_once_with([], {}, {})  # type: ignore[attr-defined]
    code(inputs := ["image", "weight"])
    code.inner.assert_called_once_with(inputs)  # type: ignore[attr-defined]


BEHIND = {
    "at once": lambda y: y,
    "something pointwise": lambda y: F.relu(y) * 2,
    "a copy": lambda y: y.contiguous(),
    "convolved again": lambda y: F.conv2d(y, torch.ones(4, 8, 1, 1)),
}


# All in one graph, and slow each by itself.
NAMES = [
    pytest.param([*BEHIND], id="all"),
    *(pytest.param([name], id=name, marks=pytest.mark.slow) for name in BEHIND),
]


@pytest.mark.sampled("all-dynamic--channels-last")
@torch.no_grad()
@pytest.mark.parametrize("rules", ["", "-channels-last"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["known", "dynamic"])
@pytest.mark.parametrize("names", NAMES)
def test_a_higher_order_op_reads_what_a_convolution_made(
    names: list[str], dynamic: bool, rules: str
) -> None:
    """Its bodies are compiled for the strides of the graph, which were not those of the result."""
    convolutions = [nn.Conv2d(8, 8, 3, padding=1).eval() for _ in names]
    x = torch.randn(2, 8, 9, 9)

    def fn(x: Tensor) -> list[Tensor]:
        made = [BEHIND[name](conv(x)) for name, conv in zip(names, convolutions, strict=True)]
        positive = x.sum() > 0
        return [
            torch.cond(positive, lambda y: F.relu(y).view(-1), lambda y: y.view(-1) * 2, (y,))
            for y in made
        ]

    options = {"strict": True, "rules": rules} if rules else {"strict": True}
    run = torch.compile(fn, backend="ipex", options=options, dynamic=dynamic)
    for image in (x + 1, x - 1):
        # fp32 sums of 72 products in another order
        torch.testing.assert_close(run(image), fn(image), rtol=1e-4, atol=1e-5)
