"""What a step looks at before it takes its last plan again: in C++, or else in Python.

Whatever would make another plan is seen, and the step that follows is torch's.
"""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from ipex_inductor.optim import FusedStep, fuse_step, kernels, plan_replay, state_fingerprint
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.tensor_reader import look_cpp
from support.optim.optimizer_variants import copies

pytestmark = pytest.mark.usefixtures("way")

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # a few roundings a step, of numbers of about 1
# Of more than five dimensions sizes lie elsewhere.
SHAPES = [(8, 8), (3, 5), (7,), (), (0,), (2, 3, 4, 5), (2, 1, 3, 1, 2, 2)]


class Mine(torch.Tensor):
    """A subclass."""


def twins():
    """Steps taken, so that there is a plan, and what it reads of groups is known."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = copies(ours)
    optimizer, reference = AdamW(ours, 0.01), AdamW(theirs, 0.01)
    assert fuse_step(optimizer) is None
    for _ in range(4):
        step(ours, optimizer, theirs, reference)
    return ours, optimizer, theirs, reference


def draw(*lists):
    for same in zip(*lists, strict=True):
        drawn = torch.randn(same[0].shape)
        for p in same:
            p.grad = drawn.to(p.dtype).clone()


def step(ours, optimizer, theirs, reference):
    draw(ours, theirs)
    optimizer.step()
    reference.step()


def state_turned(params, optimizer):
    own = optimizer.state[params[0]]
    own["exp_avg"] = own["exp_avg"].t()


def state_turned_in_place(params, optimizer):
    optimizer.state[params[0]]["exp_avg"].t_()


def state_of_many_dimensions_turned_in_place(params, optimizer):
    optimizer.state[params[6]]["exp_avg"].transpose_(4, 5)


def state_elsewhere(params, optimizer):
    own = optimizer.state[params[1]]
    own["exp_avg_sq"] = own["exp_avg_sq"].clone()


def state_in_fp64(params, optimizer):
    own = optimizer.state[params[2]]
    own["exp_avg"] = own["exp_avg"].double()


def steps_in_fp64(params, optimizer):
    for own in optimizer.state.values():
        own["step"] = own["step"].double()


def loaded(params, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def forgotten(params, optimizer):
    del optimizer.state[params[1]]


def lacking(params, optimizer):
    optimizer.state[params[1]].clear()


def moved(params, optimizer):
    params[0].data = params[0].data.clone()


def turned(params, optimizer):
    params[0].data = params[0].data.t()


def swapped(params, optimizer):
    params[1].grad = None
    torch.utils.swap_tensors(params[1], nn.Parameter(params[1].detach().clone()))
    gc.collect()


def in_bf16(params, optimizer):
    params[2].data = params[2].data.bfloat16()
    params[2].grad = None


def flagged(params, optimizer):
    optimizer.param_groups[0]["maximize"] = True


def rate_in_a_tensor(params, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02)


def another_group(params, optimizer):
    params.append(nn.Parameter(torch.ones(4)))
    optimizer.add_param_group({"params": params[-1:], "weight_decay": 0.5})


def fewer(params, optimizer):
    optimizer.param_groups[0]["params"].pop(1)


CHANGES = [
    *(state_turned, state_turned_in_place, state_of_many_dimensions_turned_in_place),
    *(state_elsewhere, state_in_fp64, steps_in_fp64, loaded),
    *(forgotten, lacking, moved, turned, swapped, in_bf16, flagged, rate_in_a_tensor),
    *(another_group, fewer),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.sampled
def test_what_makes_another_plan_is_seen(change):
    ours, optimizer, theirs, reference = four = twins()
    before = state_fingerprint.look(optimizer, {})
    for params, each in (ours, optimizer), (theirs, reference):
        change(params, each)
    draw(ours, theirs)
    after = state_fingerprint.look(optimizer, {})
    assert after is None or after.facts != before.facts
    assert plan_replay.look_and_compare(optimizer, {})[1] is None
    if change in (lacking, state_in_fp64, in_bf16):  # of which torch makes errors
        return
    for _ in range(2):
        step(*four)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE)


def others(name, *values):
    """One value a step, of groups by this name."""
    return pytest.param(
        [lambda group, value=value: group.update({name: value}) for value in values], id=name
    )


IN_TURNS = [
    others("lr", 0.1, 0.1, 0.02, 0.3),  # a number is made of it and of the step
    others("betas", (0.5, 0.9), (0.5, 0.9), [0.5, 0.99], [0.8, 0.99]),
    others("eps", 1e-2, 1e-1),
    others("weight_decay", 0.5, 0.5, 0.0),
    others("maximize", True, 0, False),
    others("note", "of no one's", 3),
    pytest.param(
        [lambda group: group.update(betas=[0.5, 0.9]), *[lambda group: group["betas"].sort()] * 2]
        + [lambda group: group["betas"].reverse()] * 3,
        id="betas in place",
    ),
    pytest.param(
        [lambda group: group.update(lr=0.1), lambda group: group.update(sorted(group.items()))],
        id="none",
    ),
]


@pytest.mark.parametrize("changes", IN_TURNS)
def test_other_numbers_are_taken(changes):
    four = ours, optimizer, theirs, reference = twins()
    for change in [*changes, lambda group: None]:
        for each in (optimizer, reference):
            change(each.param_groups[0])
        step(*four)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, **CLOSE)


def test_a_number_that_stood_for_one_step_only(monkeypatch):
    """Of a step that is looked at in Python's words: what was known before it is still right."""
    four = ours, optimizer, theirs, reference = twins()
    for rate, known in ((0.5, False), (0.01, True), (0.02, True)):
        for each in (optimizer, reference):
            each.param_groups[0]["lr"] = rate
        with monkeypatch.context() as patched:
            if not known:
                for module in (plan_replay, kernels):
                    patched.setattr(module, "repeat_plain_step", lambda *_: False)
            step(*four)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, **CLOSE)


