"""Predicted times of attention calls: those of rates and links that were made up, and none without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.plan.calibration import Calibration
from dbsp_megatron.plan.rates import DIRECTIONS, KernelRate, LinkCurve
from tests.harness import run_ranks
from tools.sp_prediction import predicted_ms

BLOCK, HEADS, HEAD_DIM = 8, 5, 16
BLOCK_US, ROW_US, LAUNCH_US, LINK_US = 7.0, 0.5, 30.0, 1000.0


def _mask() -> BlockMask:
    """The first head has all 25 blocks, the others the diagonal; the last block is short."""
    blocks = torch.eye(5, dtype=torch.bool).repeat(1, HEADS, 1, 1)
    blocks[:, 0] = True
    return BlockMask(blocks, BLOCK, BLOCK, 37, 37)


def _calibration(path: Path, dtype: str = "float32") -> str:
    rates = tuple(
        KernelRate(
            engine="torch", direction=direction, dtype=dtype, head_dim=HEAD_DIM, block_size_q=BLOCK,
            block_size_k=BLOCK, block_us=factor * BLOCK_US, row_us=ROW_US, launch_us=LAUNCH_US, r_squared=1.0,
            max_relative_residual=0.0, num_points=16,
        )
        for direction, factor in zip(DIRECTIONS, (1, 3), strict=True)
    )  # fmt: skip
    links = tuple(
        LinkCurve(collective=name, num_ranks=2, scope="node", num_bytes=(1, 2**30), time_us=(LINK_US, LINK_US))
        for name in ("all_to_all", "p2p")
    )
    Calibration(machine="made up", versions={}, kernels=rates, links=links, plan_us=1.0).save(path)
    return str(path)


def _predicted(rank: int, world_size: int, path: str, strategy: str) -> tuple[float | None, float | None]:
    """Forward, and forward with backward."""
    mesh = (world_size, 1) if strategy == "ulysses" else (1, world_size)
    config = SequenceParallelConfig(
        strategy=strategy, ulysses_degree=mesh[0], ring_degree=mesh[1], block_size=BLOCK, calibration=path
    )
    sp = SequenceParallel(config)
    mask = _mask()
    layout = sp.layout(mask.seqlen_q)
    q = layout.shard(torch.randn(1, mask.seqlen_q, HEADS, HEAD_DIM))
    sp.begin_step(0)
    assert predicted_ms(sp, 0, q.device, backward=False) is None, "nothing was called yet"
    sp.attention(q, q, q, mask=mask, layer=0, layout=layout)
    forward, both = (predicted_ms(sp, 0, q.device, backward=backward) for backward in (False, True))
    sp.destroy()
    return forward, both


def test_predicted_ms_of_one_process_is_what_the_rates_say(tmp_path: Path) -> None:
    blocks, rows = 25 + 4 * 5, HEADS * 5
    rest = rows * ROW_US + LAUNCH_US
    forward, both = _predicted(0, 1, _calibration(tmp_path / "machine.json"), "ulysses")
    assert forward == pytest.approx((blocks * BLOCK_US + rest) / 1e3)
    assert both == pytest.approx((4 * blocks * BLOCK_US + 2 * rest) / 1e3)


def test_predicted_ms_is_that_of_the_fuller_rank_and_its_exchanges(tmp_path: Path) -> None:
    """Ulysses gives the first rank three heads of five, the full one among them."""
    results = run_ranks(_predicted, 2, _calibration(tmp_path / "machine.json"), "ulysses")
    blocks, rest = 25 + 2 * 5, 3 * 5 * ROW_US + LAUNCH_US
    forward = blocks * BLOCK_US + rest + 2 * LINK_US
    assert results[0] == results[1]
    assert results[0] == pytest.approx((forward / 1e3, (forward + 3 * blocks * BLOCK_US + rest + 2 * LINK_US) / 1e3))


def test_predicted_ms_is_none_where_no_rate_has_the_data_type(tmp_path: Path) -> None:
    assert _predicted(0, 1, _calibration(tmp_path / "machine.json", "bfloat16"), "ring") == (None, None)
