"""Cuts the world into tensor x sequence x data x pipeline parallel groups, in the rank order of megatron-core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dbsp_megatron.comm.agree import Belief, agree, digest_int
from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.config.resolve import ResolvedMesh, check_world_size
from dbsp_megatron.parallel_state import attach_to_collection, hierarchical_sizes
from dbsp_megatron.strategy import SequenceParallel, SequenceParallelConfig
from dbsp_megatron.train.distributed import World

Group = dist.ProcessGroup | None


def no_groups() -> ProcessGroupCollection:
    """The collection of a model that is not split, whatever Megatron's `parallel_state` holds."""
    return ProcessGroupCollection(tp=None, cp=None, pp=None)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """rank = ((pp_rank * dp_size + dp_rank) * sp_size + sp_rank) * tp_size + tp_rank.

    Gradients are reduced over `data_group`, which holds sequence-parallel ranks too: they have different tokens and so
    different parts of the gradient. Groups are None where an axis has one rank.
    """

    tp_rank: int = 0
    tp_size: int = 1
    sp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    tp_group: Group = None
    sp_group: Group = None
    pp_group: Group = None
    data_group: Group = None
    """Ranks with the same part of the model: all data and sequence ranks."""
    stage_group: Group = None
    """Ranks with the same layers: tensor, sequence and data ranks."""
    model_groups: ProcessGroupCollection = field(default_factory=no_groups)
    """What the model is built with."""

    @property
    def data_size(self) -> int:
        """Ranks of `data_group`."""
        return self.sp_size * self.dp_size

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the input."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank's losses and tokens count in a sum over all ranks; copies of them stay silent."""
        return self.tp_rank == 0 and self.is_last_stage

    def counted(self, values: Tensor) -> Tensor:
        """`values` where they count, else zeros: summed over the world, each token is met once."""
        return values if self.speaks else values * 0


def build_mesh(world: World, sp_size: int, parallel: ParallelConfig | None = None) -> Mesh:
    """Make the groups; collective, every rank calls.

    Raises:
        ValueError: on every rank: the sizes do not divide the world, or ranks have others.
    """
    parallel = parallel or ParallelConfig()
    _agree_on_sizes(world, sp_size, parallel)
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    dp_size = world.size // (tp_size * sp_size * pp_size)

    lists = _rank_lists(tp_size, sp_size, dp_size, pp_size)
    groups = {name: _own_group(world, parts, always=name == "sp") for name, parts in lists.items()}
    return Mesh(
        **_place(world.rank, tp_size, sp_size, dp_size, pp_size),
        tp_group=groups["tp"],
        sp_group=groups["sp"],
        pp_group=groups["pp"],
        data_group=groups["data"],
        stage_group=groups["stage"],
        model_groups=ProcessGroupCollection(tp=groups["tp"], cp=None, pp=groups["pp"]),
    )


def megatron_mesh(world: World, mesh: ResolvedMesh, parallel: ParallelConfig) -> Mesh:
    """The groups of Megatron's `parallel_state`, which is initialised here unless it is already; collective.

    Raises:
        ValueError: there is no process group; on every rank: there is no device, the sizes do not divide the world,
            ranks have others, or `parallel_state` is initialised with others.
    """
    if not dist.is_initialized():
        raise ValueError(
            "train.engine=megatron needs torch.distributed, also on one process; start with "
            "torchrun --nproc_per_node 1, or use train.engine=native"
        )
    problem = None
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        problem = (
            f"train.engine=megatron needs a CUDA device for each rank, got none ({error}); use train.engine=native or "
            "deepspeed on a CPU"
        )
    _agree_on_sizes(world, mesh.sp_size, parallel, problem)
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    _initialize_megatron(mesh, tp_size, pp_size, parallel.virtual_pipeline_parallel_size)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    dp_size = world.size // (tp_size * mesh.sp_size * pp_size)
    fault = _wrong_order(world.rank, groups, _rank_lists(tp_size, mesh.sp_size, dp_size, pp_size))
    agree("groups of Megatron", fault or None, {}, _all_ranks(world))
    return Mesh(
        **_place(world.rank, tp_size, mesh.sp_size, dp_size, pp_size),
        tp_group=groups.tp,
        sp_group=groups.cp,
        pp_group=groups.pp,
        data_group=groups.dp_cp,
        stage_group=groups.tp_dp_cp,
        model_groups=groups,
    )


def _all_ranks(world: World) -> Group:
    return None if world.size == 1 else world.group or dist.group.WORLD


def _agree_on_sizes(world: World, sp_size: int, parallel: ParallelConfig, problem: str | None = None) -> None:
    """Before groups are made: ranks that asked for others would wait for one another."""
    if problem is None:
        try:
            check_world_size(world.size, sp_size, parallel)
        except ValueError as error:
            problem = str(error)
    given = f"sequence {sp_size}, tensor {parallel.tensor_parallel_size}, pipeline {parallel.pipeline_parallel_size}"
    sizes = Belief(digest_int(given), lambda: given, "start all ranks with the same configuration")
    agree("making process groups", problem, {"parallel sizes": sizes}, _all_ranks(world))


