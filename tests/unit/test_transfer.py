"""Rows that are picked on the host and sent to a device."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.comm.transfer import select_to_device, to_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("index", [[], [3], [6, 0, 3, 3], list(range(7))], ids=len)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_select_to_device_is_plain_indexing(dim: int, index: list[int]) -> None:
    x = torch.randn(7, 7, 8)[:, :, 1:]
    rows = torch.tensor(index, dtype=torch.int64)
    expected = x[(slice(None),) * dim + (rows,)]
    picked = select_to_device(x, dim, rows, CPU)
    assert torch.equal(picked, expected)
    assert picked.dtype == x.dtype
    picked.fill_(0)
    assert not torch.equal(x, torch.zeros_like(x))


def test_to_device_gives_a_tensor_that_is_there() -> None:
    x = torch.randn(3)
    assert to_device(x, CPU) is x
