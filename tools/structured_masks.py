"""Synthetic block masks with the structure of video attention, for measurements that need no model.

A mask is a function of (kind, geometry, density, seed, layer) alone. Most kinds are drawn from a field of weights:
block (i, j) of head h is dense with probability `min(1, c * weight[i, j])`, `c` chosen for the density of the head.

Usage: python tools/structured_masks.py sth wan720 0.414 --layers 0 1 2 --output masks.npz
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dbsp_megatron.observability.atomic_file import atomic_path

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]

KINDS = {
    "st": "spatial and temporal heads; all heads of a layer share which rows and columns are popular",
    "sth": "st with popular rows and columns of each head's own",
    "sink": "st plus a few rows and columns that are dense in every head",
    "corner": "st with most work where the first quarter of the queries meets the last quarter of the keys",
    "band": "a band around the diagonal, its width by head",
    "random": "independent blocks, equal densities",
    "lognormal": "independent blocks, lognormal head densities",
    "stepdiag": "equal row and column sums, but eight contiguous chunks whose work lies in one ring step each",
    "hot_rows": "heavy rows at an exact power-of-two stride, which a plain stripe gives to one ring rank",
    "frame_causal": "frames see themselves and earlier ones, fading with distance",
}
_HEAD_SPREAD = 0.7
_SPARSEST_HEAD = 0.04
_CALIBRATION_SAMPLES = 20_000
_STEP_CHUNKS = 8
_HOT_STRIDE = 16
_FREE_GEOMETRY = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)(?:x(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Latent video after patching, in raster order behind its text tokens.

    Raises:
        ValueError: a number is too small.
    """

    frames: int
    """Latent frames."""
    rows: int
    """Tokens down a frame."""
    cols: int
    """Tokens across a frame."""
    heads: int
    """Attention heads H."""
    block_size: int = 64
    """Tokens per block."""
    text_tokens: int = 0
    """Tokens of the prompt in front of the video; their blocks attend everything and everything attends them."""

    def __post_init__(self) -> None:
        for key in ("frames", "rows", "cols", "heads", "block_size", "text_tokens"):
            value, least = getattr(self, key), 0 if key == "text_tokens" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"geometry {key} must be an integer of at least {least}, got {value!r}; change it")

    @property
    def num_blocks(self) -> int:
        """Blocks N of the sequence; the last may be short."""
        return -(-(self.text_tokens + self.frames * self.rows * self.cols) // self.block_size)

    @property
    def blocks_per_frame(self) -> float:
        """Length of a frame in blocks, rarely a whole number."""
        return self.rows * self.cols / self.block_size


GEOMETRIES = {
    "wan720": Geometry(frames=21, rows=45, cols=80, heads=40),
    "wan480": Geometry(frames=21, rows=30, cols=52, heads=40),
    "wan480s": Geometry(frames=21, rows=30, cols=52, heads=12),
    "cog15": Geometry(frames=21, rows=48, cols=85, heads=48, text_tokens=226),
    "h30": Geometry(frames=21, rows=45, cols=80, heads=30),
}


def parse_geometry(geometry: str | Geometry) -> Geometry:
    """Returns the geometry of a name, or of `FRAMESxROWSxCOLSxHEADS[xBLOCK_SIZE]`.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(geometry, Geometry):
        return geometry
    if geometry in GEOMETRIES:
        return GEOMETRIES[geometry]
    free = _FREE_GEOMETRY.fullmatch(geometry)
    if free is None:
        raise ValueError(
            f"geometry must be one of {', '.join(GEOMETRIES)} or FRAMESxROWSxCOLSxHEADS[xBLOCK_SIZE], got "
            f"{geometry!r}; write for example 21x45x80x40x64"
        )
    frames, rows, cols, heads, block_size = (int(number) for number in free.groups(default="64"))
    return Geometry(frames=frames, rows=rows, cols=cols, heads=heads, block_size=block_size)


def make_mask(kind: str, geometry: str | Geometry, density: float, seed: int = 0, layer: int = 0) -> BoolArray:
    """Draws a mask; equal arguments give equal bits, in every process that runs one NumPy on one kind of machine.

    Args:
        kind: A key of `KINDS`.
        geometry: See `parse_geometry`.
        density: Wanted share of dense blocks, above 0 and at most 1. Dense text, sinks and the diagonal come on top;
            `frame_causal` cannot exceed the causal half.
        seed: Seed, at least 0.
        layer: Layer, at least 0; layers are independent draws.

    Returns:
        bool [H, N, N], query blocks by key blocks.

    Raises:
        ValueError: if an argument is unknown or out of range.
    """
    size = parse_geometry(geometry)
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}; choose one of these")
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1, got {density!r}; pass a share such as 0.2")
    for key, value in (("seed", seed), ("layer", layer)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(f"{key} must be an integer of at least 0, got {value!r}; pass such a number")
    rng = _generator("mask", kind, size, float(density), int(seed), int(layer))
    num_heads, num_blocks = size.heads, size.num_blocks
    if kind in ("random", "stepdiag", "hot_rows"):
        densities = np.full(num_heads, float(density))
    else:
        ceiling = 1.0
        if kind == "frame_causal":
            frames = _frames(size)
            ceiling = float((frames[:, None] >= frames[None, :]).mean())
        densities = _head_densities(rng, num_heads, float(density), ceiling)
    mask = np.empty((num_heads, num_blocks, num_blocks), dtype=bool)
    if kind == "band":
        _fill_bands(mask, densities, rng)
        return mask
    weights = _WEIGHTS[kind](rng, size)
    for head in range(num_heads):
        _draw(mask[head], weights(), float(densities[head]), rng)
    if kind in ("st", "sth", "sink", "corner", "frame_causal"):
        mask[:, np.arange(num_blocks), np.arange(num_blocks)] = True
        text_blocks = -(-size.text_tokens // size.block_size)
        mask[:, :text_blocks] = True
        if kind != "frame_causal":
            mask[:, :, :text_blocks] = True
    if kind == "sink":
        num_hot = max(1, num_blocks // 60)
        mask[:, rng.choice(num_blocks, num_hot, replace=False)] = True
        mask[:, :, rng.choice(num_blocks, num_hot, replace=False)] = True
    return mask


def drift_mask(mask: BoolArray, eps: float, seed: int = 0) -> BoolArray:
    """Returns the mask of a later step: a share `eps` of each head's dense blocks moves to random places.

    The number of dense blocks of a head is scaled by `exp(eps * z)`, `z` standard normal.

    Args:
        mask: bool [H, Nq, Nk]; not changed.
        eps: Share of the dense blocks that move, in [0, 1].
        seed: Seed, at least 0.

    Returns:
        bool [H, Nq, Nk].

    Raises:
        ValueError: if the mask is no such array or `eps` is out of range.
    """
    if mask.dtype != np.bool_ or mask.ndim != 3:
        raise ValueError(f"mask must be bool [H, Nq, Nk], got {mask.dtype} {list(mask.shape)}; pass one layer's mask")
    if not 0 <= eps <= 1:
        raise ValueError(f"drift must be in [0, 1], got {eps!r}; pass the share of dense blocks that move")
    rng = _generator("drift", mask.shape, float(eps), int(seed))
    drifted = np.empty_like(mask)
    for head, before in enumerate(mask):
        num_dense = int(np.count_nonzero(before))
        num_free = before.size - num_dense
        wanted = num_dense * float(np.exp(eps * rng.standard_normal()))
        kept = min(num_dense * (1 - eps), wanted)
        leave = 1 - kept / num_dense if num_dense else 0.0
        arrive = min(1.0, (wanted - kept) / num_free) if num_free else 0.0
        drawn = rng.random(before.shape, dtype=np.float32)
        drifted[head] = np.where(before, drawn >= np.float32(leave), drawn < np.float32(arrive))
    return drifted


def _generator(*arguments: object) -> np.random.Generator:
    digest = hashlib.sha256(repr(arguments).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def _head_densities(rng: np.random.Generator, num_heads: int, density: float, ceiling: float) -> NDArray[np.float64]:
    """Lognormal densities in [floor, ceiling] whose mean is `density`, or as near as the ceiling allows."""
    spread = np.exp(_HEAD_SPREAD * rng.standard_normal(num_heads))
    floor = min(_SPARSEST_HEAD, density / 2)
    low, high = 0.0, 1e6
    for _ in range(100):
        scale = (low + high) / 2
        if np.clip(scale * spread, floor, ceiling).mean() < density:
            low = scale
        else:
            high = scale
    return np.clip(high * spread, floor, ceiling)


def _draw(out: BoolArray, weight: FloatArray, density: float, rng: np.random.Generator) -> None:
    """Fills one head: dense with probability `min(1, c * weight)`."""
    flat = weight.reshape(-1)
    if flat.size > _CALIBRATION_SAMPLES:
        flat = flat[rng.integers(0, flat.size, _CALIBRATION_SAMPLES)]
    scale = _scale_for(flat.astype(np.float64), density)
    # A uniform draw is below 1, so weights above 1 need no clipping.
    np.less(rng.random(weight.shape, dtype=np.float32), weight * np.float32(scale), out=out)


def _scale_for(weights: NDArray[np.float64], density: float) -> float:
    """Solves `mean(min(1, c * weights)) = density` for c; the largest useful c where that cannot be reached."""
    heaviest = np.sort(weights[weights > 0])[::-1]
    rest = np.cumsum(heaviest[::-1])[::-1]
    # With the k heaviest saturated, the mean grows linearly in c until the next one saturates at c = 1 / weight.
    reached = (np.arange(heaviest.size) + rest / heaviest) / weights.size
    full = int(np.searchsorted(reached, density))
    if full == heaviest.size:
        return float(1 / heaviest[-1]) if heaviest.size else 0.0
    return float((density * weights.size - full) / rest[full])


def _fill_bands(mask: BoolArray, densities: NDArray[np.float64], rng: np.random.Generator) -> None:
    num_blocks = mask.shape[1]
    place = np.arange(num_blocks)
    distance = np.abs(place[:, None] - place[None, :])
    # 1 - density is the share of the two corner triangles that the band leaves out.
    half_widths = num_blocks * (1 - np.sqrt(1 - densities))
    for head, half_width in enumerate(half_widths):
        ragged = half_width + rng.integers(-2, 3, (num_blocks, 1)) * min(1.0, half_width / 4)
        np.less_equal(distance, ragged, out=mask[head])
        mask[head, place, place] = True


def _frames(size: Geometry) -> FloatArray:
    """Frame of each block's middle token, float32 [N]; text counts as frame 0."""
    middle = (np.arange(size.num_blocks) + 0.5) * size.block_size - size.text_tokens
    return np.clip(middle // (size.rows * size.cols), 0, size.frames - 1).astype(np.float32)


def _by_distance(profile: FloatArray, num_blocks: int) -> FloatArray:
    """Matrix [N, N] whose entry (i, j) is `profile[|i - j|]`, as a view."""
    mirrored = np.concatenate([profile[::-1], profile[1:]])
    view: FloatArray = sliding_window_view(mirrored, num_blocks)[::-1]
    return view


def _popularity(rng: np.random.Generator, num_blocks: int, strength: float) -> FloatArray:
    """Positive factors [N]: slow waves along the sequence, and noise from block to block."""
    time = np.arange(num_blocks) / num_blocks
    waves = sum(
        amplitude * np.cos(2 * np.pi * (rng.uniform(0.5, turns) * time + rng.random()))
        for amplitude, turns in ((0.5, 1.5), (0.3, 4.0), (0.2, 9.0))
    )
    noise = 0.3 * rng.standard_normal(num_blocks)
    return np.exp(strength * (waves + noise)).astype(np.float32)


def _video_weights(
    rng: np.random.Generator, size: Geometry, *, own_popularity: bool, corner: bool = False
) -> Callable[[], FloatArray]:
    num_blocks, stride = size.num_blocks, size.blocks_per_frame
    frames = _frames(size)
    same_frame = (frames[:, None] == frames[None, :]).astype(np.float32)
    distance = np.arange(num_blocks, dtype=np.float32)
    to_same_place = np.abs(distance / stride - np.round(distance / stride)) * stride
    first_frame = (frames == 0).astype(np.float32)
    shared = _popularity(rng, num_blocks, 1.0), _popularity(rng, num_blocks, 1.0)
    place = np.arange(num_blocks)
    boost = np.where((place[:, None] < num_blocks / 4) & (place[None, :] >= num_blocks * 3 / 4), 12.0, 1.0)

    def weights() -> FloatArray:
        temporal = rng.beta(0.6, 0.6)
        near = np.exp(-distance / (num_blocks * rng.uniform(0.04, 0.12)))
        along = np.exp(-to_same_place / rng.uniform(2.0, 6.0) - 0.03 * distance / stride)
        profile = ((1 - temporal) * near + temporal * along + 0.01).astype(np.float32)
        weight = _by_distance(profile, num_blocks) + np.float32(0.6 * (1 - temporal)) * same_frame
        weight += np.float32(0.4 * rng.random()) * first_frame
        if own_popularity:
            rows, cols = _popularity(rng, num_blocks, 1.2), _popularity(rng, num_blocks, 1.2)
        else:
            rows, cols = (popularity ** np.float32(rng.uniform(0.4, 1.2)) for popularity in shared)
        weight *= rows[:, None]
        weight *= cols
        return weight * boost.astype(np.float32) if corner else weight

    return weights


def _even_weights(rng: np.random.Generator, size: Geometry) -> Callable[[], FloatArray]:
    weight = np.ones((size.num_blocks, size.num_blocks), dtype=np.float32)
    return lambda: weight


def _step_weights(rng: np.random.Generator, size: Geometry) -> Callable[[], FloatArray]:
    chunk = np.arange(size.num_blocks) * _STEP_CHUNKS // size.num_blocks
    # Even chunks meet themselves, odd ones the chunk half a ring away: a permutation, so that all sums are equal.
    partner = (chunk + chunk % 2 * (_STEP_CHUNKS // 2)) % _STEP_CHUNKS
    weight = np.where(partner[:, None] == chunk[None, :], 20.0, 1.0).astype(np.float32)
    return lambda: weight


def _hot_row_weights(rng: np.random.Generator, size: Geometry) -> Callable[[], FloatArray]:
    stride = min(_HOT_STRIDE, 1 << max(1, (size.num_blocks // 4).bit_length() - 1))
    hot = np.arange(size.num_blocks) % stride == 0
    weight = np.repeat(np.where(hot, 12.0, 1.0)[:, None], size.num_blocks, axis=1).astype(np.float32)
    return lambda: weight


def _frame_causal_weights(rng: np.random.Generator, size: Geometry) -> Callable[[], FloatArray]:
    frames = _frames(size)
    back = frames[:, None] - frames[None, :]

    def weights() -> FloatArray:
        return np.where(back >= 0, np.exp(np.float32(-rng.uniform(0.02, 0.3)) * back), np.float32(0))

    return weights


_WEIGHTS: dict[str, Callable[[np.random.Generator, Geometry], Callable[[], FloatArray]]] = {
    "st": lambda rng, size: _video_weights(rng, size, own_popularity=False),
    "sth": lambda rng, size: _video_weights(rng, size, own_popularity=True),
    "sink": lambda rng, size: _video_weights(rng, size, own_popularity=False),
    "corner": lambda rng, size: _video_weights(rng, size, own_popularity=False, corner=True),
    "random": _even_weights,
    "lognormal": _even_weights,
    "stepdiag": _step_weights,
    "hot_rows": _hot_row_weights,
    "frame_causal": _frame_causal_weights,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draws masks and saves them packed to one bit a block; returns the exit status."""
    kinds = "\n".join(f"  {kind:13s} {what}" for kind, what in KINDS.items())
    parser = argparse.ArgumentParser(
        description="Draw synthetic block masks.", epilog=f"kinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("kind", help="structure of the masks, see below")
    parser.add_argument("geometry", help=f"{', '.join(GEOMETRIES)} or FRAMESxROWSxCOLSxHEADS[xBLOCK_SIZE]")
    parser.add_argument("density", type=float, help="share of dense blocks")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--layers", type=int, nargs="+", default=[0], help="layers to draw (default: 0)")
    parser.add_argument("--output", type=Path, required=True, help="file to write, .npz")
    options = parser.parse_args(argv)
    try:
        if options.output.suffix != ".npz":
            raise ValueError(f"--output must end in .npz, got {str(options.output)!r}; rename it")
        masks = [make_mask(options.kind, options.geometry, options.density, options.seed, layer)
                 for layer in options.layers]  # fmt: skip
    except ValueError as error:
        print(f"structured_masks: {error}", file=sys.stderr)
        return 2
    packed = np.stack([np.packbits(mask, axis=-1) for mask in masks])
    with atomic_path(options.output) as temporary:
        np.savez_compressed(temporary, packed=packed, num_k_blocks=masks[0].shape[-1])
    shape = "x".join(str(length) for length in (len(masks), *masks[0].shape))
    print(f"{options.output}: {shape}, density {np.mean([mask.mean() for mask in masks]):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