def _initialize_megatron(mesh: ResolvedMesh, tp_size: int, pp_size: int, vp_size: int) -> None:
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        levels = {}
        if min(mesh.ulysses_degree, mesh.ring_degree) > 1 and not mesh.choices:
            levels = {"hierarchical_context_parallel_sizes": hierarchical_sizes(mesh.ulysses_degree, mesh.ring_degree)}
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp_size,
            pipeline_model_parallel_size=pp_size,
            virtual_pipeline_model_parallel_size=vp_size if vp_size > 1 else None,
            context_parallel_size=mesh.sp_size,
            create_gloo_process_groups=False,
            **levels,
        )
    for name, found, wanted in (
        ("tensor_model_parallel_size", parallel_state.get_tensor_model_parallel_world_size(), tp_size),
        ("pipeline_model_parallel_size", parallel_state.get_pipeline_model_parallel_world_size(), pp_size),
        (
            "virtual_pipeline_model_parallel_size",
            parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            vp_size,
        ),
        ("context_parallel_size", parallel_state.get_context_parallel_world_size(), mesh.sp_size),
    ):
        if found != wanted:
            raise ValueError(
                f"megatron.core.parallel_state is initialised with {name}={found}, this run needs {wanted}; let the "
                "trainer initialise it, or give it the same sizes"
            )


def _rank_lists(tp_size: int, sp_size: int, dp_size: int, pp_size: int) -> dict[str, list[list[int]]]:
    """World ranks of all groups of each kind."""

    def rank_at(tp: int, sp: int, dp: int, pp: int) -> int:
        return ((pp * dp_size + dp) * sp_size + sp) * tp_size + tp

    tps, sps, dps, pps = range(tp_size), range(sp_size), range(dp_size), range(pp_size)
    return {
        "tp": [[rank_at(t, s, d, p) for t in tps] for p in pps for d in dps for s in sps],
        "sp": [[rank_at(t, s, d, p) for s in sps] for p in pps for d in dps for t in tps],
        "pp": [[rank_at(t, s, d, p) for p in pps] for d in dps for s in sps for t in tps],
        "data": [[rank_at(t, s, d, p) for d in dps for s in sps] for p in pps for t in tps],
        "stage": [[rank_at(t, s, d, p) for d in dps for s in sps for t in tps] for p in pps],
    }


def _wrong_order(rank: int, groups: ProcessGroupCollection, lists: dict[str, list[list[int]]]) -> str:
    """Why Megatron's groups do not hold the ranks that this module counts with; empty if they do."""
    for name, group in (
        ("tp", groups.tp),
        ("sp", groups.cp),
        ("pp", groups.pp),
        ("data", groups.dp_cp),
        ("stage", groups.tp_dp_cp),
    ):
        expected = next(ranks for ranks in lists[name] if rank in ranks)
        found = dist.get_process_group_ranks(group)
        if found != expected:
            return (
                f"megatron.core.parallel_state is initialised with other groups ({name} of rank {rank}: {found}, this "
                f"run needs {expected}); initialise it with order='tp-cp-ep-dp-pp', or let the trainer do it"
            )
    if groups.intra_dp_cp.size() != groups.dp_cp.size():
        return (
            "megatron.core.parallel_state is initialised with several distributed-optimizer instances, this run needs "
            "num_distributed_optimizer_instances=1"
        )
    return ""


def _place(rank: int, tp_size: int, sp_size: int, dp_size: int, pp_size: int) -> dict[str, int]:
    """Coordinates of a rank, and the sizes, as fields of `Mesh`."""
    rest, tp_rank = divmod(rank, tp_size)
    pp_rank, dp_rank = divmod(rest // sp_size, dp_size)
    return {
        "tp_rank": tp_rank,
        "tp_size": tp_size,
        "sp_size": sp_size,
        "dp_rank": dp_rank,
        "dp_size": dp_size,
        "pp_rank": pp_rank,
        "pp_size": pp_size,
    }


def _own_group(world: World, lists: Sequence[Sequence[int]], *, always: bool) -> Group:
    """The group of this rank among `lists`, which together hold every rank once."""
    if not dist.is_initialized() or (len(lists[0]) == 1 and not always):
        return None
    mine = None
    for ranks in lists:
        made = dist.new_group(list(ranks))
        if world.rank in ranks:
            mine = made
    return mine


def sequence_parallel(config: SequenceParallelConfig, mesh: Mesh) -> SequenceParallel:
    """Sequence parallelism over the mesh; in Megatron's collection of groups, if those are what the mesh has."""
    if getattr(mesh.model_groups, "cp", None) is None:
        return SequenceParallel(config, mesh.sp_group)
    sp = SequenceParallel(config, pg_collection=mesh.model_groups)
    attach_to_collection(mesh.model_groups, sp.mesh)
    return sp
