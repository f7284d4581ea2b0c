"""Inductor's templates of GPU kernels, which importing it compiles all of."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def templates_compiled_when_used() -> Iterator[None]:
    """Inside, Inductor's first import has Jinja compile none of its templates of kernels.

    There are some twenty, which takes 0.15 s, and a graph that is found, or on a CPU, uses none.
    Each is compiled at its first use, by whatever backend, and is then what it would have been.
    """
    if "torch._inductor.select_algorithm" in sys.modules:
        yield
        return
    from torch._inductor.codegen.common import KernelTemplate

    kind: Any = KernelTemplate
    own, compiled = vars(kind)["_template_from_string"], kind._template_from_string
    kind._template_from_string = staticmethod(lambda source: _later(compiled, source))
    try:
        yield
    finally:
        kind._template_from_string = own


def _later(compiled: Callable[[str], Any], source: str) -> Any:
    """`compiled(source)` from when something of it is first asked for; Jinja is imported then."""

    class Later:
        def __getattr__(self, name: str) -> Any:
            template = compiled(source)
            self.__dict__.update(vars(template))
            self.__class__ = type(template)
            return getattr(self, name)

    return Later()
