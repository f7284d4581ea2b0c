"""Sizes of convolutions and the row view of channels-last activations."""

from collections.abc import Sequence

from torch import Tensor


def sides(
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> tuple[int, int]:
    """Return the height and width of a convolution's result.

    Args:
        image: size of the activation, [H, W].
        window: size of the kernel, [h, w].
        stride: of each dimension.
        padding: of each dimension.
        dilation: of each dimension.
    """
    height, width = (
        (size + 2 * pad - step * (reach - 1) - 1) // stride + 1
        for size, reach, stride, pad, step in zip(
            image, window, stride, padding, dilation, strict=True
        )
    )
    return height, width


def rows_of(image: Tensor) -> Tensor:
    """Return an activation [B, C, H, W] in channels-last as [B * H * W, C]."""
    return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1])


def image_of(rows: Tensor, batch: int, height: int, width: int) -> Tensor:
    """Return [B * H * W, C] as [B, C, H, W] in channels-last."""
    return rows.view(batch, height, width, -1).permute(0, 3, 1, 2)
