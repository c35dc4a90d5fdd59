"""DspMesh: the axes that a model is cut by, with their groups, links and one counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from dbsp_megatron.comm.agree import Belief
from dbsp_megatron.dsp.group import DspGroup, Traffic
from dbsp_megatron.dsp.layout import Axis
from dbsp_megatron.dsp.stages import Link


class DspMesh:
    """Axes of ranks that together cut tensors.

    Args:
        groups: one for each axis, outermost (between nodes) first; a process group gets the name "dsp".
        links: price of each axis, by name; 1 ns a byte where left out.

    Attributes:
        groups: by axis name.
        links: what the planner is told.
        coords: this rank's place.
        traffic: what this rank sent on all axes.

    Raises:
        ValueError: two axes have one name, or a link names none.
    """

    def __init__(
        self,
        groups: DspGroup | dist.ProcessGroup | Sequence[DspGroup] | None,
        links: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        if not isinstance(groups, Sequence):
            groups = [groups if isinstance(groups, DspGroup) else DspGroup(groups, "dsp")]
        self.groups = {group.axis.name: group for group in groups}
        names = [group.axis.name for group in groups]
        if not names or len(self.groups) < len(names):
            raise ValueError(f"groups must have names of their own, got {names}: pass DspGroup(group, name)")
        prices = dict(links or {})
        if unknown := sorted(set(prices) - set(names)):
            raise ValueError(f"links: {unknown} are no axes, expected some of {names}")
        self.links = tuple(
            Link(axis=group.axis, ns_per_byte=price[0], ns_per_switch=price[1])
            for group in groups
            for price in [prices.get(group.axis.name, (1, 0))]
        )
        self.coords = {group.axis.name: group.rank for group in groups}
        self.traffic = Traffic()
        for group in groups:
            group.traffic = self.traffic

    def __deepcopy__(self, _: object) -> DspMesh:
        """The same mesh: its groups and its counter go together."""
        return self

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, outermost first."""
        return tuple(group.axis for group in self.groups.values())

    def agree(self, where: str, problem: str | None, beliefs: Mapping[str, Belief]) -> None:
        """Raise a ValueError on all ranks of the mesh if one has a problem or they differ.

        Raises:
            ValueError: see above.
        """
        for group in self.groups.values():
            # Every axis is asked even after an error, so that the ranks of the other axes learn of it.
            try:
                group.agree(where, problem, beliefs, always=True)
            except ValueError as error:
                problem = str(error)
        if problem:
            raise ValueError(problem)
