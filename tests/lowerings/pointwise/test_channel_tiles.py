"""Tiles of rows and channels: which loops have them, in what Inductor makes for a described GPU."""

import re

import pytest
import torch
from torch import nn
from torch._inductor.choices import InductorChoices
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.pointwise import channel_tiles, loop_choices
from ipex_inductor.prebuild import graphs
from ipex_inductor.reporting import decisions
from ipex_inductor.target.device import find_target

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="an H200 is pretended here; tests/gpu has the real one"
    ),
]

LAST = torch.channels_last
BF16 = {"dtype": torch.bfloat16, "memory_format": LAST}
# Images, and the channels and rows of the tile that their norm's loop has.
TILED = {
    (64, 64, 56, 56): (64, 32),
    (67, 256, 27, 29): (128, 16),  # rows that no tile divides
    (64, 320, 33, 33): (64, 32),
}
LEFT = {
    "no multiple of 64 channels": ((64, 96, 56, 56), BF16),
    "few numbers": ((8, 256, 28, 28), BF16),
    "channels first": ((65, 64, 56, 56), {"dtype": torch.bfloat16}),
    "channels first, as many as pixels": ((1600, 64, 8, 8), {"dtype": torch.bfloat16}),
    "fp32": ((66, 64, 56, 56), {"memory_format": LAST}),
}


class Norms(nn.Module):
    """Of each image, by running statistics."""

    def __init__(self, shapes):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(shape[1]) for shape in shapes)

    def forward(self, *images):
        return [torch.relu(norm(x)) for norm, x in zip(self.norms, images, strict=True)]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """What makes the loops of images for a GPU, by name: each with its own sizes and tile."""
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    code, codegen = [], GraphLowering.codegen

    def kept(self):
        found = codegen(self)
        code.append(found[0].value)
        return found

    monkeypatch.setattr(GraphLowering, "codegen", kept)

    def of(model, images, gpu="h200", training=False, **options):
        done = graphs.prebuild(
            model, tuple(images), find_target(gpu), training=training, options=options
        )
        fired = [e.reason for e in done.events if e.subject == channel_tiles.NAME]
        return fired, _tiles("".join(code))

    return of


def _tiles(code):
    """Of loops that have one: their rows and channels, and those of the tile."""
    found = {}
    for kernel in code.split("@triton_heuristics.")[1:]:
        if tile := re.match(r"fixed_config\(\s*config={'XBLOCK': (\d+), 'YBLOCK': (\d+)", kernel):
            rows, channels = re.search(r"ynumel = (\d+)\s+xnumel = (\d+)", kernel).groups()
            found[int(rows), int(channels)] = tuple(map(int, tile.groups()))
            # Else torch 2.11 keeps whole images in the first cache: it takes them for broadcast.
            loads = re.findall(r"tl\.load\(.*\by\d\b.*", kernel)
            assert loads
            assert not [load for load in loads if "evict_last" in load]
    return found


@pytest.mark.usefixtures("code_alone")
def test_loops_with_more_numbers_of_channels_than_of_images_have_tiles(made):
    left = LEFT.values()
    images = [torch.randn(shape).to(**BF16) for shape in TILED]
    images += [torch.randn(shape).to(**how) for shape, how in left]
    model = Norms([*TILED, *(shape for shape, _ in left)]).eval()
    fired, tiles = made(model, images)
    assert tiles == {(n * h * w, c): tile for (n, c, h, w), tile in TILED.items()}
    assert fired == ["kernels: 3"]
    assert type(V.choices) is InductorChoices


def test_a_batch_norm_in_training_has_them_forward_and_backward(made):
    x = torch.randn(64, 256, 56, 56).to(**BF16).requires_grad_()
    model = nn.Sequential(nn.BatchNorm2d(256), nn.ReLU()).to(memory_format=LAST).train()
    fired, tiles = made(model, [x], training=True)
    assert tiles == {(64 * 56 * 56, 256): (128, 16)}
    assert fired == ["kernels: 1"] * 2


class Sum(nn.Module):
    """Of several norms, or of an image times a number and itself."""

    def __init__(self, count):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(count))
        self.weight = nn.Parameter(torch.ones(64, 1, 1))

    def forward(self, *images):
        each = [norm(x) for norm, x in zip(self.norms, images, strict=False)]
        return sum(each) if each else images[0] * self.weight + images[1]


@pytest.mark.usefixtures("code_alone")
@pytest.mark.parametrize(("norms", "tiles"), [(2, 1), (3, 0), (0, 0)], ids=str)
def test_so_many_numbers_of_channels_as_were_measured(norms, tiles, made):
    """Two norms' at most, for which registers do; four times what is read of images at least."""
    images = [torch.randn(64, 64, 56, 56).to(**BF16) for _ in range(max(norms, 2))]
    fired, found = made(Sum(norms).eval(), images)
    assert len(found) == tiles
    assert len(fired) == tiles


@pytest.mark.parametrize(
    ("gpu", "options"),
    [("a10", {}), ("h200", {"rules": "-channel-tiles"}), ("h200", {"rules": "-*"})],
    ids=["not measured", "off", "all off"],
)
def test_else_nothing_changes(gpu, options, made):
    shape = (64, 64, 56, 56)
    assert made(Norms([shape]).eval(), [torch.randn(shape).to(**BF16)], gpu, **options) == ([], {})


def test_choices_of_somebody_else_are_left_alone():
    class Own(InductorChoices):
        pass

    for off, told in ((frozenset(), 1), (frozenset({channel_tiles.NAME}), 0)):
        report = decisions.GraphReport()
        with V.set_choices_handler(Own()), loop_choices.choose_loops(off, False, report):
            assert type(V.choices) is Own
        assert [e.kind for e in report.events] == ["missed"] * told


def test_the_rule_is_off_inside_a_graph_that_has_it():
    report = None  # of which nothing is reported
    with loop_choices.choose_loops(frozenset(), False, report):
        assert type(V.choices) is not InductorChoices
        with loop_choices.choose_loops(frozenset({channel_tiles.NAME}), False, report):
            assert type(V.choices) is InductorChoices
    assert type(V.choices) is InductorChoices
