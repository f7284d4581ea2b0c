"""Pieces that rules of `passes/restated` rewrite or refuse, on one device or another."""

from fuzz.motifs import bias, fresh


def upsampled(b):
    """A convolution of one pixel behind an upsampled image, alone or beside another."""
    mode = b.pick("nearest", "nearest", "bilinear")
    v = b.emit(f"F.interpolate({fresh(b, 4)}, scale_factor=2.0, mode={mode!r})")
    if b.chance(0.5):
        v = b.emit(f"torch.cat([{v}, {b.input(*b.shape(v))}], 1)")
    w = b.parameter(b.pick(2, 4), b.shape(v)[1], 1, 1)
    return b.emit(f"F.conv2d({v}, {w}, {bias(b, b.shape(w)[0])})")


def patches(b):
    """A convolution whose windows lie side by side."""
    x, side = fresh(b, 4), b.pick(2, 3)
    w = b.parameter(b.pick(4, 6), b.shape(x)[1], side, side)
    return b.emit(f"F.conv2d({x}, {w}, {bias(b, b.shape(w)[0])}, {side})")


def video(b):
    """A convolution of few channels in time and space."""
    x = b.input(b.batch(1, 2), b.pick(1, 3), b.pick(3, 4), 6, 6)
    w = b.parameter(b.pick(4, 6), b.shape(x)[1], b.pick(1, 3), 3, 3)
    return b.emit(f"F.conv3d({x}, {w}, {bias(b, b.shape(w)[0])}, padding=1)")


def equal_bags(b):
    """Embedding bags of one length; of maxima, as torch's fake describes the others wrongly.

    It gives a further result, which nobody reads, a size that eager's does not have.
    """
    rows, bags = b.pick(4, 6), b.pick(1, 2, 3)
    indices = b.emit(f"torch.arange({3 * bags}).remainder({rows}).view({bags}, 3)")
    return b.emit(f"F.embedding_bag({indices}, {b.parameter(rows, 8)}, mode='max')")


def copied_heads(b):
    """Attention over heads that were made contiguous."""
    sizes = b.batch(1, 2), b.pick(3, 5), b.pick(1, 3), 8
    heads = [b.emit(f"{b.input(*sizes)}.transpose(1, 2).contiguous()") for _ in range(3)]
    return b.emit(f"F.scaled_dot_product_attention({', '.join(heads)})")
