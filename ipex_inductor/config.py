"""The options of backend `ipex`: one frozen dataclass, resolved once per compile."""

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ipex_inductor.errors import OptionError

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

AUTOTUNE = ("auto", "always", "never", "inductor")

SYCL = ("off", "cpu", "xpu")

_BOOLEANS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def _option(default: Any, env: str, accepts: str, doc: str) -> Any:
    return field(default=default, metadata={"env": env, "accepts": accepts, "doc": doc})


@dataclass(frozen=True)
class CompileConfig:
    """What one call of `torch.compile(..., backend="ipex")` was asked to do.

    Every field but `inductor` is an option of the same name. A keyword beats the environment
    variable, which beats the default. Hashable, so that it can be part of a cache key.
    """

    mode: str = _option("default", "IPEX_MODE", " | ".join(MODES), "as torch.compile(mode=...)")
    rules: str = _option(
        "",
        "IPEX_RULES",
        'comma-separated "-name", or "-*"',
        "fusion rules to leave out, by name",
    )
    weight_prologue: bool = _option(
        True,
        "IPEX_WEIGHT_PROLOGUE",
        "bool",
        "inference: run weight-only work once, and again when a weight changes",
    )
    weight_prologue_bytes: int = _option(
        -1,
        "IPEX_WEIGHT_PROLOGUE_BYTES",
        "int, -1 for no bound",
        "how much one graph's prologue may keep; work beyond it stays in the graph, and without a "
        "bound so does what would grow weights of a byte an element (int8, fp8)",
    )
    drop_plain_weights: bool = _option(
        False,
        "IPEX_DROP_PLAIN_WEIGHTS",
        "bool",
        "inference on a CPU: free a weight's data once all that a graph reads of it is derived, at "
        "the first call; whatever else reads that weight gets an error, graphs for other sizes too "
        "where they pack it otherwise (packages: no effect)",
    )
    strict: bool = _option(
        False,
        "IPEX_STRICT",
        "bool",
        "raise where we would fall back to plain Inductor with a warning",
    )
    autotune: str = _option(
        "auto",
        "IPEX_AUTOTUNE",
        " | ".join(AUTOTUNE),
        "whether kernels may be timed: in max-autotune modes, always, never, or by Inductor alone",
    )
    autotune_budget_s: int = _option(
        600,
        "IPEX_AUTOTUNE_BUDGET_S",
        "int",
        "seconds that timing for one graph may take; then the library's kernels are used",
    )
    autotune_database: str = _option(
        "",
        "IPEX_AUTOTUNE_DATABASE",
        'folder, "" for our own',
        "where records of timings are read and written",
    )
    sycl: str = _option(
        "off",
        "IPEX_SYCL",
        " | ".join(SYCL),
        "kernels in SYCL also: cpu: on the CPU, to be tested or shown; xpu: on Intel GPUs where a "
        "model thinks them faster and nothing is recorded",
    )
    blocked_products: bool = _option(
        True,
        "IPEX_BLOCKED_PRODUCTS",
        "bool",
        "on a CPU, where faster: products on weights in blocks, short attention and convolutions "
        "of 3 x 3 pixels (Winograd's way) by our kernels, other convolutions by primitives of "
        "oneDNN that are kept (extra `onednn`)",
    )
    capture: bool = _option(
        True,
        "IPEX_CAPTURE",
        "bool",
        "inference on an NVIDIA GPU in default mode: replay a CUDA graph where launching its "
        "kernels was measured to take longer",
    )
    progress: bool = _option(
        True,
        "IPEX_PROGRESS",
        "bool",
        "lines on stderr: after 5 s of compiling what is compiled, after 20 s what is being done",
    )
    inductor: tuple[tuple[str, Any], ...] = field(
        default=(),
        hash=False,  # some of Inductor's options are dicts or lists
        metadata={"doc": "Inductor's own options, passed on for this call only"},
    )
    wrapped: bool = field(default=False, metadata={"doc": "C++ calls the kernels, by our choice"})

    @property
    def rules_off(self) -> frozenset[str]:
        """Names of the rules switched off; "*" stands for all."""
        return frozenset(entry.removeprefix("-") for entry in _entries(self.rules))


