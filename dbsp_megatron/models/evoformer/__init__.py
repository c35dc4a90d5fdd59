"""The Evoformer: two tracks, of sequences and of pairs, each attended along one dim at a time."""

from __future__ import annotations

from dbsp_megatron.models.evoformer.config import EvoformerConfig, load_evoformer_config
from dbsp_megatron.models.evoformer.model import Evoformer

__all__ = ["Evoformer", "EvoformerConfig", "load_evoformer_config"]
