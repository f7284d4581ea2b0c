"""What every template of a convolution is told of its image and window."""

from collections.abc import Sequence

from ipex_inductor.ops.stem import sides


def geometry(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> dict[str, int]:
    """Constants of a window [h, w] on an image [C, H, W]."""
    channels, *size = image
    each = {
        "IN": size,
        "OUT": sides(size, window, stride, padding, dilation),
        "WINDOW": window,
        "STRIDE": stride,
        "PADDING": padding,
        "DILATION": dilation,
    }
    sized = {
        f"{n}_{side}": v for n, both in each.items() for side, v in zip("HW", both, strict=True)
    }
    return {"CHANNELS": channels, **sized}
