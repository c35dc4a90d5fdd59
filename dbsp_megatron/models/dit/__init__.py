"""A video Diffusion Transformer on megatron-core modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbsp_megatron.models.dit.config import DiTConfig, load_model_config
    from dbsp_megatron.models.dit.model import VideoDiT

__all__ = ["DiTConfig", "VideoDiT", "load_model_config"]


def __getattr__(name: str) -> Any:
    # Lazy, so that reading a model config does not import megatron-core.
    if name == "VideoDiT":
        from dbsp_megatron.models.dit.model import VideoDiT

        return VideoDiT
    if name in ("DiTConfig", "load_model_config"):
        from dbsp_megatron.models.dit import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
