"""Whole models, inference and training: the result is right, and every rule fires as often as ever.

Right is what torch's own benchmarks call right, `torch._dynamo.utils.same`: as near to eager as the
tolerance, or to a float64 run as eager is. Most models run op by op behind all of our passes; two
of them, and with `-m slow` all, run as Inductor's code.

How often each rule fires is pinned in fired_rules/, a file for each major version of transformers,
as those write their models anew. After a change that is meant to be seen there, with each version:

    EXPECTTEST_ACCEPT=1 pytest tests/end_to_end/test_models.py -k often
"""

import copy
import itertools
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters, same

from ipex_inductor.reporting import decisions
from support.helpers import has_kernels
from support.tiny_models import MODELS, build

transformers = pytest.importorskip("transformers", reason="its models are what is compiled here")

PINS = Path(__file__).parent / "fired_rules" / f"transformers{transformers.__version__[0]}.txt"

# Those of torch's benchmarks (benchmarks/dynamo): 1e-4 in fp32, 1e-2 in bf16 and for gradients.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
FP64 = 1e-10

# A family of ops and a dtype each.
GENERATED = {("resnet", torch.float32), ("bert", torch.bfloat16)}
# Those whose ops other models have too: depthwise convolutions (efficientnet), a mask added to
# attention by hand (gpt2), encoder and decoder (t5).
ALIKE = ("mobilenet_v2", "roberta", "whisper")
# In training also windows, and encoder and decoder, which have no rules of their own there; groups
# are efficientnet's, and layers of attention bert's.
ALIKE_IN_TRAINING = (*ALIKE, "swin", "t5", "resnext", "vit")
MARKS = {
    "timm_resnext": pytest.mark.skipif(
        find_spec("timm") is None, reason="timm is not installed, and nothing of ours needs it"
    ),
}


def names(slow):
    """All models, those of `slow` marked so."""
    return [pytest.param(name, marks=marks_of(name, name in slow)) for name in MODELS]


def marks_of(name, slow):
    return [*([pytest.mark.slow] if slow else []), *([MARKS[name]] if name in MARKS else [])]


def compiled(fn, fullgraph=True):
    return torch.compile(fn, backend="ipex", fullgraph=fullgraph, options={"strict": True})


def run(model, inputs):
    result = model(**inputs)
    return result if isinstance(result, torch.Tensor) else result.logits


def cast(model, inputs, dtype):
    """A copy in another dtype; indices stay what they are."""
    moved = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return copy.deepcopy(model).to(dtype), moved


def assert_same(name, eager, ours, truth, tolerance, least=0.0):
    """`same` with results of size one: its tolerance is absolute, and small results would pass.

    What is smaller than `least` is rounding, of which nobody can ask to be near.
    """
    size = max(truth.double().square().mean().sqrt().item(), least)
    said = []
    values = (eager / size, ours / size, truth / size)
    right = same(*values, tol=tolerance, log_error=lambda text, *of: said.append(text % of))
    assert right, f"{name}: {said}"


@torch.no_grad()
def check_inference(name, dtype):
    """The rules that fired in the model `name`, whose result is right."""
    counters.clear()
    model, inputs = build(name)
    model, inputs = cast(model.eval(), inputs, dtype)
    ours = run(compiled(model), inputs)
    truth = run(*cast(model, inputs, torch.float64))
    assert_same(name, run(model, inputs), ours, truth, TOLERANCE[dtype])
    return Counter(counters["ipex"])


# Those that code is generated of, and whose ops other models have: layers of attention (vit: bert),
# groups (resnext: efficientnet), or other tests: windows (swin: test_whole_patterns.py).
ELSEWHERE = (*ALIKE, "vit", "resnext", "swin", *(name for name, _ in GENERATED))
# Quickly each model in one dtype, as the rules that fire are the same in both.
IN_TURN = [
    pytest.param(name, dtype, marks=marks_of(name, name in ELSEWHERE), id=f"{name}-{dtype}")
    for name, dtype in zip(MODELS, itertools.cycle(TOLERANCE), strict=False)
]


@pytest.mark.sampled(
    "efficientnet-torch.float32",
    "convnext-torch.bfloat16",
    "t5-torch.bfloat16",
    "dlrm-torch.float32",
)
@pytest.mark.parametrize(("name", "dtype"), IN_TURN)
def test_every_rule_fires_in_one_dtype(op_by_op, name, dtype):
    check_pinned(name, dtype)


def check_pinned(name, dtype):
    fired = check_inference(name, dtype)
    if has_kernels(dtype):
        assert pinned(name, dtype) == {rule: count for rule, count in fired.items() if count}


