"""Lengths in buckets: one compiled graph serves many prompt and cache lengths."""

SMALLEST_CHUNK = 16
LARGEST_CHUNK = 256  # tokens; a GEMM of 256 rows is bound by arithmetic on CPUs and on GPUs
SMALLEST_CEILING = 256  # keys; a token reads them in microseconds, beside milliseconds of weights
LARGEST_STEP = 1024  # keys; ceilings above it are multiples, so at most 1023 masked keys are read


def round_ceiling(length: int) -> int:
    """Return the number of keys that a cache for `length` tokens is allocated for."""
    if length > LARGEST_STEP:
        return -(-length // LARGEST_STEP) * LARGEST_STEP
    return max(SMALLEST_CEILING, _next_power_of_two(length))


def round_chunk(length: int) -> int:
    """Return the number of rows that `length` tokens of a prompt are computed in.

    One token keeps one row: it shares the graph of decoding.
    """
    if length == 1:
        return 1
    return max(SMALLEST_CHUNK, _next_power_of_two(length))


def split_into_chunks(length: int) -> list[tuple[int, int]]:
    """Return (first token, number of tokens) of the chunks of a prompt of `length` tokens."""
    starts = range(0, length, LARGEST_CHUNK)
    return [(start, min(LARGEST_CHUNK, length - start)) for start in starts]


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