def test_a_number_that_no_step_could_read_is_not_known():
    four = ours, optimizer, theirs, reference = twins()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[0]["eps"] = "small"
    with pytest.raises(ValueError, match="small"):
        optimizer.step()
    optimizer.param_groups[0]["eps"] = reference.param_groups[0]["eps"]
    reference.param_groups[0]["lr"] = 0.5
    step(*four)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE)


def test_a_parameter_that_changes_its_group_is_seen():
    """All stand in the same order then."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = copies(ours)

    def in_two(params):
        return AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 1.0}], 0.01)

    optimizer, reference = in_two(ours), in_two(theirs)
    assert fuse_step(optimizer) is None
    for number in range(4):
        if number == 2:
            for each in (optimizer, reference):
                one, other = each.param_groups
                other["params"].insert(0, one["params"].pop())
        step(ours, optimizer, theirs, reference)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE)


@pytest.mark.host("torch's foreach ops raise later on a GPU, half done")
def test_a_gradient_without_memory_is_torchs():
    """Its address is 0, which is as aligned as any; torch refuses to mix it with others."""
    ours, optimizer, theirs, reference = twins()
    for params, each in (ours, optimizer), (theirs, reference):
        draw(params)
        params[0].grad = torch._to_functional_tensor(torch.ones(SHAPES[0]))
        assert params[0].grad.data_ptr() == 0
        with pytest.raises(RuntimeError, match="functional"):
            each.step()
    assert state_fingerprint.look(optimizer, {}) is None
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE)


GRADIENTS = {
    "absent": lambda p: None,
    "turned": lambda p: torch.randn(8, 8).t(),
    "expanded": lambda p: torch.randn(()).expand(8, 8),
    "unaligned": lambda p: torch.randn(65)[1:].view(8, 8),
    "negated": lambda p: torch._neg_view(torch.randn(8, 8)),
    "sparse": lambda p: torch.randn(8, 8).to_sparse(),
    "a subclass": lambda p: torch.randn(8, 8).as_subclass(Mine),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_that_make_another_plan_are_seen(case):
    ours, optimizer, *_ = twins()
    before = state_fingerprint.look(optimizer, {})
    ours[0].grad = GRADIENTS[case](ours[0])
    after = state_fingerprint.look(optimizer, {})
    assert (after is None) == (case in ("negated", "sparse", "a subclass"))
    assert after is None or after.facts != before.facts


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "made anew"])
def test_the_last_plan_is_taken_for_other_gradients(kept, monkeypatch):
    ours, optimizer, theirs, reference = twins()
    monkeypatch.setattr(plan_replay, "plan", None)  # nobody plans
    for _ in range(3):
        if kept:
            for p, q in zip(ours, theirs, strict=True):
                p.grad.copy_(torch.randn(p.shape))
                q.grad.copy_(p.grad)
        else:
            held = [p.grad for p in ours]  # so that the new ones lie elsewhere
            draw(ours, theirs)
            del held
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **CLOSE)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_order_of_states_says_nothing(groups):
    """That of parameters that were trained later is another than theirs."""
    optimizer = twins()[1]
    (group,) = optimizer.param_groups
    params = group["params"]
    optimizer.param_groups = [group | {"params": params[k::groups]} for k in range(groups)]
    before = state_fingerprint.look(optimizer, {})
    state = dict(reversed(optimizer.state.items()))
    optimizer.state.clear()
    optimizer.state.update(state)
    seen = state_fingerprint.look(optimizer, {})
    assert seen.facts == before.facts
    assert {*map(id, seen.held)} >= {id(t) for own in state.values() for t in own.values()}


def test_nothing_is_held():
    """The memory of what was looked at goes when its owner lets it go."""
    ours, optimizer, *_ = twins()
    there = [weakref.ref(optimizer.state[ours[0]]["exp_avg"]), weakref.ref(ours[0].grad)]
    optimizer.state.clear()
    ours[0].grad = None
    gc.collect()
    assert [ref() for ref in there] == [None, None]


def test_where_cpp_is_not_to_be_had_python_looks(monkeypatch, caplog):
    """And the log says so, once."""

    def missing(*_, **__):
        raise NotBuiltError("no C++ compiler was found, and no cache has the kernel")

    monkeypatch.undo()
    monkeypatch.setattr(look_cpp, "load", missing)
    for each in (look_cpp.reader, state_fingerprint._reader):
        each.cache_clear()
    caplog.set_level(logging.INFO, "ipex_inductor")
    try:
        optimizer = twins()[1]
        assert state_fingerprint.look(optimizer, {}) is not None
    finally:
        for each in (look_cpp.reader, state_fingerprint._reader):
            each.cache_clear()
    (line,) = (r.getMessage() for r in caplog.records if "looked at by Python" in r.message)
    assert "no C++ compiler was found" in line


def test_gradients_at_the_same_addresses_are_compared_once(monkeypatch):
    """Which of them share memory, where they are to be zero."""
    params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    fused = FusedStep(SGD(params, 0.1), zero_grad=True)
    draw(params)
    for _ in range(3):
        fused()
    monkeypatch.setattr(plan_replay, "find_overlapping", None)
    fused()
    monkeypatch.undo()
    shared = torch.rand(6)
    taken = shared.clone()
    params[0].grad, params[1].grad = shared[:4], shared[2:]
    before = [p.detach().clone() for p in params]
    fused()
    assert not shared.any()
    for p, b, part in zip(params, before, (taken[:4], taken[2:]), strict=True):
        torch.testing.assert_close(p.detach(), b - 0.1 * part, **CLOSE)
