"""BlockMask: checks at construction, density, token-level form, digest."""

from __future__ import annotations

import re

import pytest
import torch

from dbsp_megatron import BlockMask
from tests.reference import expand_blocks, random_blocks


def test_block_mask_seqlen_defaults_to_whole_blocks() -> None:
    mask = BlockMask(torch.ones(1, 2, 3, 5, dtype=torch.bool), block_size_q=16, block_size_k=8)
    assert (mask.seqlen_q, mask.seqlen_k) == (48, 40)
    assert (mask.batch_size, mask.num_heads, mask.num_q_blocks, mask.num_k_blocks) == (1, 2, 3, 5)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("block_q", "block_k", "seqlen_q", "seqlen_k"), [(8, 8, 37, 37), (16, 4, 33, 7), (5, 3, 1, 2)])
def test_to_dense_equals_indexing_by_block(
    batch: int, block_q: int, block_k: int, seqlen_q: int, seqlen_k: int
) -> None:
    blocks = random_blocks(3, batch, 3, -(-seqlen_q // block_q), -(-seqlen_k // block_k))
    mask = BlockMask(blocks, block_q, block_k, seqlen_q, seqlen_k)
    dense = mask.to_dense()
    assert dense.dtype == torch.bool
    assert torch.equal(dense, expand_blocks(blocks, block_q, block_k, seqlen_q, seqlen_k))


def test_density_is_share_of_dense_blocks() -> None:
    blocks = torch.zeros(1, 2, 2, 4, dtype=torch.bool)
    blocks[0, 1, 0, :3] = True
    assert BlockMask(blocks, 8, 8).density == pytest.approx(3 / 16)
    assert BlockMask(torch.zeros_like(blocks), 8, 8).density == 0.0


def test_density_of_mask_without_key_blocks_is_zero() -> None:
    """A sequence of length 0 has no blocks and no 0/0 (Trap B119)."""
    mask = BlockMask(torch.zeros(1, 2, 1, 0, dtype=torch.bool), 8, 8, 4, 0)
    assert mask.density == 0.0
    assert mask.to_dense().shape == (1, 2, 4, 0)


@pytest.mark.parametrize("seqlen_k", [None, 19])
def test_dense_turns_every_block_on(seqlen_k: int | None) -> None:
    mask = BlockMask.dense(3, 37, seqlen_k, block_size_q=16, block_size_k=8)
    assert mask.density == 1.0
    assert mask.blocks.shape == (1, 3, 3, 5 if seqlen_k is None else 3)
    assert mask.to_dense().shape == (1, 3, 37, seqlen_k or 37)
    assert bool(mask.to_dense().all())


@pytest.mark.parametrize("seqlen", [0, 32, 49, 1000])
@pytest.mark.parametrize("side", ["q", "k"])
def test_block_mask_refuses_length_that_does_not_fit_the_blocks(side: str, seqlen: int) -> None:
    """Three blocks of 16 hold 33 to 48 tokens; the message names length, block size and count (Trap B03)."""
    blocks = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    lengths = {"seqlen_q": 48, "seqlen_k": 48, f"seqlen_{side}": seqlen}
    with pytest.raises(ValueError, match=rf"seqlen_{side}\D*{seqlen}\b") as error:
        BlockMask(blocks, 16, 16, **lengths)
    assert re.search(r"\b16\b", str(error.value))
    assert re.search(r"\b3\b", str(error.value))


@pytest.mark.parametrize("seqlen", [33, 48])
def test_block_mask_accepts_shortest_and_longest_tail(seqlen: int) -> None:
    mask = BlockMask(torch.ones(1, 1, 3, 3, dtype=torch.bool), 16, 16, seqlen, seqlen)
    assert mask.to_dense().shape == (1, 1, seqlen, seqlen)


@pytest.mark.parametrize(
    ("blocks", "word"),
    [
        (torch.ones(1, 2, 3, 3), "bool"),
        (torch.ones(1, 2, 3, 3, dtype=torch.int64), "bool"),
        (torch.ones(2, 3, 3, dtype=torch.bool), r"4 dim|\[B"),
        (torch.ones(1, 1, 2, 3, 3, dtype=torch.bool), r"4 dim|\[B"),
    ],
)
def test_block_mask_refuses_other_dtypes_and_shapes(blocks: torch.Tensor, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        BlockMask(blocks, 16, 16)


@pytest.mark.parametrize("size", [0, -4])
def test_block_mask_refuses_block_size_below_one(size: int) -> None:
    blocks = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"block_size_k\D*1\D*{size}"):
        BlockMask(blocks, 16, size)


def test_block_mask_is_frozen() -> None:
    mask = BlockMask.dense(1, 16, block_size_q=8, block_size_k=8)
    with pytest.raises(AttributeError):
        mask.block_size_q = 4  # type: ignore[misc]


def test_digest_depends_on_pattern_sizes_and_lengths() -> None:
    blocks = random_blocks(0, 1, 2, 3, 3)
    base = BlockMask(blocks, 16, 16, 40, 40)
    flipped = blocks.clone()
    flipped[0, 1, 2, 0] ^= True
    others = [
        BlockMask(flipped, 16, 16, 40, 40),
        BlockMask(blocks, 14, 16, 40, 40),
        BlockMask(blocks, 16, 16, 41, 40),
        BlockMask(blocks, 16, 16, 40, 41),
        BlockMask(blocks.expand(2, -1, -1, -1).clone(), 16, 16, 40, 40),
        BlockMask(blocks.transpose(2, 3).contiguous(), 16, 16, 40, 40),
    ]
    digests = [mask.digest for mask in (base, *others)]
    assert len(set(digests)) == len(digests)
    assert BlockMask(blocks.clone(), 16, 16, 40, 40).digest == base.digest


def test_digest_follows_a_write_to_the_blocks() -> None:
    mask = BlockMask(torch.zeros(1, 1, 2, 2, dtype=torch.bool), 8, 8)
    before = mask.digest
    mask.blocks[0, 0, 1, 0] = True
    assert mask.digest != before
    assert mask.digest == BlockMask(mask.blocks.clone(), 8, 8).digest


def test_to_same_device_keeps_pattern_and_lengths() -> None:
    mask = BlockMask(random_blocks(1, 2, 2, 2, 3), 16, 8, 20, 24)
    moved = mask.to("cpu")
    assert torch.equal(moved.blocks, mask.blocks)
    assert (moved.block_size_q, moved.block_size_k, moved.seqlen_q, moved.seqlen_k) == (16, 8, 20, 24)
