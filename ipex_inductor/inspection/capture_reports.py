"""A compile of its own whose reports are collected, and that leaves tensors as they were."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ipex_inductor.backend import compile_graph
from ipex_inductor.errors import IpexError
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import Event, GraphReport


def compiled(
    model: Callable[..., Any], seen: list[GraphReport], **compile_args: Any
) -> Callable[..., Any]:
    """`torch.compile(model, backend="ipex", ...)` that collects the report of each graph in `seen`.

    Independent of any other compilation of the model: the frame Dynamo compiles is a new one.
    """
    inner = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", model))

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        with decisions.capturing() as opened:
            result = compile_graph(gm, example_inputs, **options)
        seen.append(opened[-1] if opened else _stayed_out())
        return result

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # what Dynamo compiles, and looks up, it keeps there
    options = dict(compile_args.pop("options", None) or {})
    mode = compile_args.pop("mode", None)  # torch.compile takes one of the two
    options |= {"mode": mode} if mode else {}
    run = torch.compile(call, backend=backend, options=options, **compile_args)

    def with_own_errors(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:  # Dynamo wraps what a backend raises
            raised = getattr(error, "inner_exception", None)
            if isinstance(raised, IpexError):
                raise raised from None
            raise

    return with_own_errors


@contextlib.contextmanager
def unchanged(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """These tensors have their values back afterwards, and torch its random state."""
    saved = [(t, None if t.is_inference() else t._version, t.detach().clone()) for t in tensors]
    devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for tensor, version, values in saved:
            if tensor.is_inference() or tensor._version != version:
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(values)


def _stayed_out() -> GraphReport:
    reason = "our passes stayed out of this graph; the warning in the log says why"
    return GraphReport([Event("fallback", "plain Inductor", reason)])
