"""The form in which a loop calls a model: whole-sequence models, and models that attend along one dim at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.models.axial import AxialDiT
from dbsp_megatron.models.axial.sparse import SparseAttention
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.strategy import SequenceParallel
from dbsp_megatron.train.forward import Grid, ShardedModel


class ShardedAxialModel(ShardedModel):
    """An AxialDiT, whose plan says which tokens a rank holds.

    Args:
        module: the model as it is called, possibly wrapped for data parallelism.
        model: the model itself.
        config: its description.
        sp: of strategy dsp, or none.
        mask: which attention blocks are computed along long dims.
        options: as of `ShardedModel`.
    """

    def __init__(
        self,
        module: Callable[..., Tensor],
        model: AxialDiT,
        config: DiTConfig,
        sp: SequenceParallel,
        mask: MaskConfig,
        **options: Any,
    ) -> None:
        super().__init__(module, config, sp, mask, **options)
        # In a tuple, which keeps hold of a part of the model without owning it.
        self._model = (model,)
        self._positions: dict[Grid, Tensor] = {}

    def recalibrate(self) -> bool:
        """False: tokens stay where they are."""
        return False

    def video_positions(self, grid: Grid) -> Tensor:
        """See `ShardedModel.video_positions`."""
        if grid not in self._positions:
            self._positions[grid] = self._model[0].local_positions(grid)
        return self._positions[grid]

    def relaid(self, tensors: list[Tensor], grid: Grid) -> list[Tensor]:
        """The tensors as they are."""
        return tensors

    def gather(self, tokens: Tensor, grid: Grid) -> Tensor:
        """See `ShardedModel.gather`."""
        whole = tokens.new_zeros(tokens.shape[0], grid[0] * grid[1] * grid[2], tokens.shape[2])
        whole[:, self.video_positions(grid).to(tokens.device)] = tokens
        if self.sp.size > 1:
            dist.all_reduce(whole, group=self.sp.group)
        return whole

    @contextmanager
    def session(self, grid: Grid) -> Iterator[None]:
        """Holds the precision, and counts what is sent, backward passes included."""
        stages = self._model[0].session
        before = 0 if stages is None else stages.mesh.traffic.total_bytes
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bf16):
            yield
        if stages is not None:
            self.sp.count_sent(stages.mesh.traffic.total_bytes - before)

    def _inputs(self, grid: Grid, context: Tensor | None, image_context: Tensor | None) -> dict[str, Any]:
        return {"context": self._on_device(context), "sparse": self._sparse()}

    def _sparse(self) -> SparseAttention | None:
        if self._method.name == "dense":
            return None
        return SparseAttention(
            method=self._method,
            block_size=self.sp.config.block_size,
            engine=self.sp.config.engine,
            step=self.sp.step,
        )


def shard_model(
    module: Callable[..., Tensor],
    model: nn.Module,
    config: DiTConfig,
    sp: SequenceParallel,
    mask: MaskConfig,
    **options: Any,
) -> ShardedModel:
    """A model with the tokens that this rank holds.

    Args:
        module: the model as it is called, possibly wrapped for data parallelism.
        model: the model itself.
        config: its description.
        sp: the ranks that share a sequence.
        mask: which attention blocks are computed.
        options: as of `ShardedModel`.
    """
    if isinstance(model, AxialDiT):
        return ShardedAxialModel(module, model, config, sp, mask, **options)
    return ShardedModel(module, config, sp, mask, **options)
