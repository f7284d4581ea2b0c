"""How many shapes the tests on a GPU, quick and slow, have of each template in each dtype.

Their own functions are called here with all their parameters; what would run a kernel takes down
what of. A shape is the sizes of images, weights, windows and steps, whatever the tile and layout.
"""

import importlib.util
import inspect
import itertools
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from support.cases import batch_norm_relu_cases, glu_cases, moment_cases, pool_cases, skinny_cases

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[1] / "gpu" / "kernels"
FEWEST = 40
HALVES, ALL = ("bfloat16", "float16"), ("bfloat16", "float16", "float32")
# Those that each template is offered in: `left` of test_every_template.py.
DTYPES = {
    **dict.fromkeys(("stem", "depthwise", "strips"), ALL),
    **dict.fromkeys(("stem_pool", "stem_weight", "fprop", "boxes", "grouped"), HALVES),
    **dict.fromkeys(("shortcut streamed", "shortcut boxes"), HALVES),
    **dict.fromkeys(("streamed", "persistent", "pipelined", "gated", "preactivated"), HALVES),
    **dict.fromkeys(("one row", "few rows", "pool", "pool's backward", "moments"), ALL),
}


def loaded(name):
    """The tests of that file, which nobody collects here."""
    spec = importlib.util.spec_from_file_location(f"counted_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def every_call(test):
    """By pytest's marks, quick and slow."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        names = [mark.args[0] for mark in marks]
        plain = [each.values[0] if isinstance(each, ParameterSet) else each for each in values]
        test(**dict(zip(names, plain, strict=True)))


def of_values(module):
    """Those of values, and no others, take nothing but parameters."""
    found = [f for name, f in inspect.getmembers(module) if name.startswith("test_values")]
    assert found
    return found


@pytest.fixture(scope="module")
def shapes():
    """By template and dtype; of products how many terms they sum up comes first."""
    made = defaultdict(set)
    with pytest.MonkeyPatch.context() as patch:
        for name, replace in REPLACED.items():
            module = loaded(name)
            replace(patch, module, made)
            for test in of_values(module):
                every_call(test)
    return made


SIZES = ("x", "weight", "stride", "padding", "dilation", "groups", "source")


def images(patch, module, made):
    """Convolutions, and products of rows, whose cases are those of convolutions."""

    def error(case, device):
        kind = f"{case['template']} {case.get('kind', '')}".strip()
        made[kind, case["dtype"]].add((case["x"][1], str([case.get(name) for name in SIZES])))
        return 0.0

    for name in ("error", "error_of_weight"):
        patch.setattr(module, name, error, raising=False)
    patch.setattr(module, "ERRORS", {}, raising=False)


def of_few_rows(patch, module, made):
    def check(tile, x, weight, errors):
        kind = "one row" if len(x) == 1 else "few rows"
        made[kind, str(x.dtype)[6:]].add((x.shape[1], len(x), len(weight)))

    patch.setattr(module, "cases", lambda device, whole: skinny_cases.cases("cpu", whole))
    patch.setattr(module, "check", check)


def pools(patch, module, made):
    """The forward is not of windows over the border."""

    def backward(case, device):
        sizes = [case[name] for name in ("x", "window", "stride", "padding", "ceil")]
        made["pool's backward", case["dtype"]].add(str(sizes))
        return 0

    def forward(case, device):
        if not case["ceil"]:
            sizes = [case[name] for name in ("x", "window", "stride", "padding")]
            made["pool", case["dtype"]].add(str(sizes))
        return 0

    patch.setattr(pool_cases, "differs", backward)
    patch.setattr(pool_cases, "forward_differs", forward)


def of_moments(patch, module, made):
    def kernel(x, tile, parts):
        made["moments", str(x.dtype)[6:]].add((*x.shape,))
        return x

    def numbers(rows, columns, dtype, mean, device):
        return torch.empty(rows, columns, dtype=dtype)

    patch.setattr(moment_cases, "numbers", numbers)
    patch.setattr(moment_cases, "kernel", kernel)
    patch.setattr(moment_cases, "close", lambda *_: None)
    for other in ("extremes", "not_finite", "reference"):  # of one shape each, or of some of those
        patch.setattr(moment_cases, other, lambda device: None)


def pairs(patch, module, made):
    """Of few sizes, each with every activation and with or without biases."""

    def error(*given):
        made["gated", given[3]].add(given[:3])
        return 0.0

    patch.setattr(glu_cases, "error", error)


def of_preactivated(patch, module, made):
    def error(*given):
        made["preactivated", given[2]].add(given[0])
        return 0.0

    patch.setattr(batch_norm_relu_cases, "error", error)


REPLACED = {
    "test_conv_templates": images,
    "test_conv_weight": images,
    "test_skinny": of_few_rows,
    "test_pool": pools,
    "test_moments": of_moments,
    "test_glu": pairs,
    "test_batch_norm_relu": of_preactivated,
}


@pytest.mark.parametrize("template", DTYPES)
def test_each_has_forty_shapes_in_each_dtype(template, shapes):
    counts = {dtype: len(shapes[template, dtype]) for dtype in DTYPES[template]}
    assert min(counts.values()) >= FEWEST, counts


@pytest.mark.parametrize("template", ["persistent", "pipelined", "one row", "few rows"])
def test_products_of_many_terms_have_thousands_and_tails(template, shapes):
    for dtype in DTYPES[template]:
        many = {terms for terms, *_ in shapes[template, dtype] if terms >= 2**11}
        assert max(many) > 2**13, dtype
        assert any(terms % 64 for terms in many), dtype


def test_no_other_template_is_tested(shapes):
    """Or its name is missing above."""
    assert {template for template, _ in shapes} == {*DTYPES}
