"""Our GradScaler decides as torch's does, and a fused step's reading of gradients is done once."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from ipex_inductor.optim import FusedStep, GradScaler, fuse_step, norms, state_fingerprint
from support.helpers import pickled

pytestmark = pytest.mark.host("the CPU stands in for a GPU; tests/gpu/test_fused_around.py has one")

# One product rounds where torch has two, and the formulas round in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
BAD = {2: float("inf"), 5: float("nan")}  # at these steps


class Reading:
    """A GPU's, done by torch on the CPU."""

    made: list  # of all, in order

    def __init__(self, grads):
        self.grads = grads

    def takes(self, divisor):
        return True

    def load(self, squares, looks, kernel):
        pass

    def allocate_clip(self):
        return norms.Clip(torch.tensor(torch.nan), torch.tensor(torch.nan, dtype=torch.float64))

    def allocate_flag(self):
        return torch.tensor(torch.nan)

    def run(self, addresses, clip, divisor, clipped, found, looks, scalars):
        Reading.made.append("look" * looks + "norm" * (clip is not None))
        if looks:
            found.fill_(float(not all(g.isfinite().all() for g in self.grads)))
        if clip is not None:
            norm = nn.utils.get_total_norm(self.grads) / (1.0 if divisor is None else divisor)
            clipped.norm.copy_(norm)
            clipped.factor.copy_((clip / (norm.double() + 1e-6)).clamp(max=1.0))


@pytest.fixture
def readings(monkeypatch):
    """As if the CPU were a GPU."""
    Reading.made = []
    monkeypatch.setattr(
        norms,
        "_look_on_cuda",
        lambda optimizer, seen: seen or state_fingerprint.gradients(optimizer),
    )
    monkeypatch.setattr(norms, "_find_reading", lambda _, seen, whole: Reading(seen.grads))
    return Reading.made


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3,), (5, 7), ())]


def draw(scale, *lists, bad=None):
    for same in zip(*lists, strict=True):
        drawn = torch.randn(same[0].shape)
        for p in same:
            p.grad = drawn * scale
    for params in lists:
        if bad is not None:
            params[1].grad[2, 3] = bad


def scalers(**options):
    both = [
        kind("cpu", init_scale=2.0**10, **options) for kind in (GradScaler, torch.amp.GradScaler)
    ]
    for scaler in both:
        scaler.scale(torch.ones(()))
    return both


@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("read", [False, True], ids=["", "read once"])
def test_the_scale_and_the_steps_are_torchs(clip, read, request):
    """With a growth, and steps skipped for both kinds of bad numbers."""
    made = request.getfixturevalue("readings") if read else []
    ours, theirs = tensors(), tensors()
    step = FusedStep(AdamW(ours, 0.01), clip_norm=clip, zero_grad=True)
    reference = AdamW(theirs, 0.01)
    mine, its = scalers(growth_interval=2)
    for number in range(8):
        draw(its.get_scale(), ours, theirs, bad=BAD.get(number))
        before = [p.detach().clone() for p in ours]
        mine.step(step.optimizer)
        if clip:
            its.unscale_(reference)
            norm = nn.utils.clip_grad_norm_(theirs, clip)
            if number not in BAD:
                torch.testing.assert_close(step.grad_norm, norm, rtol=1e-6, atol=0)
        its.step(reference)
        mine.update()
        its.update()
        assert mine.state_dict() == its.state_dict()
        assert not any(p.grad.any() for p in ours)
        if number in BAD:
            assert all(map(torch.equal, ours, before))
        assert not {"grad_scale", "found_inf"} & vars(step.optimizer).keys()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE)
    assert made == read * 8 * ["looknorm" if clip else "look"]


def test_gradients_written_after_they_were_read_are_read_again(readings):
    """By a hook of the step, say."""
    ours, theirs = tensors(), tensors()
    step = FusedStep(SGD(ours, 0.1), clip_norm=0.5)
    reference = SGD(theirs, 0.1)
    step.optimizer.register_step_pre_hook(lambda *_: (ours[1].grad.mul_(3.0), None)[1])
    scaler, _ = scalers()
    draw(1024.0, ours, theirs)
    scaler.step(step.optimizer)
    for q in theirs:
        q.grad /= 1024.0
    theirs[1].grad.mul_(3.0)
    nn.utils.clip_grad_norm_(theirs, 0.5)
    reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE)
    assert readings == ["look", "norm"]


def test_gradients_that_a_hook_writes_as_nobody_sees_are_read_after_it(readings):
    ours = tensors()
    step = FusedStep(SGD(ours, 0.1), clip_norm=0.5)
    step.optimizer.register_step_pre_hook(lambda *_: (ours[1].grad.data.mul_(3.0), None)[1])
    scaler, _ = scalers()
    draw(1024.0, ours)
    scaler.step(step.optimizer)
    scale = scaler.get_scale()
    norm = nn.utils.get_total_norm([p.grad / scale for p in ours])
    torch.testing.assert_close(step.grad_norm, norm)
    assert readings == ["look", "norm"]


