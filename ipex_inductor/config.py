"""Options of backend `ipex`: one frozen dataclass, resolved once per compile."""

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
    """The configuration of one call of `torch.compile(..., backend="ipex")`.

    Every field but `inductor` is an option of that name. A keyword beats the environment variable,
    which beats the default. Hashable, so that it can be part of a cache key.
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
        "most bytes of one graph's preprocessed weights; work beyond it stays in the graph, and "
        "without a bound so does work that expands one-byte weights (int8, fp8)",
    )
    drop_plain_weights: bool = _option(
        False,
        "IPEX_DROP_PLAIN_WEIGHTS",
        "bool",
        "inference on a CPU: free a weight's data at the first call, once a graph reads only "
        "results derived from it; all other readers of that weight get an error, and so do graphs "
        "for other sizes that pack it differently (packages: no effect)",
    )
    shared_packing: bool = _option(
        False,
        "IPEX_SHARED_PACKING",
        "bool",
        "inference on a CPU: join linear layers on one input for any number of rows, so that "
        "graphs of one model for few and for many rows read one packed copy of the weights",
    )
    strict: bool = _option(
        False,
        "IPEX_STRICT",
        "bool",
        "raise errors instead of falling back to plain Inductor with a warning",
    )
    autotune: str = _option(
        "auto",
        "IPEX_AUTOTUNE",
        " | ".join(AUTOTUNE),
        "when kernels may be timed: in max-autotune modes, always, never, or by Inductor alone",
    )
    autotune_budget_s: int = _option(
        600,
        "IPEX_AUTOTUNE_BUDGET_S",
        "int",
        "most seconds of kernel timing per graph; then the library's kernels are used",
    )
    autotune_first_call: bool = _option(
        True,
        "IPEX_AUTOTUNE_FIRST_CALL",
        "bool",
        "inference on an NVIDIA GPU with autotune=auto: while a graph compiles, compare library "
        "calls for kernels without a record, in at most a tenth of the compile time",
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
        "SYCL kernels: cpu: on the CPU too, for tests and demos; xpu: on Intel GPUs also if they "
        "are predicted to be faster and no record exists",
    )
    blocked_products: bool = _option(
        True,
        "IPEX_BLOCKED_PRODUCTS",
        "bool",
        "on a CPU, if faster: own kernels for GEMMs on blocked weights, short attention and 3 x 3 "
        "Winograd convolutions; cached oneDNN primitives for other convolutions (extra "
        "`onednn`)",
    )
    capture: bool = _option(
        True,
        "IPEX_CAPTURE",
        "bool",
        "inference on an NVIDIA GPU in default mode: replay a CUDA graph if launching its kernels "
        "was measured to take longer",
    )
    progress: bool = _option(
        True,
        "IPEX_PROGRESS",
        "bool",
        "lines on stderr: the graph after 5 s of compiling, the current phase after 20 s",
    )
    inductor: tuple[tuple[str, Any], ...] = field(
        default=(),
        hash=False,  # some of Inductor's options are dicts or lists
        metadata={"doc": "Inductor's own options, passed on for this call only"},
    )
    wrapped: bool = field(default=False, metadata={"doc": "cpp_wrapper, enabled by default"})

    @property
    def rules_off(self) -> frozenset[str]:
        """Return the names of the rules switched off; "*" stands for all."""
        return frozenset(entry.removeprefix("-") for entry in _entries(self.rules))


_fusion = True


def enable_fusion(enabled: bool) -> None:
    """Set whether graphs compiled from now on get the rules if `rules` is not set."""
    global _fusion
    _fusion = enabled


def own_options() -> dict[str, Any]:
    """Return this backend's options by name: the fields with an environment variable."""
    return {f.name: f for f in fields(CompileConfig) if "env" in f.metadata}


def resolve(
    mode: str | None,
    options: Mapping[str, Any] | None,
    inductor_types: Mapping[str, type | None],
    env: Mapping[str, str] = os.environ,
) -> CompileConfig:
    """Merge defaults, environment, `mode=` and `options=` into one checked config.

    `enable_fusion(False)` beats the environment, but no keyword.

    Args:
        mode: mode of `torch.compile`.
        options: options of `torch.compile`.
        inductor_types: type of each option that Inductor knows; None: any value.
        env: environment variables.

    Raises:
        OptionError: for an unknown key or mode (it lists the nearest) and for a wrong type.
    """
    options_here = own_options()
    values: dict[str, Any] = {
        name: _parse(env[f.metadata["env"]], f)
        for name, f in options_here.items()
        if env.get(f.metadata["env"])
    }
    if not _fusion:
        values["rules"] = "-*"
    if mode is not None:
        values["mode"] = mode
    inductor: dict[str, Any] = {}
    for key, value in (options or {}).items():
        name = str(key).replace("-", "_")
        if name in options_here:
            values[name] = _check_type(name, value, options_here[name].type)
        elif name in inductor_types:
            inductor[name] = _check_type(name, value, inductor_types[name])
        else:
            raise unknown("option", str(key), [*options_here, *inductor_types])
    for name, choices in (("mode", MODES), ("autotune", AUTOTUNE), ("sycl", SYCL)):
        if values.get(name, choices[0]) not in choices:
            raise unknown(name, str(values[name]), choices)
    _check_rules(values.get("rules", ""))
    if (seconds := values.get("autotune_budget_s", 0)) < 0:
        advice = 'To time nothing, pass {"autotune": "never"}.'
        raise OptionError("autotune_budget_s of 0 or more seconds", str(seconds), advice)
    return replace(CompileConfig(**values), inductor=tuple(sorted(inductor.items())))


def unknown(kind: str, name: str, accepted: Iterable[str]) -> OptionError:
    """Return the error for a misspelt `name`, with the nearest of the known ones."""
    accepted = list(accepted)
    near = difflib.get_close_matches(name, accepted, n=3, cutoff=0.4) or accepted[:5]
    advice = f"Did you mean {', '.join(repr(n) for n in near)}?"
    return OptionError(f"a known {kind}", repr(name), f"{advice} `ipex-inductor config` lists all.")


def _check_type(name: str, value: Any, expected: type | None) -> Any:
    if expected is None or isinstance(value, expected):
        return value
    received = f"{value!r} ({type(value).__name__})"
    advice = f"Pass a value of type {expected.__name__}."
    raise OptionError(f"option {name!r} of type {expected.__name__}", received, advice)


def _entries(rules: str) -> list[str]:
    return [entry.strip() for entry in rules.split(",") if entry.strip()]


def _check_rules(rules: str) -> None:
    for entry in _entries(rules):
        if not entry.startswith("-") or entry == "-":
            advice = 'Write "-name" to leave one rule out, "-*" for all of them.'
            raise OptionError('entries of `rules` like "-name"', repr(entry), advice)


def _parse(text: str, option: Any) -> Any:
    """Return the value of an environment variable, which is always text."""
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
