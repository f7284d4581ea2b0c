"""Versions that a step counts, as torch's own call does; gradients that Python has not seen."""

import ctypes
import weakref
from array import array

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.optim import SGD, AdamW

from ipex_inductor.compat import private_memory
from ipex_inductor.errors import DeviceError
from ipex_inductor.optim import fuse_step, kernels, state_fingerprint
from ipex_inductor.optim import plan_replay as again
from ipex_inductor.optim.launching import launch_groups_cpu
from ipex_inductor.templates.tensor_reader import look_cpp
from ipex_inductor.templates.tensor_reader.step_counters import Cells

WORD = private_memory.WORD


class Mine(torch.Tensor):
    """A subclass."""


def reader():
    found = look_cpp.reader()
    assert isinstance(found, look_cpp.Reader), found
    return found


def kinds():
    """A tensor, two views of it, a parameter, no elements, one of inference, a subclass."""
    base = torch.zeros(8)
    with torch.inference_mode():
        odd = torch.zeros(2)
    view, own = base[2:], nn.Parameter(torch.zeros(3))
    return [base, view, view[1:], own, torch.zeros(0), odd, torch.zeros(2).as_subclass(Mine), base]


def versions(tensors):
    return [None if t.is_inference() else t._version for t in tensors]


@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference mode"])
def test_versions_are_counted_as_torch_counts_them(inference):
    ours, theirs = kinds(), kinds()
    with torch.inference_mode(inference):
        reader().bump(ours)
        torch.autograd.graph.increment_version(theirs)
    assert versions(ours) == versions(theirs)
    assert versions(ours)[0] == 4  # it, twice, and two views that share its counter


def test_plain_tensors_are_not_left_to_torch(monkeypatch):
    tensors = kinds()[:5]
    monkeypatch.setattr(torch.autograd.graph, "increment_version", None)
    reader().bump(tensors)
    assert versions(tensors) == [3, 3, 3, 1, 1]


# One that is not there, and one that takes a tensor too, but only reads its version.
@pytest.mark.parametrize("name", ["no_such_function", "_ZNK2at10TensorBase8_versionEv"])
def test_where_torchs_function_is_not_the_one_its_public_call_counts(name, monkeypatch):
    monkeypatch.setattr(look_cpp, "BUMP", name)
    found = look_cpp.Reader()
    assert found._bump is None
    ours, theirs = kinds(), kinds()
    found.bump(ours)
    torch.autograd.graph.increment_version(theirs)
    assert versions(ours) == versions(theirs)


def test_where_torch_lacks_a_function_python_looks(monkeypatch):
    monkeypatch.setattr(look_cpp, "ASKED", (*look_cpp.ASKED[:-1], "no_such_function"))
    with pytest.raises(look_cpp.NotBuiltError, match="not to be had"):
        look_cpp.Reader()


