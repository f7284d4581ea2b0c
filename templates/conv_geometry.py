"""Constants of an input image and a window, shared by all convolution templates."""

from collections.abc import Sequence

from ipex_inductor.ops.conv.geometry import sides


def geometry(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> dict[str, int]:
    """Return the constants of a convolution with a window [h, w] on an image [C, H, W].

    Args:
        image: [C, H, W] of the input.
        window: its size [h, w].
        stride: of the window, by side.
        padding: of the input, by side.
        dilation: of the window, by side.
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
