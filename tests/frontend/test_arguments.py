"""What `optimize` refuses, in the words its users know, and what it says about the rest."""

import inspect
import logging

import pytest
import torch
from torch import nn
from torch.optim import SGD

import ipex_inductor
from ipex_inductor import errors

ARGUMENTS = {  # with their defaults, in this order
    "model": inspect.Parameter.empty,
    "dtype": None,
    "optimizer": None,
    "level": "O1",
    "inplace": False,
    "conv_bn_folding": None,
    "linear_bn_folding": None,
    "weights_prepack": None,
    "replace_dropout_with_identity": None,
    "optimize_lstm": None,
    "split_master_weight_for_bf16": None,
    "fuse_update_step": None,
    "auto_kernel_selection": None,
    "sample_input": None,
    "graph_mode": None,
    "concat_linear": None,
}


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)).eval()


def optimizer():
    return SGD(model().parameters(), lr=0.1)


def mixed():
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    made[1].to("meta")
    return made


def compiled():
    made = model()
    made.compile()
    return made


def test_the_signature():
    parameters = inspect.signature(ipex_inductor.optimize).parameters
    assert list(parameters) == list(ARGUMENTS)
    assert [p.default for p in parameters.values()] == list(ARGUMENTS.values())


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda: ipex_inductor.optimize(model().train()),
            AssertionError,
            "The optimizer should be given for training mode",
        ),
        (
            lambda: ipex_inductor.optimize(model(), optimizer=optimizer()),
            AssertionError,
            "The optimizer should not be given for inference mode",
        ),
        (
            lambda: ipex_inductor.optimize(model(), level="O2"),
            RuntimeError,
            "Unexpected optimization level O2. Options are 'O0', 'O1'.",
        ),
        (
            lambda: ipex_inductor.optimize(model(), level=None),
            RuntimeError,
            "Unexpected optimization level None",
        ),
        (
            lambda: ipex_inductor.optimize(mixed()),
            RuntimeError,
            "The model is mixed with different device type",
        ),
        (lambda: ipex_inductor.optimize(model().to("meta")), errors.DeviceError, "to_empty"),
        (lambda: ipex_inductor.optimize(torch.relu), errors.ArgumentError, "torch.nn.Module"),
        (lambda: ipex_inductor.optimize(model(), torch.int8), errors.ArgumentError, "bfloat16"),
        (
            lambda: ipex_inductor.optimize(model().train(), optimizer=object()),
            errors.ArgumentError,
            "torch.optim.Optimizer",
        ),
        (
            lambda: ipex_inductor.optimize(nn.DataParallel(model()).eval()),
            errors.WrappedModelError,
            "DataParallel.*plain model first",
        ),
        (
            lambda: ipex_inductor.optimize(torch.compile(model())),
            errors.WrappedModelError,
            "OptimizedModule",
        ),
        (lambda: ipex_inductor.optimize(compiled()), errors.WrappedModelError, "not compiled yet"),
        (lambda: ipex_inductor.report(model()), errors.ArgumentError, "optimize returned"),
    ],
)
def test_what_is_refused(call, kind, text):
    with pytest.raises(kind, match=text) as caught:
        call()
    assert isinstance(caught.value, errors.IpexError)


def test_before_a_wrapper_not_after(alone):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    ready = ipex_inductor.optimize(model(), torch.bfloat16)
    wrapped = DistributedDataParallel(ready)
    assert wrapped(torch.randn(2, 4)).dtype == torch.float32
    with pytest.raises(errors.WrappedModelError, match="DistributedDataParallel"):
        ipex_inductor.optimize(wrapped.eval())
    sharded = model()
    fully_shard(sharded[0])
    with pytest.raises(errors.WrappedModelError, match="FSDP"):
        ipex_inductor.optimize(sharded)


