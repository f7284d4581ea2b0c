"""Constants of an activation and a kernel, shared by all convolution templates."""

from collections.abc import Sequence

from ipex_inductor.ops.conv.geometry import sides


def geometry(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> dict[str, int]:
    """Return the constants of a kernel [h, w] on an image [C, H, W].

    Args:
        image: [C, H, W] of the input.
        window: [h, w] of the kernel.
        stride: of the kernel.
        padding: of the input.
        dilation: of the kernel.
    """
    channels, *size = image
    pairs = {
        "IN": size,
        "OUT": sides(size, window, stride, padding, dilation),
        "WINDOW": window,
        "STRIDE": stride,
        "PADDING": padding,
        "DILATION": dilation,
    }
    sized = {
        f"{n}_{side}": v for n, both in pairs.items() for side, v in zip("HW", both, strict=True)
    }
    return {"CHANNELS": channels, **sized}
