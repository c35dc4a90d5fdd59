"""What was measured of a kernel (KernelRate) and of a link (LinkCurve)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.integers import checked_count

DIRECTIONS = ("forward", "backward")
COLLECTIVES = ("all_to_all", "p2p", "all_gather")
SCOPES = ("node", "network")
DTYPES = ("float32", "bfloat16", "float16")
MIN_R_SQUARED = 0.9
MEASURE_AGAIN = "measure it again on an idle machine"

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class KernelRate:
    """Time of one attention launch: `block_us * dense blocks + row_us * rows + launch_us`.

    Raises:
        ValueError: if a number is impossible or the fit was poor.
    """

    engine: str
    """Kernel that was measured."""
    direction: str
    """`forward` or `backward` (a whole backward: dq, dk and dv)."""
    dtype: str
    """Data type of q, k, v: `float32`, `bfloat16` or `float16`."""
    head_dim: int
    """Head dimension D."""
    block_size_q: int
    """Query tokens in a block."""
    block_size_k: int
    """Key tokens in a block."""
    block_us: float
    """Microseconds for one dense block of one head (alpha), the whole device working on many; above 0."""
    row_us: float
    """Microseconds for one (head, q-block) row (beta): reading q, writing the output."""
    launch_us: float
    """Microseconds for one launch (gamma), whatever it computes."""
    r_squared: float
    """Explained share of the variance of the fit."""
    max_relative_residual: float
    """Largest |fitted - measured| / measured."""
    num_points: int
    """Measured points behind the fit."""
    note: str = ""
    """What was assumed when this rate stands in for one that was not measured; empty for a measured one."""

    def __post_init__(self) -> None:
        check_text("engine", self.engine)
        check_text("note", self.note)
        check_member("direction", self.direction, DIRECTIONS)
        check_member("dtype", self.dtype, DTYPES)
        for name in ("head_dim", "block_size_q", "block_size_k", "num_points"):
            checked_count(name, getattr(self, name))
        for name in ("block_us", "row_us", "launch_us", "max_relative_residual"):
            check_number(name, getattr(self, name), positive=name == "block_us")
        if not is_number(self.r_squared) or not MIN_R_SQUARED <= self.r_squared <= 1:
            raise ValueError(
                f"r_squared must be between {MIN_R_SQUARED} and 1, got {self.r_squared!r}; a fit below does not "
                f"describe the kernel, {MEASURE_AGAIN}"
            )

    def time_us(self, blocks: NDArray[Any] | float, rows: NDArray[Any] | float) -> FloatArray:
        """Returns microseconds of a launch for any shapes that broadcast; 0 where there is nothing to compute.

        Args:
            blocks: Dense blocks, summed over heads and batch.
            rows: (head, q-block) rows, summed over batch.
        """
        blocks, rows = np.broadcast_arrays(np.asarray(blocks, np.float64), np.asarray(rows, np.float64))
        total = self.block_us * blocks + self.row_us * rows + self.launch_us
        return np.where((blocks > 0) | (rows > 0), total, 0.0)


@dataclass(frozen=True, kw_only=True)
class LinkCurve:
    """Time of one collective by its size.

    Raises:
        ValueError: if the curve is too short, not finite or falls.
    """

    collective: str
    """`all_to_all`, `p2p` (one ring hop: send to the next, receive from the last) or `all_gather`."""
    num_ranks: int
    """Ranks in the group that was measured."""
    scope: str
    """`node` (all ranks in one node) or `network` (every byte leaves its node)."""
    num_bytes: tuple[int, ...]
    """Bytes one rank sends to others in a call (what it keeps does not count), ascending; at least two sizes."""
    time_us: tuple[float, ...]
    """Microseconds for each size, never falling."""

    def __post_init__(self) -> None:
        sizes = tuple(checked_count("num_bytes", size, minimum=0) for size in self.num_bytes)
        object.__setattr__(self, "num_bytes", sizes)
        object.__setattr__(self, "time_us", tuple(self.time_us))
        check_member("collective", self.collective, COLLECTIVES)
        check_member("scope", self.scope, SCOPES)
        checked_count("num_ranks", self.num_ranks)
        if len(self.num_bytes) != len(self.time_us) or len(self.num_bytes) < 2:
            raise ValueError(
                f"num_bytes and time_us must have the same length of at least 2, got {len(self.num_bytes)} and "
                f"{len(self.time_us)}; measure more sizes"
            )
        for time in self.time_us:
            check_number("time_us", time, positive=True)
        for before, after in itertools.pairwise(zip(self.num_bytes, self.time_us, strict=True)):
            if after[0] <= before[0] or after[1] < before[1]:
                raise ValueError(
                    f"the curve must rise: {before[0]} bytes take {before[1]} us but {after[0]} bytes {after[1]} us; "
                    "fit it with fit_curve"
                )

    def time(self, num_bytes: float) -> float:
        """Returns microseconds of a call, linear between the measured sizes.

        Beyond the last size the last rising slope goes on; below the first the first slope does, but never below 0.

        Args:
            num_bytes: Bytes the rank sends, at least 0.
        """
        sizes, times = self.num_bytes, self.time_us
        if num_bytes >= sizes[-1]:
            lower = next((i for i in reversed(range(len(times))) if times[i] < times[-1]), None)
            slope = 0.0 if lower is None else (times[-1] - times[lower]) / (sizes[-1] - sizes[lower])
            return times[-1] + slope * (num_bytes - sizes[-1])
        if num_bytes < sizes[0]:
            slope = (times[1] - times[0]) / (sizes[1] - sizes[0])
            return max(0.0, times[0] - slope * (sizes[0] - num_bytes))
        return float(np.interp(num_bytes, sizes, times))


def check_member(name: str, value: Any, members: tuple[str, ...]) -> None:
    """Refuses a value that is none of `members`, naming them."""
    if not isinstance(value, str) or value not in members:
        raise ValueError(f"{name} must be one of {', '.join(members)}, got {value!r}; use one of them")


def check_text(name: str, value: Any) -> None:
    """Refuses a value that is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r}; write it in quotes")


def is_number(value: Any) -> bool:
    """Tells whether `value` is a finite int or float (no boolean)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        # An integer beyond every float.
        return False


def check_number(name: str, value: Any, *, positive: bool = False) -> None:
    """Refuses a value that is no finite number of at least (or, `positive`, above) 0."""
    if not is_number(value) or value < 0 or (positive and value == 0):
        raise ValueError(
            f"{name} must be a finite number {'above' if positive else 'of at least'} 0, got {value!r}; {MEASURE_AGAIN}"
        )
