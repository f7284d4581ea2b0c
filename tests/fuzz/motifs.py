"""The families of rules as program pieces: each takes a builder and returns its last value.

Sizes come from small sets, so that torch's caches of fake results are hit.
"""

import dataclasses
import functools
import math

from fuzz.tables import BINARY, DEAD, MISSES, NOISE, POSITIVE, UNARY

# Sources


def source(b, dims):
    """A live value of one of these numbers of dimensions, or a new input."""
    live = [name for name, _ in b.steps if b.dim(name) in dims and b.env[name].numel() <= 3000]
    live = [n for n in live[-4:] if b.env[n].is_floating_point() and 0 not in b.shape(n)]
    live = [n for n in live if b.env[n].isfinite().all() and b.env[n].abs().max() < 50]
    if live and b.chance(0.7):
        return b.rng.choice(live)
    return fresh(b, b.rng.choice(dims))


def fresh(b, dim):
    """A new input: batch, then rows or channels, then what lies in them."""
    if dim < 3:
        return b.input(*[b.batch(1, 2, 3)] * (dim - 1), b.pick(4, 6, 8))
    rows = b.length(4, 6) if dim == 3 else b.pick(4, 6)
    plane = [b.length(5, 6), *[b.pick(5, 6)] * (dim - 4)] if dim > 3 else []
    return b.input(b.batch(1, 2, 3), rows, *plane, b.pick(6, 8))


def other(b, shape):
    """Another tensor of this shape: a live value, a new input or a parameter."""
    live = [name for name, _ in b.steps if b.shape(name) == shape and b.calm(name) == name]
    if live and b.chance(0.5):
        return b.rng.choice(live)
    return b.parameter(*shape, scale=1.0) if b.chance(0.1) else b.input(*shape)


# Products


def bias(b, size, probability=0.7):
    """A bias, sometimes strided, expanded, of one element or computed."""
    if not b.chance(probability):
        return None
    if b.chance(0.85):
        return b.parameter(size)
    made = {
        "strided": lambda: b.emit(f"{b.parameter(2 * size)}[::2]"),
        "column": lambda: b.emit(f"{b.parameter(size, 3)}[:, 1]"),
        "expanded": lambda: b.emit(f"{b.parameter(1)}.expand({size})"),
        "flipped": lambda: b.emit(f"{b.parameter(size)}.flip(0)"),
        "an input": lambda: b.input(size),
        "computed": lambda: b.emit(f"{b.parameter(size)} * 2"),
    }
    kind = b.rng.choice(sorted(made))
    b.tag(f"bias: {kind}")
    return made[kind]()


def weight(b, *shape):
    """A weight: mostly a parameter, sometimes none, or one computed from parameters."""
    if b.chance(0.85):
        return b.parameter(*shape)
    kind = b.pick("an input", "computed", "a buffer", "not contiguous", "depends on an input")
    b.tag(f"weight: {kind}")
    scale = 1 / math.sqrt(max(1, math.prod(shape[1:])))
    if kind == "an input":
        return b.input(*shape, scale=scale)
    if kind == "a buffer":
        return b.buffer(*shape, scale=scale)
    if kind == "computed":
        return b.emit(f"{b.parameter(*shape)} * 2 - 0.25")
    if kind == "depends on an input":
        return b.emit(f"{b.parameter(*shape)} * {b.input(shape[-1])}")
    turned = b.parameter(*reversed(shape), scale=scale)
    return b.emit(f"{turned}.permute({', '.join(map(str, reversed(range(len(shape)))))})")


def window(b, dims, size):
    """(kernel, stride, padding, dilation), each with its own numbers a dimension, that fit."""
    while True:
        kernel, stride, padding, dilation = (
            [b.rng.choice(options) for _ in range(dims)]
            for options in ([1, 2, 3], [1, 1, 2], [0, 0, 1, 2], [1, 1, 2])
        )
        fits = [
            s + 2 * p >= d * (k - 1) + 1
            for k, p, d, s in zip(kernel, padding, dilation, size, strict=True)
        ]
        if all(fits):
            return kernel, stride, padding, dilation


