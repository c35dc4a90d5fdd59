"""The `mpu` object that DeepSpeed asks for its groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dbsp_megatron.train.mesh import Mesh


class ModelParallelUnit:
    """Megatron's names for our mesh, as DeepSpeed calls them.

    `data_parallel` is all data *and* sequence ranks, over which ZeRO splits its state and gradients are reduced: that
    is what DeepSpeed does alike at every stage. There is no `sequence_parallel` method on purpose: with one, stages 0
    to 2 and stage 3 divide gradients by different numbers.

    Args:
        mesh: the groups; where an axis has one rank, a group of this rank alone is made (collective).
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        alone = None
        if mesh.tp_group is None or mesh.data_group is None:
            for rank in range(dist.get_world_size()):
                made = dist.new_group([rank])
                alone = made if rank == dist.get_rank() else alone
        self._model = mesh.tp_group or alone
        self._data = mesh.data_group or alone

    def get_model_parallel_group(self) -> Any:
        """Ranks that share matrices."""
        return self._model

    def get_model_parallel_rank(self) -> int:
        """Place among them."""
        return self._mesh.tp_rank

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self._mesh.tp_size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_tensor_model_parallel_src_rank(self) -> int:
        """World rank of the first of them."""
        return int(dist.get_process_group_ranks(self._model)[0])

    def get_data_parallel_group(self) -> Any:
        """Ranks with the same part of the model: data and sequence ranks."""
        return self._data

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their world ranks."""
        return list(dist.get_process_group_ranks(self._data))

    def get_data_parallel_rank(self) -> int:
        """Place among them."""
        return int(dist.get_rank(self._data))

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self._mesh.data_size

    def get_pipeline_model_parallel_rank(self) -> int:
        """There is one stage."""
        return 0

    def get_pipeline_model_parallel_world_size(self) -> int:
        """There is one stage."""
        return 1
