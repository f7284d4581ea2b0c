"""One module on several pools at once: the batch is split, and the results are joined."""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import torch

from ipex_inductor.cpu.cores import shared_out
from ipex_inductor.cpu.pool import CPUPool, Task, pin
from ipex_inductor.errors import ArgumentError, OptionError


class MultiStreamModuleHint:
    """Dimension along which each argument is split, or each result joined.

    An entry is a dimension, None (whole to each stream; for results, the first stream's), or a
    tuple, list or dict of entries. A result has one entry, or keywords if it is a dict.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = list(args), kwargs
        self.args_len, self.kwargs_len = len(args), len(kwargs)


FIRST = MultiStreamModuleHint(0)


def get_default_num_streams(cpu_pool: CPUPool) -> int:
    """Return the number of streams for "AUTO": one per core."""
    return len(cpu_pool.core_ids)


class MultiStreamModule(torch.nn.Module):
    """Module that runs `model` in several threads, each on a share of the pool and of the batch.

    Cores and batch are shared out evenly; the first streams take one more if it does not come out
    even. For a batch smaller than `num_streams` each of the first streams has one sample. Raises
    `OptionError` and `ArgumentError`.

    Args:
        model: the module, or any function.
        num_streams: a number, at most one per core, or "AUTO" (`get_default_num_streams`).
        cpu_pool: the cores, None for all that this process may use.
        concat_output: whether to join the streams' results; otherwise they are a list.
        input_split_hint: how arguments are split; arguments without a hint go whole to each stream.
        output_concat_hint: how results are joined.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        num_streams: int | str = "AUTO",
        cpu_pool: CPUPool | None = None,
        concat_output: bool = True,
        input_split_hint: MultiStreamModuleHint = FIRST,
        output_concat_hint: MultiStreamModuleHint = FIRST,
    ) -> None:
        super().__init__()
        self.cpu_pool = cpu_pool or CPUPool()
        self.core_list = self.cpu_pool.core_ids
        self.num_streams = _number(num_streams, self.cpu_pool)
        self.concat_output = concat_output
        self.input_split_hint = input_split_hint
        self.output_concat_hint = output_concat_hint
        self.model = model
        self._pin = pin(self.cpu_pool)
        shares = shared_out(self.core_list, self.num_streams) if self.num_streams > 1 else []
        self.tasks = [Task(model, CPUPool(share)) for share in shares]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result for the whole batch, or a list of the streams' results."""
        if not self.tasks:
            with self._pin:
                result = self.model(*args, **kwargs)
            return result if self.concat_output else [result]
        hint = self.input_split_hint
        sizes = shared_out(range(_batch(hint, args, kwargs)), self.num_streams)
        parts = [share for share in sizes if share] or sizes[:1]  # an empty batch goes to one
        futures = [
            task(
                *(_slice_argument(h, a, part) for h, a in _pair_hints(hint.args, args)),
                **{k: _slice_argument(hint.kwargs.get(k), a, part) for k, a in kwargs.items()},
            )
            for task, part in zip(self.tasks, parts, strict=False)
        ]
        wait(futures)  # nothing still runs when one of them raises
        results = [future.get() for future in futures]
        return _join_results(self.output_concat_hint, results) if self.concat_output else results

    def get_stream_number(self) -> int:
        """Return the number of streams."""
        return self.num_streams


def _number(requested: int | str, cpu_pool: CPUPool) -> int:
    if isinstance(requested, str) and requested.upper() == "AUTO":
        return get_default_num_streams(cpu_pool)
    if not isinstance(requested, int) or isinstance(requested, bool) or requested < 1:
        raise OptionError(
            '"AUTO" or a number of streams', repr(requested), "A stream needs a core."
        )
    most = len(cpu_pool.core_ids)
    if requested > most:
        warnings.warn(f"{requested} streams for {most} cores: {most} it will be", stacklevel=3)
    return min(requested, most)


