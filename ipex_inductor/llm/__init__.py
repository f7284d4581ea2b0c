"""`ipex.llm`: language models of transformers, optimized in one call."""

from ipex_inductor.llm.optimizing import optimize as optimize
from ipex_inductor.llm.optimizing import optimize as optimize_transformers

__all__ = ["optimize", "optimize_transformers"]
