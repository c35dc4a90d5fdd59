"""The `mpu` object through which DeepSpeed asks for process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dbsp_megatron.comm.agree import Belief, agree, digest_int
from dbsp_megatron.parallel_state import moves_host_tensors


class DeepSpeedMpu:
    """Groups of this rank under the names that Megatron gave them, as `deepspeed.initialize(mpu=...)` calls them.

    What DeepSpeed calls data parallel is all data *and* sequence ranks: they hold different tokens and so different
    parts of every gradient. ZeRO splits its state over them and averages gradients over them, alike at every stage; to
    have the sum, multiply the loss by their number. There is no `sequence_parallel` method on purpose: with one,
    DeepSpeed 0.19 divides gradients by different numbers at stages 0 to 2 and at stage 3.

    Every rank makes one at the same time (groups of single ranks may have to be made).

    Args:
        data_group: ranks with the same part of the model; None for the world.
        tensor_group: ranks that share the matrices of a layer; None if they are not split.

    Raises:
        ValueError: `torch.distributed` is not initialised; on every rank: a group is none of this rank, a
            tensor-parallel group comes without a data group, or ranks pass groups of other sizes.
    """

    def __init__(
        self, data_group: dist.ProcessGroup | None = None, tensor_group: dist.ProcessGroup | None = None
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("DeepSpeedMpu needs torch.distributed; call deepspeed.init_distributed() before")
        world: Any = dist.group.WORLD
        problem = None
        for name, group in (("data_group", data_group), ("tensor_group", tensor_group)):
            if group is not None and not isinstance(group, dist.ProcessGroup):
                problem = f"{name} must be a process group of this rank, got {group!r}: pass the one that it is in"
        if problem is None and tensor_group is not None and data_group is None:
            problem = (
                "data_group must be given beside tensor_group, got None; the world holds ranks with other parts of the "
                "model: make a group of the ranks with this part"
            )
        given = f"data_group {_size_text(data_group)}, tensor_group {_size_text(tensor_group)}"
        groups = Belief(digest_int(given), lambda: given, "pass groups of one size on every rank, or None on all")
        # Devices of ranks may not be set yet, so that NCCL could not be used.
        control = world if moves_host_tensors(world) else dist.new_group(backend="gloo")
        try:
            agree("making DeepSpeedMpu", problem, {"groups": groups}, control)
        finally:
            if control is not world:
                dist.destroy_process_group(control)
        self._data: dist.ProcessGroup = data_group or world
        self._tensor = tensor_group or _alone()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that share matrices."""
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        """Place among them."""
        return self._tensor.rank()

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self._tensor.size()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_tensor_model_parallel_src_rank(self) -> int:
        """World rank of the first of them."""
        return int(dist.get_process_group_ranks(self._tensor)[0])

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks with the same part of the model: data and sequence ranks."""
        return self._data

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their world ranks."""
        return list(dist.get_process_group_ranks(self._data))

    def get_data_parallel_rank(self) -> int:
        """Place among them."""
        return self._data.rank()

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self._data.size()

    def get_pipeline_model_parallel_rank(self) -> int:
        """There is one stage."""
        return 0

    def get_pipeline_model_parallel_world_size(self) -> int:
        """There is one stage."""
        return 1


def _size_text(group: object) -> str:
    return f"of {group.size()} ranks" if isinstance(group, dist.ProcessGroup) else "none"


def _alone() -> dist.ProcessGroup:
    """A group of this rank; collective."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine: dist.ProcessGroup = groups[dist.get_rank()]
    return mine
