"""Whatever changes between steps, a GPU's fused steps are torch's: drawn programs of changes.

On a GPU of the host (`simulated_gpu.py`), in fp64, so that a wrong number is no rounding.
"""

import copy
import itertools
import math
import random

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from ipex_inductor.optim import FusedStep, GradScaler, Lamb, Lars
from support.optim import simulated_gpu

pytestmark = pytest.mark.host("a driver that computes on tensors of the host")


def groups(p, rate):
    return [{"params": p[:2]}, {"params": p[2:], "lr": rate}]


MADE = {
    "adamw": lambda p: AdamW(groups(p, 0.03), 0.01, foreach=False),
    "adam": lambda p: Adam(groups(p, 0.03), 0.01, weight_decay=0.1, foreach=False),
    "sgd": lambda p: SGD(groups(p, 0.3), 0.1, 0.9, dampening=0.1, foreach=False),
    "sgd plain": lambda p: SGD(p, 0.1, foreach=False),
    "adagrad": lambda p: Adagrad(p, 0.1, lr_decay=0.01, foreach=False),
    "lamb": lambda p: Lamb(p, 0.1, weight_decay=0.1),
    "lars": lambda p: Lars(p, 0.1, 0.9, epsilon=1e-3),
}
ASKED = [(None, True), (0.5, False), (0.5, True)]  # a norm to clip, and gradients made zero
HOW = (*["as it is"] * 3, "attributes", "attributes, unscaled", "scaler", "closure")


class Program:
    """An optimizer that is fused, the same of torch, and what is drawn for both."""

    def __init__(self, gpu, name, seed):
        self.gpu, self.draw = gpu, random.Random(seed)
        torch.manual_seed(seed)
        self.mine = [nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (3, 5, 4, 7)]
        self.theirs = [nn.Parameter(p.detach().clone()) for p in self.mine]
        self.ours, self.torchs = MADE[name](self.mine), MADE[name](self.theirs)
        # Half of them seldom change, and little: else no step is like the one before for long.
        is_regular = self.draw.random() < 0.5
        self.often, self.absent = (0.1, 0.0) if is_regular else (0.35, 0.05)
        self.ways = HOW[:1] if is_regular else HOW
        kinds = self.draw.sample([*CHANGES.values()], self.draw.choice([1, 2, len(CHANGES)]))
        self.changes = [*itertools.chain(*kinds)]
        clip, zero = (None, False) if is_regular else self.draw.choice(ASKED)
        self.step = FusedStep(self.ours, clip_norm=clip, zero_grad=zero)
        self.scheduled = self.draw.choice([None, "a number", "a tensor"])
        if self.scheduled == "a tensor":
            for ours in self.ours.param_groups:
                ours["lr"] = torch.tensor(0.1)
        self.scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.scaler.scale(torch.ones(()))  # which makes its tensors
        self.hooks, self.kept, self.history = [], [], []

    def param(self):
        return self.draw.choice(self.mine)

    def groups(self):
        """Each of ours with torch's."""
        return [*zip(self.ours.param_groups, self.torchs.param_groups, strict=True)]

    def group(self):
        """One of ours, and the same of torch's."""
        return self.draw.choice(self.groups())

    def schedule(self):
        """As torch's schedulers do after each step: a tensor stays where it is."""
        for ours, torchs in self.groups():
            rate = self.draw.random() / 10
            if isinstance(ours["lr"], torch.Tensor):
                ours["lr"].fill_(rate)
            else:
                ours["lr"] = rate
            torchs["lr"] = float(ours["lr"])


def rate(program):
    ours, torchs = program.group()
    ours["lr"] = torchs["lr"] = program.draw.random() / 10


def rate_in_a_tensor(program):
    ours, torchs = program.group()
    dtype = program.draw.choice([torch.float32, torch.float64])
    ours["lr"] = torch.tensor(program.draw.random() / 10, dtype=dtype)
    if program.draw.random() < 0.5:
        program.gpu.keep(ours["lr"])
    torchs["lr"] = float(ours["lr"])


def rate_in_its_place(program):
    ours, torchs = program.group()
    if isinstance(ours["lr"], torch.Tensor):
        ours["lr"].fill_(program.draw.random() / 10)
        torchs["lr"] = float(ours["lr"])


def decay(program):
    ours, torchs = program.group()
    ours["weight_decay"] = torchs["weight_decay"] = program.draw.choice([0.0, 0.1, 0.2])


def momentum(program):
    ours, torchs = program.group()
    if ours.get("momentum"):
        ours["momentum"] = torchs["momentum"] = program.draw.choice([0.9, 0.5])


def who_counts(program):
    ours, _ = program.group()
    if "capturable" in ours:
        ours["capturable"] = not ours["capturable"]


def gradient_absent(program):
    program.param().grad = None


def gradient_moved(program):
    p = program.param()
    program.kept.append(p.grad)  # so that its memory is not what the next one gets
    p.grad = None if p.grad is None else p.grad.clone()


def gradient_not_aligned(program):
    p = program.param()
    if p.grad is not None:
        p.grad = torch.zeros(p.numel() + 1, dtype=p.dtype)[1:]


