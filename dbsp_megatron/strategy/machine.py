"""What is known of the machine before it is measured."""

from __future__ import annotations

from dataclasses import replace

from dbsp_megatron.plan import Calibration, reference_calibration
from dbsp_megatron.plan.rates import LinkCurve

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
