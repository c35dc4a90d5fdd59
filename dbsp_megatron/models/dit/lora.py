"""Settings of low-rank adapters (LoRA), and which parameters they are; importing this does not import megatron-core."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import nn

DEFAULT_TARGETS = (
    *("linear_qkv", "linear_proj", "text_linear_proj"),
    *("linear_q", "linear_kv"),
    *("linear_fc1", "linear_fc2"),
)
"""Projections of self-attention and cross-attention, and the feed-forward, in all models."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which layers get an adapter, and its size."""

    rank: int = 0
    """Inner channels of each adapter; 0 trains all weights, without adapters."""
    alpha: float | None = None
    """An adapter adds alpha / rank * B A x; null means alpha = rank, a factor of 1."""
    targets: list[str] = field(default_factory=list)
    """Layers that get an adapter, by the end of their name (`linear_qkv`, `self_attention.linear_proj`); none means
    the projections of attention and feed-forward (`linear_qkv`, `linear_proj`, `text_linear_proj`, `linear_q`,
    `linear_kv`, `linear_fc1`, `linear_fc2`)."""
    modules_to_save: list[str] = field(default_factory=lambda: ["coarse_branch"])
    """Modules, by name, whose own weights are trained and saved beside the adapters: new ones that no checkpoint
    has."""

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 0:
            raise ValueError(f"lora.rank must be an integer >= 0, got {self.rank!r}; 0 trains all weights")
        if self.alpha is not None and not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ValueError(f"lora.alpha must be a positive number, got {self.alpha!r}; null means lora.rank")
        for key in ("targets", "modules_to_save"):
            names = getattr(self, key)
            if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
                raise ValueError(f"lora.{key} must be a list of names, got {names!r}; e.g. [linear_qkv]")

    @property
    def scale(self) -> float:
        """Factor on B A."""
        if not self.rank:
            return 0.0
        return 1.0 if self.alpha is None else self.alpha / self.rank


def is_adapter(name: str) -> bool:
    """Whether a parameter is a part of an adapter, by its name."""
    return name.rpartition(".")[2] in ("lora_a", "lora_b")


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that training changes, by name: what a checkpoint beside that of the base model has to hold."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
