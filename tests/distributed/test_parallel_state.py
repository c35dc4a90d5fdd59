"""Process groups of the Ulysses x Ring mesh: membership, order of creation, destruction, Megatron's groups."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from dbsp_megatron import parallel_state
from dbsp_megatron.parallel_state import (
    SequenceParallelGroups,
    attach_to_collection,
    factorisations,
    groups_from_megatron,
    hierarchical_sizes,
    host_group,
)
from tests.harness import run_ranks


def _members(group: dist.ProcessGroup | None, alone: int) -> list[int]:
    return [alone] if group is None else dist.get_process_group_ranks(group)


def _check_meshes(groups: SequenceParallelGroups, ranks: list[int]) -> None:
    """Every mesh over `ranks`: members, positions, and a collective that really spans them."""
    me = dist.get_rank()
    position = ranks.index(me)
    for ulysses, ring in factorisations(len(ranks)):
        mesh = groups.mesh(ulysses, ring)
        label = f"mesh {ulysses}x{ring} of {ranks}, rank {me}"
        assert (mesh.rank, mesh.size) == (position, len(ranks)), label
        assert mesh.rank == mesh.ring_rank * ulysses + mesh.ulysses_rank, label
        want_ulysses = ranks[mesh.ring_rank * ulysses : (mesh.ring_rank + 1) * ulysses]
        want_ring = ranks[mesh.ulysses_rank :: ulysses]
        for group, want in ((mesh.ulysses_group, want_ulysses), (mesh.ring_group, want_ring)):
            assert _members(group, me) == want, label
            if group is not None:
                assert group.size() == len(want), label
                total = torch.tensor([float(me)])
                dist.all_reduce(total, group=group)
                assert total.item() == sum(want), label


def _meshes_of_world(rank: int, world_size: int) -> None:
    _check_meshes(SequenceParallelGroups(dist.group.WORLD), list(range(world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_groups_hold_the_ranks_of_each_axis(world_size: int) -> None:
    """Degree k gives groups of exactly k ranks in every factorisation, no short tail group (Traps B71, B75)."""
    run_ranks(_meshes_of_world, world_size)


def _meshes_of_parts(rank: int, world_size: int, parts: list[list[int]]) -> None:
    mine = None
    for part in parts:
        group = dist.new_group(part)
        if rank in part:
            mine = (group, part)
    assert mine is not None
    groups = SequenceParallelGroups(mine[0])
    _check_meshes(groups, mine[1])
    groups.destroy()
    total = torch.ones(1)
    dist.all_reduce(total, group=mine[0])
    assert total.item() == len(mine[1])


@pytest.mark.parametrize(
    "parts",
    [
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],
        [[0, 1, 2, 3, 4, 5], [6, 7]],
    ],
    ids=str,
)
def test_groups_nest_in_a_part_of_the_world(parts: list[list[int]]) -> None:
    """Data-parallel replicas build their own meshes, also of unequal size; none waits for another (Trap B71)."""
    run_ranks(_meshes_of_parts, sum(map(len, parts)), parts)


def _record_new_groups(rank: int, world_size: int) -> list[tuple[int, ...]]:
    calls: list[tuple[int, ...]] = []
    original = dist.new_group

    def recording(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        calls.append(tuple(ranks))
        return original(ranks, *args, **kwargs)

    dist.new_group = recording
    try:
        SequenceParallelGroups(dist.group.WORLD)
    finally:
        dist.new_group = original
    return calls


@pytest.mark.parametrize("world_size", [4, 6, 8])
def test_groups_are_asked_for_in_one_order_on_all_ranks(world_size: int) -> None:
    """Every rank issues the identical sequence of rank lists, and asks for no list twice (Trap B71)."""
    calls = run_ranks(_record_new_groups, world_size)
    assert calls[0], "nothing was recorded"
    assert all(other == calls[0] for other in calls)
    assert len(set(calls[0])) == len(calls[0])


def _refuse(rank: int, world_size: int, degrees: list[tuple[int, int]]) -> list[str]:
    groups = SequenceParallelGroups(dist.group.WORLD)
    messages = []
    for ulysses, ring in degrees:
        try:
            groups.mesh(ulysses, ring)
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("accepted")
    return messages


def _urgent(rank: int, world_size: int, parts: list[list[int]]) -> list[str]:
    """Groups as beside NCCL, with options that hold a time limit; gloo takes no others."""
    made = {tuple(part): dist.new_group(part) for part in parts}
    mine = next(part for part in parts if rank in part)
    limit = timedelta(seconds=77)
    before = len(c10d._world.pg_map)
    with (
        patch.object(parallel_state, "moves_by_nccl", lambda group: True),
        patch.object(parallel_state, "urgent_options", lambda: SimpleNamespace(_timeout=limit)),
    ):
        groups = SequenceParallelGroups(made[tuple(mine)])
    _check_meshes(groups, mine)
    limits = []
    for (ulysses, ring), mesh in groups.meshes.items():
        for group in (mesh.ulysses_group, mesh.ring_group):
            if group is not None:
                backend: Any = group._get_backend(torch.device("cpu"))
                limits.append(f"{ulysses}x{ring} {'UR'[group is mesh.ring_group]} {backend.options._timeout == limit}")
    groups.destroy()
    assert len(c10d._world.pg_map) == before
    total = torch.ones(1)
    dist.all_reduce(total, group=made[tuple(mine)])
    assert total.item() == len(mine)
    return limits


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 2], [1, 3]]], ids=str)
def test_urgent_groups_have_the_time_limit_of_their_options(parts: list[list[int]]) -> None:
    """Of another limit torch warns, and names of several backends have another default than NCCL's own."""
    want = {4: ["4x1 U True", "2x2 U True", "2x2 R False", "1x4 R False"], 2: ["2x1 U True", "1x2 R False"]}
    for limits in run_ranks(_urgent, 4, parts):
        assert limits == want[len(parts[0])]


