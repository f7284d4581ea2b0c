"""layer_norm and rms_norm in SYCL, fused with an addition before them."""

from torch import Tensor

from ipex_inductor.aot_cache.key import pairs
from ipex_inductor.templates.sycl.device import Device
from ipex_inductor.templates.sycl.kernel import constants, head, options, part, types
from ipex_inductor.templates.sycl.source import Entry, Source
from ipex_inductor.templates.sycl.tiles import CPU, LANES

SUB_GROUPS = {CPU: 1}  # that share a row; on a CPU a barrier costs more than it hides
USUAL = 16  # sub-groups of a work-group by default

_ARGUMENTS = ("*",) * 6 + ("i32", "i64", "i64", "fp32")


def source(arch: str, dtype: str, centred: bool) -> Source:
    """Return the kernel `norm`: layer_norm if `centred`, else rms_norm. Sums are fp32.

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
    """Normalise the last dimension of x (+ other); return the result and the normalised sum.

    Args:
        device: the device of the tensors.
        made: a kernel of `source`.
        x: the input, of the dtype of all other tensors.
        weight: [x.shape[-1]], or None.
        bias: [x.shape[-1]], or None.
        epsilon: added to the mean of squares.
        other: of x's shape, added before, or None.
    """
    size = x.shape[-1]
    y = x.new_empty(x.shape)
    added = x if other is None else x.new_empty(x.shape)
    if not x.numel():
        return y, added
    rows, addend = _rows(x), None if other is None else _rows(other)
    teams = SUB_GROUPS.get(CPU if device.waits else "", USUAL)
    parameters = [0 if t is None else t.contiguous() for t in (weight, bias)]
    arguments = (
        *(rows, 0 if addend is None else addend, *parameters, 0 if addend is None else added, y),
        *(size, rows.stride(0), 0 if addend is None else addend.stride(0), epsilon),
    )
    device.load(made).kernel("norm")(arguments, (len(rows) * teams * LANES,), (teams * LANES,))
    return y, added


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
