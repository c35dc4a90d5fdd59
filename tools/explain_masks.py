"""The block masks that a run is expected to have: measured ones, those of a fixed pattern, or assumed structures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dbsp_megatron.masks import DenseMask, TokenGrid
from dbsp_megatron.masks.file import FileMask
from dbsp_megatron.masks.mask_file import MaskFile, unpack_bits
from dbsp_megatron.masks.schedule import ScheduledMask
from dbsp_megatron.masks.static import StaticMask
from dbsp_megatron.masks.summary import summarize
from tools.explain_layout import Situation
from tools.mask_files import file_sources
from tools.structured_masks import KINDS, BoolArray, Geometry, make_mask

ASSUMED_DENSITY = 0.3
"""Share of dense blocks where nothing says another."""

_MOST_LAYERS = 3
_MOST_DRAWN = 600
"""Blocks a side of a mask that is drawn; longer sequences are drawn in coarser blocks."""
_MOST_PAIRS = 2**25
"""Token pairs of a fixed pattern that are looked at."""
_LEAST_ROWS = 8
_STRUCTURES = {"topk": "random", "vsa": "random", "sparse_videogen": "band", "radial": "band", "sliding_tile": "band"}
"""Structure of masks that are drawn, by method; others have popular rows and columns of each head's own."""
_USUAL_STRUCTURE = "sth"


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpectedMasks:
    """Masks of some layers."""

    layers: tuple[BoolArray, ...]
    """bool [H, N, N] each, shared by the samples."""
    density: float
    """Mean share of dense blocks."""
    measured: bool
    """Real masks, or the exact ones of a fixed pattern."""
    source: str
    """Where they come from, in words."""


def expected_masks(
    situation: Situation, path: Path | None = None, kind: str | None = None, density: float | None = None
) -> ExpectedMasks:
    """Masks to plan with.

    Args:
        situation: the run.
        path: masks that were saved, or a run folder that saved some; they win over everything.
        kind: structure of masks that are drawn, a key of `structured_masks.KINDS`; None: by the method.
        density: share of dense blocks of masks that are drawn; None: that of the method, else an assumed one.

    Raises:
        ValueError: masks are for other heads or blocks, or a value is out of range.
    """
    if density is not None and not 0 < density <= 1:
        raise ValueError(f"--density must be above 0 and at most 1, got {density!r}; pass a share such as 0.3")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"--mask-kind must be one of {', '.join(KINDS)}, got {kind!r}; choose one of these")
    if path is not None:
        return _from_file(situation, path)
    if kind is not None or density is not None:
        return _drawn(situation, kind, density, "as asked for")
    method = situation.method.inner if isinstance(situation.method, ScheduledMask) else situation.method
    if isinstance(method, DenseMask):
        shape = (situation.resolved.num_heads, *2 * (_num_blocks(situation),))
        return ExpectedMasks(layers=(np.ones(shape, bool),), density=1.0, measured=True, source="every block is dense")
    if isinstance(method, FileMask):
        return _of_layers(_saved(method.file), f"{method.name}: {method.path}")
    if isinstance(method, StaticMask):
        return _fixed_pattern(situation, method)
    known = getattr(method, "density", None)
    if known is not None and situation.config.mask.method in ("topk", "vsa"):
        return _drawn(situation, None, float(np.mean(known)), "density of the method, structure assumed")
    return _drawn(situation, None, None, "assumed: the density follows from the data")


