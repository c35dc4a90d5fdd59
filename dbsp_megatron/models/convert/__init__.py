"""Weights of published transformers, in the form of diffusers, as those of a `VideoDiT`, and back."""

from __future__ import annotations

from dbsp_megatron.models.convert.conversion import Conversion, from_diffusers_config, from_model_config
from dbsp_megatron.models.convert.folder import DiffusersFolder, write_diffusers_folder
from dbsp_megatron.models.convert.load import load_diffusers, load_weights

__all__ = [
    "Conversion",
    "DiffusersFolder",
    "from_diffusers_config",
    "from_model_config",
    "load_diffusers",
    "load_weights",
    "write_diffusers_folder",
]
