"""Process groups of the Ulysses x Ring mesh, nested in Megatron's context-parallel group or in any plain group.

sp rank p = ring_rank * U + ulysses_rank: Ulysses is the inner axis, so its all-to-all stays on neighbouring ranks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from dbsp_megatron.compat import new_group_of_members

if TYPE_CHECKING:
    from dbsp_megatron.strategy.sequence_parallel import SequenceParallel


@dataclass(frozen=True)
class SequenceParallelMesh:
    """One factorisation of an sp group.

    `group`, `ulysses_group` and `ring_group` are None where the axis has one rank and no group is needed.
    """

    ulysses_degree: int
    ring_degree: int
    rank: int
    group: dist.ProcessGroup | None
    ulysses_group: dist.ProcessGroup | None
    ring_group: dist.ProcessGroup | None

    @property
    def ulysses_rank(self) -> int:
        """Position on the Ulysses axis."""
        return self.rank % self.ulysses_degree

    @property
    def ring_rank(self) -> int:
        """Position on the ring axis."""
        return self.rank // self.ulysses_degree

    @property
    def size(self) -> int:
        """Number of ranks, U * R."""
        return self.ulysses_degree * self.ring_degree


def members(group: dist.ProcessGroup) -> list[int]:
    """World ranks of a group, before something is sent in it.

    Raises:
        ValueError: the group was destroyed.
    """
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError) as error:
        # A backend would wait for ever, abort, or exchange as if nothing had happened.
        raise ValueError(
            "a process group was destroyed that is still needed, by a backward pass for instance "
            "(SequenceParallel.destroy, destroy_model_parallel or destroy_process_group was called too early): destroy "
            "groups after the last backward pass, and make a new SequenceParallel to go on"
        ) from error


def moves_host_tensors(group: dist.ProcessGroup) -> bool:
    """Whether the group has a backend for CPU tensors (gloo, or gloo beside NCCL)."""
    return "cpu:" in dist.get_backend_config(group)


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group if it moves CPU tensors, else one of the same ranks that does; collective then.

    Raises:
        ValueError: the group was destroyed.
    """
    if group.size() == 1 or moves_host_tensors(group):
        return group
    ranks = members(group)
    if len(ranks) == dist.get_world_size():
        return cast(dist.ProcessGroup, dist.new_group(ranks, backend="gloo"))
    return new_group_of_members(ranks, f"dbsp-{_drawn_number(group, ranks)}-host", "gloo")


def _drawn_number(group: dist.ProcessGroup, ranks: list[int]) -> int:
    """A number that nobody drew before, chosen by the first rank; collective."""
    drawn = torch.tensor([random.SystemRandom().randrange(2**62)])
    if not moves_host_tensors(group):
        drawn = drawn.cuda()
    dist.broadcast(drawn, src=ranks[0], group=group)
    return int(drawn)


def moves_by_nccl(group: dist.ProcessGroup) -> bool:
    """Whether NCCL moves the CUDA tensors of a group."""
    return "nccl" in dist.get_backend_config(group)


