"""Rules that are no epilogue: gated linears, pad, attention, linears on one input, what is left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor import report
from ipex_inductor.passes.attention import SCALES

ONE, TWO = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
CONV, LINE = nn.Conv2d(4, 6, 3), nn.Conv1d(4, 6, 3, padding=1)
NORM, TABLE = nn.LayerNorm(8), nn.Embedding(9, 8)
IMAGE, ROWS = torch.randn(2, 4, 5, 5), torch.randn(2, 3, 8)


def found(fn, *args):
    with torch.no_grad():
        got = torch.compile(fn, backend="ipex", options={"strict": True})(*args)
        want = fn(*args)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    # Another order of summation in fp32, results near 1.
    torch.testing.assert_close(got, want, rtol=0, atol=4e-6)
    return dict(counters["ipex"])


FIRE = {
    "silu(linear)*linear": (lambda x: F.silu(ONE(x)) * TWO(x), ROWS),
    "gelu(linear)*linear": (lambda x: TWO(x) * F.gelu(ONE(x)), ROWS[0]),
    "gelu_tanh(linear)*linear": (lambda x: F.gelu(ONE(x), approximate="tanh") * TWO(x), ROWS),
    "linear|linear": (lambda x: torch.cat([ONE(x), TWO(x)], -1), ROWS),
}


@pytest.mark.parametrize("name", FIRE)
def test_linear_rules_fire(op_by_op, name):
    assert found(*FIRE[name]) == {name: 1}


PADS = {"all": (2, 2, 1, 1), "last only": (2, 2)}


@pytest.mark.parametrize("name", PADS)
def test_pad_enters_the_window(op_by_op, name):
    assert found(lambda x: CONV(F.pad(x, PADS[name])), IMAGE) == {"pad+conv": 1}


def test_pad_enters_the_window_of_a_line(op_by_op):
    assert found(lambda x: LINE(F.pad(x, (2, 2))), IMAGE[:, :, 0]) == {"pad+conv": 1}


@torch._dynamo.config.patch(error_on_recompile=True)
def test_pad_keeps_the_batch_dynamic(op_by_op):
    fn = torch.compile(lambda x: CONV(F.pad(x, (1, 1))), backend="ipex", dynamic=True)
    with torch.no_grad():
        for batch in (2, 3):
            assert len(fn(torch.randn(batch, 4, 5, 5))) == batch
    assert counters["ipex"] == {"pad+conv": 1}


NO_PADS = {
    "uneven": lambda x: CONV(F.pad(x, (2, 1, 1, 1))),
    "cropping": lambda x: CONV(F.pad(x, (-1, -1))),
    "not zero": lambda x: CONV(F.pad(x, (1, 1), value=1.0)),
    "reflected": lambda x: CONV(F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "channels": lambda x: CONV(F.pad(x[:, :2], (0, 0, 0, 0, 1, 1))),
    "second user": lambda x: (lambda y: CONV(y) + y.sum())(F.pad(x, (1, 1)) / 8),
}


@pytest.mark.parametrize("name", NO_PADS)
def test_pad_is_left_where_it_is_no_window(op_by_op, name):
    found(NO_PADS[name], IMAGE)
    assert "pad+conv" not in counters["ipex"]


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("scaling", SCALES)
def test_attention_by_hand(op_by_op, scaling, permuted, masked):
    scores, _ = SCALES[scaling]
    x = torch.randn(2, 5, 3, 7).transpose(1, 2) if permuted else torch.randn(2, 3, 5, 7)

    def attend(x, mask):
        found = scores(x, x.sin(), 2.5)
        return F.softmax(found + mask if masked else found, -1) @ x.cos()

    name = f"softmax({scaling}{'+mask' if masked else ''})@v"
    assert found(attend, x, torch.randn(2, 1, 1, 5)) == {name: 1}


LEFT = {
    "add+layer_norm": (lambda x: NORM(x + x.sin()), ROWS),
    "embedding+layer_norm": (lambda t: NORM(TABLE(t)), torch.arange(6).view(2, 3)),
    "div+add+softmax": (lambda s: F.softmax(s / 8 + s[:, :1, :1], -1), IMAGE),
    "view+transpose+contiguous+view": (
        lambda x: x.view(2, 2, 2, 5, 5).transpose(1, 2).contiguous().view(2, 4, 5, 5),
        IMAGE,
    ),
    "bmm+gelu": (lambda x: F.gelu(torch.baddbmm(x[:, :1], x, x)), IMAGE[0]),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_said(op_by_op, name):
    assert found(*LEFT[name]) == {}
    left = [e for r in report.reports() for e in r.events if e.kind == "left"]
    assert [e.subject for e in left] == [name]
    assert "left_to_inductor" in left[0].reason
