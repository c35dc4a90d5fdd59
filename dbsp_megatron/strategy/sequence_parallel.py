"""SequenceParallel: the object that splits a sequence over ranks and runs attention on it.

Dims: B batch, S tokens of the whole sequence, s tokens of this rank, H/Hkv heads, D head dim, N blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.attention.api import softmax_scale
from dbsp_megatron.attention.engines import Engine, attention_class, choose_engine
from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import Belief, agree, digest_int
from dbsp_megatron.compat import in_backward
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.parallel_state import SequenceParallelGroups, SequenceParallelMesh, groups_from_megatron
from dbsp_megatron.plan import PartitionPlan, PlanCache, ReplanRule, plan_or_stay
from dbsp_megatron.strategy.auto import Auto
from dbsp_megatron.strategy.base import ranks_of_node
from dbsp_megatron.strategy.call import LayerCall, check_inputs
from dbsp_megatron.strategy.config import SequenceParallelConfig
from dbsp_megatron.strategy.context import Context
from dbsp_megatron.strategy.counts import gather_mask
from dbsp_megatron.strategy.layer import LayerRunner
from dbsp_megatron.strategy.layout import TokenLayout
from dbsp_megatron.strategy.planning import FixedMesh, Planning
from dbsp_megatron.strategy.records import StepRecords
from dbsp_megatron.strategy.selection import MeshSelection
from dbsp_megatron.strategy.start import agreed_strategy, ranks_to_use
from dbsp_megatron.strategy.statistics import rank_stats, step_stats
from dbsp_megatron.strategy.timed_engine import TimedEngine

_MAX_LAYOUTS = 64
_KEPT_ROWS = 1 << 20
"""Mask rows up to this many blocks per layer are kept for `layer_mask`."""
_NO_LAYOUT = "no token layout is active: run forward and backward inside `with sp.use(layout=..., mask=...)`"


class SequenceParallel:
    """Sequence parallelism with one strategy on one process group; every rank of the group makes it and calls it alike.

    Args:
        config: strategy, mesh and policies.
        group: ranks that share a sequence; default the world. Without torch.distributed, a single rank.
        pg_collection: Megatron's ProcessGroupCollection; its context-parallel group is used instead of `group`.

    Raises:
        ValueError: on every rank, before any exchange: a rank has no valid configuration, the strategy cannot run on
            this many ranks, or ranks were given different configurations.
    """

    def __init__(
        self, config: SequenceParallelConfig, group: dist.ProcessGroup | None = None, *, pg_collection: Any = None
    ) -> None:
        group = ranks_to_use(group, pg_collection)
        size = 1 if group is None else group.size()
        self.strategy = agreed_strategy(config, group)
        self.config = config
        self.groups = (
            groups_from_megatron(pg_collection)
            if pg_collection is not None and group is not None
            else SequenceParallelGroups(group)
        )
        self.mesh: SequenceParallelMesh = self.groups.mesh(self.strategy.ulysses_degree, self.strategy.ring_degree)
        self.group = group
        self.size, self.rank = size, self.mesh.rank
        self.ulysses_degree, self.ring_degree = self.mesh.ulysses_degree, self.mesh.ring_degree
        self._planning, self.cache = self._make_planning()
        self.records = StepRecords()
        self._runner = LayerRunner(self.config, self.strategy, self.groups, self._planning)
        self.latest = self._runner.latest
        self._layouts: OrderedDict[tuple[int, int], TokenLayout] = OrderedDict()
        self._context: list[Context] = []
        self._step: int | None = None
        self._calls = 0
        self._step_of_layer: dict[int, int] = {}
        self._destroyed = False
        self._rows: dict[int, tuple[Tensor | BlockMask, TokenLayout, PartitionPlan]] = {}

    def _make_planning(self) -> tuple[Planning, PlanCache]:
        """What makes plans, and the plan cache of the (default) mesh."""
        mesh = (self.ulysses_degree, self.ring_degree)
        if isinstance(self.strategy, Auto):
            group = None if self.size == 1 else self.groups.control_group
            selection = MeshSelection(self.strategy, group, speaks=self.rank == 0)
            return selection, selection.caches[mesh]
        cache = PlanCache(
            lambda workload: plan_or_stay(self.strategy.plan, workload, *mesh),
            rule=ReplanRule(min_gain=self.config.replan_gain),
            mesh=mesh,
        )
        return FixedMesh(cache), cache

    def layout(self, seqlen: int, block_size: int | None = None) -> TokenLayout:
        """Who holds which tokens of a sequence; made once per length and kept (bounded) until `recalibrate`.

        Args:
            seqlen: tokens of the whole sequence.
            block_size: tokens per block, default `config.block_size`.

        Raises:
            ValueError: a size is not positive, or the strategy has no layouts.
        """
        self._check_splits_tokens()
        key = (seqlen, self.config.block_size if block_size is None else block_size)
        if key not in self._layouts:
            self._layouts[key] = self._make_layout(*key)
            while len(self._layouts) > _MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def recalibrate(self) -> bool:
        """Replaces layouts whose ring ranks measured counts show to be uneven; no communication.

        For `block_policy` auto and hot_stripe. Call it between steps, alike on all ranks, and if it returns True ask
        `layout` again and shard anew: tokens have other homes. Layouts handed out before stay usable when they are
        passed to `attention` or `use`.

        Returns:
            Whether any layout was replaced.
        """
        if not self.strategy.calibrates_layout:
            return False
        changed = False
        for key, layout in self._layouts.items():
            homes = self._runner.better_homes(layout)
            if homes is not None:
                self._layouts[key] = self._make_layout(*key, homes)
                changed = True
        return changed

    def _make_layout(self, seqlen: int, block_size: int, homes: np.ndarray | None = None) -> TokenLayout:
        return TokenLayout(
            seqlen,
            block_size,
            self.strategy.layout_policy,
            *self.strategy.layout_degrees,
            self.rank,
            self.group,
            self.groups.control_group,
            homes,
        )

    def _check_splits_tokens(self) -> None:
        if not self.strategy.splits_tokens:
            raise ValueError(
                f"sp.strategy={self.config.strategy} is for models that attend along one dim at a time "
                "(attention_dims) and switch by themselves: take such a model, or strategy dbsp for one sequence"
            )

    @property
    def step(self) -> int:
        """The step begun last; 0 before any."""
        return self._step or 0

    def count_sent(self, num_bytes: int) -> None:
        """Add bytes that a model sent over these ranks by itself to those of the step."""
        self._runner.traffic.bytes_sent += num_bytes

    def begin_step(self, step: int) -> None:
        """Start a training or denoising step: plans are decided once per layer and step, statistics start anew.

        Without it, every attention call counts as a step of its own.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step must be an integer >= 0, got {step!r}: pass the number of the step")
        self._step = step
        self.records.start()
        self._runner.traffic.bytes_sent = 0

    @contextmanager
    def use(
        self,
        layout: TokenLayout | None = None,
        mask: BlockMask | MaskMethod | None = None,
        grid: tuple[int, int, int] | None = None,
    ) -> Iterator[SequenceParallel]:
        """Layout, mask and token grid for the attention modules called inside.

        With activation recompute the backward pass calls them again: keep it inside too.
        """
        self._context.append(Context(layout, mask, grid))
        try:
            yield self
        finally:
            self._context.pop()

    @property
    def context_layout(self) -> TokenLayout:
        """The layout of the innermost `use`.

        Raises:
            ValueError: there is none.
        """
        layout = self._context[-1].layout if self._context else None
        if layout is None:
            raise ValueError(_NO_LAYOUT)
        return layout

    def attention_in_context(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, scale: float | None = None, problem: str | None = None
    ) -> Tensor:
        """`attention` with layout, mask and grid of the innermost `use`.

        Args:
            q: as there.
            k: as there.
            v: as there.
            layer: as there.
            scale: as there.
            problem: an error of the caller on this rank, which all ranks raise in place of attention.
        """
        context = self._context[-1] if self._context else Context()
        if problem is None and context.layout is None:
            problem = _NO_LAYOUT
        options = {"mask": context.mask, "layer": layer, "layout": context.layout, "grid": context.grid}
        return self._attention(q, k, v, scale=scale, problem=problem, **options)

    @torch.compiler.disable
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: BlockMask | MaskMethod | None = None,
        layer: int = 0,
        layout: TokenLayout | None = None,
        scale: float | None = None,
        grid: tuple[int, int, int] | None = None,
    ) -> Tensor:
        """Attention of the whole sequence, this rank's tokens in and out; collective, with gradients.

        Args:
            q: [B, s, H, D], tokens `layout.positions`.
            k: [B, s, Hkv, D].
            v: [B, s, Hkv, Dv].
            mask: BlockMask over the global sequence in original token order, equal on all ranks; or a MaskMethod, which
                sees block means of q and k; None attends everything.
            layer: layer index, for plans and statistics.
            layout: default the one made by `layout()` for the mask's length; needed if several were made.
            scale: softmax scale, default D ** -0.5.
            grid: (frames, rows, columns) of tokens, for mask methods.

        Returns:
            [B, s, H, Dv] in q's dtype, with memory of its own. With U = 1 the backward pass reads it, so that a write
            to it before makes PyTorch raise there.

        Raises:
            ValueError: on every rank alike: inputs do not fit, or ranks hold different masks, shapes or plans.
        """
        return self._attention(q, k, v, mask=mask, layer=layer, layout=layout, scale=scale, grid=grid, problem=None)

    @torch.compiler.disable
    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask | MaskMethod | None,
        layer: int,
        layout: TokenLayout | None,
        scale: float | None,
        grid: tuple[int, int, int] | None,
        problem: str | None,
    ) -> Tensor:
        step = self._number_of(layer)
        call: LayerCall | None = None
        try:
            if problem is not None:
                raise ValueError(problem)
            if self._destroyed:
                raise ValueError("this SequenceParallel was destroyed: make a new one")
            self._check_splits_tokens()
            layout = self._find_layout(mask) if layout is None else layout
            check_inputs(q, k, v, mask, layout, min(ring for _, ring in self.strategy.meshes))
            if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
                raise ValueError(f"layer must be an integer >= 0, got {layer!r}")
            scale = softmax_scale(scale, q.shape[-1])
            if mask is None:
                size = layout.block_size
                mask = BlockMask.dense(q.shape[2], layout.seqlen, block_size_q=size, block_size_k=size)
            engine = TimedEngine(self._choose_engine(q, k, v, mask, layout), self.records, layer)
            made = LayerCall(q, k, v, mask, layer, step, layout, scale, grid, engine)
            # A user's mask method says what it is and needs: what it raises is told to all ranks, too.
            _ = (made.shape_digest, made.mask_digest)
            call = made
        except ValueError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = f"{type(error).__name__}: {error}"
        out, rows, plan = self._runner.run(call, problem, layer, step, self.records)
        if call is not None:
            self.records.layer(layer).ran(call, plan)
        if call is not None and (isinstance(rows, BlockMask) or rows.numel() <= _KEPT_ROWS):
            self._rows[layer] = (rows, call.layout, plan)
        return out

    def _number_of(self, layer: int) -> int:
        """Step of a call: the one begun, else each call counts, but for activation recompute, which repeats one."""
        if self._step is not None:
            return self._step
        key = layer if isinstance(layer, int) else -1
        if in_backward() and key in self._step_of_layer:
            return self._step_of_layer[key]
        step = self._step_of_layer[key] = self._calls
        self._calls += 1
        self.records.start()
        return step

    def _choose_engine(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | MaskMethod, layout: TokenLayout
    ) -> Engine:
        """One engine for all steps of a layer's call and their backward pass, from what is alike on all ranks."""
        sizes, batch_masks = (layout.block_size, layout.block_size), q.shape[0] > 1
        if isinstance(mask, BlockMask):
            sizes, batch_masks = (mask.block_size_q, mask.block_size_k), mask.batch_size > 1
        backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        attention = attention_class(
            *(q, k, v),
            *sizes,
            batch_masks=batch_masks,
            backward=backward,
            deterministic=backward and torch.are_deterministic_algorithms_enabled(),
            resume=any(ring > 1 for _, ring in self.strategy.meshes),
        )
        return choose_engine(self.config.engine, attention)

    def stats(self, *, by_rank: bool = False) -> dict[str, Any]:
        """Numbers of the current step: means over layers, sums of bytes and time of this rank.

        `sp/mesh` tells how many layers ran on which mesh; `sp/ulysses_degree` and `sp/ring_degree` are those of most.

        Args:
            by_rank: also the load of every rank, planned bytes by kind of link and the speed of attention, which take
                a pass over all plans.
        """
        mesh, sent = (self.ulysses_degree, self.ring_degree), self._runner.traffic.bytes_sent
        stats: dict[str, Any] = dict(step_stats(self.records, self._planning.stats(), self.config.strategy, mesh, sent))
        if by_rank:
            per_node = ranks_of_node()
            nodes = [rank // per_node for rank in self.groups.ranks]
            stats |= rank_stats(self.records, self.latest, nodes, self.rank)
        return stats

    def layer_stats(self) -> list[dict[str, Any]]:
        """The current step's numbers per layer, ascending."""
        return [self.records.layers[layer].as_dict() for layer in sorted(self.records.layers)]

    @property
    def layers_with_mask(self) -> list[int]:
        """Layers whose `layer_mask` this rank can take part in; may differ between ranks where masks are large."""
        return sorted(self._rows)

    def layer_mask(self, layer: int) -> tuple[np.ndarray, PartitionPlan]:
        """The last mask of a layer (first sample, bool [H, Nq, Nk]) and its plan; collective.

        Raises:
            ValueError: on every rank: the layer has not run yet, or its mask was too large to keep on a rank.
        """
        problem = None
        if layer not in self._rows:
            problem = f"layer {layer} has no kept mask: run it first (masks over {_KEPT_ROWS} blocks are not kept)"
        asked = Belief(digest_int(layer), lambda: f"layer {layer}", "ask for the same layer on all ranks")
        agree(f"mask of layer {layer}", problem, {"the layer": asked}, self.groups.control_group)
        rows, layout, plan = self._rows[layer]
        whole = rows.numpy() if isinstance(rows, BlockMask) else gather_mask(rows, layout)
        return whole[0], plan

    def destroy(self) -> None:
        """Release the process groups made here; may be called again."""
        self._destroyed = True
        self.groups.destroy()

    def _find_layout(self, mask: BlockMask | MaskMethod | None) -> TokenLayout:
        known = list(self._layouts.values())
        fitting = [layout for layout in known if not isinstance(mask, BlockMask) or layout.seqlen == mask.seqlen_q]
        if len(fitting) == 1:
            return fitting[0]
        made = ", ".join(f"(seqlen {layout.seqlen}, block_size {layout.block_size})" for layout in known[-8:])
        wanted = f"seqlen={mask.seqlen_q}" if isinstance(mask, BlockMask) else "this sequence"
        if fitting:
            # The order of tokens differs between them, so that a guess could be silently wrong.
            raise ValueError(f"{len(fitting)} token layouts fit {wanted}, made so far: {made}; pass layout=")
        raise ValueError(f"no token layout for {wanted}, made so far: {made or 'none'}; call sp.layout(seqlen) first")
