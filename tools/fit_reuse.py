"""Whether a calibration that is there already is the one that would be measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dbsp_megatron.plan.calibration import Calibration
from tools.fit_config import FitConfig

_COMPARED = ("dbsp_megatron", "torch", "triton", "cuda", "nccl")
"""Versions that decide how fast kernels and links are."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a file must hold to be kept."""

    machine: str
    """Device, nodes and ranks."""
    versions: dict[str, str]
    """Of everything."""
    kernels: tuple[tuple[str, str, str, int, int, int], ...]
    """Engine, direction, data type, head dim, and tokens of a q-block and a k-block."""
    links: tuple[tuple[str, int, str], ...]
    """Collective, ranks and scope."""
    note_start: str
    """How its note begins: sizes of launches, and whether they were tiny."""


def note_start(config: FitConfig) -> str:
    """How the note of a calibration begins."""
    return (
        f"tools/fit_latency.py{' --quick' if config.quick else ''}: at most {config.heads} heads and {config.seqlen} "
        "tokens; median error on masks that were not fitted: "
    )


def why_not_kept(path: Path, wanted: Wanted) -> str | None:
    """Why a file has to be measured again; None if it will do, an empty text if there is none."""
    if not path.exists():
        return ""
    try:
        found = Calibration.load(path)
    except ValueError as error:
        return f"it cannot be used ({error})"
    if found.machine != wanted.machine:
        return f"it was measured on {found.machine}, this is {wanted.machine}"
    for name in _COMPARED:
        before, now = found.versions.get(name), wanted.versions.get(name)
        if before != now:
            return f"it was measured with {name} {before or 'missing'}, this is {now or 'missing'}"
    rates = {(r.engine, r.direction, r.dtype, r.head_dim, r.block_size_q, r.block_size_k) for r in found.kernels}
    for kernel in wanted.kernels:
        if kernel not in rates:
            engine, direction, dtype, head_dim, block_q, block_k = kernel
            return f"it has no {direction} rate of {engine} {dtype} D{head_dim} {block_q}x{block_k}"
    curves = {(link.collective, link.num_ranks, link.scope) for link in found.links}
    for link in wanted.links:
        if link not in curves:
            return f"it has no {link[0]} curve of {link[1]} ranks ({link[2]})"
    if not found.note.startswith(wanted.note_start):
        return "other sizes were measured"
    return None