def _batch(hint: MultiStreamModuleHint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the batch size: the common size of the split dimensions of all hinted arguments."""
    values, hints = _by_name(args, kwargs), _by_name(hint.args, hint.kwargs)
    if absent := [str(name) for name in hints if name not in values]:
        missing = f"none at {', '.join(absent)}"
        raise ArgumentError("the arguments that the hint names", missing, "Mend input_split_hint.")
    sizes = {size for name, how in hints.items() for size in _sizes(how, values[name])}
    if len(sizes) != 1:
        advice = "Mend input_split_hint: every dimension it names is cut alike."
        raise ArgumentError("arguments of one batch", f"sizes {sorted(sizes)}", advice)
    return sizes.pop()


def _by_name(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    named: dict[int | str, Any] = dict(enumerate(args))
    return named | dict(kwargs.items())


def _sizes(how: Any, value: Any) -> list[int]:
    if how is None:
        return []
    if isinstance(how, int):
        if not isinstance(value, torch.Tensor) or value.dim() <= how:
            advice = "Name None in input_split_hint for what is not to be cut."
            raise ArgumentError(f"a tensor to cut along {how}", _kind(value), advice)
        return [value.size(how)]
    return [size for h, v in _inner(how, value) for size in _sizes(h, v)]


def _slice_argument(how: Any, value: Any, part: list[int]) -> Any:
    """Return a stream's share of an argument."""
    if how is None:
        return value
    if isinstance(how, int):
        return value.narrow(how, part[0] if part else 0, len(part))
    if isinstance(how, dict):
        return {**value, **{k: _slice_argument(h, value[k], part) for k, h in how.items()}}
    return type(how)(_slice_argument(h, v, part) for h, v in _inner(how, value))


def _join_results(hint: MultiStreamModuleHint, results: list[Any]) -> Any:
    if hint.kwargs and not hint.args:
        return _join(hint.kwargs, results)
    if len(hint.args) != 1 or hint.kwargs:
        actual = f"{len(hint.args)} and {len(hint.kwargs)} keywords"
        advice = "A result of several tensors is one argument, a tuple."
        raise ArgumentError("one argument or keywords in output_concat_hint", actual, advice)
    return _join(hint.args[0], results)


def _join(how: Any, results: list[Any]) -> Any:
    """Return the streams' results as one."""
    if how is None:
        return results[0]
    if isinstance(how, int):
        if not all(isinstance(result, torch.Tensor) for result in results):
            advice = "Say in output_concat_hint what the result is made of."
            raise ArgumentError(f"tensors to join along {how}", _kind(results[0]), advice)
        return torch.cat(results, how)
    if isinstance(how, dict):
        _same_names(how, results[0])
        return {k: _join(h, [result[k] for result in results]) for k, h in how.items()}
    pairs = zip(*(_inner(how, result) for result in results), strict=True)
    return type(how)(_join(p[0][0], [value for _, value in p]) for p in pairs)


def _inner(how: Any, value: Any) -> list[tuple[Any, Any]]:
    """Return pairs of hint and value for the parts of a container; raise `ArgumentError`."""
    if isinstance(how, dict):
        if isinstance(value, dict) and how.keys() <= value.keys():
            return [(h, value[k]) for k, h in how.items()]
    elif isinstance(how, tuple | list):
        if isinstance(value, tuple | list) and len(value) == len(how):
            return list(zip(how, value, strict=True))
    else:
        advice = "Those are all there are."
        raise ArgumentError(
            "a dimension, None, or a tuple, list or dict of them", repr(how), advice
        )
    raise ArgumentError(f"what the hint {how!r} speaks of", _kind(value), "Mend the hint.")


def _same_names(how: dict[str, Any], result: Any) -> None:
    """Raise `ArgumentError` unless the result has the hint's keys.

    Otherwise a part would be lost, or a stream's share would be taken for the whole.
    """
    if not isinstance(result, dict) or result.keys() != how.keys():
        advice = "Say of each, in output_concat_hint, how it is joined; None: the first stream's."
        raise ArgumentError(f"results with {', '.join(how)}", _kind(result), advice)


def _pair_hints(hints: list[Any], args: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    return list(zip([*hints, *[None] * (len(args) - len(hints))], args, strict=True))


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a {type(value).__name__} with {', '.join(map(str, value))}"
    return f"a {type(value).__name__}"
