"""Time of a layer in chunks of heads, and how many make it shortest."""

from __future__ import annotations

import pytest

from dbsp_megatron.plan.chunk_time import MOST_CHUNKS, best_num_chunks, kernel_tail_us, most_chunks, pipelined_us


def test_pipelined_us_leaves_the_first_and_last_exchange_in_the_open() -> None:
    assert pipelined_us(400.0, 1000.0, 1) == pytest.approx(1400.0)
    assert pipelined_us(400.0, 1000.0, 2) == pytest.approx(200 + 1000 + 60)
    # More to exchange than to compute: it cannot be hidden.
    assert pipelined_us(4000.0, 100.0, 4) == pytest.approx(1000 + 3000 + 180)


def test_best_num_chunks_splits_only_where_it_gains() -> None:
    assert best_num_chunks(0.0, 1000.0) == 1
    assert best_num_chunks(100.0, 1000.0) == 1
    assert best_num_chunks(4000.0, 10000.0) == 4
    assert best_num_chunks(4000.0, 10000.0, most=2) == 2
    assert best_num_chunks(4000.0, 20000.0) == 4


def test_best_num_chunks_counts_the_tail_of_every_kernel() -> None:
    """16 H200, 8 x 2, 1,478 rows of 7 ms: three chunks took 7.8 ms of kernels where one took 6.8 (emulated)."""
    tail = kernel_tail_us(7000.0, 1478, 132)
    assert tail == pytest.approx(0.5 * 132 * 7000 / 1478)
    assert pipelined_us(1000.0, 7000.0, 3, tail) == pytest.approx(1000 / 3 + 7000 + 2 * tail + 120)
    assert best_num_chunks(1080.0, 7000.0, 3) == 3
    assert best_num_chunks(1080.0, 7000.0, 3, tail) == 1
    assert kernel_tail_us(7000.0, 0, 132) == pytest.approx(0.5 * 132 * 7000)
    assert kernel_tail_us(7000.0, 1478, None) == 0.0


def test_best_num_chunks_launches_no_more_than_the_host_can() -> None:
    """Where kernels are shorter than the host needs for another chunk, the device would wait for the host."""
    assert best_num_chunks(900.0, 1000.0) == 1
    assert best_num_chunks(900.0, 4999.0) == 1
    assert best_num_chunks(900.0, 5000.0) == 2
    assert best_num_chunks(900.0, 7000.0) == 3


@pytest.mark.parametrize(
    ("ulysses", "kv_heads", "most"),
    [(1, 12, 1), (2, 12, MOST_CHUNKS), (4, 12, 3), (8, 12, 1), (8, 4, 1), (2, 1, 1)],
)
def test_most_chunks_leaves_every_rank_heads_in_each(ulysses: int, kv_heads: int, most: int) -> None:
    assert most_chunks(ulysses, kv_heads) == most
