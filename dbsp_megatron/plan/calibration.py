"""Calibration: what was measured on one machine, and the file that keeps it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.plan.integers import checked_count
from dbsp_megatron.plan.rate_fit import fit_curve, fit_rate, nonnegative_fit
from dbsp_megatron.plan.rates import (
    COLLECTIVES,
    DIRECTIONS,
    DTYPES,
    SCOPES,
    KernelRate,
    LinkCurve,
    check_member,
    check_number,
    check_text,
)

_JSON_FORMAT = 1

# Figures of one H200: (density, forward TFLOP/s, backward TFLOP/s) of valid pairs, by block size.
_REFERENCE_SEQLEN, _REFERENCE_HEADS, _REFERENCE_HEAD_DIM = 32768, 12, 128
_REFERENCE_CELLS = {
    64: ((0.25, 567, 454), (0.1, 540, 427), (0.25, 547, 452), (0.1, 484, 429), (1.0, 577, 460)),
    128: ((0.25, 607, 541), (0.1, 574, 509), (0.25, 593, 542), (0.1, 554, 510), (1.0, 622, 554)),
}
# Two H200 over NVLink: latency in us, then (bytes a rank sends, GB/s). A buffer of an all-to-all of two leaves by half.
_REFERENCE_LINKS = {
    "all_to_all": (35.5, ((32_000_000, 236), (128_000_000, 278))),
    "p2p": (63.0, ((64_000_000, 255), (256_000_000, 301))),
}

__all__ = [
    "Calibration",
    "KernelRate",
    "LinkCurve",
    "fit_curve",
    "fit_rate",
    "reference_calibration",
]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured on one machine.

    Raises:
        ValueError: if an entry has the wrong type or `plan_us` is impossible.
    """

    machine: str
    """Name of the accelerator and how it is linked."""
    versions: dict[str, str]
    """Versions of what was measured with."""
    kernels: tuple[KernelRate, ...]
    """Kernel rates, any number of engines, types and sizes."""
    links: tuple[LinkCurve, ...]
    """Link curves."""
    plan_us: float
    """Host microseconds to plan a layer."""
    note: str = ""
    """Where the numbers come from and how far they can be trusted."""
    num_multiprocessors: int | None = None
    """Rows that the device computes at a time: bounds the time of calls with few long rows (`RowTails`); None: not."""

    def __post_init__(self) -> None:
        check_text("machine", self.machine)
        check_text("note", self.note)
        if not isinstance(self.versions, dict):
            raise ValueError(f"versions must map names to versions, got {self.versions!r}; pass a dict of text")
        for name, version in self.versions.items():
            check_text("a name in versions", name)
            check_text(f"versions[{name!r}]", version)
        for key, kind in (("kernels", KernelRate), ("links", LinkCurve)):
            entries = getattr(self, key)
            if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, kind) for entry in entries):
                raise ValueError(f"{key} must hold {kind.__name__} objects, got {entries!r}; pass a tuple of them")
            object.__setattr__(self, key, tuple(entries))
        check_number("plan_us", self.plan_us)
        if self.num_multiprocessors is not None:
            checked_count("num_multiprocessors", self.num_multiprocessors)

    def kernel(
        self,
        direction: str,
        dtype: str,
        head_dim: int,
        block_size_q: int,
        block_size_k: int,
        engine: str | None = None,
    ) -> KernelRate:
        """Returns the measured rate, or the nearest one scaled by arithmetic, which its `note` then says.

        Same type comes first, then the block area, then the head dimension that is closest (in ratio), then the fastest
        engine. Blocks cost in proportion to area times head dimension, rows to query tokens times head dimension.

        Args:
            direction: `forward` or `backward`.
            dtype: Data type of q, k, v: `float32`, `bfloat16` or `float16`.
            head_dim: Head dimension.
            block_size_q: Query tokens in a block.
            block_size_k: Key tokens in a block.
            engine: Kernel; None takes any.

        Raises:
            ValueError: if an argument is out of range, or the direction (or engine) was not measured at all.
        """
        check_member("direction", direction, DIRECTIONS)
        check_member("dtype", dtype, DTYPES)
        head_dim = checked_count("head_dim", head_dim)
        block_size_q = checked_count("block_size_q", block_size_q)
        block_size_k = checked_count("block_size_k", block_size_k)
        area = block_size_q * block_size_k

        def distance(rate: KernelRate) -> tuple[bool, float, float, float, str]:
            rate_area = rate.block_size_q * rate.block_size_k
            return (
                rate.dtype != dtype,
                abs(math.log(area / rate_area)) + abs(math.log(block_size_q / rate.block_size_q)),
                abs(math.log(head_dim / rate.head_dim)),
                rate.block_us,
                rate.engine,
            )

        fitting = [rate for rate in self.kernels if rate.direction == direction and engine in (None, rate.engine)]
        if not fitting:
            known = ", ".join(sorted({f"{rate.engine} {rate.direction}" for rate in self.kernels})) or "none"
            wanted = direction if engine is None else f"{engine} {direction}"
            raise ValueError(f"kernels has no {wanted} rate (there is: {known}); measure it with tools/fit_latency.py")
        best = min(fitting, key=distance)
        if (best.dtype, best.head_dim, best.block_size_q, best.block_size_k) == (
            dtype,
            head_dim,
            block_size_q,
            block_size_k,
        ):
            return best
        width = head_dim / best.head_dim
        note = (
            f"scaled from {best.dtype}, head_dim {best.head_dim}, blocks {best.block_size_q}x{best.block_size_k}"
            f" to {dtype}, head_dim {head_dim}, blocks {block_size_q}x{block_size_k}: not measured"
        )
        return replace(
            best,
            dtype=dtype,
            head_dim=head_dim,
            block_size_q=block_size_q,
            block_size_k=block_size_k,
            block_us=best.block_us * width * area / (best.block_size_q * best.block_size_k),
            row_us=best.row_us * width * block_size_q / best.block_size_q,
            note=f"{best.note}; {note}" if best.note else note,
        )

    def link(self, collective: str, num_ranks: int, scope: str) -> LinkCurve:
        """Returns the curve of the group size closest in ratio, the larger one on ties.

        Args:
            collective: `all_to_all`, `p2p` or `all_gather`.
            num_ranks: Ranks in the group.
            scope: `node` or `network`.

        Raises:
            ValueError: if an argument is out of range, or this collective was not measured in this scope; another
                scope never stands in for it.
        """
        check_member("collective", collective, COLLECTIVES)
        check_member("scope", scope, SCOPES)
        num_ranks = checked_count("num_ranks", num_ranks)
        fitting = [link for link in self.links if (link.collective, link.scope) == (collective, scope)]
        if not fitting:
            known = ", ".join(sorted({f"{link.collective} ({link.scope})" for link in self.links})) or "none"
            where = "" if scope == "node" else ", started on two nodes or more"
            raise ValueError(
                f"links has no {collective} curve of scope {scope!r} (there is: {known}); measure it with "
                f"`torchrun --nproc_per_node 2 tools/fit_latency.py`{where}, or set ranks_per_node to the number of "
                "ranks that share a node"
            )
        return min(fitting, key=lambda link: (abs(math.log(num_ranks / link.num_ranks)), -link.num_ranks))

    def to_json(self) -> str:
        """Returns the calibration as indented JSON text."""
        stored = {"format": _JSON_FORMAT, **asdict(self)}
        if self.num_multiprocessors is None:
            # Versions that do not know it read the file.
            del stored["num_multiprocessors"]
        return json.dumps(stored, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Reads what `to_json` wrote and checks every number.

        Raises:
            ValueError: naming the entry that is missing or impossible.
        """
        try:
            stored = json.loads(text)
        except RecursionError as error:
            raise ValueError("a calibration must be JSON text, this is nested too deeply; write a new one") from error
        except ValueError as error:
            raise ValueError(f"a calibration must be JSON text: {error}; pass what to_json() returned") from error
        if not isinstance(stored, dict) or stored.pop("format", None) != _JSON_FORMAT:
            raise ValueError(f"a calibration must be an object of format {_JSON_FORMAT}; run tools/fit_latency.py")
        for name, kind in (("kernels", KernelRate), ("links", LinkCurve)):
            entries = stored.get(name)
            if not isinstance(entries, list):
                raise ValueError(f"{name} must be a list, got {entries!r}; run tools/fit_latency.py again")
            stored[name] = tuple(_checked_entry(kind, f"{name}[{i}]", entry) for i, entry in enumerate(entries))
        made: Calibration = _checked_entry(cls, "the calibration", stored)
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration to a file, atomically."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: naming the file and the entry that is missing or impossible.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} is no calibration: {error}") from error


def reference_calibration() -> Calibration:
    """Returns rates of one and two H200, derived from throughput figures of the Hopper kernels.

    A default for planning and for examples: nothing in it was measured on the user's machine. Launch overhead was not
    measured apart, so the fixed part of every launch counts as cost of its rows. There are curves inside a node only.
    """
    kernels = []
    for direction, flops_per_pair in (("forward", 4), ("backward", 10)):
        for block_size, cells in _REFERENCE_CELLS.items():
            num_rows = _REFERENCE_SEQLEN // block_size * _REFERENCE_HEADS
            points = []
            for density, *tflops in cells:
                blocks = density * num_rows * (_REFERENCE_SEQLEN // block_size)
                rate = tflops[DIRECTIONS.index(direction)]
                flops = blocks * flops_per_pair * _REFERENCE_HEAD_DIM * block_size**2
                points.append((blocks, num_rows, flops / (rate * 1e6)))
            costs, r_squared, residual = nonnegative_fit(np.array(points))
            kernels.append(
                KernelRate(
                    engine="gluon",
                    direction=direction,
                    dtype="bfloat16",
                    head_dim=_REFERENCE_HEAD_DIM,
                    block_size_q=block_size,
                    block_size_k=block_size,
                    block_us=costs[0],
                    row_us=costs[2] / num_rows,
                    launch_us=0.0,
                    r_squared=r_squared,
                    max_relative_residual=residual,
                    num_points=len(points),
                    note="derived from throughput figures of one H200",
                )
            )
    links = tuple(
        LinkCurve(
            collective=collective,
            num_ranks=2,
            scope="node",
            num_bytes=(1, *(size for size, _ in bandwidths)),
            time_us=(latency, *(size / (rate * 1e3) for size, rate in bandwidths)),
        )
        for collective, (latency, bandwidths) in _REFERENCE_LINKS.items()
    )
    return Calibration(
        machine="NVIDIA H200 (one card; links: two cards, NVLink, 18 links)",
        versions={"torch": "2.11", "triton": "3.6.0", "cuda": "13.0"},
        kernels=tuple(kernels),
        links=links,
        plan_us=320.0,
        num_multiprocessors=132,
        note=(
            "derived from throughput and bandwidth figures of H200 cards (32768 tokens, 12 heads, head_dim 128), not "
            "measured on this machine; run tools/fit_latency.py for rates of your own"
        ),
    )


def _checked_entry(kind: Any, name: str, entry: Any) -> Any:
    try:
        if not isinstance(entry, dict):
            raise ValueError(f"must be an object, got {entry!r}")
        known = {field.name for field in fields(kind)}
        if unknown := sorted(set(entry) - known):
            raise ValueError(f"has unknown keys {', '.join(map(str, unknown))}")
        return kind(**entry)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}; correct it or run tools/fit_latency.py again") from error
