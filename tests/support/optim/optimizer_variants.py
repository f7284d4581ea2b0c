"""What the tests of optimizers share: variants, ways to hold weights, a model and its fp32 twin."""

import copy
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from ipex_inductor.optim import Lamb, Lars, attach_master_weights
from ipex_inductor.optim.planning import plan
from ipex_inductor.optim.weights import TABLE

# How weights are held: dtype, split.
LOW = {
    "bf16 split": (torch.bfloat16, True),
    "bf16 master": (torch.bfloat16, False),
    "fp16 master": (torch.float16, False),
}

VARIANTS = {
    "sgd": partial(SGD, lr=0.1),
    "sgd momentum": partial(SGD, lr=0.1, momentum=0.9),
    "sgd dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "sgd nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd maximize": partial(SGD, lr=0.1, momentum=0.9, maximize=True),
    "sgd foreach": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd torch-fused": partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "sgd tensor lr": partial(SGD, lr=torch.tensor(0.1), momentum=0.9),
    "adagrad": partial(Adagrad, lr=0.1),
    "adagrad decays": partial(Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.01),
    "adagrad start": partial(Adagrad, lr=0.1, initial_accumulator_value=0.5, eps=1e-4),
    "adagrad foreach": partial(Adagrad, lr=0.1, maximize=True, foreach=True),
    "adagrad torch-fused": partial(Adagrad, lr=0.1, weight_decay=0.01, fused=True),
    "adam": partial(Adam),
    "adam lr 0": partial(Adam, lr=0.0),
    "adam amsgrad": partial(Adam, amsgrad=True, weight_decay=0.01),
    "adam maximize": partial(Adam, maximize=True, betas=(0.8, 0.95)),
    "adam foreach": partial(Adam, foreach=True, amsgrad=True),
    "adam torch-fused": partial(Adam, fused=True, weight_decay=0.01),
    "adam tensor lr": partial(Adam, lr=torch.tensor(1e-2)),
    "adamw": partial(AdamW, weight_decay=0.1),
    "adamw amsgrad": partial(AdamW, amsgrad=True, maximize=True),
    "adamw foreach": partial(AdamW, foreach=True),
    "lamb": partial(Lamb),
    "lamb decay": partial(Lamb, weight_decay=0.1, betas=(0.8, 0.95)),
    "lars": partial(Lars, lr=0.1),
    "lars momentum": partial(Lars, lr=0.1, momentum=0.9, weight_decay=0.01, epsilon=1e-6),
}
ONE_EACH = ("sgd momentum", "adagrad", "adam amsgrad", "adamw", "lamb decay", "lars momentum")


# Of one element, of none, longer than a vector, and to be channels-last.
SHAPES = [(), (1,), (0,), (13,), (5, 7), (3, 4, 2, 2)]


def tensors(dtype=torch.float32, shapes=SHAPES):
    """Parameters of those shapes, unaligned; those of four dimensions are channels-last."""
    made = []
    for shape in shapes:
        flat = torch.randn(torch.Size(shape).numel() + 1).to(dtype)[1:]
        if len(shape) == 4:
            n, c, h, w = shape
            made.append(nn.Parameter(flat.view(n, h, w, c).permute(0, 3, 1, 2)))
        else:
            made.append(nn.Parameter(flat.view(shape)))
    return made


def copies(params, dtype=None):
    """The same values, in layouts of their own."""
    return [nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def in_groups(params):
    """Two groups, the second with a rate of its own."""
    return [{"params": params[1:]}, {"params": params[:1], "lr": 0.01}]


def single(make):
    """The same optimizer in torch's single-tensor form, in which each formula can be read.

    The host counts, as torch's powers of steps on a GPU are fp32's, also where all else is fp64.
    """
    off = {} if make.func in (Lamb, Lars) else {"foreach": False, "fused": False}
    off |= {"capturable": False} if "capturable" in make.keywords else {}
    return partial(make.func, **make.keywords | off)


def left(optimizer):
    """Why kernels leave parameters to torch, in the step that is next."""
    return set(plan(optimizer, vars(optimizer).get(TABLE, {})).left.values())


def device():
    """Where these tests run: see their `--device`."""
    return torch.get_default_device()


def autocast(dtype, **kwargs):
    """torch's, on that device."""
    return torch.autocast(device().type, dtype, **kwargs)


class Net(nn.Module):
    """A tied weight, a channels-last and a 0-d parameter, a norm that stays fp32."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(5)
        self.up, self.down = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.down.weight = self.up.weight
        self.gain = nn.Parameter(torch.tensor(1.5))

    def cast(self):
        """The parameters that are held in low precision."""
        return [p for name, p in self.named_parameters() if not name.startswith("norm")]


def groups(model):
    """Two groups, the second with a rate of its own."""
    first, *rest = model.parameters()
    return [{"params": rest}, {"params": [first], "lr": 0.01}]


def pair(make, held, model=None):
    """A model and its optimizer as `held` says, and their plain fp32 twins."""
    model = model or Net()
    twin = copy.deepcopy(model)
    optimizer, reference = make(groups(model)), make(groups(twin))
    attach_master_weights(model, optimizer, model.cast(), held[0], split=held[1])
    return model, optimizer, twin, reference


def same_gradients(model, twin, skip=()):
    """One draw for both: rounded to the dtype that `model` computes in, fp32 for the twin."""
    for number, (p, q) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
        drawn = torch.randn_like(q).to(p.dtype)
        p.grad = None if number in skip else drawn.to(p.grad_dtype)
        q.grad = None if number in skip else drawn.float()


def train(model, optimizer, twin, reference, steps=5):
    """The same steps for both."""
    for number in range(steps):
        same_gradients(model, twin, skip={number % 3})
        optimizer.step()
        reference.step()


def assert_same(model, optimizer, twin, reference):
    """Weights and optimizer state agree to the bit, in fp32, under the same names."""
    ours, theirs = model.state_dict(), twin.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name].stride() == value.stride()
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0, msg=name)
    ours, theirs = optimizer.state_dict(), reference.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        assert ours["state"][key].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(ours["state"][key][name], value, rtol=0, atol=0, msg=name)
