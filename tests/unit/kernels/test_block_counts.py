"""block_counts against counting with NumPy, and its Triton kernel in the interpreter against the plain twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_counts import block_counts, naive_block_counts
from tests.harness import run_ranks

# batch, heads, q-blocks, k-blocks, ranks: tiles of 32 and 64 rows, several chunks of 128 columns, none that is full.
SHAPES = [
    (1, 3, 19, 131, 8),
    (3, 2, 70, 300, 3),
    (2, 1, 129, 17, 64),
    (1, 1, 1, 1, 1),
    (2, 5, 33, 257, 12),
]


def _case(batch: int, heads: int, num_q: int, num_k: int, ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_k)
    density = torch.rand((batch, heads, num_q, 1), generator=generator)
    rows = torch.rand((batch, heads, num_q, num_k), generator=generator) < density
    return rows, torch.randint(ranks, (num_k,), generator=generator)


def _views(rows: Tensor, home: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The same kind of input in the memory layouts that callers have."""
    num_q = rows.shape[2]
    return {
        "contiguous": (rows, home),
        "some rows, int32 homes": (rows[:, :, num_q // 3 :: 2], home.int()),
        "transposed": (rows.transpose(2, 3).contiguous().transpose(2, 3), home),
        "expanded batch": (rows[:1].expand(2, -1, -1, -1), home),
        "every second column": (rows[..., ::2], home[::2]),
        "all dense": (torch.ones_like(rows), home),
        "no rows": (rows[:, :, :0], home),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_counts_equals_counting_by_hand(shape: tuple[int, int, int, int, int]) -> None:
    for name, (rows, home) in _views(*_case(*shape)).items():
        row_tiles, columns = block_counts(rows, home, shape[-1])
        dense, homes = rows.numpy(), home.numpy()
        want = np.stack([dense[..., homes == rank].sum((0, 3)) for rank in range(shape[-1])], axis=-1)
        assert (row_tiles.dtype, columns.dtype) == (torch.int32, torch.int32)
        assert np.array_equal(row_tiles.numpy(), want), name
        assert np.array_equal(columns.numpy(), dense.sum((0, 1, 2))), name


def _run_interpreter(rank: int, world_size: int, shapes: list[tuple[int, int, int, int, int]]) -> list[str]:
    from dbsp_megatron.kernels.block_counts.triton_kernel import triton_block_counts

    faults = []
    for shape in shapes:
        for name, (rows, home) in _views(*_case(*shape)).items():
            got, want = triton_block_counts(rows, home, shape[-1]), naive_block_counts(rows, home, shape[-1])
            if not all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(got, want, strict=True)):
                faults.append(f"{shape} {name}")
    return faults


def test_triton_block_counts_equals_twin_in_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported, so a process of its own runs it."""
    pytest.importorskip("triton", reason="needs triton")
    faults = run_ranks(_run_interpreter, 1, SHAPES, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=120)[0]
    assert not faults, faults


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.ones(1, 2, 3, 5)}, "rows must be bool"),
        ({"rows": torch.ones(2, 3, 5, dtype=torch.bool)}, "rows must be bool"),
        ({"k_home": torch.zeros(4, dtype=torch.int64)}, "k_home must be int64 or int32"),
        ({"k_home": torch.zeros(5)}, "k_home must be int64 or int32"),
        ({"k_home": torch.zeros(5, dtype=torch.int64, device="meta")}, "k_home must be on cpu"),
        ({"num_ranks": 0}, "num_ranks must be at least 1"),
    ],
)
def test_block_counts_refuses_what_does_not_fit(change: dict[str, object], message: str) -> None:
    good = {
        "rows": torch.ones(1, 2, 3, 5, dtype=torch.bool),
        "k_home": torch.zeros(5, dtype=torch.int64),
        "num_ranks": 2,
    }
    with pytest.raises(ValueError, match=message):
        block_counts(**(good | change))
