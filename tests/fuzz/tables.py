"""What the generator chooses from, spelt as users spell it: `{v}` is the value, `{o}` another."""

# Name -> spellings. The domain of the last few is positive.
UNARY = {
    "relu": ("F.relu({v})", "torch.relu({v})", "{v}.relu()", "{v}.relu_()", "F.relu({v}, True)"),
    "relu6": ("F.relu6({v})", "F.hardtanh({v}, 0.0, 6.0)", "F.relu6({v}, True)"),
    "hardtanh": ("F.hardtanh({v})", "F.hardtanh({v}, -0.5, 2.0)", "F.hardtanh_({v})"),
    "clamp": (
        "{v}.clamp(-0.5, 0.75)",
        "torch.clamp({v}, 0, 6)",
        "{v}.clamp(min=0.0)",
        "{v}.clamp(max=0.5)",
        "{v}.clamp_(-1.0, 1.0)",
    ),
    "sigmoid": ("torch.sigmoid({v})", "{v}.sigmoid_()"),
    "tanh": ("torch.tanh({v})", "F.tanh({v})", "{v}.tanh_()"),
    "gelu": ("F.gelu({v})", "F.gelu({v}, approximate='none')"),
    "gelu_tanh": ("F.gelu({v}, approximate='tanh')",),
    "gelu_by_hand": ("{v} * 0.5 * (1.0 + torch.erf({v} / math.sqrt(2.0)))",),
    "gelu_tanh_by_hand": (
        "0.5 * {v} * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * ({v} + 0.044715 * {v} ** 3)))",
    ),
    "quick_gelu": ("{v} * torch.sigmoid(1.702 * {v})", "torch.sigmoid({v} * 1.702) * {v}"),
    "silu": ("F.silu({v})", "F.silu({v}, True)"),
    "silu_by_hand": ("{v} * torch.sigmoid({v})", "torch.sigmoid({v}) * {v}", "{v}.sigmoid() * {v}"),
    "hardswish": ("F.hardswish({v})", "F.hardswish({v}, True)"),
    "hardsigmoid": ("F.hardsigmoid({v})", "F.hardsigmoid({v}, True)"),
    "leaky_relu": ("F.leaky_relu({v})", "F.leaky_relu({v}, 0.25)", "F.leaky_relu_({v}, 0.1)"),
    "elu": ("F.elu({v})", "F.elu({v}, 0.5)", "F.elu_({v})", "F.celu({v})", "F.selu({v})"),
    "mish": ("F.mish({v})", "F.mish({v}, True)"),
    "abs": ("torch.abs({v})", "{v}.abs_()"),
    "exp": ("torch.exp({v})", "{v}.exp_()"),
    "square": ("torch.square({v})", "{v}.square_()"),
    "pow": ("{v}.pow(2)", "{v} ** 3", "torch.pow({v}, 2.0)"),
    "round": ("torch.round({v})", "{v}.round_()"),
    "neg": ("-{v}",),
    "softplus": ("F.softplus({v})",),
    "log": ("torch.log({v})", "{v}.log_()"),
    "sqrt": ("torch.sqrt({v})", "{v}.sqrt_()"),
    "root": ("{v}.pow(0.5)", "torch.pow({v}, 1.5)", "torch.rsqrt({v})"),
}
POSITIVE = frozenset({"log", "sqrt", "root"})

# A tensor of the same shape, or one that broadcasts to it.
BINARY = {
    "add": ("{v} + {o}", "{o} + {v}", "torch.add({v}, {o})", "{v}.add_({o})"),
    "sub": ("{v} - {o}", "{o} - {v}", "{v}.sub_({o})", "torch.sub({v}, {o})"),
    "mul": ("{v} * {o}", "{o} * {v}", "{v}.mul_({o})"),
    "scaled": (
        "torch.add({v}, {o}, alpha=2)",
        "torch.add({o}, {v}, alpha=0.5)",
        "torch.sub({v}, {o}, alpha=3)",
    ),
    "gate": ("torch.sigmoid({v}) * {o}", "{v} * torch.sigmoid({o})", "{v} * {o}.sigmoid()"),
    "div": ("{v} / ({o}.abs() + 1)",),
}

# Between product and epilogue: what must keep a rule away. `{s}` is the shape.
MISSES = {
    "cast": "{v}.to(torch.{other})",
    "cast and back": "{v}.to(torch.{other}).to(torch.{dtype})",
    "number added": "{v} + 1",
    "scaled": "{v} * 0.5",
    "transposed": "{v}.transpose(0, -1)",
    "flattened": "{v}.reshape(-1)",
    "rows merged": "{v}.reshape(1, {n})",
    "flipped": "{v}.flip(-1)",
    "flipped rows": "torch.flip({v}, (0,))",
    "sliced": "{v}[..., :2]",
    "a row less": "{v}[1:]",
    "zero-size": "{v}[:0]",
    "expanded": "{v}.unsqueeze(0).expand(2, *{s})",
    "permuted": "{v}.movedim(0, -1).contiguous()",
    "detached": "{v}.detach()",
    "cumulated": "{v}.cumsum(-1)",
}

# What changes nothing: a rule may or may not fire, the value stays.
NOISE = {
    "x+0": "{v} + 0",
    "x*1": "{v} * 1",
    "x-0": "{v} - 0.0",
    "view round trip": "{v}.reshape(-1).reshape({s})",
    "squeeze round trip": "{v}.unsqueeze(0).squeeze(0)",
    "transpose twice": "{v}.transpose(0, -1).transpose(0, -1)",
    "double transpose copied": "{v}.transpose(0, -1).contiguous().transpose(0, -1)",
    "contiguous": "{v}.contiguous()",
    "clone": "{v}.clone()",
    "alias": "{v}.view_as({v})",
    "split and cat": "torch.cat(torch.split({v}, 2, -1), -1)",
    "chunk and cat": "torch.cat({v}.chunk(2, 0), 0)",
    "stack": "torch.stack(({v}, {v}), 0)[1]",
    "flip twice": "{v}.flip(0).flip(0)",
    "same dtype": "{v}.to(torch.{dtype})",
    "expand_as": "{v}.expand_as({v})",
    "dropout": "F.dropout({v}, 0.5, training=False)",
    "select": "torch.where({v} < 1e9, {v}, {v})",
    "double neg": "-(-{v})",
}

DEAD = ("torch.relu({v})", "{v} + 1", "{v}.sum()", "{v}.reshape(-1)")
