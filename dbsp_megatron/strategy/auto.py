"""Dual-balanced sequence parallelism on a mesh that is chosen for each layer at run time."""

from __future__ import annotations

from collections.abc import Sequence

from dbsp_megatron.parallel_state import factorisations
from dbsp_megatron.strategy.base import register_strategy
from dbsp_megatron.strategy.dbsp import DualBalanced


@register_strategy
class Auto(DualBalanced):
    """Every factorisation of the ranks, unless degrees are given, on one striped token layout.

    Source:
        db-SP (arXiv:2511.23113), strategy selection. Differs: times are added up by ring step instead of scaled by the
        imbalance, are corrected by what was measured, and include plans that balance nothing; a choice is kept until
        another gains enough.
    """

    name = "auto"

    @property
    def meshes(self) -> tuple[tuple[int, int], ...]:
        """All factorisations; the given one if a degree is given."""
        given = (self.config.ulysses_degree, self.config.ring_degree)
        if given != ("auto", "auto"):
            return ((self.ulysses_degree, self.ring_degree),)
        return tuple(factorisations(self.size))

    @property
    def layout_degrees(self) -> tuple[int, int]:
        """A ring of all ranks: its stripe is one for every ring degree along the chain of prime factors."""
        return (self.ulysses_degree, self.ring_degree) if len(self.meshes) == 1 else (1, self.size)

    def prepare(self, ranks: Sequence[int]) -> int:
        """Checks the calibration as well."""
        found = super().prepare(ranks)
        self._check_calibration(self.config.calibration, across=len(ranks) > self.ranks_per_node)
        return found

    def _check_calibration(self, path: str | None, *, across: bool) -> None:
        """Refuses a calibration that cannot predict every mesh."""
        problem = None
        try:
            if not any(rate.direction == "forward" for rate in self.calibration.kernels):
                raise ValueError("kernels has no forward rate; measure it with tools/fit_latency.py")
            for mesh in self.meshes:
                for collective, degree in zip(("all_to_all", "p2p"), mesh, strict=True):
                    if degree > 1 and self.ranks_per_node > 1:
                        self.calibration.link(collective, degree, "node")
                    if self.size > 1 and across:
                        self.calibration.link(collective, degree, "network")
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            raise ValueError(f"sp.calibration={path} does not serve sp.strategy=auto on {self.size} ranks: {problem}")

    @property
    def trains(self) -> bool:
        """Whether times of backward passes can be predicted."""
        return any(rate.direction == "backward" for rate in self.calibration.kernels)

    @property
    def policies(self) -> tuple[str, str]:
        """Head and block policy of a `StrategySelector`."""
        moves = ("auto", "paper", "minimal_move", "step_aware")
        moved = self._has_ring and self.config.block_policy in moves
        return self.config.head_policy, self.config.block_policy if moved else "home"

    @property
    def calibrates_layout(self) -> bool:
        """As dbsp does, if any mesh has a ring."""
        return self._has_ring and self.config.block_policy in ("auto", "hot_stripe")

    @property
    def needs_mask_on_host(self) -> bool:
        """As dbsp does, if any mesh has a ring."""
        return self._has_ring and self.config.block_policy == "paper"

    def needs_row_tiles(self, num_heads: int) -> bool:
        """If dbsp needs them on any mesh; always the same, as all meshes are planned from one count."""
        largest = max(ulysses for ulysses, _ in self.meshes)
        cuts = self.config.head_policy == "split" or (
            self.config.head_policy == "auto" and largest > 1 and num_heads < 8 * largest
        )
        return cuts or (self._has_ring and self.config.block_policy in ("minimal_move", "step_aware"))

    @property
    def _has_ring(self) -> bool:
        return any(ring > 1 for _, ring in self.meshes)
