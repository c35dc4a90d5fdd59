"""MaskConfig: which mask method a run uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Choice and settings of the mask method."""

    method: str = "topp"
    """"dense" or "topp"."""

    top_p: float = 0.7
    """topp: share of the pooled attention mass that the kept blocks of each query block must reach, in (0, 1]."""

    min_blocks: int = 1
    """topp: key blocks kept at least per query block."""

    dense_layers: int = 0
    """The first layers that stay dense."""

    dense_steps: int = 0
    """The first steps that stay dense."""

    def __post_init__(self) -> None:
        if self.method not in ("dense", "topp"):
            raise ValueError(f"mask.method must be dense or topp, got {self.method!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"mask.top_p must be in (0, 1], got {self.top_p}: 1 keeps every block")
        for key in ("min_blocks", "dense_layers", "dense_steps"):
            low = 1 if key == "min_blocks" else 0
            if getattr(self, key) < low:
                raise ValueError(f"mask.{key} must be >= {low}, got {getattr(self, key)}")