def test_what_a_step_that_raised_had_read_is_forgotten(readings, monkeypatch):
    ours = tensors()
    step = FusedStep(SGD(ours, 0.1), clip_norm=0.5)
    scaler, _ = scalers()
    draw(1024.0, ours)

    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step.optimizer, "step", stopped)
        with pytest.raises(KeyboardInterrupt):
            scaler.step(step.optimizer)
    for p in ours:
        p.grad.data.mul_(0.5)
    step()  # which still unscales, as torch's would
    norm = nn.utils.get_total_norm([p.grad / 1024.0 for p in ours])
    torch.testing.assert_close(step.grad_norm, norm)


def test_a_reading_is_for_one_step(readings):
    ours = tensors()
    step = FusedStep(SGD(ours, 0.1), clip_norm=0.5)
    scaler, _ = scalers()
    draw(1024.0, ours)
    scaler.step(step.optimizer)
    scaler.update()
    step()  # the same gradients, without a scale
    assert readings == ["looknorm", "norm"]
    torch.testing.assert_close(step.grad_norm, nn.utils.get_total_norm([p.grad for p in ours]))


def test_a_scale_of_the_users_own_counts(readings):
    """torch multiplies it into the scaler's."""
    ours, theirs = tensors(), tensors()
    step = FusedStep(SGD(ours, 0.1), clip_norm=0.5)
    reference = SGD(theirs, 0.1)
    scaler, _ = scalers()
    draw(1.0, ours, theirs)
    for p in ours:
        p.grad *= 4096.0
    step.optimizer.grad_scale = torch.tensor(4.0)
    scaler.step(step.optimizer)
    nn.utils.clip_grad_norm_(theirs, 0.5)
    reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE)
    assert readings == ["look", "norm"]


def test_after_unscale_the_norm_alone_is_read(readings):
    ours = tensors()
    step = FusedStep(SGD(ours, 0.1), clip_norm=0.5)
    scaler, _ = scalers()
    draw(1024.0, ours)
    wanted = nn.utils.get_total_norm([p.grad for p in ours]) / 1024
    scaler.unscale_(step.optimizer)
    scaler.step(step.optimizer)
    assert readings == ["norm"]
    torch.testing.assert_close(step.grad_norm, wanted)


def steps_twice(scaler, optimizer):
    scaler.step(optimizer)
    scaler.step(optimizer)


def unscales_twice(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscales_after_the_step(scaler, optimizer):
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def has_a_closure(scaler, optimizer):
    scaler.step(optimizer, closure=lambda: None)


def updates_before_a_step(scaler, optimizer):
    scaler.update()


def has_no_gradients(scaler, optimizer):
    optimizer.zero_grad()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("read", [False, True], ids=["", "read once"])
@pytest.mark.parametrize(
    "wrong",
    [
        *(steps_twice, unscales_twice, unscales_after_the_step, has_a_closure),
        *(updates_before_a_step, has_no_gradients),
    ],
)
def test_errors_are_torchs(wrong, read, request):
    if read:
        request.getfixturevalue("readings")
    said = []
    for scaler in scalers():
        params = tensors()
        optimizer = FusedStep(SGD(params, 0.1), clip_norm=1.0).optimizer
        draw(1024.0, params)
        with pytest.raises((AssertionError, RuntimeError)) as error:
            wrong(scaler, optimizer)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_other_optimizers_are_torchs(readings):
    """Fused or not, but for `FusedStep`; with a fused one in the same scaler."""
    made = []
    for scaler in scalers():
        params = [tensors(seed) for seed in range(3)]
        optimizers = [AdamW(params[0]), SGD(params[1], 0.1)]
        fuse_step(optimizers[1])
        fused = FusedStep(SGD(params[2], 0.1))
        torch.manual_seed(1)
        scales = []
        for number in range(4):
            for n, each in enumerate(params):
                draw(scaler.get_scale(), each, bad=float("inf") if number == n else None)
            for optimizer in (*optimizers, fused.optimizer):
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        made.append((params, scales))
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=0)
    assert readings == ["look"] * 4  # by ours alone


def test_copies_and_checkpoints():
    mine, its = scalers()
    for other in (pickled(mine), copy.deepcopy(mine)):
        assert type(other) is GradScaler
        assert other.state_dict() == mine.state_dict()
    its.update(4.0)
    mine.load_state_dict(its.state_dict())
    assert mine.get_scale() == 4.0
    assert GradScaler("cpu", enabled=False).state_dict() == {}
