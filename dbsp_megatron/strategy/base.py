"""SequenceParallelStrategy and its registry: a new strategy is one file with one registered class."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from dbsp_megatron.comm.agree import digest_int
from dbsp_megatron.parallel_state import check_degrees, factorisations
from dbsp_megatron.plan import Calibration, PartitionPlan, Workload, plan_workload
from dbsp_megatron.strategy.config import SequenceParallelConfig
from dbsp_megatron.strategy.machine import default_calibration

_registry: dict[str, type[SequenceParallelStrategy]] = {}


class SequenceParallelStrategy(ABC):
    """Which mesh, token layout and plan a sequence-parallel run uses. Stateless; the runtime is the same for all.

    Args:
        config: the run's settings.
        size: number of sequence-parallel ranks P.

    Raises:
        ValueError: the strategy cannot run with these degrees.
    """

    name: ClassVar[str]
    splits_tokens: ClassVar[bool] = True
    """Whether attention of one sequence is split; else models cut their tensors by themselves."""

    def __init__(self, config: SequenceParallelConfig, size: int) -> None:
        self.config, self.size = config, size
        self.ulysses_degree, self.ring_degree = self.degrees()
        check_degrees(self.ulysses_degree, self.ring_degree, size)
        self.calibration = default_calibration()
        self.ranks_per_node = size

    @abstractmethod
    def degrees(self) -> tuple[int, int]:
        """(ulysses_degree, ring_degree) of the run."""

    @property
    def meshes(self) -> tuple[tuple[int, int], ...]:
        """All (U, R) that layers may run on."""
        return ((self.ulysses_degree, self.ring_degree),)

    @property
    def layout_degrees(self) -> tuple[int, int]:
        """(U, R) that the token layout is made for."""
        return self.ulysses_degree, self.ring_degree

    def prepare(self, ranks: Sequence[int]) -> int:
        """Reads what the strategy needs beside its configuration, the rates of the machine, before any exchange.

        Args:
            ranks: global ranks that share the sequence.

        Returns:
            A hash that has to be equal on all ranks.

        Raises:
            ValueError: this rank cannot run.
        """
        path, local = self.config.calibration, ranks_of_node()
        self.calibration = default_calibration() if path is None else Calibration.load(path)
        nodes = [rank // local for rank in ranks]
        self.ranks_per_node = nodes.count(nodes[0])
        return digest_int(self.calibration.to_json(), self.ranks_per_node)

    @property
    def layout_policy(self) -> str:
        """How blocks are laid out at the model input: contiguous or stripe."""
        return "contiguous"

    @property
    def calibrates_layout(self) -> bool:
        """Whether `SequenceParallel.recalibrate` may order the blocks anew by measured counts."""
        return False

    @property
    def needs_mask_on_host(self) -> bool:
        """Whether `plan` needs `workload.blocks`, the whole mask, beside the counts."""
        return False

    def needs_row_tiles(self, num_heads: int) -> bool:
        """Whether `plan` uses `workload.row_tiles`, counts of every single row, in a layer with so many heads."""
        return False

    def plan(self, workload: Workload) -> PartitionPlan:
        """Plan of one layer from its counts."""
        return plan_workload(
            workload,
            ulysses_degree=self.ulysses_degree,
            ring_degree=self.ring_degree,
            head_policy="contiguous",
            block_policy="home",
        )

    def _fixed(self, key: str, value: int) -> int:
        """`value`, unless the config asks for something else."""
        asked = getattr(self.config, key)
        if asked not in ("auto", value):
            raise ValueError(
                f"sp.{key}={asked} does not fit sp.strategy={self.name} on {self.size} ranks, which has "
                f"{key}={value}: drop the flag or use --sp-strategy usp"
            )
        return value

    def _from_config(self) -> tuple[int, int]:
        """Degrees as configured; an `auto` is filled from the other, two of them from the machine's shape."""
        u, r = self.config.ulysses_degree, self.config.ring_degree
        if u == "auto" and r == "auto":
            # Ulysses inside a node (its all-to-all wants the fast links), the ring between nodes.
            return next(pair for pair in factorisations(self.size) if pair[0] <= ranks_of_node())
        if u == "auto" or r == "auto":
            key, given = ("ring_degree", r) if u == "auto" else ("ulysses_degree", u)
            if not isinstance(given, int) or self.size % given:
                raise ValueError(
                    f"sp.{key}={given} must divide the number of sequence-parallel ranks {self.size}: "
                    f"choose from {factorisations(self.size)}"
                )
            other = self.size // given
            return (other, given) if u == "auto" else (given, other)
        return u, r


def ranks_of_node() -> int:
    """Ranks that the launcher started on this node; 8 if it does not say."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "8")))


def register_strategy(cls: type[SequenceParallelStrategy]) -> type[SequenceParallelStrategy]:
    """Class decorator: make `cls` available as `strategy=cls.name`."""
    if cls.name in _registry:
        raise ValueError(f"a strategy called {cls.name!r} is registered already: choose another name")
    _registry[cls.name] = cls
    return cls


def strategy_names() -> list[str]:
    """Registered names, in order of registration."""
    return list(_registry)


def get_strategy(name: str) -> type[SequenceParallelStrategy]:
    """The registered class.

    Raises:
        ValueError: unknown name.
    """
    if name in _registry:
        return _registry[name]
    raise ValueError(f"sp.strategy must be one of {', '.join(_registry)}, got {name!r}")
