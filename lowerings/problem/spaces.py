"""All kernel choices that a record may name, with the values that their parameters may have."""

from ipex_inductor.autotune.space import Values, register
from ipex_inductor.templates.sycl.tiles import blocks
from ipex_inductor.templates.triton import skinny

LIBRARY = (
    "mm",
    "mm_dtype",
    "addmm",
    "addmm_padded",
    "bias_addmm",
    "bmm",
    "bmm_dtype",
    "baddbmm",
    "convolution",
    "convolution_padded",
    "convolution_backward",
    "conv1x1_via_mm",
)
# Calls that also compute an epilogue.
FUSED = ("cudnn.convolution_relu", "cudnn.convolution_add_relu", "cublaslt.addmm_activation")
TRITON = (
    "mm",
    "bmm",
    "mm_persistent_tma",
    "blackwell_ws_persistent_device_tma",
    "convolution2d",
    "convolution3d",
    "depthwise_conv1d",
)
MICRO = tuple(f"CppMicro{name}" for name in ("GemmAMX", "GemmFP32Vec", "GemmRef", "Brgemm"))

# Our templates, which are candidates beside a library's calls and not in Inductor's lists.
CONVOLUTIONS = ("stem", "depthwise", "strips", "fprop", "boxes", "grouped", "stem_weight")
TOGETHER = ("shortcut_streamed", "shortcut_boxes", "stem_pool", "preactivated")
DEFAULT_INT8 = "ipex.int8"  # a template by the sizes of the problem, without a record
DEFAULT_WEIGHT_ONLY = "ipex.weight_only"  # a template or a library's GEMM, by the sizes
DEQUANTIZED = "ipex.weight_only_dequantized"  # a library's GEMM on the dequantized weight
INT8 = ("int8_gemm", "int8_streamed", "int8_conv", "int8_boxes")
GEMMS = ("streamed", "persistent", "pipelined", "gated")
WEIGHT_ONLY = "weight_only"
FAMILIES = (*CONVOLUTIONS, *TOGETHER, *INT8, *GEMMS, WEIGHT_ONLY)
OURS = tuple(f"ipex.triton.{name}" for name in FAMILIES)

_TILES = tuple(2**n for n in range(3, 10))
_WARPS: Values = (1, 2, 4, 8, 16, 32)
_STAGES: Values = tuple(range(9))
_REQUIRED: dict[str, Values] = {"num_stages": _STAGES, "num_warps": _WARPS}
# Each template has some of these. The options for AMD are last.
_OPTIONAL: dict[str, Values] = {
    "BLOCK_M": _TILES,
    "BLOCK_N": _TILES,
    "BLOCK_K": _TILES,
    "GROUP_M": tuple(range(1, 17)),
    "NUM_SMS": tuple(range(1, 1025)),
    "EPILOGUE_SUBTILE": (False, True, 0, 1, 2, 4),
    "matrix_instr_nonkdim": (0, 16, 32),
    "waves_per_eu": tuple(range(9)),
    "kpack": (1, 2),
}
_OUR_TILES: dict[str, Values] = {
    "num_stages": _STAGES,
    "programs": tuple(range(1, 9)),
    "parts": (1, 2, 4, 8),
    "unroll": (1, 2, 4),
    **{f"BLOCK_{side}": tuple(2**n for n in range(10)) for side in "MNKHW"},
}
TRITON_PARAMETERS = (*_REQUIRED, *_OPTIONAL)

for _name in LIBRARY:
    register("library", f"aten.{_name}")
for _name in (*FUSED, DEFAULT_INT8, DEFAULT_WEIGHT_ONLY, DEQUANTIZED):
    register("library", _name)
for _name in TRITON:
    register("template", f"inductor.triton.{_name}", optional=_OPTIONAL, **_REQUIRED)
for _name in OURS:
    register("template", _name, optional=_OUR_TILES, num_warps=_WARPS)
register("template", "inductor.cpp.bmm", micro=MICRO)

_ours = [tile for one_row in (True, False) for tile in skinny.tiles(one_row)]
_fields = dict(zip(skinny.Tile._fields, zip(*_ours, strict=True), strict=True))
del _fields["joined"]
register("template", skinny.NAME, {"joined": (True,)}, **_fields)

# SYCL kernels, for Intel GPUs.
register("template", "ipex.sycl.product", None, block=blocks())
register("template", "ipex.sycl.grouped", None, block=("",))
