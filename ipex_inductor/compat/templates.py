"""Lazy compilation of Inductor's templates of GPU kernels, all of which its import compiles."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def templates_compiled_when_used() -> Iterator[None]:
    """Stop Inductor's first import from compiling its kernel templates with Jinja, meanwhile.

    There are some twenty, which takes 0.15 s, and a cached graph, or one on a CPU, uses none. Each
    is compiled at its first use, by any backend, with the usual result.
    """
    if "torch._inductor.select_algorithm" in sys.modules:
        yield
        return
    from torch._inductor.codegen.common import KernelTemplate

    kind: Any = KernelTemplate
    descriptor, compiled = vars(kind)["_template_from_string"], kind._template_from_string
    kind._template_from_string = staticmethod(lambda source: _later(compiled, source))
    try:
        yield
    finally:
        kind._template_from_string = descriptor


def _later(compiled: Callable[[str], Any], source: str) -> Any:
    """Return a stand-in for `compiled(source)` that imports Jinja and compiles at first use."""

    class Later:
        """A template that is compiled when an attribute is first read."""

        def __getattr__(self, name: str) -> Any:
            template = compiled(source)
            self.__dict__.update(vars(template))
            self.__class__ = type(template)
            return getattr(self, name)

    return Later()
