"""Transformers that attend along the dims of a video in turn: what dynamic sequence parallelism is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbsp_megatron.models.axial.config import AxialConfig
    from dbsp_megatron.models.axial.model import AxialDiT

__all__ = ["AxialConfig", "AxialDiT"]


def __getattr__(name: str) -> Any:
    # Lazy, so that reading a model config does not import megatron-core.
    if name == "AxialDiT":
        from dbsp_megatron.models.axial.model import AxialDiT

        return AxialDiT
    if name == "AxialConfig":
        from dbsp_megatron.models.axial.config import AxialConfig

        return AxialConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
