"""LayoutCalibrator: collects counts of all layers and finds the striped layout that evens them out."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from weakref import ref

import numpy as np

from dbsp_megatron.plan import PartitionPlan, Workload, hot_stripe, stripe_deviation
from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.items import sum_over_items
from dbsp_megatron.strategy.layout import TokenLayout

_MAX_SEQUENCES = 64
_LONGEST_WAIT = 64
_MIN_GAIN = 0.005


@dataclass
class _Sums:
    """Load vectors of one kind of sequence since its layout was last looked at."""

    by_layer: dict[int, IntArray] = field(default_factory=dict)
    num_steps: int = 0
    wait: int = 1


class LayoutCalibrator:
    """Decides between steps whether another order of token blocks would even out the ring ranks.

    A layout must serve every layer and cannot be changed inside a step, so counts of all layers are summed over steps
    before it is looked at, after 1, 2, 4, ... and then every 64 steps. It is replaced only if that lowers the largest
    deviation of a ring rank's load, over layers and ring groups, by more than 0.005.

    Everything depends on counts that all ranks have, so ranks decide alike without talking.

    Args:
        ulysses_degree: U.
        ring_degree: R.
    """

    def __init__(self, ulysses_degree: int, ring_degree: int) -> None:
        self._mesh = (ulysses_degree, ring_degree)
        self._sums: OrderedDict[tuple[int, int], _Sums] = OrderedDict()
        # Made once for a mask that stays.
        self._last: dict[int, tuple[ref[Workload], ref[PartitionPlan], IntArray]] = {}

    def observe(self, layer: int, layout: TokenLayout, workload: Workload, plan: PartitionPlan) -> None:
        """Adds one call's counts.

        Args:
            layer: layer index.
            layout: the layout that the counts are in.
            workload: the counts; ignored if their blocks are not those of the layout or columns were not counted.
            plan: the plan in use, for the heads of each ring group.
        """
        if self._mesh[1] == 1 or workload.col_blocks is None:
            return
        if not workload.num_q_blocks == workload.num_k_blocks == layout.num_blocks:
            return
        key = (layout.seqlen, layout.block_size)
        sums = self._sums.setdefault(key, _Sums())
        self._sums.move_to_end(key)
        while len(self._sums) > _MAX_SEQUENCES:
            self._sums.popitem(last=False)
        last = self._last.get(layer)
        if last is not None and last[0]() is workload and last[1]() is plan:
            vectors = last[2]
        else:
            rows = sum_over_items(workload.row_blocks, plan.head_items, self._mesh[0])
            vectors = np.concatenate([rows, workload.col_blocks[None]])
            self._last[layer] = ref(workload), ref(plan), vectors
        known = sums.by_layer.get(layer)
        sums.by_layer[layer] = vectors if known is None else known + vectors

    def better_homes(self, layout: TokenLayout) -> IntArray | None:
        """Homes that should replace those of a layout; None to keep it. Call once per step and layout.

        Args:
            layout: the layout in use.

        Returns:
            int64 [N], sp rank of each block, or None.
        """
        sums = self._sums.get((layout.seqlen, layout.block_size))
        if sums is None or not sums.by_layer:
            return None
        sums.num_steps += 1
        if sums.num_steps < sums.wait:
            return None
        weights = np.concatenate([sums.by_layer[layer] for layer in sorted(sums.by_layer)])
        sums.by_layer, sums.num_steps, sums.wait = {}, 0, min(2 * sums.wait, _LONGEST_WAIT)
        deviation = stripe_deviation(weights, layout.homes, *self._mesh)
        if deviation <= _MIN_GAIN:
            return None
        homes = hot_stripe(weights, *self._mesh)
        gain = deviation - stripe_deviation(weights, homes, *self._mesh)
        return homes if gain > _MIN_GAIN else None


class MeshCalibrators:
    """One LayoutCalibrator for each mesh with a ring that layers run on; that of the most calls decides.

    A layout serves all meshes, but only one of them can be evened out.
    """

    def __init__(self) -> None:
        self._by_mesh: dict[tuple[int, int], LayoutCalibrator] = {}
        self._num_calls: dict[tuple[int, int], int] = {}

    def observe(self, layer: int, layout: TokenLayout, workload: Workload, plan: PartitionPlan) -> None:
        """Adds one call's counts, see `LayoutCalibrator.observe`."""
        mesh = (plan.ulysses_degree, plan.ring_degree)
        if mesh[1] == 1:
            return
        self._by_mesh.setdefault(mesh, LayoutCalibrator(*mesh)).observe(layer, layout, workload, plan)
        self._num_calls[mesh] = self._num_calls.get(mesh, 0) + 1

    def better_homes(self, layout: TokenLayout) -> IntArray | None:
        """See `LayoutCalibrator.better_homes`; the mesh with the larger ring wins ties."""
        if not self._num_calls:
            return None
        mesh = max(self._num_calls, key=lambda mesh: (self._num_calls[mesh], mesh[1]))
        return self._by_mesh[mesh].better_homes(layout)