def groups_of(b, channels):
    return b.rng.choice([g for g in (1, 1, 1, 2, channels) if channels % g == 0])


def conv(dims):
    def product(b, x=None):
        x = x or source(b, [dims + 2] * 9 + [dims + 1])
        channels, *size = b.shape(x)[-dims - 1 :]
        kernel, stride, padding, dilation = window(b, dims, size)
        groups = groups_of(b, channels)
        out = groups * b.pick(1, 2, 4) if groups > 1 else b.pick(1, 4, 6, 8)
        w, c = weight(b, out, channels // groups, *kernel), bias(b, out)
        if b.chance(0.1) and dims == 2 and b.dim(x) == 4:
            x = b.emit(f"{x}.contiguous(memory_format=torch.channels_last)")
        if b.chance(0.3) and stride == [1] * dims:
            small = all(k <= s for k, s in zip(kernel, size, strict=True))
            where = b.pick("'same'", "'valid'", "0") if small else "'same'"
            return b.emit(f"F.conv{dims}d({x}, {w}, {c}, padding={where}, groups={groups})")
        return b.emit(f"F.conv{dims}d({x}, {w}, {c}, {stride}, {padding}, {dilation}, {groups})")

    return product


def transposed(dims):
    def product(b, x=None):
        x = x or source(b, [dims + 2])
        channels, *size = b.shape(x)[-dims - 1 :]
        groups = groups_of(b, channels)
        out = b.pick(1, 2, 4)
        kernel = [b.pick(1, 2, 3) for _ in size]
        stride = [b.pick(1, 1, 2) for _ in size]
        dilation = [b.pick(1, 1, 2) for _ in size]
        padding = [min(b.pick(0, 0, 1), d * (k - 1)) for k, d in zip(kernel, dilation, strict=True)]
        extra = [b.rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
        w, c = weight(b, channels, out, *kernel), bias(b, out * groups)
        return b.emit(
            f"F.conv_transpose{dims}d({x}, {w}, {c}, {stride}, {padding}, {extra}, {groups},"
            f" {dilation})"
        )

    return product


def padded_conv(b, x=None):
    """A convolution behind a pad that it could do itself, or could not."""
    dims = b.pick(1, 2, 2, 3)
    x = x or source(b, [dims + 2])
    crops = ["cropped"] if min(b.shape(x)[-dims:]) > 4 else []
    # One at a time: of two traps, the second is not reached.
    kind = b.pick("even", "even", "even", "uneven", "value", "channels", "replicate", *crops)
    pads, rest = [b.pick(0, 1, 1, 2)] * 2 * dims, b.pick("", "", ", 'constant', 0")
    if kind == "uneven":
        pads[b.rng.randrange(2 * dims)] += 1
    elif kind == "value":
        pads, rest = [b.pick(1, 2)] * 2 * dims, ", value=1.5"
    elif kind == "channels":
        pads += [1, 1]
    elif kind == "replicate":
        rest = ", mode='replicate'"
    elif kind == "cropped":
        pads = [-1] * 2 * dims
    b.tag(f"pad: {kind}")
    x = b.emit(f"F.pad({x}, {tuple(pads)}{rest})")
    if b.chance(0.15):
        b.extra_outputs.append(x)
    return conv(dims)(b, x)


def linear(b, x=None):
    x = x or source(b, [2, 3, 4])
    inner, outer = b.shape(x)[-1], b.pick(1, 4, 6, 8)
    form = b.pick("linear", "linear", "linear", "matmul", "matmul+bias", "kn", "flattened")
    if form == "kn":
        w = weight(b, inner, outer)
        c = bias(b, outer)
        return b.emit(f"{x} @ {w} + {c}" if c else f"{x} @ {w}")
    w = weight(b, outer, inner)
    if form == "matmul":
        return b.emit(f"torch.matmul({x}, {w}.t())")
    c = bias(b, outer)
    if form == "flattened":
        rows = math.prod(b.shape(x)[:-1])
        v = b.emit(f"F.linear({x}.reshape(-1, {inner}), {w}, {c})")
        shape = b.pick((*b.shape(x)[:-1], outer), (1, rows, outer), (rows, 1, outer), (outer, rows))
        return b.emit(f"{v}.view({', '.join(map(str, shape))})")
    if form == "matmul+bias" and c:
        return b.emit(b.pick(f"{x} @ {w}.t() + {c}", f"{c} + {x} @ {w}.t()"))
    return b.emit(f"F.linear({x}, {w}, {c})")


# Forms of torch.addmm: what it adds, and its scales.
ADDENDS = {
    "bias": lambda b, rows, outer: b.parameter(outer),
    "matrix": lambda b, rows, outer: b.pick(b.input, b.parameter)(rows, outer),
    "one": lambda b, rows, outer: b.parameter(1),
    "column": lambda b, rows, outer: b.input(rows, 1),
    "row": lambda b, rows, outer: b.parameter(1, outer),
}
SCALES = (", alpha=0.5", ", beta=0.5", ", beta=2, alpha=3")


def addmm(b, x=None, odd=0.3):
    """`odd` is how likely its addend is no bias, and how likely it is scaled."""
    x = x or source(b, [2])
    rows, inner = b.shape(x)
    outer = b.pick(4, 6, 8)
    w = weight(b, outer, inner)
    kind = b.rng.choice(sorted(ADDENDS)) if b.chance(odd) else "bias"
    scale = b.rng.choice(SCALES) if b.chance(odd) else ""
    return b.emit(f"torch.addmm({ADDENDS[kind](b, rows, outer)}, {x}, {w}.t(){scale})")


def bmm(b, x=None):
    x = x or source(b, [3])
    batch, rows, inner = b.shape(x)
    outer = b.pick(4, 6)
    y = weight(b, batch, inner, outer)
    form = b.pick("bmm", "bmm", "matmul", "baddbmm", "turned", "bmm+bias")
    if form == "baddbmm":
        addend = b.rng.choice([b.parameter, b.input])(*b.pick((outer,), (batch, rows, outer)))
        scale = b.pick("", "", ", alpha=0.5", ", beta=0.5")
        return b.emit(f"torch.baddbmm({addend}, {x}, {y}{scale})")
    if form == "turned":
        y = b.emit(f"{y}.transpose(1, 2).contiguous()")
        return b.emit(f"torch.bmm({x}, {y}.transpose(1, 2))")
    if form == "bmm+bias":
        return b.emit(f"torch.bmm({x}, {y}) + {b.parameter(outer)}")
    return b.emit(f"torch.{form}({x}, {y})")


PRODUCTS = {
    "conv1d": conv(1),
    "conv2d": conv(2),
    "conv3d": conv(3),
    "conv_transpose1d": transposed(1),
    "conv_transpose2d": transposed(2),
    "conv_transpose3d": transposed(3),
    "pad": padded_conv,
    "linear": linear,
    "addmm": addmm,
    "bmm": bmm,
}


# Epilogues


def unary(b, v, name=None):
    """An activation; a positive domain is reached by shifting the value's own bias."""
    name = name or b.rng.choice(sorted(UNARY))
    b.tag(f"unary: {name}")
    if name in POSITIVE and (b.env[v].numel() == 0 or b.env[v].min() < 0.1):
        v = positive(b, v)
    return spelt(b, v, UNARY[name])


def positive(b, v):
    """`v` made positive where it is: by a shift of the bias it was made with, else by abs."""
    made = b.steps[-1] if b.steps and b.steps[-1][0] == v else None
    shifted = made and _shift_bias(b, made)
    return v if shifted else b.emit(f"{v}.abs() + 0.5")


def _shift_bias(b, step):
    """Raise the one-dimensional parameter that the last step adds by as much as is needed."""
    name, line = step
    for number, leaf in enumerate(b.leaves):
        used_once = sum(leaf.name in line.replace(",", " ").split() for _, line in b.steps) == 1
        if leaf.kind != "parameter" or len(leaf.shape) != 1 or not used_once:
            continue
        if f"{leaf.name}," not in line and not line.endswith(f"+ {leaf.name}"):
            continue
        lowest = float(b.env[name].min())
        raised = dataclasses.replace(leaf, shift=round(1 - lowest, 2))
        old = b.env[leaf.name]
        b.env[leaf.name] = raised.value()
        value = b.evaluate(line)
        if value.min() > 0.1:
            b.leaves[number], b.env[name] = raised, value
            return True
        b.env[leaf.name] = old
    return False


def spelt(b, v, spellings, **names):
    """`v` put into one of these spellings; not in place where it is a leaf or cannot be."""
    line = b.rng.choice(spellings)
    in_place = "_(" in line or "True)" in line
    if in_place and (v[0] != "v" or b.env[v].numel() == 0):
        v = b.emit(f"{v}.clone()")
    try:
        return b.emit(line.format(v=v, **names))
    except RuntimeError:  # in place on memory that overlaps
        return b.emit(spellings[0].format(v=v, **names))


def binary(b, v, name=None):
    name = name or b.rng.choice(sorted(BINARY))
    shape = b.shape(v)
    kind = "same"
    if b.chance(0.25):
        kind = b.pick("row", "column", "one", "number", "itself", "wider", "scalar tensor")
    b.tag(f"binary: {name}, {kind}")
    if kind == "number":
        o = b.pick("0.5", "2", "1.0")
        return b.emit(b.pick("{v} + {o}", "{v} * {o}", "{o} - {v}").format(v=v, o=o))
    dims = [1] * len(shape)
    o = {
        "same": lambda: other(b, shape),
        "row": lambda: b.input(*dims[:-1], *shape[-1:]),
        "column": lambda: b.input(*shape[:1], *dims[1:]),
        "one": lambda: b.input(*dims),
        "itself": lambda: v,
        "wider": lambda: b.input(2, *shape),
        "scalar tensor": lambda: b.input(),
    }[kind]()
    spellings = BINARY[name] if kind != "wider" else BINARY[name][:2]  # not in place
    if o == v and name in ("sub", "scaled"):  # zero, or nearly: nothing could be seen behind it
        o = b.input(*shape)
    if b.chance(0.1) and o[0] == "x" and kind == "same" and len(shape) > 1:
        turned = b.input(*reversed(shape))
        o = b.emit(f"{turned}.permute({', '.join(map(str, reversed(range(len(shape)))))})")
    return spelt(b, v, spellings, o=o)


def batch_norm(b, v, weights=None):
    """Statistics far from the identity, so that a wrong fold shows."""
    if b.dim(v) < 2:
        return v
    channels = b.shape(v)[1]
    training = b.chance(0.06) and b.env[v].numel() > 4 * channels and weights is None
    if weights is None:
        affine = b.pick("both", "both", "both", "none", "weight", "bias")
        statistics = b.chance(0.95)
        mean = b.buffer(channels) if statistics else b.parameter(channels)
        variance = b.buffer(channels, fill="positive")
        gamma = b.parameter(channels, scale=1.0) if affine in ("both", "weight") else None
        beta = b.parameter(channels, scale=1.0) if affine in ("both", "bias") else None
        if b.chance(0.05):
            mean = b.input(channels)
            b.tag("batch norm: mean is an input")
        weights = (mean, variance, gamma, beta)
        b.tag(f"batch norm: {'training' if training else affine}")
        b.norms.append(weights)
    mean, variance, gamma, beta = weights
    epsilon = b.pick(1e-5, 1e-5, 1e-3, 0.1)
    mode = "True" if training and mean[0] == "m" else "False"
    return b.emit(f"F.batch_norm({v}, {mean}, {variance}, {gamma}, {beta}, {mode}, 0.1, {epsilon})")


def layer_norm(b, v):
    shape = b.shape(v)
    rank = b.pick(1, 1, 2) if len(shape) > 1 else 1
    over = shape[-rank:]
    kind = b.pick("layer", "layer", "rms", "rms", "rms_by_hand")
    b.tag(f"norm: {kind}")
    gamma = b.parameter(*over, scale=1.0) if b.chance(0.8) else None
    if kind == "layer":
        beta = b.parameter(*over, scale=1.0) if b.chance(0.8) else None
        return b.emit(f"F.layer_norm({v}, {list(over)}, {gamma}, {beta}, {b.pick(1e-5, 1e-3)})")
    if kind == "rms":
        # A power of two: torch rounds this epsilon to the dtype, which the twin cannot undo.
        return b.emit(f"F.rms_norm({v}, {list(over)}, {gamma}, {b.pick(2**-20, 2**-10)})")
    root = b.emit(f"torch.rsqrt({v}.pow(2).mean(-1, keepdim=True) + 1e-6)")
    if gamma and rank == 1:
        return b.emit(b.pick("{g} * ({v} * {r})", "{v} * {r} * {g}").format(g=gamma, v=v, r=root))
    return b.emit(f"{v} * {root}")


def noise(b, v, table=NOISE):
    name = b.rng.choice(sorted(table))
    shape = list(b.shape(v))
    if name in ("cast", "cast and back") and b.chance(0.5):
        name = "cast and back"
    if not fits(name, shape):
        return v
    b.tag(f"{'noise' if table is NOISE else 'miss'}: {name}")
    values = {"v": v, "s": shape, "n": math.prod(shape), "dtype": b.dtype}
    values["other"] = "float64" if b.chance(0.5) else _another(b.dtype)
    if name == "expanded":
        values["s"] = ", ".join(map(str, shape))
        return b.emit(f"{v}.unsqueeze(0).expand(2, {values['s']})")
    return b.emit(table[name].format(**values))


def _another(dtype):
    return "bfloat16" if dtype == "float32" else "float32"


def fits(name, shape):
    """Whether a piece of noise makes sense for this shape."""
    if not shape or 0 in shape:
        return name in ("x+0", "x*1", "clone", "alias")
    if name in ("chunk and cat", "a row less"):
        return shape[0] > 1
    return len(shape) < 5 or name != "expanded"


def dead(b, v):
    b.emit(b.rng.choice(DEAD).format(v=v))
    return v


# Whole pieces


def product(b, kind=None, follows=None):
    """A product, perhaps batch norm and a near-miss, then the epilogue that `follows` names."""
    kind = kind or b.rng.choice(sorted(PRODUCTS))
    before = None
    if kind.startswith("conv") and b.chance(0.1):
        dims = int(kind[-2])
        before = batch_norm(b, source(b, [dims + 2]))
        b.tag("batch norm before")
    v = PRODUCTS[kind](b, before)
    if b.chance(0.15):
        v = between(b, v)
    if b.chance(0.2) and b.dim(v) > 1:
        v = batch_norm(b, v)
        if b.chance(0.15):
            v = between(b, v)
    b.tag(f"product: {kind}, {follows or 'any'}")
    return EPILOGUES[follows](b, v) if follows else epilogue(b, v)


def epilogue(b, v):
    order = b.pick("u", "u", "u", "u", "u", "b", "b", "bu", "bu", "ub", "relu", "")
    for step in order if order != "relu" else ("b", "relu"):
        calm = b.calm(v)
        if calm is None:
            break
        v = {"u": unary, "b": binary, "relu": lambda b, v: unary(b, v, "relu")}[step](b, calm)
        if b.chance(0.04):
            v = between(b, v)
    return v


def add_relu(b, v):
    return unary(b, binary(b, v, "add"), "relu")


EPILOGUES = {
    **{name: functools.partial(unary, name=name) for name in UNARY},
    **{name: functools.partial(binary, name=name) for name in BINARY},
    "add+relu": add_relu,
    "batch norm": batch_norm,
    "layer norm": lambda b, v: layer_norm(b, v) if b.dim(v) and 0 not in b.shape(v) else v,
}


def between(b, v):
    """A near-miss or noise behind `v`, or a second user of it."""
    kind = b.pick("miss", "miss", "noise", "noise", "dead", "second user", "second user")
    if kind == "second user":
        b.tag("miss: second user")
        b.extra_outputs.append(b.emit(b.pick("{v} + 1", "{v}.sin()", "{v} * 1.0").format(v=v)))
        return v
    if kind == "dead":
        return dead(b, v)
    new = noise(b, v, MISSES if kind == "miss" else NOISE)
    return new if b.env[new].is_floating_point() else v


def padded(b):
    return epilogue(b, padded_conv(b))


def norm_traps(b):
    """What others folded wrongly: a linear layer's last axis is no channel; one weight twice."""
    kind = b.rng.choice(sorted(TRAPS))
    b.tag(f"trap: {kind}")
    return TRAPS[kind](b)


def twice(b):
    """One weight in two convolutions, a batch norm behind the first, perhaps behind both."""
    x = source(b, [4])
    channels = b.shape(x)[1]
    w, c = b.parameter(channels, channels, 1, 1), bias(b, channels)
    v = batch_norm(b, b.emit(f"F.conv2d({x}, {w}, {c})"))
    v = b.emit(f"F.conv2d({v}, {w}, {c})")
    return batch_norm(b, v, b.norms[-1]) if b.chance(0.5) else unary(b, v)


def shared_norm(b):
    """One batch norm behind two convolutions, perhaps of the same weight."""
    x = source(b, [4])
    channels = b.shape(x)[1]
    v = batch_norm(b, b.emit(f"F.conv2d({x}, {b.parameter(channels, channels, 1, 1)})"))
    v = b.emit(f"F.conv2d({v}, {b.parameter(channels, channels, 1, 1)})")
    return batch_norm(b, v, b.norms[-1])


def linear_norm(*lead):
    """A linear layer of this input, whose result has as many rows as features."""

    def piece(b):
        v = b.emit(f"F.linear({b.input(*lead, 4)}, {b.parameter(6, 4)}, {bias(b, 6)})")
        return epilogue(b, batch_norm(b, v))

    return piece


def reshaped_norm(b):
    """A linear layer whose features are cut into channels and what lies in them."""
    rows, cut = b.pick(2, 3), b.pick((6, 2), (2, 6), (12,), (3, 2, 2), (1, 12))
    v = b.emit(f"F.linear({b.input(rows, 4)}, {b.parameter(12, 4)}, {bias(b, 12)})")
    return epilogue(b, batch_norm(b, b.emit(f"{v}.view({rows}, {', '.join(map(str, cut))})")))


def turned_norm(b):
    """A square result turned before its batch norm."""
    v = b.emit(f"F.conv2d({b.input(2, 4, 4, 4)}, {b.parameter(4, 4, 1, 1)}, {bias(b, 4)})")
    return batch_norm(b, b.emit(f"{v}.{b.pick('transpose(1, 2)', 'permute(0, 3, 1, 2)')}"))


def addmm_norm(b):
    """A batch norm beside addmm with its scales and addends."""
    if b.chance(0.4):
        return epilogue(b, addmm(b, batch_norm(b, b.input(3, 4)), odd=0.7))
    return epilogue(b, batch_norm(b, addmm(b, b.input(3, 4), odd=0.7)))


def norm_before(b):
    """A batch norm before a product: padding, bias and groups matter."""
    kind = b.pick("conv1d", "conv2d", "conv2d", "conv3d", "linear", "conv_transpose2d")
    dims = 0 if kind == "linear" else int(kind[-2])
    return epilogue(b, PRODUCTS[kind](b, batch_norm(b, source(b, [dims + 2]))))


TRAPS = {
    "twice": twice,
    "shared norm": shared_norm,
    "linear 2d": linear_norm(3),
    "linear 3d": linear_norm(2, 6),
    "linear 4d": linear_norm(2, 6, 4),
    "one feature": linear_norm(2, 1),
    "reshaped": reshaped_norm,
    "turned": turned_norm,
    "addmm": addmm_norm,
    "before": norm_before,
    "before again": norm_before,
}


def add_norm(b):
    v = source(b, [2, 3, 4])
    if b.chance(0.3):
        v = linear(b, v)
    v = binary(b, v, "add") if b.chance(0.85) else v
    if b.chance(0.15):
        v = between(b, v)
    if b.chance(0.4):
        b.extra_outputs.append(v)  # the residual goes on
    if b.dim(v) == 0 or 0 in b.shape(v):
        return v
    return layer_norm(b, v)


def embedding_norm(b):
    rows, width = 5, b.pick(6, 8)
    shape = b.pick((b.length(3),), (b.batch(2), b.length(4)))
    v = b.emit(
        f"F.embedding({b.input(*shape, fill='index', scale=rows)}, {b.parameter(rows, width)})"
    )
    for _ in range(b.pick(0, 0, 1, 2)):
        ids = b.input(*b.pick(shape, shape[-1:]), fill="index", scale=rows)
        v = b.emit(f"{v} + F.embedding({ids}, {b.parameter(rows, width)})")
    if b.chance(0.15):
        v = between(b, v)
    return layer_norm(b, v) if b.dim(v) and 0 not in b.shape(v) else v


def scores(b, v, keys):
    """Scaled, masked and normalised over the last axis (or, as a trap, another)."""
    scale = b.pick("/ 2.0", "* 0.5", f"/ math.sqrt({keys})", "* 0.3", "")
    if scale:
        v = b.emit(f"{v} {scale}")
    lead = b.shape(v)[:-2]
    rows = b.shape(v)[-2] if b.dim(v) > 1 else 1
    mask = b.pick("none", "additive", "additive", "broadcast", "boolean", "causal", "where")
    b.tag(f"mask: {mask}")
    if mask == "additive":
        v = b.emit(f"{v} + {b.input(*b.shape(v))}")
    elif mask == "broadcast":
        ones = [1] * len(lead)
        v = b.emit(f"{v} + {b.input(*b.pick(ones, list(lead)), b.pick(1, rows), keys)}")
    elif mask == "boolean":
        v = b.emit(f"{v}.masked_fill({b.input(rows, keys, fill='mask')}, -1e4)")
    elif mask == "where":
        v = b.emit(f"torch.where({b.input(rows, keys, fill='mask')}, {v}, -1e4)")
    elif mask == "causal":
        tri = b.emit(f"torch.ones({rows}, {keys}, dtype=torch.bool).tril()")
        v = b.emit(f"{v}.masked_fill(~{tri}, float('-inf'))")
    if b.chance(0.15):
        v = between(b, v)
    if not b.dim(v) or 0 in b.shape(v):
        return v
    dim = -1 if b.chance(0.9) else 0
    return b.emit(b.pick("F.softmax({v}, {d})", "{v}.softmax({d})").format(v=v, d=dim))


def masked_softmax(b):
    v = source(b, [3, 4])
    return scores(b, v, b.shape(v)[-1])


def attention(b):
    """softmax(q k^T * scale + mask) v, as people write it."""
    batch, heads, keys, width = b.batch(1, 2), b.pick(1, 2, 3), b.length(3, 5), b.pick(4, 8)
    queries = keys if b.chance(0.8) else 4
    lead = (batch, heads) if b.chance(0.8) else (heads,)
    form = b.pick("inputs", "inputs", "projected")
    if form == "projected":
        x = b.input(batch, keys, heads * width)
        made = []
        for _ in "qkv":
            w = b.parameter(heads * width, heads * width)
            y = b.emit(f"F.linear({x}, {w}, {bias(b, heads * width)})")
            made.append(b.emit(f"{y}.view({batch}, {keys}, {heads}, {width}).transpose(1, 2)"))
        q, k, v = made
    else:
        q = b.input(*lead, queries, width)
        k, v = b.input(*lead, keys, width), b.input(*lead, keys, b.pick(width, width, 6))
    if b.chance(0.2):
        q = b.emit(f"{q} * {b.pick(0.5, 0.25)}")
    turned = b.pick("{k}.transpose(-2, -1)", "{k}.mT", "{k}.transpose(-1, -2)").format(k=k)
    weights = scores(b, b.emit(f"torch.matmul({q}, {turned})"), keys)
    if b.shape(weights)[-1:] != b.shape(v)[-2:-1]:
        return weights
    if b.chance(0.15):
        weights = b.emit(f"F.dropout({weights}, 0.1, training=False)")
    if b.chance(0.15):
        b.extra_outputs.append(weights)
    result = b.emit(f"torch.matmul({weights}, {v})")
    if form == "projected" and b.dim(result) == 4:
        return b.emit(
            f"{result}.transpose(1, 2).contiguous().view({batch}, -1, {heads * width})"
            if b.shape(result)[-1] == width
            else f"{result}.transpose(1, 2)"
        )
    return result


def gated(b):
    """act(linear(x)) * linear(x), and what only looks like it."""
    x = source(b, [2, 3])
    inner, outer = b.shape(x)[-1], b.pick(6, 8)
    c = bias(b, outer, 0.4)
    d = bias(b, outer, 0.8 if c else 0.05)
    gate = b.emit(f"F.linear({x}, {b.parameter(outer, inner)}, {c})")
    if b.chance(0.1):
        gate = between(b, gate)
    y = x if b.chance(0.85) else b.input(*b.shape(x))
    up = b.emit(f"F.linear({y}, {b.parameter(outer, inner)}, {d})")
    gate = unary(b, gate, b.pick("silu", "silu", "silu", "gelu", "sigmoid", "relu", "tanh"))
    if b.shape(gate) != b.shape(up):
        return gate
    v = b.emit(b.pick(f"{gate} * {up}", f"{up} * {gate}"))
    return b.emit(f"F.linear({v}, {b.parameter(inner, outer)})") if b.chance(0.5) else v


def shared_input(b):
    """Two to four linear layers of one input, of unequal widths."""
    x = source(b, [2, 3, 4])
    inner = b.shape(x)[-1]
    biased = b.pick(0.0, 1.0, 0.5)
    results = []
    for _ in range(b.pick(2, 2, 3, 3, 4)):
        outer = b.pick(2, 4, 6)
        w = b.parameter(outer, inner) if b.chance(0.95) else weight(b, outer, inner)
        y = b.input(*b.shape(x)) if b.chance(0.15) else x
        results.append(b.emit(f"F.linear({y}, {w}, {bias(b, outer, biased)})"))
    if b.chance(0.3):
        results[0] = epilogue(b, results[0])
    b.extra_outputs += results[:-1]
    return epilogue(b, results[-1])


def shuffles(b):
    """view + transpose + contiguous + view, as attention and channel shuffle do."""
    v = source(b, [3, 4])
    first, second, *rest = b.shape(v)
    if (rest[0] if len(rest) == 1 else second) % 2:
        return v
    if len(rest) == 1:
        line = f"{v}.view({first}, {second}, 2, {rest[0] // 2}).transpose(1, 2).contiguous()"
        v = b.emit(line)
        return b.emit(f"{v}.view({first}, 2, {second * rest[0] // 2})")
    v = b.emit(f"{v}.reshape({first}, 2, {second // 2}, {', '.join(map(str, rest))})")
    v = b.emit(f"{v}.transpose(1, 2).contiguous()")
    return b.emit(f"{v}.view({first}, {second}, {', '.join(map(str, rest))})")


def pointwise(b):
    v = source(b, [1, 2, 3, 4])
    for _ in range(b.pick(1, 2, 3)):
        calm = b.calm(v)
        if calm is None:
            break
        v = b.pick(unary, binary, noise)(b, calm)
    return v


def reshaped(b):
    """Joins pieces of different ranks."""
    v = source(b, [3, 4, 5])
    return b.emit(
        b.pick("{v}.flatten(1)", "{v}.mean(-1)", "{v}.amax(-1)", "{v}.flatten(0, 1)").format(v=v)
    )


# Piece -> how often it is drawn.
MOTIFS = {
    product: 40,
    norm_traps: 15,
    padded: 10,
    add_norm: 7,
    embedding_norm: 4,
    masked_softmax: 5,
    attention: 7,
    gated: 6,
    shared_input: 7,
    shuffles: 4,
    pointwise: 5,
    reshaped: 3,
}
