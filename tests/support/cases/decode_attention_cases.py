"""The kernel of attention over a cache alone: by Triton's interpreter, on a GPU, or compiled.

Run as a program it prints the errors of the cases that are named, by the interpreter.
"""

import json
import sys
from dataclasses import dataclass

import jinja2
import torch

from ipex_inductor.templates.build.gpu import _module
from ipex_inductor.templates.triton import decode_attention
from ipex_inductor.templates.triton.decode_attention import Mask, Tile
from support.rendered_templates import NAMES, binary


@dataclass(frozen=True)
class Case:
    """Attention of `queries` of each head of keys. `mask` is a key of `MASKS`."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    mask: str = "padding"
    parts: int = 4
    block: int = 16
    stages: int = 2
    across: bool = False  # keys and values lie as [B, K, H, D]

    @property
    def tile(self):
        """The block sizes."""
        return Tile(self.block, self.parts, 4, self.stages)


def pad(case):
    """Texts that begin and end at different keys."""
    visible = torch.zeros(case.batch, 1, 1, case.keys, dtype=torch.bool)
    for text in range(case.batch):
        visible[text, ..., text * case.keys // 8 : case.keys // 2 + 1 + text] = True
    return visible


def slide(case):
    """A window that moves with the queries."""
    rows, columns = torch.arange(case.queries)[:, None], torch.arange(case.keys)
    return ((columns <= rows + case.keys // 2) & (columns >= rows + case.keys // 3))[None, None]


def hide_text(case):
    """All keys of the first text are hidden."""
    visible = pad(case).clone()
    visible[0] = False
    return visible


def hide_row(case):
    """All keys of the first query are hidden."""
    visible = slide(case).clone()
    visible[..., 0, :] = False
    return visible


def add(case):
    """Addends, of which some hide."""
    generator = torch.Generator().manual_seed(1)
    shape = case.batch, case.heads, case.queries, case.keys
    return torch.randn(shape, generator=generator).masked_fill(~pad(case), -torch.inf)


def as_addends(visible):
    """Return 0 for visible keys and -inf for all others."""
    return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)


MASKS = {
    "none": lambda case: None,
    "padding": pad,
    "window": slide,
    "hidden text": hide_text,
    "hidden row": hide_row,
    "added padding": lambda case: as_addends(pad(case)),
    "alibi": add,
    "one key": lambda case: (torch.arange(case.keys) == case.keys - 1)[None, None, None],
}
# Tails of blocks, of widths and of rows; one part, more parts than blocks, more than live blocks.
CASES = {
    "one query": Case(1, 2, 1, 96, 64),
    "four queries of a group": Case(2, 2, 4, 200, 128),
    "no mask": Case(1, 2, 3, 70, 64, "none"),
    "one part": Case(2, 1, 4, 70, 64, parts=1),
    "more parts than blocks": Case(1, 1, 2, 40, 64, parts=8),
    "three parts": Case(1, 2, 5, 150, 64, parts=3),
    "width 80": Case(2, 1, 4, 100, 80),
    "width 96, one part": Case(1, 2, 4, 50, 96, parts=1),
    "width 256": Case(1, 1, 7, 100, 256),
    "sixteen queries": Case(1, 1, 16, 100, 64, "window"),
    "hidden text": Case(2, 1, 4, 100, 64, "hidden text"),
    "hidden row": Case(1, 2, 3, 100, 64, "hidden row"),
    "hidden row, one part": Case(1, 2, 3, 100, 64, "hidden row", parts=1),
    "addends": Case(2, 2, 4, 100, 64, "added padding"),
    "addends by head": Case(2, 2, 3, 100, 64, "alibi"),
    "only the last key": Case(1, 2, 4, 100, 64, "one key"),
    "heads across": Case(2, 3, 4, 100, 64, across=True),
}


def make_operands(case, dtype, device="cpu"):
    """Return queries, keys, values and the mask; keys that are hidden at the ends are NaN."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(case.batch, case.queries, case.heads, case.width, generator=generator)
    shape = case.batch, case.heads, case.keys, case.width
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    mask = MASKS[case.mask](case)
    if mask is not None:
        seen = mask if mask.dtype is torch.bool else mask != -torch.inf
        seen = seen.expand(case.batch, case.heads, -1, -1).any(2)
        live = (seen.cummax(-1).values.bool()) & (seen.flip(-1).cummax(-1).values.flip(-1).bool())
        k, v = (t.masked_fill(~live[..., None], torch.nan) for t in (k, v))
        mask = mask.to(device, dtype if mask.is_floating_point() else None)
    if case.across:
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    return *(t.to(device, dtype) for t in (q.transpose(1, 2), k, v)), mask


