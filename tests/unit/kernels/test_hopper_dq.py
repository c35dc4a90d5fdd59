"""What the Hopper backward pass does around its main kernel, in Triton's interpreter against plain PyTorch."""

from __future__ import annotations

import math

import pytest
import torch

from tests.harness import run_ranks
from tests.reference import nan_filled_memory

pytest.importorskip("triton", reason="needs triton")

BATCH, HEADS, SEQLEN, PADDED = 2, 3, 70, 128


def _prepare(_rank: int, _world_size: int) -> list[str]:
    from tests.unit.kernels.interpreter import prepare

    prepare()
    from dbsp_megatron.kernels.block_sparse_attention.hopper_dq import prepare_kernel

    with nan_filled_memory():
        generator = torch.Generator().manual_seed(1)
        lse = torch.randn((BATCH, SEQLEN, HEADS), generator=generator).transpose(1, 2)
        delta = torch.randn((BATCH, HEADS, SEQLEN), generator=generator)
        lse[1, 2, 69] = lse[0, 1, 0] = float("-inf")
        delta[1, 2, 69] = float("nan")
        lse[1, 0, 5] = float("nan")
        stats = torch.empty((2, BATCH, HEADS, PADDED))
        sums = torch.empty(BATCH * HEADS * PADDED * 64)
        counter = torch.empty(1, dtype=torch.int32)
        prepare_kernel[(PADDED // 64 * BATCH * HEADS,)](
            lse, delta, stats[0], stats[1], sums, counter, SEQLEN, PADDED, HEADS, *lse.stride(), *delta.stride(), D=64
        )
    want = torch.full((2, BATCH, HEADS, PADDED), float("inf"))
    want[1] = 0.0
    want[0, ..., :SEQLEN] = lse * math.log2(math.e)
    want[1, ..., :SEQLEN] = delta
    for b, h, row in ((1, 2, 69), (0, 1, 0)):
        want[0, b, h, row], want[1, b, h, row] = float("inf"), 0.0
    faults = [] if torch.allclose(stats, want, rtol=1e-6, atol=0.0, equal_nan=True) else ["row statistics"]
    faults += [] if bool((sums == 0).all()) else ["sums"]
    return faults + ([] if int(counter) == 0 else ["counter"])


def _reorder(_rank: int, _world_size: int, dim: int, head_dim: int, columns: int) -> list[str]:
    from tests.unit.kernels.interpreter import prepare

    prepare()
    from dbsp_megatron.kernels.block_sparse_attention.hopper_dq import reorder_kernel

    dq = torch.randn((BATCH, PADDED, HEADS, dim), generator=torch.Generator().manual_seed(2))
    # Registers of a warpgroup: rows as [warp, half, lane // 4], columns as [eight, lane % 4, two]. A group of four is
    # [half, two] of a thread, and threads of a group are neighbours.
    parts = dq.permute(0, 2, 1, 3).reshape(BATCH, HEADS, PADDED // 64, 4, 2, 8, dim // columns, columns // 8, 4, 2)
    sums = parts.permute(0, 1, 2, 6, 7, 3, 5, 8, 4, 9).contiguous()
    with nan_filled_memory():
        got = torch.empty((BATCH, SEQLEN, HEADS, head_dim))
        reorder_kernel[(PADDED // 64 * BATCH * HEADS,)](
            sums, got, 0.5, SEQLEN, PADDED, HEADS, D=dim, DV=head_dim, DN=columns
        )
    return [] if torch.equal(got, dq[:, :SEQLEN, :, :head_dim] * 0.5) else ["dq"]


def _interpret(check: object, *args: object) -> None:
    faults = run_ranks(check, 1, *args, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=200)[0]
    assert not faults, faults


def test_prepare_kernel_pads_statistics_and_clears_sums() -> None:
    _interpret(_prepare)


@pytest.mark.parametrize(("dim", "head_dim", "columns"), [(128, 128, 64), (128, 96, 64), (128, 96, 128), (64, 64, 64)])
def test_reorder_kernel_undoes_the_order_of_registers(dim: int, head_dim: int, columns: int) -> None:
    _interpret(_reorder, dim, head_dim, columns)
