"""Training: master weights, fused steps, copies, and checkpoints that fit before and after."""

import copy
import itertools
import logging
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

import ipex_inductor
from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim import FUSED_OPTIMIZERS, SPLIT_OPTIMIZERS, Lamb

OPTIMIZERS = [
    *(Lamb, SGD, Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
]
each_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)


class Net(nn.Module):
    """Everything a cast list treats differently: cast, kept, frozen, tied."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.head.weight

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.tied(self.head(self.frozen(y)))


X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)


def step(model, optimizer, dtype=torch.float32):
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = model(X).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(kind, steps=2, **options):
    model = Net()
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def low(model, dtype=torch.bfloat16):
    return {name for name, p in model.named_parameters() if p.dtype == dtype}


CAST = {
    *("conv.weight", "conv.bias", "frozen.weight", "frozen.bias"),
    *("head.weight", "head.bias", "tied.bias"),
}


def report(model, kind):
    return ipex_inductor.report(model).count(kind)


@each_optimizer
@pytest.mark.sampled
def test_a_pretrained_model_goes_on_training(kind):
    model, optimizer = trained(kind)
    twin = copy.deepcopy(model)
    reference = kind(twin.parameters(), lr=0.01)
    reference.load_state_dict(optimizer.state_dict())
    ours, stepper = ipex_inductor.optimize(model, torch.bfloat16, optimizer)
    assert low(ours) == CAST
    assert ours.tied.weight is ours.head.weight
    wants = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in ours.named_parameters()} == wants
    assert type(stepper) is kind
    for _ in range(5):
        losses = step(ours, stepper, torch.bfloat16), step(twin, reference)
        # bf16 products, of 2**-8 relative error each, on the way to the loss
        assert losses[0] == pytest.approx(losses[1], rel=0.1, abs=0.02)
    for name, value in ours.state_dict().items():
        assert value.dtype == twin.state_dict()[name].dtype
    assert ("split_master_weight_for_bf16" in report(ours, "fired")) == (kind in SPLIT_OPTIMIZERS)
    assert ("fuse_update_step" in report(ours, "fired")) == (kind in FUSED_OPTIMIZERS)
    events = [e for e in ours.ipex_report.events if e.subject == "fuse_update_step"]
    missed = [e.reason for e in events if e.kind == "missed"]
    # The convolution's weight is channels-last now, its state of before is not.
    layout = "torch itself steps 1 parameters: a state "
    assert all(r.startswith(layout) for r in missed) == (kind in FUSED_OPTIMIZERS)


@each_optimizer
def test_checkpoints_load_after_optimize(kind):
    model, optimizer = trained(kind)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for level, inplace, dtype in itertools.product(
        ["O0", "O1"], [True, False], [torch.float32, torch.bfloat16]
    ):
        fresh = Net()
        made = ipex_inductor.optimize(
            fresh, dtype, kind(fresh.parameters(), lr=0.01), level=level, inplace=inplace
        )
        assert (made[0] is fresh) == inplace
        made[0].load_state_dict(weights)
        made[1].load_state_dict(state)
        assert_equal(made[0].state_dict(), weights)
        assert_equal(made[1].state_dict()["state"], state["state"])
        step(*made, dtype)


COMBINATIONS = list(itertools.product([torch.float32, torch.bfloat16], *[[True, False]] * 4))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_three_times(combination):
    dtype, inplace, prepack, split, fuse = combination
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    twin = copy.deepcopy(model)
    reference = SGD(twin.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        model, optimizer = ipex_inductor.optimize(
            model,
            dtype,
            optimizer,
            inplace=inplace,
            weights_prepack=prepack,
            split_master_weight_for_bf16=split,
            fuse_update_step=fuse,
        )
        assert ("fuse_update_step" in report(model, "fired")) == fuse
        step(model, optimizer, dtype)
        step(twin, reference)
    expected = twin.state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == expected[name].dtype
        # float32: layouts sum in another order. bfloat16: 3 steps of lr 0.01 on rounded gradients.
        rtol, atol = (1e-4, 1e-6) if dtype is torch.float32 else (0.02, 0.02)
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=atol)


def test_the_callers_objects_are_not_touched():
    model, optimizer = trained(Adam)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    strides = [p.stride() for p in model.parameters()]
    attributes = set(vars(model)), set(vars(optimizer))
    ours, stepper = ipex_inductor.optimize(model, torch.bfloat16, optimizer)
    step(ours, stepper, torch.bfloat16)
    after = model.state_dict(), optimizer.state_dict()
    assert_equal(after[0], before[0])
    assert_equal(after[1]["state"], before[1]["state"])
    assert strides == [p.stride() for p in model.parameters()]
    assert (set(vars(model)), set(vars(optimizer))) == attributes


def test_the_optimizer_of_a_part_of_the_model():
    model = Net()
    ours, stepper = ipex_inductor.optimize(model, torch.bfloat16, SGD(model.head.parameters(), 0.1))
    before = copy.deepcopy(ours.state_dict())
    step(ours, stepper, torch.bfloat16)
    changed = {
        name for name, value in ours.state_dict().items() if not torch.equal(value, before[name])
    }
    own = {name for name in changed if not name.startswith("norm.")}  # statistics
    assert own == {"head.weight", "head.bias", "tied.weight"}


def test_parameters_that_are_not_the_models_stay_the_callers():
    model, extra = Net(), nn.Parameter(torch.ones(2))
    optimizer = SGD([*model.parameters(), extra], lr=0.1)
    _, stepper = ipex_inductor.optimize(model, torch.bfloat16, optimizer)
    extra.grad = torch.ones(2)
    stepper.step()
    assert torch.equal(extra.detach(), torch.full((2,), 0.9))


def test_hooks_of_the_optimizer_stay():
    model, optimizer = trained(SGD)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step(*ipex_inductor.optimize(model, torch.bfloat16, optimizer), torch.bfloat16)
    assert seen == ["before", "after"]


def test_a_scheduler_made_afterwards_drives_the_rate():
    model, optimizer = trained(SGD)
    model, optimizer = ipex_inductor.optimize(model, torch.bfloat16, optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    step(model, optimizer, torch.bfloat16)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_scheduler_made_before_is_warned_about(caplog):
    model, optimizer = trained(SGD)
    lr_scheduler.StepLR(optimizer, 1)
    with caplog.at_level(logging.WARNING, "IPEX"):
        pair = ipex_inductor.optimize(model, torch.bfloat16, optimizer)
        ipex_inductor.optimize(pair[0], torch.bfloat16, pair[1])
        ipex_inductor.optimize(model, torch.bfloat16, optimizer, inplace=True)
    assert [message.split(":")[0] for message in caplog.messages] == ["[NotSupported]scheduler"]


def test_without_autocast_it_trains_as_well():
    model, optimizer = trained(SGD)
    ours, stepper = ipex_inductor.optimize(model, torch.bfloat16, optimizer)
    assert ours(X).dtype == torch.float32
    losses = [step(ours, stepper) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_half_precision_has_whole_masters():
    model, optimizer = trained(SGD)
    ours, stepper = ipex_inductor.optimize(model, torch.float16, optimizer)
    assert low(ours, torch.float16) == CAST
    assert "split_master_weight_for_bf16" in report(ours, "missed")
    step(ours, stepper)


def test_cast_before_is_too_late(caplog):
    model = Net().bfloat16()
    with caplog.at_level(logging.WARNING, "IPEX"):
        ours, _ = ipex_inductor.optimize(model, torch.bfloat16, SGD(model.parameters(), 0.1))
    assert caplog.messages[0] == (
        "[NotSupported]Can't convert model's parameters dtype from torch.bfloat16 to torch.bfloat16"
    )
    assert "dtype" in report(ours, "missed")


def test_lbfgs_stays_in_full_precision():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    ours, stepper = ipex_inductor.optimize(model, torch.bfloat16, optimizer)
    assert not low(ours)
    assert "dtype" in report(ours, "missed")

    def closure():
        stepper.zero_grad()
        loss = ours(X).square().mean()
        loss.backward()
        return loss

    stepper.step(closure)


def test_only_what_was_asked_for_warns(caplog):
    model = Net()
    make = torch.optim.Rprop
    with caplog.at_level(logging.WARNING, "IPEX"):
        ipex_inductor.optimize(model, torch.bfloat16, make(model.parameters()))
    assert not caplog.messages
    with caplog.at_level(logging.WARNING, "IPEX"):
        ipex_inductor.optimize(
            model, torch.bfloat16, make(model.parameters()), split_master_weight_for_bf16=True
        )
    assert len(caplog.messages) == 1
    assert "does not support fused/fused split update for" in caplog.messages[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "IPEX"):
        ipex_inductor.optimize(
            model,
            torch.bfloat16,
            SGD(model.parameters(), 0.1),
            split_master_weight_for_bf16=True,
            fuse_update_step=False,
        )
    assert "IPEX does not non-fused split master weight for bf16 training" in caplog.messages[0]


def test_inference_after_training_folds_in_full_precision():
    model, _ = trained(SGD)
    ours, _ = ipex_inductor.optimize(
        nn.Sequential(model.conv, model.norm), torch.bfloat16, SGD(model.parameters(), 0.1)
    )
    full = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    full.load_state_dict(ours.state_dict())
    ready = ipex_inductor.optimize(ours.eval())
    expected = ipex_inductor.optimize(full)
    assert type(ready[1]) is nn.Identity
    assert_equal(ready.state_dict(), expected.state_dict())


@pytest.mark.parametrize("inplace", [False, True])
def test_hooks_and_attributes_of_parameters_stay(inplace):
    model = nn.Linear(8, 4)
    seen = []
    model.bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    model.bias.no_decay = True
    ours, _ = ipex_inductor.optimize(model, optimizer=SGD(model.parameters(), 0.1), inplace=inplace)
    ours(torch.ones(4, 8)).sum().backward()
    assert torch.equal(ours.bias.grad, torch.full((4,), 0.01))
    assert len(seen) == 1
    assert seen[0] is ours.bias
    assert ours.bias.no_decay


def test_functions_an_optimizer_holds_are_copied():
    class Scaled(SGD):
        def step(self, closure=None):
            self.param_groups[0]["lr"] = self.rate(0.01)
            return super().step(closure)

    model = nn.Linear(2, 2)
    optimizer = Scaled(model.parameters(), 1.0)
    optimizer.rate = math.sqrt
    _, ours = ipex_inductor.optimize(model, optimizer=optimizer)
    ours.step()
    assert ours.param_groups[0]["lr"] == 0.1


def test_an_optimizer_of_another_model_is_refused():
    """Two optimizers of one model: the first call's copy has parameters of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (SGD(layer.parameters(), 0.1) for layer in model)
    ours, _ = ipex_inductor.optimize(model, torch.bfloat16, first)
    with pytest.raises(ArgumentError, match=r"steps none of them.*inplace=True"):
        ipex_inductor.optimize(ours, torch.bfloat16, second)
    for optimizer in (first, second):
        ipex_inductor.optimize(model, torch.bfloat16, optimizer, inplace=True)
    before = model.state_dict()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(2, 4)).float().sum().backward()
    first.step()
    second.step()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_optimizer_without_parameters():
    ours, _ = ipex_inductor.optimize(
        nn.Linear(3, 3), torch.bfloat16, torch.optim.Adamax([{"params": []}])
    )
    assert "split_master_weight_for_bf16" in report(ours, "missed")


