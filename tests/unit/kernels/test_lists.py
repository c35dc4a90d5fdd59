"""Index lists against lists made by hand, and their Triton kernels in the interpreter against the plain twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention.lists import (
    BlockLists,
    build_lists,
    dense_lists,
    launch_order,
    naive_build_lists,
    naive_launch_order,
)
from tests.harness import run_ranks
from tests.reference import random_blocks

# batch, heads, q-blocks, k-blocks; every kind of head of `random_blocks` (dense, empty rows, hot columns), odd sizes.
SHAPES = [(1, 5, 19, 131), (2, 3, 33, 257), (3, 1, 70, 17), (1, 1, 1, 1), (1, 2, 3, 1343), (2, 5, 128, 16)]

# The interpreter takes a millisecond for an operation on a tile.
INTERPRETER_SHAPES = [(1, 5, 19, 131), (2, 3, 17, 30), (1, 1, 1, 1), (1, 1, 2, 1343)]


def _views(shape: tuple[int, int, int, int]) -> dict[str, Tensor]:
    blocks = random_blocks(7, *shape)
    return {
        "contiguous": blocks,
        "transposed": blocks.transpose(2, 3).contiguous().transpose(2, 3),
        "every second column": blocks[..., ::2],
        "shared by heads": blocks[:, :1],
        "expanded batch": blocks[:1].expand(2, -1, -1, -1),
        "all dense": torch.ones_like(blocks),
        "all empty": torch.zeros_like(blocks),
        "no rows": blocks[:, :, :0],
        "no columns": blocks[..., :0],
    }


def _check_direction(count: Tensor, index: Tensor, blocks: Tensor) -> None:
    """The first `count` entries of each row are ascending and are exactly the dense blocks."""
    listed = torch.zeros_like(blocks)
    for row_count, row_index, row in zip(count.flatten(), index.flatten(0, 2), listed.flatten(0, 2), strict=True):
        entries = row_index[:row_count].long()
        assert bool((entries.diff() > 0).all())
        row[entries] = True
    assert torch.equal(listed, blocks)


def _check_by_hand(lists: BlockLists, blocks: Tensor) -> None:
    assert lists.t_count is not None
    assert lists.t_index is not None
    assert lists.full is not None
    assert torch.equal(lists.full, blocks.flatten(2).all(-1) if blocks.numel() else lists.full)
    _check_direction(lists.count, lists.index, blocks.contiguous())
    _check_direction(lists.t_count, lists.t_index, blocks.transpose(2, 3).contiguous())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_build_lists_equals_lists_made_by_hand(shape: tuple[int, int, int, int]) -> None:
    for blocks in _views(shape).values():
        lists = build_lists(blocks, transpose=True)
        _check_by_hand(lists, blocks)
        assert lists.t_order is not None
        assert lists.t_index is not None
        assert lists.index.is_contiguous()
        assert lists.t_index.is_contiguous()
        assert sorted(lists.order.tolist()) == list(range(lists.count.numel()))
        assert sorted(lists.t_order.tolist()) == list(range(lists.t_index.shape[:3].numel()))


def test_build_lists_makes_the_transpose_only_when_asked() -> None:
    blocks = random_blocks(3, 1, 5, 9, 7)
    lists = build_lists(blocks, transpose=False)
    assert (lists.t_count, lists.t_index, lists.t_order) == (None, None, None)
    _check_by_hand(lists.with_transpose(blocks), blocks)
    complete = build_lists(blocks, transpose=True)
    assert complete.with_transpose(blocks) is complete


def test_build_lists_stores_long_rows_in_32_bits() -> None:
    blocks = torch.zeros((1, 1, 2, 32770), dtype=torch.bool)
    blocks[..., -1] = True
    lists = build_lists(blocks, transpose=True)
    assert (lists.index.dtype, lists.t_index.dtype) == (torch.int32, torch.int16)  # type: ignore[union-attr]
    assert lists.index[0, 0, :, 0].tolist() == [32769, 32769]


def test_build_lists_takes_many_heads_of_many_rows() -> None:
    """Trap B53: no table of a fixed size limits heads times rows."""
    blocks = torch.zeros((1, 48, 768, 3), dtype=torch.bool)
    blocks[:, 1::2, 5::7, 1:] = True
    lists = build_lists(blocks, transpose=True)
    assert torch.equal(lists.count, blocks.sum(-1, dtype=torch.int32))
    assert sorted(lists.order.tolist()) == list(range(48 * 768))
    # Heads with work come first, longest row first; head 1 is the first of them.
    assert lists.order[0] == 768 + 5


def test_launch_order_starts_long_rows_then_goes_head_by_head() -> None:
    # One multiprocessor's mean share is sum / 132, so that only a row of more than sum / 1320 counts as long.
    count = torch.full((1, 3, 700), 2, dtype=torch.int32)
    count[0, 1] = 3
    count[0, 2, 650], count[0, 0, 3], count[0, 0, 690] = 40, 50, 1
    order = launch_order(count).tolist()
    assert order[:2] == [3, 2 * 700 + 650]
    assert order[2:702] == list(range(700, 1400))
    assert order[702:1401] == [i for i in range(700) if i not in (3, 690)] + [690]
    assert order[1401:] == [i for i in range(1400, 2100) if i != 2050]
    assert torch.equal(launch_order(count), naive_launch_order(count))


def test_dense_lists_equal_those_of_a_dense_mask() -> None:
    got = dense_lists(2, 3, 5, 1100, "cpu")
    want = build_lists(torch.ones((2, 3, 5, 1100), dtype=torch.bool), transpose=True)
    for name in ("count", "t_count", "full", "order", "t_order"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.index.untyped_storage().nbytes() < 100
    assert got.index.shape == want.index.shape


@pytest.mark.parametrize("blocks", [torch.ones(1, 2, 3, 4), torch.ones(2, 3, 4, dtype=torch.bool)], ids=str)
def test_build_lists_refuses_what_is_no_mask(blocks: Tensor) -> None:
    for build in (build_lists, naive_build_lists):
        with pytest.raises(ValueError, match="blocks must be bool"):
            build(blocks, transpose=False)


def _run_interpreter(rank: int, world_size: int) -> list[str]:
    from dbsp_megatron.kernels.block_sparse_attention.lists_kernel import triton_compact, triton_order_keys

    faults = []
    for shape in INTERPRETER_SHAPES:
        for name, blocks in _views(shape).items():
            for direction in (blocks, blocks.transpose(2, 3)):
                want = naive_build_lists(direction, transpose=False)
                count, index = triton_compact(direction, want.index.dtype)
                valid = torch.arange(direction.shape[3]) < count[..., None]
                same = torch.equal(count, want.count) and torch.equal(index[valid], want.index[valid])
                if not same:
                    faults.append(f"lists {shape} {name}")
                keys = triton_order_keys(count, 132, 10)
                if not torch.equal(torch.sort(keys, descending=True, stable=True).indices.int(), want.order):
                    faults.append(f"order {shape} {name}")
    return faults


def test_triton_lists_equal_twin_in_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported, so a process of its own runs it."""
    pytest.importorskip("triton", reason="needs triton")
    faults = run_ranks(_run_interpreter, 1, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=200)[0]
    assert not faults, faults
