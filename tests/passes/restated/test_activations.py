"""Activations that are moved before views of a convolution's result."""

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor.passes.restated import activations
from support.rewritten import rewrite

pytestmark = pytest.mark.unit

aten = torch.ops.aten
IMAGES = torch.randn(2, 4, 6, 6), torch.randn(4, 1, 3, 3)


def moved(fn):
    """Return whether an activation reads the convolution itself, in the graph of a function."""
    gm, events = rewrite(activations.move_before_views, fn, *IMAGES)
    (convolution,) = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    is_moved = all(user.target in activations.ACTIVATIONS for user in convolution.users)
    assert events == [("fired", activations.NAME, "")] * is_moved
    return is_moved


def tokens(x, weight):
    return F.conv2d(x, weight, None, padding=1, groups=4).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("activate", [F.gelu, F.silu, F.relu, torch.tanh])
def test_tokens_are_activated_as_images(activate):
    assert moved(lambda x, weight: activate(tokens(x, weight)))


def test_an_option_of_the_activation_is_kept():
    assert moved(lambda x, weight: F.gelu(tokens(x, weight), approximate="tanh"))


def read_twice(x, weight):
    y = tokens(x, weight)
    return F.gelu(y) + y


def read_beside(x, weight):
    y = F.conv2d(x, weight, None, padding=1, groups=4)
    return F.gelu(y.flatten(2)) + y.flatten(2)


def take_a_part(x, weight):
    return F.gelu(tokens(x, weight)[:, 1:])


@pytest.mark.parametrize("fn", [read_twice, read_beside, take_a_part])
def test_other_readers_keep_the_result_as_it_was(fn):
    assert not moved(fn)
