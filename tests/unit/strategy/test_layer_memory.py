"""Estimated memory of a layer whose heads are exchanged in chunks; the runtime is compared in tests/distributed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dbsp_megatron import SequenceParallelConfig
from dbsp_megatron.strategy import TokenLayout
from dbsp_megatron.strategy.call import CallShape
from dbsp_megatron.strategy.fallback import stay_home
from dbsp_megatron.strategy.layer_memory import layer_bytes

SHAPE = CallShape(
    batch=1,
    seqlen=16,
    num_heads=4,
    num_kv_heads=4,
    head_dim=1,
    head_dim_v=1,
    dtype=torch.float32,
    block_size_q=4,
    block_size_k=4,
    backward=False,
    whole_chunks=True,
)
"""On two Ulysses ranks a chunk of two heads has, on each, 16 rows of q, k, v and out, there and at home: 64 bytes."""


def _bytes(mesh: tuple[int, int], chunks: int | str, shape: CallShape = SHAPE) -> int:
    layout = TokenLayout(16, 4, "contiguous", *mesh, 0, None)
    config = SequenceParallelConfig(exchange_chunks=chunks)  # type: ignore[arg-type]
    return layer_bytes(stay_home(shape, layout, mesh), shape, layout.counts, config)


def test_layer_bytes_of_one_chunk_by_hand() -> None:
    """q, k, v sent and received; then out in their place, twice as much for its way back."""
    assert _bytes((2, 1), 1) == 2 * (3 * 128) == 3 * 128 + 128 + 2 * 128


def test_layer_bytes_of_two_chunks_by_hand() -> None:
    """The most is taken when the output of the second chunk is packed.

    There are the output of all heads, both chunks of q, k, v, out and lse, and both buffers of both ways back.
    """
    assert _bytes((2, 1), 2) == 128 + 2 * (5 * 64) + 2 * (2 * 64)


def test_layer_bytes_of_a_backward_pass_in_two_chunks_by_hand() -> None:
    """The most is taken when the gradients of the second chunk are packed.

    There are the output, what the forward pass kept, the gradients at home, those of the chunk, and both buffers of
    both ways back.
    """
    want = 128 + 2 * (5 * 64) + 3 * 128 + 3 * 64 + 2 * (2 * 3 * 64)
    assert _bytes((2, 1), 2, replace(SHAPE, backward=True)) == want


@pytest.mark.parametrize("backward", [False, True])
def test_layer_bytes_of_auto_are_those_of_the_number_that_needs_most(backward: bool) -> None:
    shape = replace(SHAPE, backward=backward)
    sizes = [_bytes((2, 1), num, shape) for num in (1, 2, 3, 4)]
    assert _bytes((2, 1), "auto", shape) == max(sizes) > min(sizes)


@pytest.mark.parametrize("mesh", [(1, 1), (1, 2)])
def test_layer_bytes_without_an_exchange_of_heads_do_not_depend_on_chunks(mesh: tuple[int, int]) -> None:
    assert len({_bytes(mesh, chunks) for chunks in (1, 2, 4, "auto")}) == 1


def test_layer_bytes_of_grouped_heads_count_chunks_of_kv_heads() -> None:
    """One K/V head is one chunk, whatever is asked for."""
    shape = replace(SHAPE, num_kv_heads=1)
    assert _bytes((2, 1), 4, shape) == _bytes((2, 1), 1, shape)
    shape = replace(SHAPE, num_kv_heads=2)
    assert _bytes((2, 1), 4, shape) == _bytes((2, 1), 2, shape) != _bytes((2, 1), 1, shape)
