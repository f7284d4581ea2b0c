"""`ipex::persistent` to our Triton template: products of rows that sum up many terms."""

from functools import partial
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from ipex_inductor.autotune.record import Problem
from ipex_inductor.lowerings import listed
from ipex_inductor.lowerings.conv_templates import ints
from ipex_inductor.lowerings.rows import (
    conv,
    linear,
    rows_of_image,
    rows_of_layer,
    why_no_layer,
    why_no_pixels,
)
from ipex_inductor.lowerings.templated import aligned, calls, dense, facts, in_turns, node, template
from ipex_inductor.lowerings.workload import named
from ipex_inductor.templates import persistent
from ipex_inductor.templates.persistent import Tile


def _lower(x: Any, weight: Any, bias: Any, tile: list[int]) -> Any:
    chosen = Tile(*tile)
    given = [
        aligned(dense(each), persistent.VECTOR) for each in (x, weight, bias) if each is not None
    ]
    (rows, terms), (columns, _) = ([int(n) for n in t.get_size()] for t in given[:2])
    multiprocessors, room = facts(listed.arch_of(x.get_device()))
    programs = multiprocessors * max(1, room // chosen.shared(x.get_dtype().itemsize))
    return node(
        template("ipex_persistent", persistent.SOURCE, in_turns),
        given,
        ir.FixedLayout(x.get_device(), torch.float32, [rows, columns]),
        chosen.num_warps,
        chosen.num_stages,
        ALLOW_TF32=False,
        **persistent.constants(rows, columns, terms, bias is not None, chosen, programs),
    )


def _why_not(tile: Tile, problem: Problem, rows: int) -> str | None:
    if not problem.arch.startswith("sm_90"):
        return "it is for Hopper's copy engine"
    operands = named(problem)
    if "other" in operands and tile.BLOCK_M * tile.BLOCK_N > persistent.MOST_ADDED:
        return "there are no registers left for what is added"
    columns, terms = ints(operands["weight"].shape[:2])
    sizes = {"rows": rows, "columns": columns, "terms": terms}
    fewest = {**persistent.FEWEST, "columns": tile.BLOCK_N}
    few = [name for name, least in fewest.items() if sizes[name] < least]
    if few:
        return f"it has too few {' and '.join(few)}"
    if terms * getattr(torch, operands["x"].dtype).itemsize % persistent.VECTOR:
        return "its rows do not begin where the copy engine does"
    return None


def _why_not_linear(tile: Tile, problem: Problem) -> str | None:
    return why_no_layer(problem) or _why_not(tile, problem, rows_of_layer(problem))


def _why_not_conv(tile: Tile, problem: Problem) -> str | None:
    return why_no_pixels(problem) or _why_not(tile, problem, rows_of_image(problem))


_PERSISTENT = persistent.NAME, persistent.SOURCE, persistent.TILES
LINEAR_CALLS = calls(*_PERSISTENT, partial(linear, torch.ops.ipex.persistent), _why_not_linear)
CONV_CALLS = calls(*_PERSISTENT, partial(conv, torch.ops.ipex.persistent), _why_not_conv)


def register() -> None:
    """Add the lowering to Inductor's registry."""
    register_lowering(torch.ops.ipex.persistent.default, type_promotion_kind=None)(_lower)
