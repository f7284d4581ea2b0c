"""The `ipex::` operators: schema, fake and reference implementation, one file per family.

Importing this package registers them with torch. Only graphs that this backend's passes rewrote
contain one; plain Inductor never meets them.
"""

from ipex_inductor.ops.attention import (
    decode_attention,
    indirect_attention,
    paged_attention,
    short_attention,
)
from ipex_inductor.ops.conv import (
    batch_norm_relu,
    conv,
    conv_weight,
    cudnn,
    depthwise,
    fprop,
    grouped,
    pool,
    residual,
    small_channel,
    small_channel_pool,
    sycl,
    winograd,
)
from ipex_inductor.ops.gemm import (
    blocked,
    glu,
    linear,
    products,
    skinny,
)
from ipex_inductor.ops.pointwise import (
    balanced_rounding,
    cat,
    foreach,
    moments,
    relu_masks,
)
from ipex_inductor.ops.quant import (
    fp8,
    fp8_states,
    fp8_steps,
    int8,
    int8_embedding,
    weight_only,
    weight_only_rows,
)

__all__ = [
    "balanced_rounding",
    "batch_norm_relu",
    "blocked",
    "cat",
    "conv",
    "conv_weight",
    "cudnn",
    "decode_attention",
    "depthwise",
    "foreach",
    "fp8",
    "fp8_states",
    "fp8_steps",
    "fprop",
    "glu",
    "grouped",
    "indirect_attention",
    "int8",
    "int8_embedding",
    "linear",
    "moments",
    "paged_attention",
    "pool",
    "products",
    "relu_masks",
    "residual",
    "short_attention",
    "skinny",
    "small_channel",
    "small_channel_pool",
    "sycl",
    "weight_only",
    "weight_only_rows",
    "winograd",
]
