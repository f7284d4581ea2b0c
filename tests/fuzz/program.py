"""A program as data: tensors it starts from and lines of torch; what the reducer cuts."""

import dataclasses
import json
import math
import re
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fuzz import quantized_names
from ipex_inductor.passes import joint


def rule(name: str, number: int = 0) -> Callable[..., torch.Tensor]:
    """The pattern of the rule called `name`; the next ones are other spellings."""
    return [r.pattern for r in joint.RULES if r.name == name][number]


# What the lines may name.
NAMES = {"torch": torch, "F": F, "math": math, "rule": rule, **quantized_names.NAMES}

NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Wide(TorchFunctionMode):
    """Where it is on, every floating-point dtype that is asked for is float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*wide_arguments(args), **wide_arguments(kwargs or {}))


def wide_arguments(arguments):
    """A tuple or dict of arguments with float64 in the place of narrower dtypes."""
    if isinstance(arguments, dict):
        return {key: _wide(v) for key, v in arguments.items()}
    return tuple(_wide(v) for v in arguments)


def _wide(value):
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


@dataclass(frozen=True)
class Leaf:
    """A tensor the program starts from: `kind` is input, parameter or buffer.

    `fill` is "normal" (times `scale`, plus `shift`), "positive" (0.5 to 2), "mask" (bool) or
    "index" (integers below `scale`). Its values depend on its name and shape alone.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    fill: str = "normal"
    scale: float = 1.0
    shift: float = 0.0

    def value(self) -> torch.Tensor:
        """In float64, or integers, or bools."""
        random = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        draw = torch.rand(self.shape, generator=random, dtype=torch.float64)
        if self.fill == "index":
            return (draw * self.scale).long()
        if self.fill == "mask":
            return draw > 0.3
        if self.fill == "positive":
            return 0.5 + 1.5 * draw
        normal = torch.randn(self.shape, generator=random, dtype=torch.float64)
        return normal * self.scale + self.shift

    def text(self) -> str:
        """An expression for such a tensor, for a reader."""
        shape = ", ".join(map(str, self.shape))
        if self.fill == "index":
            made = f"torch.randint({int(self.scale)}, ({shape},))"
        elif self.fill == "mask":
            made = f"torch.rand({shape}) > 0.3"
        elif self.fill == "positive":
            made = f"torch.rand({shape}) * 1.5 + 0.5"
        else:
            scale = f" * {self.scale:.3g}" if self.scale != 1 else ""
            shift = f" + {self.shift:.3g}" if self.shift else ""
            made = f"torch.randn({shape}){scale}{shift}"
        return f"nn.Parameter({made})" if self.kind == "parameter" else made


