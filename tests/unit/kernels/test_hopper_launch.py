"""What the Hopper kernels say they can run, and which query heads a backward program takes; without a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbsp_megatron.kernels.block_sparse_attention import hopper_launch
from dbsp_megatron.kernels.block_sparse_attention.hopper_launch import (
    backward_config,
    check_call,
    check_lists,
    query_groups,
    supports,
)
from dbsp_megatron.kernels.block_sparse_attention.lists import build_lists
from tests.reference import random_blocks


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a card that fits."""
    monkeypatch.setattr(hopper_launch, "_wrong_device", lambda _: None)
    monkeypatch.setattr(hopper_launch, "_missing_software", lambda: None)


def test_supports_names_the_device_first() -> None:
    x = _tensor(1, 10, 2, 100)
    assert supports(x, x, x, 48, 48) == "device is cpu, not CUDA"
    with pytest.raises(ValueError, match="not CUDA; ask supports"):
        check_call(supports(x, x, x, 64, 64))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dim", [8, 40, 64, 72, 96, 128])
@pytest.mark.parametrize("layout", ["contiguous", "heads first", "fused", "one head of many"])
def test_supports_takes_views_without_copies(dim: int, layout: str) -> None:
    x = {
        "contiguous": _tensor(2, 70, 3, dim),
        "heads first": _tensor(2, 3, 70, dim).transpose(1, 2),
        "fused": _tensor(2, 70, 3, 3, dim)[:, :, 1],
        "one head of many": _tensor(1, 70, 7, dim)[:, 5:, 2:3],
    }[layout]
    for block_q, block_k in ((64, 64), (128, 64), (128, 128), (64, 128)):
        assert supports(x, x.half().bfloat16(), x, block_q, block_k, scale=0.3) is None
    assert hopper_launch.for_tma(x) is x


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": _tensor(1, 9, 2, 64, dtype=torch.float32)}, "dtypes"),
        ({"k": _tensor(1, 9, 2, 64, dtype=torch.float16)}, "dtypes"),
        ({"v": _tensor(1, 9, 2, 128)}, "head dims 64, 64, 128 differ"),
        ({name: _tensor(1, 9, 2, 68) for name in "qkv"}, "head dim 68 is no multiple of 8 up to 128"),
        ({name: _tensor(1, 9, 2, 136) for name in "qkv"}, "head dim 136 is no multiple of 8 up to 128"),
        ({"block_size_q": 32}, "blocks of 32 x 64"),
        ({"block_size_k": 256}, "blocks of 64 x 256"),
        ({"scale": 0.0}, "not positive"),
        ({"scale": float("nan")}, "not positive"),
        ({"deterministic": True}, "any order"),
        ({"q": _tensor(1, 9, 64, 2).transpose(2, 3)}, "last dim"),
        ({"v": _tensor(1, 1, 2, 64).expand(1, 9, 2, 64)}, "stride of 0 bytes in dim 1"),
        ({"k": _tensor(1, 9, 2, 68)[..., :64]}, "stride of 136 bytes in dim 2"),
        ({"k": _tensor(1, 9, 2, 72)[..., 4:68]}, "address"),
    ],
)
def test_supports_names_what_does_not_fit(change: dict[str, Any], reason: str) -> None:
    good: dict[str, Any] = {name: _tensor(1, 9, 2, 64) for name in "qkv"} | {"block_size_q": 64, "block_size_k": 64}
    assert supports(**good) is None
    assert reason in str(supports(**good | change))


def test_for_tma_copies_an_expanded_gradient() -> None:
    x = torch.ones((), dtype=torch.bfloat16).expand(1, 9, 2, 64)
    assert hopper_launch.for_tma(x).stride() == (9 * 2 * 64, 2 * 64, 64, 1)


def test_for_tma_copies_what_lies_at_an_unfit_address() -> None:
    x = torch.randn(9 * 2 * 64 + 4).bfloat16()[4:].view(1, 9, 2, 64)
    assert x.data_ptr() % 16 == 8
    assert hopper_launch.for_tma(x).data_ptr() % 16 == 0
    assert torch.equal(hopper_launch.for_tma(x), x)