def parameter_moved(program):
    p = program.param()
    program.kept.append(p.data)
    p.data = p.data.clone()


def counts(program):
    more = program.draw.choice([1, 2, 0.5])
    for optimizer in (program.ours, program.torchs):
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].add_(more)


def states_moved(program):
    for state in program.ours.state.values():
        for name, held in state.items():
            if isinstance(held, torch.Tensor):
                state[name] = held.clone()
                if program.gpu.has(held):
                    program.gpu.keep(state[name])


def states_loaded(program):
    for optimizer in (program.ours, program.torchs):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def state_forgotten(program):
    if not isinstance(program.ours, Adagrad):  # which makes its own once
        number = program.draw.randrange(len(program.mine))
        program.ours.state.pop(program.mine[number], None)
        program.torchs.state.pop(program.theirs[number], None)


def group_added(program):
    if len(program.mine) < 8 and not isinstance(program.ours, Adagrad):
        p = nn.Parameter(torch.randn(6, dtype=torch.float64))
        q = nn.Parameter(p.detach().clone())
        program.mine.append(p)
        program.theirs.append(q)
        program.ours.add_param_group({"params": [p]})
        program.torchs.add_param_group({"params": [q]})


def order(program):
    ours, _ = program.group()
    ours["params"].reverse()


def clip(program):
    program.step._options.clip_norm = program.draw.choice([None, 0.5, 2.0])


def zeroing(program):
    program.step._options.zero_grad = not program.step._options.zero_grad


def stream(program):
    program.gpu.stream = program.draw.choice([0, 7, 9])


def hook(program):
    if program.hooks:
        program.hooks.pop().remove()
    else:
        program.hooks.append(program.ours.register_step_pre_hook(lambda *_: None))


CHANGES = {
    "rates": (rate, rate_in_a_tensor, rate_in_its_place),
    "numbers": (decay, momentum, counts, who_counts),
    "gradients": (gradient_absent, gradient_moved, gradient_not_aligned, parameter_moved),
    "states": (states_moved, states_loaded, state_forgotten),
    "groups": (group_added, order),
    "what is asked for": (clip, zeroing, stream, hook),
}


def gradients(program, scale):
    """Drawn into the memory of those before, of some parameters none. Torch's have no scale."""
    draw = program.draw
    for p, q in zip(program.mine, program.theirs, strict=True):
        grad = torch.randn_like(p)
        q.grad = grad.clone()
        if p.grad is not None and draw.random() >= program.absent:
            p.grad.copy_(grad * scale)
        elif draw.random() < 0.8:
            p.grad = grad * scale
        else:
            p.grad = q.grad = None


def stepped(program, how, bad, scale):
    """By ours, as it is told of the scale and of gradients that are not finite."""
    ours = program.ours
    if how == "scaler":
        program.scaler.step(ours)
        found = program.scaler._per_optimizer_states[id(ours)]["found_inf_per_device"]
        assert sum(map(float, found.values())) == bad
        program.scaler.update()
        return
    if how.startswith("attributes"):
        ours.grad_scale = None if "unscaled" in how else torch.tensor(scale)
        ours.found_inf = torch.tensor(float(bad))
    ours.step(*[lambda: None] * (how == "closure"))
    if how.startswith("attributes"):
        del ours.grad_scale, ours.found_inf


def one_step(program):
    draw, options = program.draw, program.step._options
    if program.scheduled:
        program.schedule()
    while draw.random() < program.often:
        change = draw.choice(program.changes)
        program.history.append(change.__name__)
        change(program)
    how = draw.choice(program.ways)
    scale = {"scaler": program.scaler._scale.item(), "attributes": 4.0}.get(how, 1.0)
    gradients(program, scale)
    there = [p for p in program.mine if p.grad is not None]
    if not there:
        return
    bad = how not in ("as it is", "closure") and draw.random() < 0.25
    if bad:
        there[0].grad[0] = draw.choice([math.inf, math.nan])
    program.history.append(f"{how}{', not finite' * bad}, clip {options.clip_norm}")
    before = [p._version for p in there]
    stepped(program, how, bad, scale)
    assert program.gpu.error is None
    if not bad:
        if options.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(program.theirs, options.clip_norm)
            close(program.step.grad_norm, norm)
        program.torchs.step()
        assert all(p._version > version for p, version in zip(there, before, strict=True))
    assert not options.zero_grad or not any(p.grad.any() for p in there)
    for p, q in zip(program.mine, program.theirs, strict=True):
        close(p, q)
        for name, held in program.torchs.state.get(q, {}).items():
            if held is not None:
                close(program.ours.state[p][name], held)


def close(mine, theirs):
    # Sums in another order, counts in fp32, and a norm that is kept in the gradients' dtype.
    found, wanted = (torch.as_tensor(t).detach().double() for t in (mine, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.sampled
def test_steps_are_torchs(name, seeds, monkeypatch):
    gpu = simulated_gpu.installed(monkeypatch)
    for seed in seeds:
        program = Program(gpu, name, seed)
        for _ in range(40):
            try:
                one_step(program)
            except Exception as error:
                error.add_note(f"seed {seed}, last {program.history[-12:]}")
                raise
    assert gpu.at_once, "none was like the one before"