def test_mesh_refuses_degrees_that_do_not_fill_the_group() -> None:
    """Six ranks cannot form groups of four; the message names both degrees and the rank count (Traps B01, B75)."""
    degrees = [(4, 1), (4, 2), (1, 4), (2, 2), (0, 6), (-2, -3)]
    for messages in run_ranks(_refuse, 6, degrees):
        for (ulysses, ring), message in zip(degrees, messages, strict=True):
            assert message != "accepted", (ulysses, ring)
            assert all(f"{number}" in message for number in (ulysses, ring, 6)), message


def _cycles(rank: int, world_size: int) -> None:
    user = dist.new_group(list(range(world_size)))
    counts = []
    for _ in range(5):
        groups = SequenceParallelGroups(dist.group.WORLD)
        total = torch.ones(1)
        dist.all_reduce(total, group=groups.mesh(2, 2).ulysses_group)
        groups.destroy()
        groups.destroy()
        gc.collect()
        counts.append(len(c10d._world.pg_map))
    assert counts == [2] * 5, counts
    total = torch.ones(1)
    dist.all_reduce(total, group=user)
    assert total.item() == world_size


def test_destroy_leaves_no_group_behind() -> None:
    """Five build and destroy cycles leave only the default and the user's group; destroy may be repeated (Trap B73)."""
    run_ranks(_cycles, 4)


def _cycles_of_parts(rank: int, world_size: int, parts: list[list[int]]) -> None:
    made = [dist.new_group(part) for part in parts]
    index = next(i for i, part in enumerate(parts) if rank in part)
    before = len(c10d._world.pg_map)
    for cycle in range(4):
        groups = SequenceParallelGroups(made[index])
        # Ranks arrive at different times, so that an address left over from the last cycle would be found.
        time.sleep(0.02 * ((rank * 7 + cycle * 3) % 5))
        _check_meshes(groups, parts[index])
        groups.destroy()
        assert len(c10d._world.pg_map) == before


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2, 4, 5], [1, 3]]], ids=str)
def test_groups_can_be_built_again_in_a_part_of_the_world(parts: list[list[int]]) -> None:
    """Replicas destroy and rebuild their meshes: no rank meets the remains of the last cycle (Traps B71, B73)."""
    run_ranks(_cycles_of_parts, sum(map(len, parts)), parts, timeout_s=30)