def _num_blocks(situation: Situation) -> int:
    return -(-situation.resolved.num_tokens // situation.config.sp.block_size)


def _some(entries: list[int]) -> list[int]:
    """At most a few, spread evenly."""
    count = min(len(entries), _MOST_LAYERS)
    return [entries[index * len(entries) // count] for index in range(count)]


def _of_layers(layers: tuple[BoolArray, ...], source: str) -> ExpectedMasks:
    density = float(np.mean([layer.mean() for layer in layers]))
    return ExpectedMasks(layers=layers, density=density, measured=True, source=source)


def _saved(file: MaskFile) -> tuple[BoolArray, ...]:
    return tuple(unpack_bits(file.packed(layer), file.num_blocks).numpy() for layer in _some(sorted(file.layers)))


def _from_file(situation: Situation, path: Path) -> ExpectedMasks:
    try:
        file = MaskFile(path)
        layers, num_saved = _saved(file), len(file.layers)
    except ValueError:
        # Not of our own format: arrays, or a run folder.
        sources = file_sources(path)
        if not sources:
            raise ValueError(
                f"--mask-file {path} saved no masks; name a file of masks or a run with partitions/"
            ) from None
        layers, num_saved = tuple(sources[index].load() for index in _some(list(range(len(sources))))), len(sources)
    wanted = (situation.resolved.num_heads, *2 * (_num_blocks(situation),))
    for layer in layers:
        if layer.shape != wanted:
            raise ValueError(
                f"--mask-file {path} must hold masks of {wanted[0]} heads and {wanted[1]} x {wanted[2]} blocks, got "
                f"{list(layer.shape)}; give masks of this model, clip size and sp.block_size"
            )
    return _of_layers(layers, f"{len(layers)} of {num_saved} masks of {path}")


def _fixed_pattern(situation: Situation, method: StaticMask) -> ExpectedMasks:
    """All rows of a fixed pattern, or for long sequences its density in some rows and a drawn structure."""
    resolved, size = situation.resolved, situation.config.sp.block_size
    num, num_tokens = _num_blocks(situation), resolved.num_tokens
    rows = min(num, max(_LEAST_ROWS, _MOST_PAIRS // (size * num_tokens)))
    host_blocks = np.unique(np.linspace(0, num - 1, rows).astype(np.int64))
    empty = torch.zeros(1, 1, 1, 1).expand(1, num_tokens, resolved.num_heads, 1)
    blocks, settings = torch.from_numpy(host_blocks), {"seqlen": num_tokens, "block_size": size}
    summary = summarize(empty, (), blocks=blocks, host_blocks=host_blocks, **settings)
    grid = TokenGrid(*resolved.grid, cube=situation.config.mask.cube)
    found = method.predict(summary, summary, 0, 0, grid)[0]
    if len(host_blocks) == num:
        return _of_layers((found.contiguous().numpy(),), f"{method.name}: its fixed pattern")
    share = float(found.float().mean())
    return _drawn(situation, None, share, f"density in {len(host_blocks)} rows of the fixed pattern, structure assumed")


def _drawn(situation: Situation, kind: str | None, density: float | None, why: str) -> ExpectedMasks:
    resolved, size, num = situation.resolved, situation.config.sp.block_size, _num_blocks(situation)
    kind = kind or _STRUCTURES.get(situation.config.mask.method, _USUAL_STRUCTURE)
    coarse = -(-num // _MOST_DRAWN)
    frames, rows, columns = resolved.grid
    geometry = Geometry(
        frames=frames,
        rows=rows,
        cols=columns,
        heads=resolved.num_heads,
        block_size=size * coarse,
        text_tokens=resolved.text_tokens,
    )
    share = ASSUMED_DENSITY if density is None else density
    if share == 1.0:
        mask = np.ones((resolved.num_heads, num, num), bool)
    else:
        mask = make_mask(kind, geometry, share)
        mask = mask.repeat(coarse, axis=1).repeat(coarse, axis=2)[:, :num, :num] if coarse > 1 else mask
    drawn = f", drawn in blocks of {size * coarse} tokens" if coarse > 1 else ""
    return ExpectedMasks(
        layers=(mask,),
        density=float(mask.mean()),
        measured=False,
        source=f"synthetic {kind} mask ({KINDS[kind]}{drawn}), density {share:.3g}: {why}",
    )
