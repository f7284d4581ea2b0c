"""Packers of quantized checkpoints, word by word, that share nothing with the readers."""

import torch

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each of eight columns


def wrap(words):
    """Return words of 32 bits as int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack(values, bits):
    """Pack integers [R, C] along C, lowest bits first; a last word may not be full."""
    each = 32 // bits
    words = torch.zeros(values.shape[0], -(-values.shape[1] // each), dtype=torch.int64)
    for column in range(values.shape[1]):
        words[:, column // each] |= values[:, column].long() << (bits * (column % each))
    return wrap(words)


def pack_gptq(stored, zeros, bits=4):
    """Pack integers [N, K] along K and stored zero points [N, G] along N, as GPTQ does."""
    return pack(stored, bits).t().contiguous(), pack(zeros.t(), bits)


def pack_awq(stored, zeros):
    """Pack integers [N, K] and zero points [N, G] along N in the order of AWQ."""
    words = []
    for values in (stored, zeros):
        packed = torch.zeros(values.shape[1], values.shape[0] // 8, dtype=torch.int64)
        for n in range(values.shape[0]):
            packed[:, n // 8] |= values[n].long() << (4 * AWQ_NIBBLES[n % 8])
        words.append(wrap(packed))
    return words
