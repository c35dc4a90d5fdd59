"""The description of a transformer that attends along the dims of a video in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from dbsp_megatron.models.dit.config import DiTConfig

SpacePositions = Literal["none", "base", "area"]

GRIDS = (("T", "S"), ("T", "H", "W"))
"""Sequence dims: frames and the tokens of a frame, or frames, rows and columns."""


@dataclass(frozen=True, kw_only=True)
class AxialConfig(DiTConfig):
    """Shape and options of an `AxialDiT`; `num_layers` counts the layers of all dims together."""

    attention_dims: tuple[str, ...]
    """Dims that layers attend along, in turn: layer i along entry i modulo their number. Of T and S (frames, and tokens
    of a frame) or of T, H and W (frames, rows, columns)."""
    rope_dims: tuple[str, ...] = ()
    """Dims along which queries and keys are rotated, by the index along the dim."""
    text_dims: tuple[str, ...] | None = None
    """Dims whose layers also attend to the text; None means all, with `text: cross`."""
    cross_norm: bool = False
    """Whether queries of the cross-attention to the text are normed first."""
    space_positions: SpacePositions = "none"
    """Sinusoids of columns and rows added at the input. `base`: index * space_base / patches along the dim. `area`: as
    if the frame were a square of as many tokens, whose side is `round(sqrt(S)) / sqrt(S) * space_base` (Open-Sora)."""
    space_base: int = 32
    """Side of the frames of training, in patches."""
    time_positions: bool = False
    """Sinusoids of frames added before the first layer that attends along T, unless there is one frame only."""
    time_positions_scale: float = 1.0
    """Frame indices are divided by this before the sinusoids."""
    fps: float | None = None
    """Frames per second where a call does not say; None: the model is not told."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attention_dims or not any(set(self.attention_dims) == set(grid) for grid in GRIDS):
            raise ValueError(
                f"attention_dims must name all dims of one of the grids {GRIDS}, each at least once; got "
                f"{self.attention_dims!r}"
            )
        for name, dims in (("rope_dims", self.rope_dims), ("text_dims", self.text_dims or ())):
            if unknown := sorted(set(dims) - set(self.attention_dims)):
                raise ValueError(f"{name} must name some of attention_dims {self.attention_dims}; got {unknown}")
        if self.space_positions not in get_args(SpacePositions):
            raise ValueError(
                f"space_positions must be one of {', '.join(get_args(SpacePositions))}; got {self.space_positions!r}"
            )
        if self.hidden_size % 4 and (self.space_positions != "none" or self.time_positions):
            raise ValueError(
                f"hidden_size must be a multiple of 4 with space_positions or time_positions; got {self.hidden_size}"
            )
        for key in ("space_base", "time_positions_scale", "fps"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"{key} must be > 0; got {value!r}")
        self._check_plain()

    def _check_plain(self) -> None:
        """Refuse what belongs to a `VideoDiT` only."""
        for key, wanted in (
            ("text", ("none", "cross")),
            ("position_embedding", ("none",)),
            ("image_dim", (None,)),
            ("coarse_branch", (False,)),
            ("num_single_layers", (0,)),
            ("rope_axes", (None,)),
            ("rope_base_grid", (None,)),
        ):
            value = getattr(self, key)
            if value not in wanted:
                raise ValueError(
                    f"{key} must be {' or '.join(map(str, wanted))} with attention_dims; got {value!r}: use rope_dims, "
                    "space_positions and time_positions for places"
                )
        if self.text_dims is not None and self.text != "cross":
            raise ValueError(f"text_dims needs text: cross; got {self.text_dims!r} with text: {self.text}")

    @property
    def grid_dims(self) -> tuple[str, ...]:
        """Sequence dims, outermost first: a token's id counts along the last one fastest."""
        return next(grid for grid in GRIDS if set(grid) == set(self.attention_dims))

    def attention_dim(self, layer: int) -> str:
        """Dim that layer 0, 1, ... attends along."""
        return self.attention_dims[layer % len(self.attention_dims)]

    def attends_text(self, dim: str) -> bool:
        """Whether layers along a dim have cross-attention to the text."""
        return self.text == "cross" and (self.text_dims is None or dim in self.text_dims)

    def lengths(self, grid: tuple[int, int, int]) -> Mapping[str, int]:
        """Length of every sequence dim of a video of so many patches along frames, rows and columns."""
        frames, rows, columns = grid
        if self.grid_dims == ("T", "S"):
            return {"T": frames, "S": rows * columns}
        return {"T": frames, "H": rows, "W": columns}
