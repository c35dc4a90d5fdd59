"""LayoutCalibrator: when it looks at a layout, what it counts, when it keeps it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.plan import Workload, plan_workload
from dbsp_megatron.plan.hot_layout import stripe_deviation
from dbsp_megatron.plan.items import items_of_owners
from dbsp_megatron.strategy.calibration import LayoutCalibrator
from dbsp_megatron.strategy.layout import TokenLayout

NUM_BLOCKS = 24


def layout_of(ring: int, ulysses: int = 1, homes: np.ndarray | None = None) -> TokenLayout:
    return TokenLayout(NUM_BLOCKS * 4 - 1, 4, "stripe", ulysses, ring, 0, None, None, homes)


def hot_workload(layout: TokenLayout, ring: int, ulysses: int = 1, *, hot: int = 0, num_heads: int = 2) -> Workload:
    """Full rows at every ring-th block from `hot` on, a diagonal elsewhere."""
    blocks = torch.eye(NUM_BLOCKS, dtype=torch.bool).repeat(1, num_heads, 1, 1)
    blocks[:, :, hot::ring] = True
    return Workload.from_mask(BlockMask(blocks), layout.homes, layout.homes, ulysses * ring)


def observe(calibrator: LayoutCalibrator, layout: TokenLayout, workload: Workload, ulysses: int, ring: int) -> None:
    plan = plan_workload(workload, ulysses_degree=ulysses, ring_degree=ring, block_policy="home")
    calibrator.observe(0, layout, workload, plan)


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (1, 3), (2, 3), (1, 4)])
def test_better_homes_even_out_what_was_observed(ulysses: int, ring: int) -> None:
    calibrator, layout = LayoutCalibrator(ulysses, ring), layout_of(ring, ulysses)
    workload = hot_workload(layout, ring, ulysses)
    observe(calibrator, layout, workload, ulysses, ring)
    homes = calibrator.better_homes(layout)
    assert homes is not None
    rows = workload.row_blocks.sum(axis=0)[None]
    assert stripe_deviation(rows, layout.homes, ulysses, ring) > 0.5
    # Six hot rows for four ranks: two of them must hold two.
    assert stripe_deviation(rows, homes, ulysses, ring) < (0.3 if ring == 4 else 0.15)
    assert np.bincount(homes).tolist() == np.bincount(layout.homes).tolist()


def test_better_homes_waits_twice_as_long_each_time() -> None:
    """Looked at after steps 1, 3, 7: what one step shows must not throw tokens about in every step."""
    calibrator, layout = LayoutCalibrator(1, 2), layout_of(2)
    looked = []
    for step in range(1, 9):
        observe(calibrator, layout, hot_workload(layout, 2, hot=step % 2), 1, 2)
        before = calibrator._sums[layout.seqlen, 4].by_layer
        calibrator.better_homes(layout)
        if calibrator._sums[layout.seqlen, 4].by_layer is not before:
            looked.append(step)
    assert looked == [1, 3, 7]


def test_better_homes_keeps_a_layout_that_is_even() -> None:
    calibrator, layout = LayoutCalibrator(1, 2), layout_of(2)
    blocks = torch.ones(1, 2, NUM_BLOCKS, NUM_BLOCKS, dtype=torch.bool)
    observe(calibrator, layout, Workload.from_mask(BlockMask(blocks), layout.homes, layout.homes, 2), 1, 2)
    assert calibrator.better_homes(layout) is None


def test_better_homes_without_counts_is_none() -> None:
    assert LayoutCalibrator(1, 2).better_homes(layout_of(2)) is None


def test_observe_ignores_counts_that_say_nothing_of_the_layout() -> None:
    """A ring of one, counts without columns, blocks of another size than the layout's."""
    layout = layout_of(2)
    workload = hot_workload(layout, 2)
    bare = Workload(workload.row_blocks, workload.tile_blocks, None, workload.q_home, workload.k_home, 2)
    coarse = Workload.from_mask(
        BlockMask(torch.ones(1, 2, 12, 12, dtype=torch.bool)), layout.homes[::2], layout.homes[::2], 2
    )
    calibrator = LayoutCalibrator(1, 2)
    for counts in (bare, coarse):
        observe(calibrator, layout, counts, 1, 2)
        assert calibrator.better_homes(layout) is None
    alone = LayoutCalibrator(2, 1)
    observe(alone, layout_of(1, 2), hot_workload(layout_of(1, 2), 1, 2), 2, 1)
    assert alone.better_homes(layout_of(1, 2)) is None


def test_layouts_of_other_homes_have_other_keys() -> None:
    plain = layout_of(2)
    swapped = plain.homes.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert len({plain.key, layout_of(2, homes=swapped).key, layout_of(2, homes=plain.homes.copy()).key}) == 3
    assert layout_of(2, homes=swapped).key == layout_of(2, homes=swapped.copy()).key


def test_observe_takes_each_plan_and_each_mask_for_what_they_are() -> None:
    """What is kept of the call before serves the same mask and plan only."""
    layout = layout_of(3, 2)
    masks = [hot_workload(layout, 3, 2, hot=hot, num_heads=3) for hot in (0, 1)]
    made = plan_workload(masks[0], ulysses_degree=2, ring_degree=3, block_policy="home")
    plans = [replace(made, head_items=items_of_owners(np.array(owner), NUM_BLOCKS)) for owner in ([0, 0, 1], [0, 1, 1])]
    calls = [(mask, plan) for mask in masks for plan in plans]
    together = LayoutCalibrator(2, 3)
    want = np.zeros(1, dtype=np.int64)
    for mask, plan in [*calls, *calls[1:], calls[0], calls[0]]:
        together.observe(0, layout, mask, plan)
        alone = LayoutCalibrator(2, 3)
        alone.observe(0, layout, mask, plan)
        want = want + alone._sums[layout.seqlen, 4].by_layer[0]
    assert np.array_equal(together._sums[layout.seqlen, 4].by_layer[0], want)
