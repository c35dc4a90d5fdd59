"""Dual-balanced sequence parallelism on a mesh that is chosen for each layer at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dbsp_megatron.comm.agree import digest_int
from dbsp_megatron.parallel_state import factorisations
from dbsp_megatron.plan import Calibration, reference_calibration
from dbsp_megatron.plan.rates import LinkCurve
from dbsp_megatron.strategy.base import ranks_of_node, register_strategy
from dbsp_megatron.strategy.dbsp import DualBalanced

_NETWORK_US = 20.0
_NETWORK_BYTES_PER_US = 50_000
_GIGABYTE = 10**9


def default_calibration() -> Calibration:
    """Rates of H200 cards in one node (`reference_calibration`), and an assumed network of 50 GB/s for each of them."""
    node = reference_calibration()
    network = tuple(
        LinkCurve(
            collective=collective,
            num_ranks=2,
            scope="network",
            num_bytes=(1, _GIGABYTE),
            time_us=(_NETWORK_US, _NETWORK_US + _GIGABYTE / _NETWORK_BYTES_PER_US),
        )
        for collective in ("all_to_all", "p2p")
    )
    return replace(node, links=node.links + network, note=f"{node.note}; assumed network of 50 GB/s a card, 20 us")


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
        """Reads and checks the calibration."""
        path, local = self.config.calibration, ranks_of_node()
        self.calibration = default_calibration() if path is None else Calibration.load(path)
        nodes = [rank // local for rank in ranks]
        self.ranks_per_node = nodes.count(nodes[0])
        self._check_calibration(path, across=len(set(nodes)) > 1)
        return digest_int(self.calibration.to_json(), self.ranks_per_node)

    def _check_calibration(self, path: str | None, *, across: bool) -> None:
        """Refuses a calibration that cannot predict every mesh."""
        problem = None
        try:
            if not any(rate.direction == "forward" for rate in self.calibration.kernels):
                raise ValueError("kernels has no forward rate; measure it with tools/fit_latency.py")
            for mesh in self.meshes:
                for collective, degree in zip(("all_to_all", "p2p"), mesh, strict=True):
                    if degree > 1:
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
        return self.config.head_policy, self.config.block_policy if self.config.block_policy in moves else "home"

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