def trained(steps=2):
    """With a plan that lasts; gradients are of a backward pass."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((8, 8), (7,), ())]
    optimizer = AdamW(params, 0.01)
    assert fuse_step(optimizer) is None
    for _ in range(steps):
        backward(params)
        optimizer.step()
    return params, optimizer


def backward(params):
    for p in params:
        p.grad = None
    sum((p * p).sum() for p in params).backward()


def object_of(param):
    """That of its gradient; 0 as long as Python has none."""
    theirs = ctypes.CDLL(torch._C.__file__)
    grad = theirs[private_memory.GRADIENT]
    grad.restype, grad.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    impl = ctypes.c_void_p.from_address(grad(param._cdata)).value
    return (
        ctypes.c_void_p.from_address(impl + WORD * private_memory.layout().python_object).value or 0
    )


@pytest.mark.parametrize("cpp", [True, False], ids=["C++", "torch's call"])
def test_each_step_counts_one_version_of_what_it_writes(cpp, monkeypatch):
    if not cpp:
        monkeypatch.setattr(reader(), "_bump", None)
    params, optimizer = trained()
    views = [p.detach().view(-1) for p in params]
    before = versions(written(params, optimizer) + views)
    for _ in range(3):
        backward(params)
        optimizer.step()
    assert versions(written(params, optimizer) + views) == [v + 3 for v in before]


def written(params, optimizer):
    return [*params, *(t for own in optimizer.state.values() for t in own.values())]


def test_a_step_like_the_last_one_is_seen_in_one_call(monkeypatch):
    params, optimizer = trained()
    for name in ("look_and_compare", "plan"):
        monkeypatch.setattr(again, name, None)
    before = versions(written(params, optimizer))
    optimizer.step()
    assert versions(written(params, optimizer)) == [v + 1 for v in before]


def test_what_has_no_version_is_not_counted_at_each_step(monkeypatch):
    """States of a first step in inference mode: to refuse one costs as much as 20 of others."""
    params, optimizer = trained(0)
    backward(params)
    with torch.inference_mode():
        optimizer.step()
    assert all(t.is_inference() for own in optimizer.state.values() for t in own.values())
    backward(params)
    optimizer.step()
    monkeypatch.setattr(again, "compare_tensors", None)
    before = versions(params)
    optimizer.step()
    assert versions(params) == [v + 1 for v in before]


class Asked:
    """Arguments of `Reader.check_and_count` for the next step, launched by a driver of our own."""

    def __init__(self, refused=0):
        self.params, self.optimizer = trained()
        backward(self.params)
        self.state, self.groups = self.optimizer.state, self.optimizer.param_groups
        self.facts = vars(self.optimizer)[again.KNOWN].facts[0]
        self.held = [dict(group) for group in self.groups]
        self.steps = Cells("float32", 2.0)
        for own in self.state.values():
            self.steps.add(own["step"].data_ptr())
        self.turn, self.launched, self.refused = self.steps.turn, [], refused
        self._room, self._ahead = array("f", [0, 0]), array("d", [0.5, 0.25, 1.5, 2.5])
        self._pointers = (ctypes.c_void_p * 2)(self._room.buffer_info()[0])
        kinds = ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
        self._driver = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(self._launch)
        fields = {
            "driver": ctypes.cast(self._driver, ctypes.c_void_p).value,
            "arguments": ctypes.addressof(self._pointers),
            "function": 7,
            "blocks": 3,
            "threads": 64,
            "shared": 5,
            "stream": 9,
            "numbers": self._room.buffer_info()[0],
            "each": 2,
            "doubles": 0,
            "ahead": self._ahead.buffer_info()[0],
            "left": 2,
            "at": 2.0,
            "kept": id(self._driver),
        }
        for name, value in fields.items():
            setattr(self.turn, name, value)

    def _launch(self, *given):
        self.launched.append((*given, [*self._room], self.counted()))
        return self.refused

    def counted(self):
        return [float(own["step"]) for own in self.state.values()]

    def again(self, held=None, facts=None, last=b"", turns=()):
        """How many versions were counted, and what was told."""
        before = versions(written(self.params, self.optimizer))
        every = [ctypes.addressof(turn) for turn in (*turns, self.turn)]
        names = [("step", "exp_avg", "exp_avg_sq")]
        facts = self.facts if facts is None else facts
        around = self.groups, held, [self.params], names, self.state
        told = reader().check_and_count(*around, facts, bytes(array("q", every)), last)
        after = versions(written(self.params, self.optimizer))
        (counted,) = {b - a for a, b in zip(before, after, strict=True)}
        return counted, told


def test_a_reader_that_sees_the_same_counts_versions_and_nothing_else_does():
    asked = Asked()
    params = asked.params
    asked.turn.far = 3.0
    assert asked.again() == (0, None)
    asked.turn.far = 2.0
    assert asked.again(facts=asked.facts[:-1]) == (0, None)
    counted, (kept, addresses) = asked.again(turns=[Cells("float32").turn])
    assert counted == 1
    assert [*array("q", addresses)] == [p.grad.data_ptr() for p in params]
    there = weakref.ref(params[0].grad)
    counted, moved = asked.again(last=addresses)
    assert (counted, len(moved)) == (1, 1)
    assert not asked.launched
    params[0].grad = None
    assert there() is not None
    assert asked.again() == (0, None)
    del kept, moved
    assert there() is None


@pytest.mark.host("its driver is told where the steps of the host lie")
def test_a_reader_takes_turns_of_what_stays_as_it_is():
    asked = Asked()
    held, group = asked.held, asked.groups[0]
    _, (_, addresses) = asked.again(held)  # gradients lie elsewhere
    assert not asked.launched
    assert asked.again(held, last=addresses) == (1, [])
    (given,) = asked.launched
    assert given[:9] == (7, 3, 1, 1, 64, 1, 1, 5, 9)
    assert given[-2:] == ([0.5, 0.25], [3.0] * 3)  # who steps meanwhile takes the next
    turn = asked.turn
    assert (turn.far, turn.at, turn.left, asked.counted()) == (3.0, 3.0, 1, [3.0] * 3)
    group["lr"] = 0.5
    assert asked.again(held, last=addresses) == (0, None)
    group["lr"] = held[0]["lr"]
    group["more"] = None
    assert asked.again(held, last=addresses) == (0, None)
    del group["more"]
    assert asked.again([*held, *held], last=addresses) == (0, None)
    assert asked.again(held, last=addresses) == (1, [])
    assert asked.launched[1][-2:] == ([1.5, 2.5], [4.0] * 3)
    assert (turn.far, turn.left) == (4.0, 0)


@pytest.mark.host("its driver is told where the steps of the host lie")
def test_a_turn_that_a_driver_refuses_counts_versions_and_no_steps():
    asked = Asked(refused=719)
    _, (_, addresses) = asked.again()
    before = versions(written(asked.params, asked.optimizer))
    with pytest.raises((DeviceError, OSError)):  # where there is no driver none has words for it
        asked.again(asked.held, last=addresses)
    assert versions(written(asked.params, asked.optimizer)) == [v + 1 for v in before]
    turn = asked.turn
    assert (turn.far, asked.counted(), turn.busy) == (2.0, [2.0] * 3, 0)
    assert turn.at != turn.far, "or its numbers would be taken for those of the next"


def test_a_number_that_is_none_counts_no_version():
    params, optimizer = trained()
    before = versions(written(params, optimizer))
    optimizer.param_groups[0]["eps"] = "small"
    with pytest.raises(ValueError, match="small"):
        optimizer.step()
    assert versions(written(params, optimizer)) == before


@pytest.mark.host("it patches kernels in C++")
def test_a_step_that_a_driver_refuses_counts_versions_and_no_steps(monkeypatch):
    (params, optimizer), (theirs, reference) = trained(), trained()
    before = versions(params)
    with monkeypatch.context() as patched:
        patched.setattr(launch_groups_cpu.CpuBatch, "run", refuse)
        with pytest.raises(DeviceError):
            optimizer.step()
    assert versions(params) == [v + 1 for v in before]
    for stepped in (optimizer, reference):
        stepped.step()
    for own, expected in zip(written(params, optimizer), written(theirs, reference), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=0)


def refuse(*_):
    raise DeviceError("a kernel that the device runs", "none", "Report it.")


def test_dynamo_stays_out_of_a_step_that_it_comes_to(monkeypatch):
    params, optimizer = trained(0)
    backward(params)
    following, repeated = [], kernels.repeat_step

    def spy(*given):
        following.append(get_eval_frame_callback())
        return repeated(*given)

    monkeypatch.setattr(kernels, "repeat_step", spy)

    @torch.compile(backend="eager")
    def train(x):
        y = x + 1
        optimizer.step()
        assert get_eval_frame_callback() is not None
        return y * 2

    before = versions(params)
    for _ in range(4):
        train(torch.ones(3))
    assert versions(params) == [v + 4 for v in before]
    assert following == [None] * 4
    assert optimizer._opt_called, "LR schedulers ask"


def test_a_backward_pass_through_what_was_stepped_is_refused():
    params, optimizer = trained()
    backward(params)
    loss = (params[0] * params[0]).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_get_no_objects_that_no_one_asks_for(monkeypatch):
    params, optimizer = trained()
    monkeypatch.setattr(again, "plan", None)  # nobody plans
    backward(params)
    assert [object_of(p) for p in params] == [0, 0, 0]
    optimizer.step()
    assert [object_of(p) for p in params] == [0, 0, 0]
    assert object_of(params[0]) == 0
    assert params[0].grad is not None
    assert object_of(params[0]) == id(params[0].grad)


def test_gradients_stay_as_long_as_they_were_seen():
    params, optimizer = trained()
    backward(params)
    seen = state_fingerprint.look(optimizer, {})
    there = weakref.ref(params[0].grad)
    params[0].grad = None
    assert there() is not None
    del seen
    assert there() is None


def test_names_of_states_are_equal_and_not_the_same():
    """As unpickling may leave them, and in another order."""
    _, optimizer = trained()
    before = state_fingerprint.look(optimizer, {})
    for own in optimizer.state.values():
        items = {"".join([*name]): value for name, value in reversed(own.items())}
        assert not any(a is b for a in items for b in own)
        own.clear()
        own.update(items)
    seen = state_fingerprint.look(optimizer, {}, before.facts)
    assert seen.facts == before.facts
    assert seen.facts[0] is before.facts[0]  # nothing was made that is the same


def test_each_group_has_its_own_names_of_states():
    params = [nn.Parameter(torch.ones(4)) for _ in range(4)]
    for p in params[1:]:
        p.grad = torch.ones(4)
    wanted = [("one", "two"), (), ("two",), ("other",)]
    state = {
        p: {name: torch.ones(4) for name in names} for p, names in zip(params, wanted, strict=True)
    }
    found = reader().look([[p] for p in params], wanted, state, b"")
    assert found is not None
    expected = [*params[1:], state[params[2]]["two"], state[params[3]]["other"]]
    assert [*map(id, found.held)] == [*map(id, expected)]


@pytest.mark.parametrize("trains", [False, True], ids=["no gradient", "gradient"])
def test_a_subclass_may_be_there_without_a_gradient(trains):
    params = [nn.Parameter(torch.ones(4)), torch.ones(3).as_subclass(Mine).requires_grad_()]
    optimizer = SGD(params, 0.1)
    assert fuse_step(optimizer) is None
    for p in params[: 1 + trains]:
        p.grad = torch.ones(p.shape)
    assert (state_fingerprint.look(optimizer, {}) is None) == trains
    optimizer.step()
    expected = [torch.full((4,), 0.9), torch.full((3,), 0.9 if trains else 1.0)]
    for p, value in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().as_subclass(torch.Tensor), value)
