"""Time of a layer whose heads are exchanged and computed in chunks, and the number of chunks that makes it shortest."""

from __future__ import annotations

MOST_CHUNKS = 4
_CHUNK_US = 60.0
"""What a chunk more costs: two exchanges and a launch that start anew, packing in smaller pieces."""
_LEAST_GAIN = 0.03
_HOST_US, _CHUNK_HOST_US = 1000.0, 2000.0
"""Time that the host takes for a layer, and for each chunk of it (two H200: 3.0 ms for one, 6.6 for 3, 9.2 for 4).
Where kernels are shorter, the device waits for the host."""


def pipelined_us(exchange_us: float, compute_us: float, num_chunks: int, tail_us: float = 0.0) -> float:
    """Time of a layer in chunks: the first exchange and the last are in the open, the others run under kernels.

    Args:
        exchange_us: all-to-alls there and back.
        compute_us: kernels, and what they wait for in the ring.
        num_chunks: chunks of equal size.
        tail_us: of a kernel, while its last rows leave multiprocessors idle; `compute_us` holds that of one.
    """
    in_the_open, more = exchange_us / num_chunks, num_chunks - 1
    computed = compute_us + tail_us * more
    return in_the_open + max(computed, exchange_us - in_the_open) + _CHUNK_US * more


def kernel_tail_us(compute_us: float, num_rows: int, num_multiprocessors: int | None) -> float:
    """Half the time of a row of mean length: what a kernel's last rows cost, each on a multiprocessor of its own.

    Args:
        compute_us: kernels of all rows.
        num_rows: (head, q-block) rows of a rank.
        num_multiprocessors: of the device; None: not known, and nothing is taken for it.
    """
    return 0.5 * (num_multiprocessors or 0) * compute_us / max(1, num_rows)


def best_num_chunks(exchange_us: float, compute_us: float, most: int = MOST_CHUNKS, tail_us: float = 0.0) -> int:
    """Chunks with the shortest time; 1 unless more gain 3 %, or where the host could not launch them in time."""
    in_time = [1, *(num for num in range(2, most + 1) if _HOST_US + _CHUNK_HOST_US * num <= compute_us)]
    times = {num: pipelined_us(exchange_us, compute_us, num, tail_us) for num in in_time}
    best = min(times, key=lambda num: (times[num], num))
    return best if times[best] < (1 - _LEAST_GAIN) * times[1] else 1


def most_chunks(ulysses_degree: int, num_kv_heads: int) -> int:
    """Chunks that are worth trying: every Ulysses rank has K/V heads in each; 1 where no heads are exchanged."""
    if ulysses_degree == 1:
        return 1
    return max(1, min(MOST_CHUNKS, num_kv_heads // min(ulysses_degree, num_kv_heads)))
