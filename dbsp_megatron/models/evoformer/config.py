"""The description of an Evoformer, and its YAML files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import yaml


@dataclass(frozen=True, kw_only=True)
class EvoformerConfig:
    """Shape and options of an `Evoformer`; the defaults are AlphaFold 2's."""

    num_blocks: int
    """Blocks, each with all sublayers of both tracks."""
    msa_channels: int
    """Channels of the track of sequences."""
    pair_channels: int
    """Channels of the track of pairs of residues."""
    msa_heads: int = 8
    """Heads of attention in the track of sequences."""
    pair_heads: int = 4
    """Heads of triangle attention."""
    head_dim: int = 32
    """Channels per head."""
    outer_channels: int = 32
    """Channels of each factor of the outer product."""
    triangle_channels: int = 128
    """Channels of triangle multiplication."""
    transition_factor: int = 4
    """Inner channels of transitions, in multiples of the outer ones."""
    recompute: Literal["none", "full"] = "none"
    """`full`: keep only what enters a block and compute each block again in the backward pass."""
    init_seed: int = 0
    """Seed of the initial weights."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("recompute", "init_seed"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be an integer >= 1; got {value!r}")
        if self.recompute not in ("none", "full"):
            raise ValueError(f"recompute must be none or full; got {self.recompute!r}")


def load_evoformer_config(name_or_path: str | Path) -> EvoformerConfig:
    """Reads a description.

    Args:
        name_or_path: `af2_evoformer`, or the path of a YAML file.

    Raises:
        ValueError: there is no such file, or a key is unknown, missing or has a bad value.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = Path(str(resources.files("dbsp_megatron") / "model_configs" / f"{name_or_path}.yaml"))
    if not path.is_file():
        raise ValueError(f"Evoformer config {str(name_or_path)!r} must be a YAML file, or af2_evoformer")
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path} must hold a mapping of EvoformerConfig fields; got {type(raw).__name__}")
    known = {field.name: field for field in dataclasses.fields(EvoformerConfig)}
    missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in raw]
    if missing or (unknown := sorted(map(str, set(raw) - set(known)))):
        wrong = f"lacks {', '.join(missing)}" if missing else f"has unknown keys {', '.join(unknown)}"
        raise ValueError(f"{path} {wrong}; known keys: {', '.join(sorted(known))}")
    return EvoformerConfig(**raw)
