"""A separate compile whose reports are collected, and that leaves tensors unchanged."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ipex_inductor.backend import compile_graph
from ipex_inductor.errors import IpexError
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import Event, GraphReport


def compile_reporting(
    model: Callable[..., Any], graph_reports: list[GraphReport], **compile_args: Any
) -> Callable[..., Any]:
    """Return `torch.compile(model, backend="ipex", ...)` that appends to `graph_reports`.

    It is independent of any other compilation of the model, as Dynamo compiles a new frame.

    Args:
        model: what is called.
        graph_reports: list that receives the report of each graph.
        compile_args: arguments of `torch.compile`.
    """
    inner = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", model))

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        with decisions.capturing() as opened:
            result = compile_graph(gm, example_inputs, **options)
        graph_reports.append(opened[-1] if opened else _stayed_out())
        return result

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # Dynamo stores compiled code by code object
    options = dict(compile_args.pop("options", None) or {})
    mode = compile_args.pop("mode", None)  # torch.compile accepts either mode or options
    options |= {"mode": mode} if mode else {}
    run = torch.compile(call, backend=backend, options=options, **compile_args)

    def call_unwrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:  # Dynamo wraps what a backend raises
            raised = getattr(error, "inner_exception", None)
            if isinstance(raised, IpexError):
                raise raised from None
            raise

    return call_unwrapped


@contextlib.contextmanager
def restore_tensors(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore the values of these tensors and torch's random state after the block."""
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
    reason = "the passes of ipex did not run on this graph; a warning in the log says why"
    return GraphReport([Event("fallback", "plain Inductor", reason)])
