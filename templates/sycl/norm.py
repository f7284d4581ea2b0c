"""layer_norm and rms_norm in SYCL, with the addition before them."""

from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.templates.sycl.device import Device
from ipex_inductor.templates.sycl.kernel import constants, head, options, part, types
from ipex_inductor.templates.sycl.source import Entry, Source
from ipex_inductor.templates.sycl.tiles import CPU, LANES

SUB_GROUPS = {CPU: 1}  # that share a row; on a CPU a barrier costs more than it hides
USUAL = 16

_ARGUMENTS = ("*",) * 6 + ("i32", "i64", "i64", "fp32")


def source(arch: str, dtype: str, centred: bool) -> Source:
    """The kernel `norm`: of layer_norm if `centred`, or else of rms_norm. Sums are fp32.

    layer_norm: `(x - mean) / sqrt(mean((x - mean)^2) + epsilon) * weight + bias` (Ba et al. 2016);
    rms_norm: `x / sqrt(mean(x^2) + epsilon) * weight` (Zhang, Sennrich 2019).
    """
    sizes = {"SG": LANES, "SUB_GROUPS": SUB_GROUPS.get(arch, USUAL), "CENTRED": centred}
    text = head() + types({"In": dtype}) + constants(sizes) + part("norm.cpp")
    return Source(
        text,
        (Entry("norm", _ARGUMENTS, 1, LANES),),
        options(arch),
        needs=("fp16",) * (dtype == "fp16"),
        problem=pairs({"template": "norm", "dtype": dtype, **sizes}),
    )


def norm(
    device: Device,
    made: Source,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    other: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`made` over the last dimension of x (+ other): the result, and what was normalised.

    weight and bias [x.shape[-1]], other as x; all of x's dtype.
    """
    size = x.shape[-1]
    y = x.new_empty(x.shape)
    added = x if other is None else x.new_empty(x.shape)
    if not x.numel():
        return y, added
    rows, beside = _rows(x), None if other is None else _rows(other)
    teams = SUB_GROUPS.get(CPU if device.waits else "", USUAL)
    known = [0 if t is None else t.contiguous() for t in (weight, bias)]
    given = (
        *(rows, 0 if beside is None else beside, *known, 0 if beside is None else added, y),
        *(size, rows.stride(0), 0 if beside is None else beside.stride(0), epsilon),
    )
    device.load(made).kernel("norm")(given, (len(rows) * teams * LANES,), (teams * LANES,))
    return y, added


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