def test_check_lists_names_the_shapes() -> None:
    lists = build_lists(torch.ones((1, 3, 2, 5), dtype=torch.bool), transpose=False)
    assert check_lists(lists, 2, 3, 65, 320, 64, 64) == (2, 5)
    for heads, seqlen in ((4, 65), (3, 129)):
        with pytest.raises(ValueError, match="lists must be of a mask"):
            check_lists(lists, 2, heads, seqlen, 320, 64, 64)


def test_check_heads_names_what_does_not_belong_together() -> None:
    q = _tensor(2, 9, 6, 64)
    hopper_launch.check_heads(q, _tensor(2, 5, 3, 64), _tensor(2, 5, 3, 64), None)
    hopper_launch.check_heads(q, _tensor(2, 5, 4, 64), _tensor(2, 5, 4, 64), torch.zeros(6, dtype=torch.int32))
    for k, v, kv_index, message in (
        (_tensor(2, 5, 3, 64), _tensor(2, 4, 3, 64), None, "k and v"),
        (_tensor(1, 5, 3, 64), _tensor(1, 5, 3, 64), None, "k and v"),
        (_tensor(2, 5, 4, 64), _tensor(2, 5, 4, 64), None, "must divide"),
        (_tensor(2, 5, 4, 64), _tensor(2, 5, 4, 64), torch.zeros(5, dtype=torch.int32), "kv_index must be"),
    ):
        with pytest.raises(ValueError, match=message):
            hopper_launch.check_heads(q, k, v, kv_index)


@pytest.mark.parametrize(
    ("dim", "block_k", "consumers", "stages"),
    [
        *[(128, 128, 2, 3), (96, 128, 2, 3), (72, 128, 2, 3), (64, 128, 1, 2), (40, 128, 1, 2)],
        *[(128, 64, 1, 2), (96, 64, 1, 2), (64, 64, 1, 2), (8, 64, 1, 2)],
    ],
)
def test_backward_config_pairs_warpgroups_for_128_wide_keys(
    dim: int, block_k: int, consumers: int, stages: int
) -> None:
    for block_q in (64, 128):
        config = backward_config(dim, block_q, block_k)
        assert (config.num_consumers, config.num_slots) == (consumers, stages)
        assert config.blocks_per_tile * 64 == block_q


def test_query_groups_needs_a_transpose() -> None:
    lists = build_lists(torch.ones((1, 3, 2, 5), dtype=torch.bool), transpose=False)
    with pytest.raises(ValueError, match="transpose"):
        query_groups(lists, 3, 3, None)


def test_query_groups_starts_the_longest_group_first_and_lists_its_heads() -> None:
    blocks = random_blocks(4, 2, 6, 7, 9)
    lists = build_lists(blocks, transpose=True)
    assert lists.t_order is not None
    plain = query_groups(lists, 6, 6, None)
    assert plain.order is lists.t_order
    assert (plain.order_heads, plain.first, plain.heads) == (6, None, None)
    table = torch.tensor([1, 0, 3, 1, 1, 3])
    for kv_index, owner in ((None, torch.arange(6) // 2), (table, table)):
        num_kv_heads = 3 if kv_index is None else 4
        groups = query_groups(lists, 6, num_kv_heads, kv_index)
        assert groups.order_heads == num_kv_heads
        assert sorted(groups.order.tolist()) == list(range(2 * num_kv_heads * 9))
        work = torch.stack([blocks[:, owner == g].sum((1, 2)) for g in range(num_kv_heads)], dim=1)
        assert work.flatten()[groups.order[0]] == work.max()
        if kv_index is not None:
            assert groups.first is not None
            assert groups.heads is not None
            assert groups.first.tolist() == [0, 1, 4, 4, 6]
            assert groups.heads.tolist() == [1, 0, 3, 4, 2, 5]


def test_query_groups_of_a_shared_mask_keeps_its_order() -> None:
    lists = build_lists(random_blocks(3, 2, 1, 7, 9), transpose=True)
    groups = query_groups(lists, 6, 2, None)
    assert groups.order is lists.t_order
    assert groups.order_heads == 1
