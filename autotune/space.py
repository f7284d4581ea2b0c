"""The registered choices; a row from a file is used only if it names one of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from ipex_inductor.autotune.record import Choice, Outcome, Record

Values = tuple[bool | int | str, ...]
_Typed = frozenset[tuple[type, bool | int | str]]  # values with their types, as True is 1 to Python


@dataclass(frozen=True)
class _Space:
    """The allowed parameters of one choice; the ones not in `required` may be omitted."""

    values: dict[str, _Typed]
    required: frozenset[str]


_SPACES: dict[tuple[str, str], _Space] = {}  # by kind and name


def register(
    kind: str, name: str, optional: Mapping[str, Values] | None = None, **parameters: Values
) -> None:
    """Register the choices of a library call or template, with all values of its parameters.

    Args:
        kind: "library" or "template".
        name: the name of the library call or template.
        optional: values of the parameters that may be omitted.
        parameters: values of the required parameters.

    Raises:
        ValueError: if the name is registered with other parameters.
    """
    all_values = {**(optional or {}), **parameters}
    typed = {key: frozenset((type(v), v) for v in values) for key, values in all_values.items()}
    space = _Space(typed, frozenset(parameters))
    if _SPACES.setdefault((kind, name), space) != space:
        raise ValueError(f"{kind} {name} is registered with other parameters")


def why_refused(record: Record, known: bool = True) -> str | None:
    """Return the reason why a well-typed record may not be used; None if it may.

    With `known`, its choices must be registered, as for everything that may run. Choices of other
    tools are never registered.
    """
    problem, source = record.problem, record.provenance.source
    if not problem.symbols and any(type(n) is str for o in problem.operands for n in o.shape):
        return "sizes vary by symbols that have no range"
    for symbol in problem.symbols:
        if symbol.low > symbol.high:
            return f"{symbol.name} is from {symbol.low} to {symbol.high}"
    raced = any(outcome.timing for outcome in record.outcomes)
    for outcome in record.outcomes:
        reason = _why_not_from(source, outcome) if source else _why_not(outcome, raced)
        if reason is None and known and not source:
            reason = why_unknown(outcome.choice)
        if reason is not None:
            return reason
    return None


def _why_not_from(source: str, outcome: Outcome) -> str | None:
    """Return the reason to refuse another tool's outcome; None to accept it.

    Such an outcome must not look as if measured here, and must not rule out a choice.
    """
    if outcome.reported is None:
        return f"{outcome.choice.name} of {source} has no reported time"
    if outcome.timing or outcome.reason or outcome.error is not None or outcome.predicted:
        return f"{outcome.choice.name} of {source} has more than a reported time"
    return None


def _why_not(outcome: Outcome, raced: bool) -> str | None:
    """Return the reason to refuse an outcome of ours; None to accept it.

    A choice may be skipped as slow, by a reported or predicted time, only if others were timed.
    """
    name, timing = outcome.choice.name, outcome.timing
    if outcome.reported is not None or outcome.predicted is not None:
        alone = outcome.reported is None or outcome.predicted is None
        passed = raced and alone and not (timing or outcome.reason or outcome.error is not None)
        return None if passed else f"{name} was skipped without a reason"
    if timing is None:
        return None if outcome.reason else f"{name} has neither a timing nor a reason"
    if outcome.error is None or outcome.tolerance is None:
        return f"{name} was timed and not verified"
    if outcome.error > outcome.tolerance:
        return f"{name} was timed though its error is {outcome.error:g}"
    if not timing.p20 <= timing.p50 <= timing.p80:
        return f"{name} has percentiles out of order"
    return None


def of_this_torch(choice: Choice) -> bool:
    """Return True unless the choice is a template of another torch version."""
    from ipex_inductor import compat  # here: reading records alone needs no torch

    of, _, _ = choice.template.partition(",")  # the rest is our template's version
    return not of.startswith("torch ") or of == compat.TEMPLATES


def why_unknown(choice: Choice) -> str | None:
    """Return the reason why a choice does not exist; None if it does."""
    space = _SPACES.get((choice.kind, choice.name))
    if space is None:
        return f"there is no {choice.kind} {choice.name}"
    parameter_names = choice.parameters.keys()
    if not space.required <= parameter_names <= space.values.keys():
        wanted, names_given = (
            ", ".join(sorted(names)) or "none" for names in (space.values, parameter_names)
        )
        return f"{choice.name} has the parameters {wanted}, not {names_given}"
    for name, value in choice.parameters.items():
        if (type(value), value) not in space.values[name]:
            return f"{choice.name} has no {name}={value!r}"
    return None
