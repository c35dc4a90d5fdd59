"""Kernel rates, curves and calibrations with round numbers that the tests of prediction share."""

from __future__ import annotations

from typing import Any

from dbsp_megatron.plan.calibration import Calibration, KernelRate, LinkCurve


def make_rate(**changes: Any) -> KernelRate:
    """A block takes 1 us, a row 0.1 us, a launch 5 us (forward), unless changed."""
    fields: dict[str, Any] = {
        "engine": "made_up",
        "direction": "forward",
        "dtype": "bfloat16",
        "head_dim": 4,
        "block_size_q": 2,
        "block_size_k": 2,
        "block_us": 1.0,
        "row_us": 0.1,
        "launch_us": 5.0,
        "r_squared": 1.0,
        "max_relative_residual": 0.0,
        "num_points": 6,
    }
    return KernelRate(**{**fields, **changes})


def make_curve(
    collective: str, latency_us: float, bytes_per_us: float, *, num_ranks: int = 2, scope: str = "node"
) -> LinkCurve:
    """A straight line through the latency at 0 bytes."""
    return LinkCurve(
        collective=collective,
        num_ranks=num_ranks,
        scope=scope,
        num_bytes=(0, 1000),
        time_us=(latency_us, latency_us + 1000 / bytes_per_us),
    )


def make_calibration(**changes: Any) -> Calibration:
    """Inside a node an all-to-all takes 3 us + bytes / 16, a hop 4 us + bytes / 8; the network is ten times slower."""
    fields: dict[str, Any] = {
        "machine": "made up",
        "versions": {"torch": "0"},
        "kernels": (make_rate(), make_rate(direction="backward", block_us=3.0, row_us=0.2, launch_us=7.0)),
        "links": (
            make_curve("all_to_all", 3.0, 16.0),
            make_curve("p2p", 4.0, 8.0),
            make_curve("all_to_all", 30.0, 1.6, scope="network"),
            make_curve("p2p", 40.0, 0.8, scope="network"),
        ),
        "plan_us": 100.0,
    }
    return Calibration(**{**fields, **changes})