_fusion = True


def enable_fusion(enabled: bool) -> None:
    """Whether graphs compiled from now on in this process get our rules, where none are named."""
    global _fusion
    _fusion = enabled


def own_options() -> dict[str, Any]:
    """Our options by name: the dataclass fields that carry an environment variable."""
    return {f.name: f for f in fields(CompileConfig) if "env" in f.metadata}


def resolve(
    mode: str | None,
    options: Mapping[str, Any] | None,
    inductor_types: Mapping[str, type | None],
    env: Mapping[str, str] = os.environ,
) -> CompileConfig:
    """Merge defaults, environment, `mode=` and `options=` into one checked config.

    `enable_fusion(False)` beats the environment, as what a program says does, and no keyword.
    `inductor_types` maps each option Inductor knows to its type, None where any value will do.
    Raises `OptionError` for an unknown key or mode (naming the nearest) and for a wrong type.
    """
    own = own_options()
    values: dict[str, Any] = {
        name: _parse(env[f.metadata["env"]], f)
        for name, f in own.items()
        if env.get(f.metadata["env"])
    }
    if not _fusion:
        values["rules"] = "-*"
    if mode is not None:
        values["mode"] = mode
    inductor: dict[str, Any] = {}
    for key, value in (options or {}).items():
        name = str(key).replace("-", "_")
        if name in own:
            values[name] = _checked(name, value, own[name].type)
        elif name in inductor_types:
            inductor[name] = _checked(name, value, inductor_types[name])
        else:
            raise unknown("option", str(key), [*own, *inductor_types])
    for name, known in (("mode", MODES), ("autotune", AUTOTUNE), ("sycl", SYCL)):
        if values.get(name, known[0]) not in known:
            raise unknown(name, str(values[name]), known)
    _check_rules(values.get("rules", ""))
    if (seconds := values.get("autotune_budget_s", 0)) < 0:
        todo = 'To time nothing, pass {"autotune": "never"}.'
        raise OptionError("autotune_budget_s of 0 or more seconds", str(seconds), todo)
    return replace(CompileConfig(**values), inductor=tuple(sorted(inductor.items())))


def unknown(kind: str, name: str, known: Iterable[str]) -> OptionError:
    """The error for a misspelt `name`, with the nearest known ones."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:5]
    todo = f"Did you mean {', '.join(repr(n) for n in near)}?"
    return OptionError(f"a known {kind}", repr(name), f"{todo} `ipex-inductor config` lists all.")


def _checked(name: str, value: Any, expected: type | None) -> Any:
    if expected is None or isinstance(value, expected):
        return value
    came = f"{value!r} ({type(value).__name__})"
    todo = f"Pass a value of type {expected.__name__}."
    raise OptionError(f"option {name!r} of type {expected.__name__}", came, todo)


def _entries(rules: str) -> list[str]:
    return [entry.strip() for entry in rules.split(",") if entry.strip()]


def _check_rules(rules: str) -> None:
    for entry in _entries(rules):
        if not entry.startswith("-") or entry == "-":
            todo = 'Write "-name" to leave one rule out, "-*" for all of them.'
            raise OptionError('entries of `rules` like "-name"', repr(entry), todo)


def _parse(text: str, option: Any) -> Any:
    """The value of an environment variable, which is always text."""
    accepts, read = _READERS.get(option.type, ("", str))
    try:
        return read(text)
    except (KeyError, ValueError):
        env = option.metadata["env"]
        raise OptionError(f"{env} {accepts}", repr(text), "Unset or fix it.") from None


_READERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    bool: (f"in {sorted(_BOOLEANS)}", lambda text: _BOOLEANS[text.lower()]),
    int: ("that is a whole number", int),
}