@pytest.mark.parametrize("name", names(slow=MODELS))
def test_every_rule_fires_as_often_as_ever(op_by_op, name):
    fired = [check_inference(name, dtype) for dtype in TOLERANCE]
    if not has_kernels(torch.bfloat16):
        found = {rule: count for rule, count in fired[0].items() if count}
        assert pinned(name, torch.float32) == found
        return
    rules = sorted(set().union(*fired))
    rows = [" ".join([f"{rule:28}", *(f"{count[rule]:4}" for count in fired)]) for rule in rules]
    assert_pinned(name, "\n".join([f"{'':28} fp32 bf16", *rows]))


def pins_of_all():
    text = PINS.read_text() if PINS.exists() else ""
    return dict(part.split("\n", 1) for part in text.split("# ")[1:])


def pinned(name, dtype):
    """How often each rule fires."""
    _, *rows = pins_of_all()[name].strip("\n").split("\n")
    column = [*TOLERANCE].index(dtype)
    counts = {row[:28].strip(): int(row[28:].split()[column]) for row in rows}
    return {rule: count for rule, count in counts.items() if count}


def assert_pinned(name, block):
    pins = pins_of_all()
    if expecttest.ACCEPT:
        pins[name] = block
        PINS.parent.mkdir(exist_ok=True)
        kept = [f"# {n}\n{pins[n].strip(chr(10))}\n" for n in MODELS if n in pins]
        PINS.write_text("\n".join(kept))
    assert pins.get(name, "").strip("\n") == block


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*how, marks=marks_of(how[0], how not in GENERATED), id=f"{how[0]}-{how[1]}")
        for how in itertools.product(MODELS, TOLERANCE)
    ],
)
def test_inference_in_generated_code(name, dtype):
    check_pinned(name, dtype)


@torch.no_grad()
@pytest.mark.parametrize("in_code", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["resnet", pytest.param("bert", marks=pytest.mark.slow)])
def test_fp64(name, in_code, request):
    """Inductor's freezing crashes here; there is nothing to fuse, and batch norms are folded.

    Code of linear layers: test_backend.py.
    """
    if not in_code:
        request.getfixturevalue("op_by_op")
    model, inputs = build(name)
    model, inputs = cast(model.eval(), inputs, torch.float64)
    want, got = run(model, inputs), run(compiled(model), inputs)
    assert got.dtype == torch.float64
    assert (got - want).abs().max() <= FP64 * want.abs().max()


def step(model, inputs, target, wrap):
    """The loss, the gradients and, after one step of SGD, the weights and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = wrap(lambda: F.mse_loss(run(model, inputs), target))()
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: p.grad.clone() for name, p in trained.items()}
    optimizer.step()
    return {"loss": loss.detach()}, gradients, model.state_dict()


def check_training(name, **sizes):
    """Without dropout, whose random numbers Inductor draws in its own order."""
    model, inputs = build(name, dropout=0.0, **sizes)
    double, doubles = cast(model.train(), inputs, torch.float64)
    with torch.no_grad():
        target = torch.randn_like(run(copy.deepcopy(model).eval(), inputs))
    eager = step(copy.deepcopy(model), inputs, target, lambda fn: fn)
    truth = step(double, doubles, target.double(), lambda fn: fn)
    # Whisper draws a number for every layer, in training, and asks whether to skip it.
    ours = step(model, inputs, target, lambda fn: compiled(fn, fullgraph=name != "whisper"))
    assert {r.source for r in decisions.reports()} == {"passes"}
    # Some gradients are zero but for rounding: of a bias before a norm, or of attention's keys.
    least = 1e-3 * max(g.square().mean().sqrt().item() for g in truth[1].values())
    limits = [(1e-4, 0.0), (1e-2, least), (1e-4, 0.0)]
    for want, got, exact, limit in zip(eager, ours, truth, limits, strict=True):
        for key in want:
            assert_same(f"{name} {key}", want[key], got[key], exact[key], *limit)


@pytest.mark.sampled("resnet", "llama")
@pytest.mark.parametrize("name", names(slow=ALIKE_IN_TRAINING))
def test_training(op_by_op, name):
    check_training(name)


@pytest.mark.parametrize("name", names(slow=MODELS))
def test_training_in_generated_code(name):
    check_training(name)


@pytest.mark.slow  # half a minute; test_training_rules.py has code of what fires
def test_training_of_a_layer_in_generated_code():
    """What g++ takes for two layers is a minute."""
    check_training("bert", num_hidden_layers=1)