def urgent_options() -> Any:
    """Options of a group of NCCL whose kernels get a multiprocessor that becomes free before those of other streams."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def factorisations(size: int) -> list[tuple[int, int]]:
    """All (ulysses_degree, ring_degree) with product `size`, largest Ulysses degree first."""
    return [(u, size // u) for u in range(size, 0, -1) if size % u == 0]


def check_degrees(ulysses_degree: int, ring_degree: int, size: int) -> None:
    """Raise ValueError unless ulysses_degree * ring_degree == size."""
    if ulysses_degree < 1 or ring_degree < 1 or ulysses_degree * ring_degree != size:
        raise ValueError(
            f"sp.ulysses_degree={ulysses_degree} times sp.ring_degree={ring_degree} must equal the number of "
            f"sequence-parallel ranks {size}: choose from {factorisations(size)}"
        )


class SequenceParallelGroups:
    """Every factorisation of one sp group, built once, so that a layer can change its mesh at run time.

    All ranks of `group` must construct it at the same time; they ask for the same subgroups in the same order.

    Args:
        group: the sp group (Megatron's context-parallel group), or None for a single process without
            torch.distributed.
        ready: (U, R) -> this rank's existing (ulysses_group, ring_group), used instead of new ones (Megatron's
            hierarchical groups); the same keys on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ready: dict[tuple[int, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] | None = None,
    ) -> None:
        self.group = group
        self.ranks = [0] if group is None else members(group)
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else dist.get_rank(group)
        self._ready = dict(ready or {})
        self._known: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}
        if group is not None:
            self._known[tuple(self.ranks), False] = group
        self._owned: list[dist.ProcessGroup] = []
        self._name: int | None = None
        if group is not None and self.size > 1 and self.size != dist.get_world_size():
            self._nonce()
        self.control_group = self._control_group()
        self.meshes = {(u, r): self._build(u, r) for u, r in factorisations(self.size)}

    def mesh(self, ulysses_degree: int, ring_degree: int) -> SequenceParallelMesh:
        """The mesh with these degrees.

        Raises:
            ValueError: their product is not the group's size.
        """
        check_degrees(ulysses_degree, ring_degree, self.size)
        return self.meshes[ulysses_degree, ring_degree]

    def alone(self) -> dist.ProcessGroup:
        """A group of this rank by itself; collective.

        Raises:
            ValueError: there is no process group.
        """
        if self.group is None:
            raise ValueError("a group of one rank needs torch.distributed: call init_process_group first")
        made = {rank: self._new_group([rank]) for rank in self.ranks}
        return cast(dist.ProcessGroup, made[self.ranks[self.rank]])

    def destroy(self) -> None:
        """Release the groups made here; groups given from outside stay alive. May be called again."""
        while self._owned:
            group = self._owned.pop()
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self.meshes = {}

    def _control_group(self) -> dist.ProcessGroup | None:
        """A group that moves host integers: gloo, beside NCCL, so that agreeing never waits for the device."""
        if self.group is None or self.size == 1 or moves_host_tensors(self.group):
            return self.group
        return self._new_group(self.ranks, backend="gloo")

    def _new_group(self, ranks: list[int], backend: str | None = None, *, urgent: bool = False) -> Any:
        options = urgent_options() if urgent else None
        if len(self.ranks) == dist.get_world_size():
            # Another limit than that of the options would make torch warn; that of NCCL is lost beside other backends.
            timeout = None if options is None else options._timeout
            made = dist.new_group(ranks, timeout, backend, options)
        elif dist.get_rank() in ranks:
            # new_group is collective over the default group, of which only these ranks are here.
            name = f"dbsp-{self._nonce()}-{'_'.join(map(str, ranks))}-{backend}-{urgent}"
            made = new_group_of_members(ranks, name, backend, options)
        else:
            return dist.GroupMember.NON_GROUP_MEMBER
        if isinstance(made, dist.ProcessGroup):
            self._owned.append(made)
        return made

    def _nonce(self) -> int:
        """A number that no earlier construction used, chosen by the first rank; collective when first called."""
        if self._name is None:
            if self.group is None:
                raise RuntimeError("a single rank needs no groups")
            self._name = _drawn_number(self.group, self.ranks)
        return self._name

    def _subgroup(self, lists: list[list[int]], *, urgent: bool = False) -> dist.ProcessGroup | None:
        """The group of this rank out of disjoint rank lists that together are all ranks."""
        mine = None
        urgent = urgent and self.group is not None and moves_by_nccl(self.group)
        for members in lists:
            if len(members) == 1:
                continue
            key = tuple(members), urgent
            if key not in self._known:
                backend = dist.get_backend_config(self.group) if urgent else None
                self._known[key] = self._new_group(members, backend, urgent=urgent)
            if self.ranks[self.rank] in members:
                mine = self._known[key]
        return mine

    def _build(self, ulysses_degree: int, ring_degree: int) -> SequenceParallelMesh:
        u, r = ulysses_degree, ring_degree
        if (u, r) in self._ready:
            return SequenceParallelMesh(u, r, self.rank, self.group, *self._ready[u, r])
        # An exchange of heads runs under the attention of other heads: it must not wait until that has ended.
        ulysses = self._subgroup([self.ranks[i * u : (i + 1) * u] for i in range(r)], urgent=True)
        ring = self._subgroup([self.ranks[i::u] for i in range(u)])
        return SequenceParallelMesh(u, r, self.rank, self.group, ulysses, ring)


def hierarchical_sizes(ulysses_degree: int, ring_degree: int) -> list[int]:
    """Value for Megatron's `hierarchical_context_parallel_sizes`: inner level (Ulysses) first."""
    return [ulysses_degree, ring_degree]


def context_parallel_group(pg_collection: Any) -> dist.ProcessGroup:
    """The group of Megatron's collection whose ranks share a sequence.

    Raises:
        ValueError: it has none.
    """
    group: dist.ProcessGroup | None = getattr(pg_collection, "cp", None)
    if group is None:
        raise ValueError(
            "pg_collection.cp is missing: initialise megatron.core parallel_state with context_parallel_size"
        )
    return group


def groups_from_megatron(pg_collection: Any) -> SequenceParallelGroups:
    """Groups inside Megatron's context-parallel group, reusing its hierarchical groups where they fit.

    Args:
        pg_collection: megatron.core ProcessGroupCollection with `cp` set (and `hcp`, if it was initialised with
            `hierarchical_context_parallel_sizes=hierarchical_sizes(U, R)`).

    Raises:
        ValueError: the collection has no context-parallel group.
    """
    group = context_parallel_group(pg_collection)
    levels = list(getattr(pg_collection, "hcp", None) or [])
    ready = {}
    if len(levels) == 2 and min(level.size() for level in levels) > 1:
        inner, outer = levels
        ready[inner.size(), outer.size()] = (inner, outer)
    return SequenceParallelGroups(group, ready)


def attach_to_collection(pg_collection: Any, mesh: SequenceParallelMesh) -> Any:
    """Carry the mesh on Megatron's collection as `pg_collection.ulysses` and `pg_collection.ring`; returns it."""
    pg_collection.ulysses = mesh.ulysses_group
    pg_collection.ring = mesh.ring_group
    return pg_collection


_current: list[SequenceParallel] = []


def set_sequence_parallel(sp: SequenceParallel | None) -> None:
    """Register the object that modules built without an explicit `sp` use (Megatron builds layers from specs)."""
    _current.clear()
    if sp is not None:
        _current.append(sp)


def get_sequence_parallel() -> SequenceParallel:
    """The registered object.

    Raises:
        ValueError: none is registered.
    """
    if not _current:
        raise ValueError(
            "no SequenceParallel is registered: call dbsp_megatron.parallel_state.set_sequence_parallel(sp) after "
            "initialising the process groups, or pass sp= in the layer spec"
        )
    return _current[0]