@dataclass(frozen=True)
class Program:
    """`steps` are (name, expression) over leaves and earlier steps; `outputs` are names.

    `dynamic` are pairs (size, another): it is for any size of inputs, and tried with both.
    """

    leaves: tuple[Leaf, ...]
    steps: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    dtype: str = "float32"
    tags: tuple[str, ...] = ()
    dynamic: tuple[tuple[int, int], ...] = ()

    def of_kind(self, *kinds: str) -> list[Leaf]:
        """The leaves of these kinds, in order."""
        return [leaf for leaf in self.leaves if leaf.kind in kinds]

    def module(self, dtype: torch.dtype) -> nn.Module:
        """The program as a module whose `forward` takes the inputs, in eval mode.

        In float64 every floating-point dtype of its lines becomes float64 too.
        """
        return _Module(self, dtype)

    def inputs(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The values of the inputs."""
        return [_cast(leaf.value(), dtype) for leaf in self.of_kind("input")]

    def resized(self) -> "Program":
        """The same lines on inputs of the other sizes."""
        sizes = dict(self.dynamic)
        leaves = tuple(
            dataclasses.replace(leaf, shape=tuple(sizes.get(n, n) for n in leaf.shape))
            if leaf.kind == "input"
            else leaf
            for leaf in self.leaves
        )
        return dataclasses.replace(self, leaves=leaves)

    def reproducer(self) -> str:
        """A standalone script that compares eager with backend ipex."""
        lines = ["import math, torch; from torch import nn; import torch.nn.functional as F"]
        if "rule(" in str(self.steps):
            lines[0] += "; from ipex_inductor.passes.joint import RULES"
            lines.append("rule = lambda name, n=0: [r.pattern for r in RULES if r.name == name][n]")
        if re.search(r"\bq[tw]?\(", str(self.steps)):
            lines.append("from fuzz.quantized_names import q, qt, qw  # PYTHONPATH=tests")
        if self.dtype != "float32":
            lines.append(f"torch.set_default_dtype(torch.{self.dtype})")
        names = ", ".join(leaf.name for leaf in self.leaves)
        values = ", ".join(leaf.text() for leaf in self.leaves)
        lines += ["torch.manual_seed(0)", f"{names}, = {values},"]
        call = ", ".join(leaf.name for leaf in self.of_kind("input"))
        lines.append(f"def f({call}):")
        lines += [f"    {name} = {line}" for name, line in self.steps]
        lines.append(f"    return {', '.join(self.outputs)},")
        option = ", dynamic=True" if self.dynamic else ""
        lines.append(f"g = torch.compile(f, backend='ipex'{option})")
        show = f"with torch.no_grad(): print(g({call}), f({call}), sep='\\n')"
        lines.append(show)
        if self.dynamic:
            again = ", ".join(leaf.text() for leaf in self.resized().of_kind("input"))
            lines += [f"{call}, = {again},", show]
        return "\n".join(lines)

    def to_json(self, why: str = "") -> str:
        """As text that `from_json` reads; `why` tells a reader what it is for."""
        fields = dataclasses.asdict(self)
        defaults = {f.name: f.default for f in dataclasses.fields(Leaf)}
        leaves = [
            {key: value for key, value in leaf.items() if value != defaults[key]}
            for leaf in fields["leaves"]
        ]
        rows = {
            "why": why,
            "dtype": self.dtype,
            "leaves": leaves,
            "steps": [list(step) for step in self.steps],
            "outputs": list(self.outputs),
        }
        if self.dynamic:
            rows["dynamic"] = [list(pair) for pair in self.dynamic]
        return _pretty(rows)


def from_json(text: str) -> Program:
    """The program that `Program.to_json` wrote."""
    fields = json.loads(text)
    leaves = tuple(Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in fields["leaves"])
    steps = tuple((name, line) for name, line in fields["steps"])
    dynamic = tuple((size, other) for size, other in fields.get("dynamic", ()))
    return Program(leaves, steps, tuple(fields["outputs"]), fields["dtype"], dynamic=dynamic)


def names_in(text: str) -> set[str]:
    """The variables of an expression: one letter, then a number."""
    return set(re.findall(r"\b[a-z]\d+\b", text))


def _pretty(rows: dict) -> str:
    """JSON with one leaf or step a line."""
    parts = []
    for key, value in rows.items():
        if key in ("leaves", "steps"):
            items = ",\n".join(f"    {json.dumps(item)}" for item in value)
            parts.append(f'  "{key}": [\n{items}\n  ]')
        else:
            parts.append(f'  "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


class _Module(nn.Module):
    def __init__(self, program: Program, dtype: torch.dtype):
        super().__init__()
        for leaf in program.of_kind("parameter"):
            value = nn.Parameter(_cast(leaf.value(), dtype))
            self.register_parameter(leaf.name, value)
        for leaf in program.of_kind("buffer"):
            self.register_buffer(leaf.name, _cast(leaf.value(), dtype))
        weights = [leaf.name for leaf in program.of_kind("parameter", "buffer")]
        inputs = [leaf.name for leaf in program.of_kind("input")]
        lines = [f"def forward(self, {', '.join(inputs)}):"]
        lines += [f"    {name} = self.{name}" for name in weights]
        lines += [f"    {name} = {line}" for name, line in program.steps]
        lines += [f"    return ({', '.join(program.outputs)},)"]
        scope = dict(NAMES)
        exec(compile("\n".join(lines), "<fuzz>", "exec"), scope)
        self._call = scope["forward"]
        self._mode = Wide if dtype == torch.float64 else nullcontext
        self.eval()

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self._mode():
            return self._call(self, *inputs)
