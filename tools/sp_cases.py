"""Shapes, masks and meshes that sequence-parallel attention is measured on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.plan import sparse_imbalance
from tools.structured_masks import GEOMETRIES, KINDS, Geometry, make_mask, parse_geometry

DENSE = "dense"
"""Kind of a mask with every block, beside those of `structured_masks`."""

Mesh = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Attention of one model at one resolution."""

    name: str
    geometry: Geometry
    """Latent video and heads; its block size is replaced by those measured."""
    head_dim: int
    block_sizes: tuple[int, ...] = (128, 64)
    """Measured if the command line names none."""

    @property
    def seqlen(self) -> int:
        """Tokens of the sequence, text included."""
        size = self.geometry
        return size.text_tokens + size.frames * size.rows * size.cols


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="wan13_480p", geometry=Geometry(frames=21, rows=30, cols=52, heads=12), head_dim=128),
        Shape(name="wan14_720p", geometry=Geometry(frames=21, rows=45, cols=80, heads=40), head_dim=128),
        Shape(name="cog5b", geometry=Geometry(frames=13, rows=30, cols=45, heads=48, text_tokens=226), head_dim=64),
        Shape(name="cog15_768p", geometry=GEOMETRIES["cog15"], head_dim=64),
        Shape(
            name="tiny",
            geometry=Geometry(frames=3, rows=6, cols=11, heads=6, text_tokens=5),
            head_dim=16,
            block_sizes=(16,),
        ),
    )
}


def find_shape(name: str, head_dim: int | None = None) -> Shape:
    """The shape of a name, or of a geometry `FRAMESxROWSxCOLSxHEADS`.

    Args:
        name: a key of SHAPES, or a geometry.
        head_dim: head dim in place of the shape's; 128 for a geometry without it.

    Raises:
        ValueError: it is neither, or the head dim is below 1.
    """
    if head_dim is not None and head_dim < 1:
        raise ValueError(f"--head-dim must be at least 1, got {head_dim}: pass the model's")
    if name in SHAPES:
        return SHAPES[name] if head_dim is None else replace(SHAPES[name], head_dim=head_dim)
    try:
        geometry = parse_geometry(name)
    except ValueError as error:
        raise ValueError(f"--shape must be one of {', '.join(SHAPES)}, or a geometry; {error}") from error
    return Shape(name=name, geometry=geometry, head_dim=128 if head_dim is None else head_dim)


@dataclass(frozen=True, kw_only=True)
class MaskChoice:
    """A mask by the arguments of its generator."""

    kind: str
    density: float
    seed: int

    def __post_init__(self) -> None:
        if self.kind != DENSE and self.kind not in KINDS:
            raise ValueError(f"--kind must be of {DENSE}, {', '.join(KINDS)}, got {self.kind!r}: use these names")
        if not 0 < self.density <= 1:
            raise ValueError(f"--density must be above 0 and at most 1, got {self.density}: pass a share like 0.25")

    def __str__(self) -> str:
        return DENSE if self.kind == DENSE else f"{self.kind} {self.density:g} seed {self.seed}"

    def make(self, shape: Shape, block_size: int, layer: int = 0) -> BlockMask:
        """The mask of a layer on the host, equal on all ranks."""
        seqlen, heads = shape.seqlen, shape.geometry.heads
        if self.kind == DENSE:
            return BlockMask.dense(heads, seqlen, block_size_q=block_size, block_size_k=block_size)
        blocks = make_mask(self.kind, replace(shape.geometry, block_size=block_size), self.density, self.seed, layer)
        return BlockMask(torch.from_numpy(blocks)[None], block_size, block_size, seqlen, seqlen)


def choices(kinds: Sequence[str], densities: Sequence[float], seeds: Sequence[int]) -> list[MaskChoice]:
    """All combinations; a dense mask once."""
    found = []
    for kind, density, seed in product(kinds, densities, seeds):
        choice = MaskChoice(kind=kind, density=1.0 if kind == DENSE else density, seed=0 if kind == DENSE else seed)
        if choice not in found:
            found.append(choice)
    return found


def with_imbalance(
    candidates: Sequence[MaskChoice], shape: Shape, block_size: int, meshes: Sequence[Mesh], low: float, high: float
) -> tuple[MaskChoice, BlockMask]:
    """The first mask whose imbalance without balancing lies between bounds on every mesh; else the nearest one.

    Args:
        candidates: masks, in the order in which they are tried.
        shape: attention.
        block_size: tokens of a block.
        meshes: (U, R) pairs; those of one rank do not count.
        low: least imbalance.
        high: largest imbalance.
    """
    best: tuple[float, MaskChoice, BlockMask] | None = None
    for choice, mask in _drawn(candidates, shape, block_size):
        values = [sparse_imbalance(mask, *mesh) for mesh in meshes if mesh != (1, 1)]
        miss = sum(max(0.0, low - value) + max(0.0, value - high) for value in values)
        if best is None or miss < best[0]:
            best = miss, choice, mask
        if miss == 0:
            break
    if best is None:
        raise ValueError("there is no mask to choose from: pass --kind and --seed")
    return best[1], best[2]


def _drawn(candidates: Sequence[MaskChoice], shape: Shape, block_size: int) -> Iterator[tuple[MaskChoice, BlockMask]]:
    for choice in candidates:
        yield choice, choice.make(shape, block_size)


def parse_mesh(text: str) -> Mesh:
    """`UxR` as a pair.

    Raises:
        ValueError: it is not that.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"--mesh must be like 2x1 (Ulysses x Ring), got {text!r}: pass two positive numbers")
    return int(parts[0]), int(parts[1])
