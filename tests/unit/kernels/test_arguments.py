"""Tensors that kernels read by pointer are refused before a launch when they do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention.arguments import check_rows, check_tables

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(1, 2, 4), torch.zeros(1, 40, 2), torch.zeros(1, 2, 40).double(), torch.zeros(1, 2, 40, device="meta")],
    ids=["short", "transposed", "fp64", "device"],
)
def test_check_rows_refuses(rows: Tensor) -> None:
    check_rows("lse", torch.zeros(1, 40, 2).transpose(1, 2), (1, 2, 40), CPU)
    with pytest.raises(ValueError, match="lse must be float32"):
        check_rows("lse", rows, (1, 2, 40), CPU)


def test_check_tables_refuses() -> None:
    index, ranges = torch.zeros(3, dtype=torch.int64), torch.zeros((3, 2), dtype=torch.int32)
    check_tables(index, ranges, 3, CPU)
    check_tables(None, None, 3, CPU)
    for wrong in (index[:2], index.float()):
        with pytest.raises(ValueError, match="kv_index must be"):
            check_tables(wrong, None, 3, CPU)
    for wrong in (ranges[:1], ranges.long(), ranges.float()):
        with pytest.raises(ValueError, match="q_range must be"):
            check_tables(None, wrong, 3, CPU)


def test_portable_kernels_refuse_before_a_launch() -> None:
    pytest.importorskip("triton", reason="needs triton")
    from dbsp_megatron.kernels.block_sparse_attention.lists import dense_lists
    from dbsp_megatron.kernels.block_sparse_attention.portable_backward import portable_backward
    from dbsp_megatron.kernels.block_sparse_attention.portable_forward import portable_forward

    q = torch.zeros(1, 40, 2, 16)
    lists = dense_lists(1, 2, 3, 3, "cpu")
    rows = torch.zeros(1, 2, 40)
    with pytest.raises(ValueError, match="lse must be float32"):
        portable_forward(q, q, q, lists, 16, 16, 1.0, out=torch.zeros_like(q), lse=rows[..., :4])
    with pytest.raises(ValueError, match="q_range must be"):
        portable_forward(q, q, q, lists, 16, 16, 1.0, q_range=torch.zeros((1, 2), dtype=torch.int32))
    with pytest.raises(ValueError, match="lse must be float32"):
        portable_backward(q, q, q, q, rows[..., :4], rows, lists, 16, 16, 1.0)
    with pytest.raises(ValueError, match="delta must be float32"):
        portable_backward(q, q, q, q, rows, rows.transpose(1, 2), lists, 16, 16, 1.0)