def _extra_group(rank: int, world_size: int) -> None:
    made = [dist.new_group(part) for part in ([0, 1, 2, 3], [4, 5])]
    # Rank 0 alone of its replica belongs to one group more.
    dist.new_group([0, 5])
    parts = [0, 1, 2, 3] if rank < 4 else [4, 5]
    _check_meshes(SequenceParallelGroups(made[rank // 4]), parts)


def test_groups_do_not_depend_on_the_groups_a_user_made() -> None:
    """One rank of a replica may belong to more groups than its neighbours, for instance to log with (Trap B71)."""
    run_ranks(_extra_group, 6, timeout_s=30)


def _destroy_after_default(rank: int, world_size: int) -> None:
    groups = SequenceParallelGroups(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    groups.destroy()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_destroy_after_the_default_group_is_gone() -> None:
    """A user who destroyed everything first gets no error from a late destroy (Trap B73)."""
    run_ranks(_destroy_after_default, 2)


def test_groups_without_torch_distributed() -> None:
    """One process needs no process group at all (Trap B121)."""
    groups = SequenceParallelGroups(None)
    mesh = groups.mesh(1, 1)
    assert (groups.size, groups.rank, groups.control_group) == (1, 0, None)
    assert (mesh.ulysses_rank, mesh.ring_rank, mesh.ulysses_group, mesh.ring_group) == (0, 0, None, None)
    with pytest.raises(ValueError, match="2"):
        groups.mesh(2, 1)
    groups.destroy()


def _megatron(rank: int, world_size: int, degree: int, sizes: list[int] | None) -> None:
    from megatron.core import parallel_state as megatron
    from megatron.core.process_groups_config import ProcessGroupCollection

    options: dict[str, Any] = {} if sizes is None else {"hierarchical_context_parallel_sizes": sizes}
    megatron.initialize_model_parallel(
        tensor_model_parallel_size=1, context_parallel_size=degree, create_gloo_process_groups=False, **options
    )
    try:
        required = ["cp"] if sizes is None else ["cp", "hcp"]
        collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=required)
        groups = groups_from_megatron(collection)
        ranks = dist.get_process_group_ranks(megatron.get_context_parallel_group())
        _check_meshes(groups, ranks)
        mesh = groups.mesh(2, degree // 2)
        if sizes is not None:
            inner, outer = megatron.get_hierarchical_context_parallel_groups()
            assert _members(mesh.ulysses_group, rank) == dist.get_process_group_ranks(inner)
            assert _members(mesh.ring_group, rank) == dist.get_process_group_ranks(outer)
        assert mesh.group is collection.cp
        attached = attach_to_collection(collection, mesh)
        assert attached.ulysses is mesh.ulysses_group
        assert attached.ring is mesh.ring_group
        groups.destroy()
        total = torch.ones(1)
        dist.all_reduce(total, group=megatron.get_context_parallel_group())
        assert total.item() == degree
    finally:
        megatron.destroy_model_parallel()


@pytest.mark.parametrize(
    ("degree", "sizes"), [(4, None), (4, [2, 2]), (2, None)], ids=["cp4", "cp4-hierarchical", "dp2-cp2"]
)
def test_groups_from_megatron_equal_its_hierarchical_groups(degree: int, sizes: list[int] | None) -> None:
    """In Megatron's cp group: Ulysses is its inner level, ring the outer, also beside data parallelism (Trap B37)."""
    assert hierarchical_sizes(2, 2) == [2, 2]
    assert hierarchical_sizes(4, 2) == [4, 2]
    run_ranks(_megatron, 4, degree, sizes, timeout_s=100)


def _megatron_without_cp(rank: int, world_size: int) -> str:
    class Empty:
        cp = None

    try:
        groups_from_megatron(Empty())
    except ValueError as error:
        return str(error)
    return "accepted"


def test_groups_from_megatron_without_context_parallel_group_is_refused() -> None:
    """A missing group is an error when it is built, not a silent fall back to one rank (Trap B37)."""
    for message in run_ranks(_megatron_without_cp, 2):
        assert "cp" in message
        assert "context_parallel_size" in message


def _host_group(rank: int, world_size: int) -> list[list[int]]:
    """Groups that are said to move tensors of a device only: a part of the world, and all of it."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    own = pairs[rank == 1]
    assert host_group(own) is own
    found = []
    for group in (own, dist.group.WORLD):
        assert group is not None
        with patch.object(parallel_state, "moves_host_tensors", side_effect=[False, True]):
            made = host_group(group)
        assert made is not group or group.size() == 1
        total = torch.tensor([rank + 1])
        dist.all_reduce(total, group=made)
        found.append([int(total), *dist.get_process_group_ranks(made)])
    return found


def test_a_group_for_host_tensors_has_the_same_ranks() -> None:
    assert run_ranks(_host_group, 3) == [[[4, 0, 2], [6, 0, 1, 2]], [[2, 1], [6, 0, 1, 2]], [[4, 0, 2], [6, 0, 1, 2]]]
