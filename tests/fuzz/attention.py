"""Attention by hand in all the ways its reader takes, and some that it must not take."""

from fuzz.motifs import between, bias

# On the scores `{s}`, [`{b}`, `{h}`, `{q}`, `{k}`]. `{low}` is the lowest number of the dtype.
SCALES = (
    "{s} * 0.5",
    "{s} / 2.0",
    "0.3 * {s}",
    "{s} * torch.full((), 0.25, dtype=torch.{dtype})",
    "{s} / torch.full((), 4.0, dtype=torch.{dtype})",
)
CAUSAL = "torch.ones({q}, {k}, dtype=torch.bool).tril()"
MASKS = {
    "additive": "{s} + {addend}",
    "first": "{addend} + {s}",
    "viewed": "({s}.view(1, {b}, {h}, {q}, {k}) + {addend}).view({b}, {h}, {q}, {k})",
    "filled": "{s}.masked_fill({drops}, {low})",
    "kept": "torch.where({drops}, {s}, {low})",
    "dropped": "torch.where({drops}, {low}, {s})",
    "kept, 0-d": "torch.where({drops}, {s}, torch.full((), {low}, dtype=torch.{dtype}))",
    "causal": "{s}.masked_fill(~" + CAUSAL + ", float('-inf'))",
    "causal, kept": "torch.where(" + CAUSAL + ", {s}, float('-inf'))",
    "causal, low": "{s}.masked_fill(torch.ones({q}, {k}, dtype=torch.bool).triu(1), {low})",
    "causal, added": "{s} + torch.full(({q}, {k}), float('-inf'), dtype=torch.{dtype}).triu(1)",
}
# What only looks like one of these: each changes the result if the reader takes it.
TRAPS = {
    "a fill that is not lost": "{s}.masked_fill({drops}, -3.0)",
    "a row masked whole": "torch.where(" + CAUSAL + ", -math.inf, {s})",
    "rows that may be masked whole": "{s}.masked_fill({drops}, -math.inf)",
    "an addend scaled": "torch.add({s}, {addend}, alpha=2)",
    "scaled behind a mask": "({s} + {addend}) * 0.5",
    "a number added": "{s} + 1",
    "squared": "{s} * {s}",
}
SCALED = "{s} * {factor}"  # a trap before masks: of filled scores its gradient is rounding alone


def attention(b):
    """softmax(q @ k * scale + mask) @ v, perhaps a second layer with the same mask or another."""
    sizes = {"b": b.batch(1, 2), "h": b.pick(1, 3), "k": b.length(3, 5), "dtype": b.dtype}
    sizes["q"] = sizes["k"] if b.chance(0.7) else 4
    sizes["low"] = f"torch.finfo(torch.{b.dtype}).min"
    width = b.pick(4, 4, 8)
    heads = _projected if b.chance(0.3) and sizes["q"] == sizes["k"] else _inputs
    q, k, v = heads(b, width, sizes)
    steps = _steps(b, sizes)
    result = _layer(b, q, k, v, steps)
    if b.chance(0.3):  # all layers of a model add one mask
        b.extra_outputs.append(result)
        result = _layer(b, q, k, v, steps if b.chance(0.5) else _steps(b, sizes))
    if b.chance(0.3):
        result = b.emit(f"{result}.transpose(1, 2).contiguous()")
        return b.emit(f"{result}.flatten(2)")
    return result


def _inputs(b, width, sizes):
    lead, q, k = (sizes["b"], sizes["h"]), sizes["q"], sizes["k"]
    turned = b.chance(0.2)
    key = b.input(*lead, width, k) if turned else b.input(*lead, k, width)
    if not turned:
        key = b.emit(b.pick("{k}.transpose(-2, -1)", "{k}.mT").format(k=key))
    return b.input(*lead, q, width), key, b.input(*lead, k, width)


def _projected(b, width, sizes):
    batch, heads, k = sizes["b"], sizes["h"], sizes["k"]
    x, inner = b.input(batch, k, 6), heads * width
    made = []
    for turned in ("transpose(1, 2)", "permute(0, 2, 3, 1)", "transpose(1, 2)"):
        y = b.emit(f"F.linear({x}, {b.parameter(inner, 6)}, {bias(b, inner)})")
        made.append(b.emit(f"{y}.view({batch}, {k}, {heads}, {width}).{turned}"))
    return made


def _steps(b, sizes):
    """Lines from the product to the softmax: scales, then masks, with casts between."""
    lines = [b.rng.choice(SCALES) for _ in range(b.pick(0, 1, 1, 2))]
    if b.chance(0.05):
        lines.append(SCALED.format(s="{s}", factor=b.input(sizes["q"], sizes["k"])))
    lines += [_mask(b, sizes) for _ in range(b.pick(0, 1, 1, 2, 2))]
    if b.chance(0.25):
        lines.insert(b.rng.randrange(len(lines) + 1), "{s}.to(torch.float32)")
    return [line.replace("{dtype}", b.dtype) for line in lines]


def _mask(b, sizes):
    kind = b.rng.choice(sorted(TRAPS if b.chance(0.25) else MASKS))
    b.tag(f"attention: {kind}")
    line = {**MASKS, **TRAPS}[kind]
    lead = b.pick((), (1, 1), (sizes["b"], 1), (sizes["b"], sizes["h"]))
    matrix = b.pick((sizes["q"], sizes["k"]), (1, sizes["k"]))
    values = {key: str(value) for key, value in sizes.items()}
    if "{addend}" in line:
        values["addend"] = b.input(*lead, *matrix)
    if "{drops}" in line:
        values["drops"] = b.input(*lead, *matrix, fill="mask")
    return line.format(s="{s}", **values)


def _layer(b, q, k, v, steps):
    if b.chance(0.2):
        q = b.emit(f"{q} {b.pick('* 0.5', '/ 2.0')}")
    s = b.emit(f"torch.matmul({q}, {k})")
    for line in steps:
        s = b.emit(line.format(s=s))
    dim = -2 if b.chance(0.05) else b.pick(-1, 3)
    wide = b.chance(0.2)
    p = b.emit(f"F.softmax({s}, {dim}{', dtype=torch.float32' * wide})")
    if b.chance(0.05):
        p = between(b, p)
    p = b.emit(f"{p}.to(torch.{b.dtype})")
    return b.emit(f"torch.matmul({p}, {v})")
