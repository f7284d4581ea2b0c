"""Linear layers that become ops of ours: of few rows, and those whose rows are uneven."""

import pytest
import torch

from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.lowerings.problem.node_problem import problem_of
from ipex_inductor.lowerings.select import library
from ipex_inductor.passes.fusion import library as passes_library
from ipex_inductor.templates.triton import skinny
from support.meta_device import H200, placed, targets

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _on_an_h200(monkeypatch):
    monkeypatch.setattr(selector_hook, "arch_of", lambda device: H200)


FEW, ADDMM = "ipex.few_rows.default", "aten.addmm.default"
BEHIND = {
    "nothing": lambda y: y,
    "an addend": lambda y: y + 1.5,
    "an activation that is no rule's": torch.sin,
}


def layer(rows, columns=4096):
    x, weight = torch.randn(rows, 600), torch.randn(columns, 600)
    return x.bfloat16(), weight.bfloat16(), torch.randn(columns).bfloat16()


class Tiled:
    """Chooses the first tile that is offered; keeps the problems it was asked about."""

    def __init__(self):
        self.problems = []

    def __call__(self, node):
        self.problems.append(problem_of(node, H200, {}))
        tiles = [c for c in library.calls(self.problems[-1]) if c.parameters]
        return (tiles[0].compute if tiles else None), "choice", "as told"


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_of_few_rows_is_offered_our_tiles(behind, bias):
    def fn(x, weight, bias_):
        product = (
            x @ weight.permute(1, 0) if not bias else torch.addmm(bias_, x, weight.permute(1, 0))
        )
        return BEHIND[behind](product)

    inputs = layer(5)
    gm, report = placed(fn, *inputs, choose=(chosen := Tiled()))
    assert targets(gm).count(FEW) == 1
    assert (chosen.problems[0].epilogue != "") == (behind != "nothing")
    assert [e.subject for e in report.events] == ["linear"]
    # Sums of 600 products, rounded to bf16 once where torch does it twice.
    torch.testing.assert_close(gm(*inputs), fn(*inputs), rtol=2e-2, atol=0.2)


NOT_OURS = {
    "many rows": (33, lambda x, w, b: torch.addmm(b, x, w.permute(1, 0))),
    "a scaled product": (5, lambda x, w, b: torch.addmm(b, x, w.permute(1, 0), alpha=2)),
    "a matrix for a bias": (5, lambda x, w, b: torch.addmm(b.expand(5, -1), x, w.permute(1, 0))),
    "a weight as it is": (5, lambda x, w, b: torch.mm(x, w.view(600, -1))),
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_is_no_linear_layer_of_few_rows_stays_torchs(name):
    rows, fn = NOT_OURS[name]
    gm, report = placed(fn, *layer(rows), choose=Tiled())
    assert FEW not in targets(gm)
    assert not report.events


def test_without_a_record_a_linear_layer_of_few_rows_is_as_it_was():
    def fn(x, weight, bias):
        return torch.addmm(bias, x, weight.permute(1, 0))

    gm, report = placed(fn, *layer(5), choose=library.Chooser({}))
    assert targets(gm)[-1] == ADDMM
    assert report.events[0].reason.startswith("aten.addmm: nothing is recorded")


def head(columns, dtype=torch.bfloat16):
    return torch.randn(600, 768).to(dtype), torch.randn(columns, 768).to(dtype)


@pytest.mark.parametrize(
    ("columns", "dtype", "found"),
    [(1001, "bfloat16", 1), (1001, "float16", 1), (1000, "bfloat16", 0), (1001, "float32", 0)],
)
def test_a_product_with_uneven_rows_is_offered_our_tiles(columns, dtype, found):
    """As a decoder's logits are, of an odd number of words: of any number of rows."""
    x, weight = head(columns, getattr(torch, dtype))

    def fn(x, weight):
        return x @ weight.permute(1, 0)

    gm, _ = placed(fn, x, weight, choose=Tiled(), weights=["weight_1"])
    assert targets(gm).count("ipex.pipelined.default") == found
    if found:
        # Sums of 768 products, rounded once.
        torch.testing.assert_close(gm(x, weight), x @ weight.T, rtol=2e-2, atol=0.2)


class Padded(Tiled):
    """Chooses the product on a weight with rows of zeros below it, if that is offered."""

    def __call__(self, node):
        known = library.calls(problem_of(node, H200, {}))
        found = [call for call in known if call.name == "aten.addmm_padded"]
        return (found[0].compute if found else None), "choice", "as told"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("columns", "found"), [(1001, 1), (1004, 1), (1000, 0)])
def test_a_product_with_uneven_rows_by_a_weight_with_whole_vectors(columns, found, bias):
    """Which is a weight's alone, so it is made once; what was added to it is cut off."""
    x, weight = head(columns)
    given = torch.randn(columns).bfloat16()

    def fn(x, weight, given):
        turned = weight.permute(1, 0)
        return torch.addmm(given, x, turned) if bias else x @ turned

    gm, _ = placed(fn, x, weight, given, choose=Padded(), weights=["weight_1"])
    assert targets(gm).count("aten.constant_pad_nd.default") == found * (1 + bias)
    made = gm(x, weight, given)
    # Sums of 768 products, rounded once.
    torch.testing.assert_close(made, fn(x, weight, given), rtol=2e-2, atol=0.2)
    assert made.is_contiguous()  # as the op says it is


def test_how_many_rows_are_few_is_known_alike():
    assert passes_library.FEW_ROWS == skinny.MOST
