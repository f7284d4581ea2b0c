"""ipex_inductor: the torch.compile backend `ipex`, and what surrounds it.

Importing this package is cheap: no compilation, no folder, no torch internals until first use.
"""

__version__ = "0.1.0"
