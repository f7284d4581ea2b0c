"""`ipex::decode_attention`: attention of few queries over a cache, on a CPU or an NVIDIA GPU."""

import torch
from torch import Tensor

from ipex_inductor.ops.common.defining import Arguments, fake, op
from ipex_inductor.target.device import level

# The kernels' bounds, which tables of beams depend on as well.
LEAST_GPU = 80  # sm_80 is the first with bf16
GPU_DTYPES = (torch.bfloat16, torch.float16)
LEAST_CPU = "x86-64:avx2"  # of which all have the instructions that convert fp16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LANES, WIDEST = 16, 256  # a head's width is a multiple of the first, and at most the second
# The most queries of a head: those of all heads that share a key, times tokens. For more, torch's
# kernel and ours on packed keys are faster where all keys are visible.
QUERIES = 16


def why_not_supported(arch: str, dtype: torch.dtype, width: int) -> str:
    """Return why no kernel is for a device and heads of a width, "" if one is."""
    on_gpu = arch.startswith("sm_")
    if on_gpu and int(arch.split(":")[0].removeprefix("sm_")) < LEAST_GPU:
        return f"it needs sm_{LEAST_GPU} or later, not {arch}"
    if not on_gpu and level(arch) < level(LEAST_CPU):
        return f"it needs {LEAST_CPU} or later, not {arch}"
    if dtype not in (GPU_DTYPES if on_gpu else DTYPES):
        return f"it has no {dtype}"
    return "" if width % LANES == 0 and width <= WIDEST else f"heads are {width} wide"


@op("decode_attention")
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor | None, scale: float
) -> Tensor:
    """Return softmax(q @ k.T * scale + mask) @ v, with zeros where every key is hidden.

    Keys that a mask of -inf hides from all queries at the begin or the end are not read, so a NaN
    there has no effect.

    Args:
        q: [B, H, Q, D].
        k: [B, H, K, D], of the dtype of q.
        v: [B, H, K, D], of the dtype of q.
        mask: broadcasts to [B, H, Q, K]; of the dtype of q and added to the scores, or on a GPU
            bools that are true for visible keys.
        table: [B, K] of int64: key j of text b is the key j of text table[b, j]. None: of text b.
        scale: factor of the scores.

    Returns:
        [B, H, Q, D] with the strides of q, as torch's op returns.
    """
    if table is not None:
        k, v = (gather_rows(t, table) for t in (k, v))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * scale
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.to(wide)
    hidden = scores == -torch.inf
    shares = scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0)
    if mask is not None:
        v = v.masked_fill(hidden.all(2).unsqueeze(-1), 0)
    return torch.empty_like(q).copy_(shares @ v.to(wide))


@fake(decode_attention)
def _(call: Arguments) -> object:
    return torch.empty_like(call.q)


def gather_rows(states: Tensor, table: Tensor) -> Tensor:
    """Return the keys or values [B, H, K, D] that a table of beams [B, K] names."""
    positions = torch.arange(states.shape[2], device=states.device)
    return states[table, :, positions].transpose(1, 2)
