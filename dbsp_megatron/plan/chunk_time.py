"""Time of a layer whose heads are exchanged and computed in chunks, and the number of chunks that makes it shortest."""

from __future__ import annotations

MOST_CHUNKS = 4
_CHUNK_US = 60.0
"""What a chunk more costs: two exchanges and a launch that start anew, packing in smaller pieces."""
_LEAST_GAIN = 0.03


def pipelined_us(exchange_us: float, compute_us: float, num_chunks: int) -> float:
    """Time of a layer in chunks: the first exchange and the last are in the open, the others run under kernels.

    Args:
        exchange_us: all-to-alls there and back.
        compute_us: kernels, and what they wait for in the ring.
        num_chunks: chunks of equal size.
    """
    in_the_open = exchange_us / num_chunks
    return in_the_open + max(compute_us, exchange_us - in_the_open) + _CHUNK_US * (num_chunks - 1)


def best_num_chunks(exchange_us: float, compute_us: float, most: int = MOST_CHUNKS) -> int:
    """Chunks with the shortest time; 1 unless more gain 3 %."""
    times = {num: pipelined_us(exchange_us, compute_us, num) for num in range(1, most + 1)}
    best = min(times, key=lambda num: (times[num], num))
    return best if times[best] < (1 - _LEAST_GAIN) * times[1] else 1


def most_chunks(ulysses_degree: int, num_kv_heads: int) -> int:
    """Chunks that are worth trying: every Ulysses rank has K/V heads in each; 1 where no heads are exchanged."""
    if ulysses_degree == 1:
        return 1
    return max(1, min(MOST_CHUNKS, num_kv_heads // min(ulysses_degree, num_kv_heads)))
