"""ipex_inductor: the torch.compile backend `ipex`, and what surrounds it.

Importing this package is cheap: no compilation, no folder, no torch internals until first use.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipex_inductor.explanation import Explanation

__version__ = "0.1.0"


def explain(model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> "Explanation":
    """What backend `ipex` does to `model` and why; see `ipex_inductor.explanation.explain`.

    `print(ipex_inductor.explain(model, x))` runs the model once and shows a table of each graph.
    """
    from ipex_inductor import explanation

    return explanation.explain(model, *inputs, **kwargs)
