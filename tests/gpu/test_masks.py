"""A mask that hides nothing, or what follows, on a GPU: torch's fused kernels, and right."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

pytestmark = pytest.mark.gpu

TOKENS, HEADS, WIDTH = 128, 4, 64
# bf16 has 8 bits: of weights, of what they are multiplied with, and of the result.
CLOSE = 3 * 2**-8


def nothing(device):
    """What transformers gives BERT: expanded in the last, for which there is no fused kernel."""
    rows = torch.arange(TOKENS, device=device)[None, None, :, None]
    return (rows >= 0).expand(2, 1, TOKENS, TOKENS)


def following(device):
    rows = torch.arange(TOKENS, device=device)
    return rows[None, :] <= rows[:, None]


class Net(nn.Module):
    """A projection and attention under a mask that is made anew at each call."""

    def __init__(self, mask):
        super().__init__()
        self.layer, self.mask = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH), mask

    def forward(self, x):
        parts = self.layer(x).view(2, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(), attn_mask=self.mask(x.device))
        return y.transpose(1, 2).reshape(2, TOKENS, -1)


def apart(got, want):
    """The distance from what fp64 says, of its size."""
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("mask", [nothing, following])
@pytest.mark.parametrize("rules", ["", "-constant-mask,-mask-layout"])
def test_the_kernel_is_fused_and_the_result_right(mask, rules):
    torch.manual_seed(0)
    exact = Net(mask).double().cuda()
    net = Net(mask).cuda().to(torch.bfloat16)
    net.load_state_dict(exact.state_dict())
    exact.load_state_dict(net.state_dict())  # as rounded
    x = torch.randn(2, TOKENS, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
    call = torch.compile(net, backend="ipex", options={"strict": True, "rules": rules})

    def inference():
        with torch.no_grad():
            return call(x)

    def training():
        result = call(x)
        return [result, *torch.autograd.grad(result.square().sum(), [*net.parameters()])]

    want = exact(x.double())
    gradients = torch.autograd.grad(want.square().sum(), [*exact.parameters()])
    result, code = run_and_get_code(inference)
    assert apart(result, want) < CLOSE
    assert result.stride() == want.stride()
    results, codes = run_and_get_code(training)
    for got, right in zip(results, [want, *gradients], strict=True):
        assert apart(got, right) < 3 * CLOSE  # the gradient of a square, back through two products
    fused = ["_scaled_dot_product_" in "".join(texts) for texts in (code, codes)]
    # Torch has no fused kernel for the first mask; the second, as it is, gets one.
    assert fused == [not rules or mask is following] * 2


class Biased(nn.Module):
    """A bias of distances, heads last as T5 has it: given to torch's attention, or by hand."""

    def __init__(self, tokens, width, by_hand):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(tokens, tokens, HEADS))
        self.by_hand, self.width = by_hand, width

    def forward(self, x):
        parts = x.view(*x.shape[:2], 3, HEADS, self.width).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        bias = self.bias.permute(2, 0, 1)[None]
        if self.by_hand:
            y = torch.softmax(query * self.width**-0.5 @ key.transpose(-2, -1) + bias, -1) @ value
        else:
            y = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return y.transpose(1, 2).reshape(*x.shape[:2], -1)


@pytest.mark.parametrize(
    ("tokens", "width", "by_hand", "kernel"),
    [
        (384, 64, False, "cudnn"),
        (384, 64, True, "cudnn"),
        (197, 64, False, "cudnn"),  # rows that do not begin at multiples of 16 bytes
        (49, 32, True, "efficient"),
    ],
)
def test_a_bias_whose_columns_lie_apart(tokens, width, by_hand, kernel):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("which kernel is best was measured on sm_90 alone")
    torch.manual_seed(0)
    net = Biased(tokens, width, by_hand).cuda().to(torch.bfloat16)
    x = torch.randn(8, tokens, 3 * HEADS * width, device="cuda", dtype=torch.bfloat16)
    want = Biased(tokens, width, True).cuda().double()
    want.load_state_dict(net.state_dict())
    with torch.no_grad():
        call = torch.compile(net, backend="ipex", options={"strict": True})
        result, (code,) = run_and_get_code(call, x)
        right = want(x.double())
    assert f"_scaled_dot_product_{kernel}_attention" in code
    assert apart(result, right) < CLOSE
    assert result.stride() == right.stride()