def test_the_optimizer_trains_below_ddp(alone):
    from torch.nn.parallel import DistributedDataParallel

    net = model().train()
    net, stepper = ipex_inductor.optimize(net, torch.bfloat16, SGD(net.parameters(), lr=0.1))
    before = net[0].state_dict()["weight"]
    wrapped = DistributedDataParallel(net)
    with torch.autocast("cpu", torch.bfloat16):
        wrapped(torch.randn(2, 4)).float().sum().backward()
    stepper.step()
    assert not torch.equal(net[0].state_dict()["weight"], before)


def test_o0_copies_too():
    net = model()
    for dtype in (None, torch.float32):
        ours = ipex_inductor.optimize(net, dtype, level="O0")
        assert ours is not net
        assert type(ours[1]) is nn.Dropout
        assert ipex_inductor.optimize(net, dtype, level="O0", inplace=True) is net
        assert not ipex_inductor.report(ours).count("fired")


def test_o0_leaves_the_original_alone_in_training():
    net = model().train()
    steps = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(2, 4)).sum().backward()
    steps.step()
    before = [p.detach().clone() for p in net.parameters()]
    ours, stepper = ipex_inductor.optimize(net, optimizer=steps, level="O0")
    assert stepper.param_groups[0]["params"] == list(ours.parameters())
    for old, new in zip(net.parameters(), ours.parameters(), strict=True):
        assert new is not old
        assert torch.equal(stepper.state[new]["exp_avg"], steps.state[old]["exp_avg"])
    ours(torch.ones(2, 4)).sum().backward()
    stepper.step()
    assert all(map(torch.equal, net.parameters(), before))
    assert not any(map(torch.equal, ours.parameters(), before))
    same = ipex_inductor.optimize(net, optimizer=steps, level="O0", inplace=True)
    assert same == (net, steps)


def test_o0_does_what_is_asked():
    net = model()
    ours = ipex_inductor.optimize(net, level="O0", replace_dropout_with_identity=True)
    assert type(ours[1]) is nn.Identity
    assert ipex_inductor.optimize(net, torch.bfloat16, level="O0")[0].weight.dtype == torch.bfloat16


def test_script_modules_come_back():
    traced = torch.jit.trace(model(), torch.randn(2, 4))
    steps = optimizer()
    assert ipex_inductor.optimize(traced) is traced
    assert ipex_inductor.optimize(traced, optimizer=steps) == (traced, steps)


def test_inplace():
    net = model()
    ours = ipex_inductor.optimize(net)
    assert ours is not net
    assert ours[0].weight.data_ptr() != net[0].weight.data_ptr()
    assert type(net[1]) is nn.Dropout
    assert ipex_inductor.optimize(net, torch.bfloat16, inplace=True) is net
    assert type(net[1]) is nn.Identity
    assert net[0].weight.dtype == torch.bfloat16


def test_in_inference_mode():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    x = torch.randn(2, 3, 4, 4)
    with torch.inference_mode():
        ours = ipex_inductor.optimize(net, torch.bfloat16, sample_input=x.clone())
    assert type(ours[1]) is nn.Identity
    assert not any(p.is_inference() for p in ours.parameters())


