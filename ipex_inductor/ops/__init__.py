"""The `ipex::` operators: schema, fake and reference implementation, one file a family.

Importing this package registers them with torch. Plain Inductor never meets them: only graphs
that our own passes rewrote contain one.
"""

from ipex_inductor.ops import (
    blocked,
    cat,
    conv,
    conv_weight,
    cudnn,
    depthwise,
    few_rows,
    foreach,
    fprop,
    gated,
    grouped,
    linear,
    moments,
    pool,
    preactivated,
    products,
    relu_masks,
    short_attention,
    shortcut,
    stem,
    stem_pool,
    sycl,
    winograd,
)

__all__ = [
    "blocked",
    "cat",
    "conv",
    "conv_weight",
    "cudnn",
    "depthwise",
    "few_rows",
    "foreach",
    "fprop",
    "gated",
    "grouped",
    "linear",
    "moments",
    "pool",
    "preactivated",
    "products",
    "relu_masks",
    "short_attention",
    "shortcut",
    "stem",
    "stem_pool",
    "sycl",
    "winograd",
]
