"""Fits of kernel rates and link curves to measured times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dbsp_megatron.plan.integers import checked_count
from dbsp_megatron.plan.rates import MEASURE_AGAIN, MIN_R_SQUARED, FloatArray, KernelRate, LinkCurve, check_number

_MIN_POINTS = 6
_MIN_SIZES = 3
_MIN_BLOCK_RANGE = 1.5
_MAX_FALL = 0.3


def fit_rate(
    points: Sequence[tuple[float, float, float]],
    *,
    engine: str,
    direction: str,
    dtype: str,
    head_dim: int,
    block_size_q: int,
    block_size_k: int,
) -> KernelRate:
    """Fits block, row and launch costs to measured launches by least squares of the relative error.

    No cost may be negative; the constrained optimum is exact, since all eight sets of non-zero costs are tried. Where
    rows do not vary their cost cannot be told from that of the launch and counts as the latter.

    Args:
        points: Measured (dense blocks, rows, microseconds), at least 6; vary blocks, and rows apart from blocks.
        engine: Kernel that was measured.
        direction: `forward` or `backward`.
        dtype: Data type of q, k, v.
        head_dim: Head dimension.
        block_size_q: Query tokens in a block.
        block_size_k: Key tokens in a block.

    Raises:
        ValueError: if the points cannot carry a fit, or the fit does not describe them.
    """
    table = np.array(points, dtype=np.float64).reshape(-1, 3)
    if table.shape[0] < _MIN_POINTS:
        raise ValueError(f"a fit needs at least {_MIN_POINTS} points, got {table.shape[0]}; measure more densities")
    if not np.isfinite(table).all() or (table[:, :2] < 0).any() or (table[:, 2] <= 0).any():
        row = int(np.flatnonzero(~np.isfinite(table).all(1) | (table[:, :2] < 0).any(1) | ~(table[:, 2] > 0))[0])
        raise ValueError(
            f"points[{row}] must hold blocks and rows of at least 0 and a time above 0, got {table[row].tolist()}; "
            f"{MEASURE_AGAIN}"
        )
    low, high = float(table[:, 0].min()), float(table[:, 0].max())
    if high < _MIN_BLOCK_RANGE * low or high == 0:
        raise ValueError(
            f"dense blocks must vary by a factor of at least {_MIN_BLOCK_RANGE}, got {low:.0f} to {high:.0f}; measure "
            "other densities or lengths"
        )
    costs, r_squared, residual = nonnegative_fit(table)
    if costs[0] <= 0 or r_squared < MIN_R_SQUARED:
        raise ValueError(
            f"the fit of {table.shape[0]} points gives block_us={costs[0]:.4g} (must be above 0), "
            f"R^2={r_squared:.3f} (at least {MIN_R_SQUARED}) and a largest relative residual of {residual:.2f}; "
            f"{MEASURE_AGAIN}, with launches that take at least 100 us"
        )
    return KernelRate(
        engine=engine,
        direction=direction,
        dtype=dtype,
        head_dim=head_dim,
        block_size_q=block_size_q,
        block_size_k=block_size_k,
        block_us=costs[0],
        row_us=costs[1],
        launch_us=costs[2],
        r_squared=r_squared,
        max_relative_residual=residual,
        num_points=table.shape[0],
    )


def fit_curve(
    num_bytes: Sequence[int], time_us: Sequence[float], *, collective: str, num_ranks: int, scope: str
) -> LinkCurve:
    """Makes a curve that never falls from measured times: the closest one in least squares.

    Args:
        num_bytes: Bytes one rank sends to others in a call, any order; times of one size are averaged.
        time_us: Microseconds, one for each.
        collective: `all_to_all`, `p2p` or `all_gather`.
        num_ranks: Ranks in the group.
        scope: `node` or `network`.

    Raises:
        ValueError: if there are fewer than 3 sizes, a number is impossible or times fall by more than 30 %.
    """
    if len(num_bytes) != len(time_us):
        raise ValueError(f"num_bytes and time_us must pair up, got {len(num_bytes)} and {len(time_us)} of them")
    by_size: dict[int, list[float]] = {}
    for size, time in zip(num_bytes, time_us, strict=True):
        check_number("time_us", time, positive=True)
        by_size.setdefault(checked_count("num_bytes", size), []).append(float(time))
    if len(by_size) < _MIN_SIZES:
        raise ValueError(f"a curve needs at least {_MIN_SIZES} sizes, got {len(by_size)}; measure more")
    sizes = sorted(by_size)
    times = [sum(by_size[size]) / len(by_size[size]) for size in sizes]
    slowest = 0
    for i, time in enumerate(times):
        if time < (1 - _MAX_FALL) * times[slowest]:
            raise ValueError(
                f"time_us falls by more than {_MAX_FALL:.0%}: {sizes[slowest]} bytes take {times[slowest]:.4g} us but "
                f"{sizes[i]} bytes {time:.4g} us; {MEASURE_AGAIN} with more warm-up"
            )
        slowest = i if time > times[slowest] else slowest
    weights = [float(len(by_size[size])) for size in sizes]
    return LinkCurve(
        collective=collective,
        num_ranks=num_ranks,
        scope=scope,
        num_bytes=tuple(sizes),
        time_us=tuple(_pooled(times, weights)),
    )


def _pooled(values: list[float], weights: list[float]) -> list[float]:
    """Isotonic regression: adjacent violators are pooled to their weighted mean."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, mass, count = pools.pop()
            total = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / total, total, count + pool[2])
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]


def nonnegative_fit(table: FloatArray) -> tuple[tuple[float, float, float], float, float]:
    """Returns the costs (block, row, launch), the weighted R^2 and the largest relative residual of [n, 3] points."""
    times = table[:, 2]
    design = np.column_stack([table[:, :2], np.ones(len(times))]) / times[:, None]
    target = np.ones(len(times))
    best, costs = float(target @ target), np.zeros(3)
    # Small sets first, and launch before rows, so that a cost that explains nothing stays 0.
    for support in ((0,), (2,), (1,), (0, 2), (0, 1), (1, 2), (0, 1, 2)):
        columns = design[:, support]
        # Columns are scaled to length 1: blocks and launches differ by many orders of magnitude.
        norms = np.linalg.norm(columns, axis=0)
        if (norms == 0).any():
            continue
        solution, _, rank, _ = np.linalg.lstsq(columns / norms, target, rcond=1e-10)
        error = float(np.square(columns / norms @ solution - target).sum())
        if rank == len(support) and (solution >= 0).all() and error < best * (1 - 1e-9):
            best, costs = error, np.zeros(3)
            costs[list(support)] = solution / norms
    weights = 1.0 / np.square(times)
    spread = float((weights * np.square(times - np.average(times, weights=weights))).sum())
    residual = float(np.abs(design @ costs - target).max())
    r_squared = 1.0 - best / spread if spread > 0 else 0.0
    return (float(costs[0]), float(costs[1]), float(costs[2])), r_squared, residual