def compute_exactly(q, k, v, mask):
    """Return attention in fp64, zeros where every key is hidden."""
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[3] ** -0.5
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        )
        hidden = (mask == -torch.inf) if mask.is_floating_point() else ~mask
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v.double().nan_to_num(0)


def render(constants, strides):
    """Return a module with `kernel(*operands, ws_ptr, OUT)`, and a result of these strides."""

    def def_kernel(*names):
        lines = "".join(
            f"    {name}: tl.constexpr = {value}\n" for name, value in constants.items()
        )
        return (
            "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
            f"def kernel({', '.join(names)}, ws_ptr, OUT):\n{lines}"
        )

    def store_output(indices, value, mask, val_shape=None, indent_width=4):
        steps = zip(indices, strides, strict=True)
        return f"tl.store(OUT + {' + '.join(f'{i} * {s}' for i, s in steps)}, {value}, mask={mask})"

    env = jinja2.Environment(undefined=jinja2.StrictUndefined)
    hooks = {"def_kernel": def_kernel, "store_output": store_output}
    return env.from_string(decode_attention.source()).render(**hooks, **constants)


def describe_mask(mask, shape):
    """Return what the kernel is told of a mask."""
    if mask is None:
        return None
    steps = [0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True)]
    return Mask(mask.is_floating_point(), mask.shape[2], steps)


def make_constants(case, q, k, v, mask):
    """Return the constants of a case."""
    strides = [t.stride() for t in (q, k, v)]
    described = describe_mask(mask, q.shape)
    return decode_attention.constants(
        q.shape, case.keys, strides, described, case.width**-0.5, case.tile
    )


def run(case, q, k, v, mask):
    """Return what the kernel writes over NaNs; its counters are zero again."""
    constants = make_constants(case, q, k, v, mask)
    out = torch.full_like(q, torch.nan)
    work = torch.full(
        (decode_attention.workspace(q.shape, case.tile) // 4 + 1,), torch.nan, device=q.device
    )
    counters = torch.zeros(case.batch * case.heads, dtype=torch.int32, device=q.device)
    more = [mask] * (mask is not None) + [counters] * (case.parts > 1)
    kernel = _module(render(constants, out.stride()))["kernel"]
    options = {"num_warps": case.tile.num_warps} if q.is_cuda else {}
    for _ in range(2):
        kernel[(constants["GROUPS"], case.parts)](q, k, v, *more, work, out, **options)
    assert not counters.any()
    return out


def error(case, dtype, device="cpu"):
    """Return the distance of the result from fp64, as a share of its size."""
    operands = make_operands(case, dtype, device)
    truth = compute_exactly(*operands)
    return float((run(case, *operands).double() - truth).norm() / truth.norm().clamp(min=1e-30))


def compile_case(case, dtype, gpu):
    """Return what Triton makes of a case for a GPU that is not here."""
    operands = make_operands(case, getattr(torch, dtype))
    mask = operands[3]
    types = dict.fromkeys(("Q", "K", "V"), f"*{NAMES[dtype]}")
    if mask is not None:
        types["MASK"] = f"*{NAMES[dtype]}" if mask.is_floating_point() else "*i1"
    types |= {"COUNTERS": "*i32"} if case.parts > 1 else {}
    types |= {"ws_ptr": "*u8", "OUT": f"*{NAMES[dtype]}"}
    text = render(make_constants(case, *operands), torch.empty_like(operands[0]).stride())
    return binary(text, types, case.tile, gpu)


if __name__ == "__main__":
    print(json.dumps({name: error(CASES[name], torch.float16) for name in sys.argv[1:]}))