def test_random_numbers_are_not_drawn():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Dropout()).eval()
    before = torch.get_rng_state()
    ipex_inductor.optimize(net, sample_input=torch.zeros(2, 3, 4, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout():
    net = nn.Sequential(*[kind(0.25) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout)])
    net.append(nn.Dropout(0.25)).append(net[0])
    net.eval()[3].train()  # on purpose, as Monte Carlo dropout does
    net[1].register_forward_hook(lambda *_: None)
    ours = ipex_inductor.optimize(net)
    assert [type(m) for m in ours] == [
        *(nn.Identity, nn.Dropout2d, nn.Identity, nn.Dropout, nn.Identity)
    ]
    assert ours[0].p == ours[2].p == 0.25
    kept = ipex_inductor.optimize(net, replace_dropout_with_identity=False)
    assert type(kept[0]) is nn.Dropout
    assert type(ipex_inductor.optimize(nn.Dropout().eval())) is nn.Dropout


@pytest.mark.parametrize("knob", ["weights_prepack", "concat_linear"])
def test_what_every_graph_does_is_left_to_it(knob, caplog):
    """Backend ipex does so whether the knob is set or not, so nothing is refused."""
    with caplog.at_level(logging.WARNING, "IPEX"):
        ours = ipex_inductor.optimize(model(), **{knob: True})
        compiled = ipex_inductor.optimize(model(), **{knob: True}, graph_mode=True)
    assert caplog.messages == []
    for made, told in ((ours, True), (compiled, False)):
        (event,) = [e for e in ipex_inductor.report(made).events if e.subject == knob]
        assert event.kind == "left"
        assert ("torch.compile" in event.reason) == told


def test_kernels_are_selected_in_a_mode_of_graphs(caplog):
    with caplog.at_level(logging.WARNING, "IPEX"):
        ours = ipex_inductor.optimize(model(), auto_kernel_selection=True)
        compiled = ipex_inductor.optimize(model(), auto_kernel_selection=True, graph_mode=True)
    (message,) = caplog.messages
    assert message.startswith("[NotSupported]auto_kernel_selection: ")
    assert "graph_mode=True" in message
    assert "mode='max-autotune'" in message
    assert "auto_kernel_selection" in ipex_inductor.report(ours).count("missed")
    assert "auto_kernel_selection" in ipex_inductor.report(compiled).count("left")


def test_what_optimize_alone_cannot_speed_up_says_what_can(caplog):
    def hints(**arguments):
        caplog.clear()
        ours = ipex_inductor.optimize(model(), **arguments)
        said = [e.reason for e in ipex_inductor.report(ours).events if e.subject == "graph_mode"]
        assert [m for m in caplog.messages if "no faster" in m] == [r for r in said if "no f" in r]
        return [reason for reason in said if "torch.compile" in reason]

    with caplog.at_level(logging.INFO, "IPEX"):
        (hint,) = hints()
        assert "this Sequential no faster" in hint
        assert "backend='ipex'" in hint
        assert hints(dtype=torch.bfloat16) == []
        assert hints(graph_mode=True) == []


def test_a_model_keeps_the_dtype_that_it_has():
    ours = ipex_inductor.optimize(model().double(), torch.float64)
    assert ours[0].weight.dtype == torch.float64
    with pytest.raises(errors.ArgumentError, match=r"what all parameters are; got torch[.]float64"):
        ipex_inductor.optimize(model(), torch.float64)


def test_what_a_sample_was_good_for():
    ours = ipex_inductor.optimize(model(), sample_input=torch.randn(2, 4))
    assert "sample_input" in ipex_inductor.report(ours).count("left")
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    ours = ipex_inductor.optimize(net, sample_input=torch.randn(2, 4))
    assert "sample_input" in ipex_inductor.report(ours).count("fired")


def test_knobs_of_the_other_phase(caplog):
    net = model()
    with caplog.at_level(logging.WARNING, "IPEX"):
        ours = ipex_inductor.optimize(net, split_master_weight_for_bf16=True)
        other, _ = ipex_inductor.optimize(
            net.train(), optimizer=SGD(net.parameters(), 0.1), conv_bn_folding=True
        )
    assert caplog.messages == [
        "[NotSupported]split_master_weight_for_bf16: it takes effect in training only",
        "[NotSupported]conv_bn_folding: it takes effect in inference only",
    ]
    assert "fuse_update_step" in ipex_inductor.report(ours).count("missed")
    assert type(other[1]) is nn.Dropout


def test_defaults_do_not_warn(caplog):
    with caplog.at_level(logging.WARNING, "IPEX"):
        ours = ipex_inductor.optimize(nn.Sequential(nn.LSTM(4, 4), nn.BatchNorm2d(4)).eval())
    assert not caplog.messages
    assert ipex_inductor.report(ours) is ours.ipex_report
    text = str(ours.ipex_report)
    assert "left: optimize_lstm (torch runs nn.LSTM" in text
    assert "missed: conv_bn_folding" in text
    assert ours.ipex_report.to_dict()["source"] == "optimize"
