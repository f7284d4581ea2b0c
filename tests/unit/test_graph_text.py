"""What sets a graph apart from those that are in the cache, by their text."""

import pytest
import torch
from torch import nn

from ipex_inductor.aot_cache import graph_text
from ipex_inductor.aot_cache.graph_text import difference
from ipex_inductor.request import _text


def text_of(model, *inputs):
    texts = []

    def keep(gm, _):
        texts.append(_text(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep)(*inputs)
    return texts[0]


def layers(width=16, activation=nn.ReLU, count=3):
    made = (m for _ in range(count) for m in (nn.Linear(width, width), activation()))
    return nn.Sequential(*made).eval()


@pytest.fixture(scope="module")
def known():
    return text_of(layers(), torch.ones(4, 16))


def test_packed_and_back(known):
    packed = graph_text.packed(known)
    assert graph_text.unpacked(packed) == known
    assert len(packed) < len(known) / 2


@pytest.mark.parametrize("text", [None, 3, "", "no base 85: \x00", "00000"])
def test_what_was_not_packed(text):
    with pytest.raises(ValueError):  # noqa: PT011  whatever finds it
        graph_text.unpacked(text)


def test_other_shapes(known):
    told = difference(text_of(layers(), torch.ones(8, 16)), [known])
    assert told == 'input_2: "f32[8, 16][16, 1]" here, input_2: "f32[4, 16][16, 1]" there'


def test_another_op(known):
    told = difference(text_of(layers(activation=nn.GELU), torch.ones(4, 16)), [known])
    here, there = told.removesuffix(" there").split(" here, ")
    assert "gelu" in here
    assert "relu" in there


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x, y):
        return self.layers(x) + y


def test_one_input_more(known):
    x = torch.ones(4, 16)
    told = difference(text_of(Added().eval(), x, x.clone()), [known])
    assert told.endswith(" there")
    assert "input_" in told


def test_the_most_alike_is_compared(known):
    far = text_of(layers(8), torch.ones(2, 8))
    here = text_of(layers(), torch.ones(8, 16))
    assert difference(here, [far, known, far]) == difference(here, [known])


def test_what_has_nothing_in_common_is_not_compared(known):
    assert difference("x = y\nz = x", [known]) == ""
    assert difference(known, []) == ""


def test_a_part_of_another(known):
    lines = known.splitlines()
    assert difference("\n".join(lines[:-2]), [known]).startswith("nothing more here, ")
