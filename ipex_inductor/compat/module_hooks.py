"""Hooks of torch that see the calls of every module."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.nn.modules import module


@contextmanager
def module_calls_observed(enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call `enter(module, args)` before each module's forward, and `leave` after it.

    `leave` gets module, args, kwargs and output; if the forward failed, None in place of the last
    two, as torch forgets that the hook takes keyword arguments.
    """
    handles = [
        module.register_module_forward_pre_hook(enter),
        module.register_module_forward_hook(leave, with_kwargs=True, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
            # torch leaves this entry behind.
            module._global_forward_hooks_with_kwargs.pop(handle.id, None)