def test_what_takes_effect_in_inference_alone_is_said(caplog):
    model = nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING, "IPEX"):
        ours, _ = ipex_inductor.optimize(
            model, optimizer=SGD(model.parameters()), concat_linear=True, graph_mode=True
        )
    assert caplog.messages == ["[NotSupported]concat_linear: it takes effect in inference only"]
    assert "concat_linear" in report(ours, "missed")


def test_a_model_that_cannot_be_copied():
    class Locked(nn.Module):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle a lock")

    with pytest.raises(ArgumentError, match="inplace=True"):
        ipex_inductor.optimize(Locked().eval())


def test_a_sample_input_is_for_inference(caplog):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "IPEX"):
        ours, _ = ipex_inductor.optimize(model, None, optimizer, sample_input=torch.ones(1, 4))
    assert caplog.messages == ["[NotSupported]sample_input: it takes effect in inference only"]
    assert "sample_input" in report(ours, "missed")


def test_fully_sharded_blocks_train(alone):
    """As docs/guides/migrating.md has it: FSDP shards parameters of one dtype together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = ipex_inductor.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    mixed, plain = copy.deepcopy(model), copy.deepcopy((model, optimizer))
    for block in (model[0], model):
        rest = [m for m in block.modules() if not isinstance(m, FSDPModule)]
        dtypes = {m: {p.dtype for p in m.parameters(recurse=False)} for m in rest}
        fully_shard([m for m in rest if torch.bfloat16 in dtypes[m]], mesh=mesh)
        fully_shard(block, mesh=mesh)
    optimizer.zero_grad()
    x = torch.randn(4, 5, 8)
    for number in range(4):
        for each, steps in ((model, optimizer), plain):
            with torch.autocast("cpu", torch.bfloat16, enabled=number < 2):
                loss = each(x).float().square().mean()
            loss.backward()
            steps.step()
            steps.zero_grad()
    for name, value in plain[0].state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), value), name

    fully_shard(mixed, mesh=mesh)
    with pytest.raises(AssertionError, match="uniform original parameter dtype") as raised:
        mixed(x)
    assert "fully_shard([m for m in block.modules()" in raised.value.__notes__[0]
