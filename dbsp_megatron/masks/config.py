"""MaskConfig: which mask method a run uses, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dbsp_megatron.masks.base import MaskMethod
from dbsp_megatron.masks.dense import DenseMask
from dbsp_megatron.masks.duo import DuoMask
from dbsp_megatron.masks.file import FileMask
from dbsp_megatron.masks.paro import ParoMask
from dbsp_megatron.masks.radial import RadialMask
from dbsp_megatron.masks.schedule import ScheduledMask
from dbsp_megatron.masks.sliding_tile import SlidingTileMask
from dbsp_megatron.masks.sparge import SpargeMask
from dbsp_megatron.masks.sparse_videogen import SparseVideoGenMask
from dbsp_megatron.masks.tile_order import check_sizes
from dbsp_megatron.masks.top_k import TopKMask
from dbsp_megatron.masks.top_p import TopPMask
from dbsp_megatron.masks.vsa import VsaMask

METHODS: dict[str, type[MaskMethod]] = {
    method.name: method
    for method in (
        *(DenseMask, TopPMask, TopKMask, SpargeMask, VsaMask, SparseVideoGenMask),
        *(SlidingTileMask, RadialMask, DuoMask, FileMask, ParoMask),
    )
}
COMMON = ("method", "cube", "dense_layers", "dense_steps", "ramp", "ramp_steps")
"""Settings that belong to every method."""


def settings_of(method: str) -> tuple[str, ...]:
    """Keys of MaskConfig that belong to a method alone."""
    return tuple(f.name for f in fields(METHODS[method]) if f.init)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Choice and settings of the mask method. A setting that is null has the method's default."""

    method: str = "topp"
    """dense, topp, topk, sparge, vsa, sparse_videogen, sliding_tile, radial, duo, file or paro."""

    top_p: float | tuple[float, ...] | None = None
    """topp, sparge: share of the pooled attention mass that kept blocks of each query block must reach, in (0, 1];
    sparge also takes one for each head."""

    density: float | None = None
    """topk, vsa: share of key blocks kept in each row; sparse_videogen: share of token pairs in a band; in (0, 1]."""

    min_blocks: int | None = None
    """topp, topk, sparge, vsa: key blocks kept at least per query block."""

    similarity: float | None = None
    """sparge: blocks whose tokens are less alike than this are always computed, in [-1, 1]."""

    sample_rows: int | None = None
    """sparse_videogen: query tokens on which both bands are compared."""

    tile: tuple[int, int, int] | None = None
    """sliding_tile: frames, rows and columns of a tile, in tokens."""

    window: tuple[int, int, int] | tuple[tuple[int, int, int], ...] | None = None
    """sliding_tile: tiles of the window along frames, rows and columns, odd numbers; several windows go to heads in
    turn."""

    width: float | None = None
    """radial: factor on the width of its windows, above 0."""

    sink_frames: int | None = None
    """radial, sparse_videogen: first frames that every token attends."""

    global_heads: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    """duo: heads that are dense."""

    sink_tokens: int | None = None
    """duo: tokens at the front of the sequence that local heads attend."""

    window_tokens: int | None = None
    """duo: distance in tokens up to which local heads attend."""

    path: str | None = None
    """file, paro: saved masks (safetensors)."""

    cube: tuple[int, int, int] | None = None
    """Frames, rows and columns of the cubes by which the model input is ordered; null keeps frame after frame."""

    dense_layers: int = 0
    """The first layers that stay dense."""

    dense_steps: int = 0
    """The first steps that stay dense."""

    ramp: str | None = None
    """linear or cosine: after the dense steps, density (or top_p) falls from 1 to its value; null for at once."""

    ramp_steps: int = 0
    """Steps of the ramp."""

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise ValueError(f"mask.method must be one of {', '.join(METHODS)}, got {self.method!r}")
        for key in (f.name for f in fields(self)):
            if key in COMMON or key in settings_of(self.method) or getattr(self, key) is None:
                continue
            takers = [name for name in METHODS if key in settings_of(name)]
            raise ValueError(
                f"mask.{key}={getattr(self, key)!r} does not belong to mask.method={self.method}: remove it, or use a "
                f"method that has it ({', '.join(takers)})"
            )
        try:
            if self.cube is not None:
                check_sizes("cube", self.cube)
            if self.ramp is not None and not METHODS[self.method].ramp_key:
                raise ValueError(
                    f"ramp={self.ramp!r} needs a method with a density, {self.method} has none: remove it, or use one "
                    f"of {', '.join(name for name in METHODS if METHODS[name].ramp_key)}"
                )
            # A file is opened where it is used: not every process that reads a configuration can see it.
            ScheduledMask(DenseMask() if "path" in settings_of(self.method) else self._make(), *self._schedule())
            if "path" in settings_of(self.method) and not (isinstance(self.path, str) and self.path):
                given = repr(self.path) if self.path else "none"
                raise ValueError(f"path must name a file of block masks for mask.method={self.method}, got {given}")
        except ValueError as error:
            raise ValueError(f"mask.{error}") from error

    @property
    def setting_by_head(self) -> str | None:
        """The setting that tells heads apart by their index in the model; None if there is none."""
        named = {"file": "path", "paro": "path", "duo": "global_heads"}.get(self.method)
        if named is None and isinstance(self.top_p, (list, tuple)):
            return "top_p"
        if named is None and self.window is not None and not isinstance(self.window[0], int):
            return "window" if len(self.window) > 1 else None
        return named

    def check_model(self, num_heads: int, num_layers: int) -> None:
        """Refuse a model that the settings do not fit; saved masks are compared where they are used.

        Raises:
            ValueError: settings name heads or layers that the model lacks, or leave no layer to the method.
        """
        if self.method != "dense" and self.dense_layers >= num_layers:
            raise ValueError(
                f"mask.dense_layers must be below the model's {num_layers} attention layers, got {self.dense_layers}: "
                f"{self.method} would act in none of them; choose fewer, or mask.method=dense"
            )
        if "path" in settings_of(self.method):
            return
        try:
            self._make().check_model(num_heads, num_layers)
        except ValueError as error:
            raise ValueError(f"mask.{error}") from error

    def _make(self) -> MaskMethod:
        keys = settings_of(self.method)
        given: dict[str, Any] = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        return METHODS[self.method](**{key: _as_tuples(x) for key, x in given.items()})

    def _schedule(self) -> tuple[int, int, str | None, int]:
        return self.dense_layers, self.dense_steps, self.ramp, self.ramp_steps


def _as_tuples(x: Any) -> Any:
    """Lists come from YAML files, and from checkpoints."""
    return tuple(map(_as_tuples, x)) if isinstance(x, (list, tuple)) else x


def build_mask_method(config: MaskConfig) -> MaskMethod:
    """The configured method, dense for its first layers and steps.

    Raises:
        ValueError: a file that cannot be used.
    """
    try:
        method = config._make()
    except ValueError as error:
        raise ValueError(f"mask.{error}") from error
    schedule = config._schedule()
    return ScheduledMask(method, *schedule) if any(schedule) else method
