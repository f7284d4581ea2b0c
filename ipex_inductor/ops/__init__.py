"""The `ipex::` operators: schema, fake and reference implementation, one file per family.

Importing this package registers them with torch. Only graphs that this backend's passes rewrote
contain one; plain Inductor never meets them.
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
