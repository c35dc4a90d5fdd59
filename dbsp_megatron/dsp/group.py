"""DspGroup: the ranks of one mesh axis, what they agree on before they talk, and what they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from dbsp_megatron.comm.agree import Belief, agree
from dbsp_megatron.dsp.layout import Axis
from dbsp_megatron.parallel_state import members, moves_host_tensors


@dataclass
class Traffic:
    """What this rank sent to others since the last reset, by axis name; copies to itself are left out."""

    bytes_sent: Counter[str] = field(default_factory=Counter)
    """Bytes."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Collectives that took part in; those that carry nothing too."""
    messages: Counter[str] = field(default_factory=Counter)
    """Non-empty messages to other ranks."""

    def add(self, axis: Axis, sizes: list[int], me: int, element_size: int) -> None:
        """Count one collective that sends sizes[i] elements to rank i of an axis."""
        others = [size for rank, size in enumerate(sizes) if rank != me and size]
        self.bytes_sent[axis.name] += sum(others) * element_size
        self.messages[axis.name] += len(others)
        self.collectives[axis.name] += 1

    @property
    def total_bytes(self) -> int:
        """Bytes over all axes."""
        return sum(self.bytes_sent.values())

    @property
    def total_collectives(self) -> int:
        """Collectives over all axes."""
        return sum(self.collectives.values())

    def reset(self) -> None:
        """Count from 0 again."""
        for counter in (self.bytes_sent, self.collectives, self.messages):
            counter.clear()


class DspGroup:
    """One axis of the mesh: a process group under a name.

    Args:
        group: its ranks; None for a single process without torch.distributed.
        name: axis name in layouts and messages; the group's own name if None.
        control_group: the same ranks on a backend that moves host tensors; `group` itself where it does.
        traffic: counter to add to; a new one if None.
        check: compare shapes, layouts and dtypes of all ranks before each collective, so that a wrong call raises the
            same ValueError on all of them instead of hanging some. One gather of a few host integers; left out where
            no backend moves host tensors.

    Attributes:
        axis: name and size.
        rank: this rank on the axis.
        traffic: what was sent.

    Raises:
        ValueError: this rank is not in the group, or there is none although there are several ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        name: str | None = None,
        *,
        control_group: dist.ProcessGroup | None = None,
        traffic: Traffic | None = None,
        check: bool = True,
    ) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError("group does not hold this rank: pass the group that this rank is in")
        if group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"group is None while torch.distributed runs on {dist.get_world_size()} ranks, each of which would "
                "take itself for alone: pass dist.group.WORLD, or a group of this rank if it shall be alone"
            )
        self.group = group
        self.check_alive()
        size = 1 if group is None else group.size()
        self.rank = 0 if group is None else dist.get_rank(group)
        self.axis = Axis(name or ("single" if group is None else group.group_name), size)
        self.traffic = Traffic() if traffic is None else traffic
        if control_group is None and group is not None and moves_host_tensors(group):
            control_group = group
        self._control = control_group if size > 1 else None
        self._check = check

    def __deepcopy__(self, _: object) -> DspGroup:
        """The same ranks: a copy of a model that holds them runs among them too."""
        return self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.axis.size

    @property
    def coords(self) -> dict[str, int]:
        """This rank's place on the axis."""
        return {self.axis.name: self.rank}

    def check_alive(self) -> None:
        """Raise ValueError if the process group was destroyed."""
        if self.group is not None:
            members(self.group)

    def agree(self, where: str, problem: str | None, beliefs: Mapping[str, Belief], *, always: bool = False) -> None:
        """Raise the same ValueError on all ranks if one has a problem or they differ; see `comm.agree.agree`.

        Args:
            where: what is about to happen.
            problem: this rank's own error.
            beliefs: what must be equal on all ranks.
            always: also if the group was made with check=False.
        """
        if (self._check or always) and self._control is not None:
            agree(where, problem, beliefs, self._control)
        elif problem:
            raise ValueError(problem)


def as_dsp_group(group: DspGroup | dist.ProcessGroup | None) -> DspGroup:
    """A group under its own name, if it is not a DspGroup yet."""
    return group if isinstance(group, DspGroup) else DspGroup(group)
