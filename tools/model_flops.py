"""Floating-point operations of a training step, counted matrix by matrix.

Model operations are those that the mathematics asks for: a forward pass, and twice as many backward, of every matrix
product and of attention over the pairs of tokens in dense blocks. Softmax, norms and other pointwise work do not count.
Hardware operations are those that are carried out: attention's backward pass has five products where the forward pass
has two, as it makes the scores again, and recomputation repeats forward passes.

Dims: S tokens of the sequence, B samples, H heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from dbsp_megatron.models.dit.config import DiTConfig
from tools.explain_memory import model_without_data

PEAK_TFLOPS = {"H200": 989.0, "H100 80GB HBM3": 989.0, "A100": 312.0}
"""Dense bf16 products of a device by a part of its name, in TFLOP/s; of data sheets, without sparsity."""

_BACKWARD, _ATTENTION_BACKWARD = 2.0, 2.5
"""Operations of a backward pass over those of the forward pass: in the model, and of attention as it is carried out."""


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """Operations of the forward passes of one optimizer step, over all ranks."""

    products: int
    """Matrix products of layers, embeddings and modulation, and attention to a context."""
    attention: int
    """Self-attention of all layers with every pair of tokens: 4 B H D S^2 each."""

    def model(self, density: float) -> float:
        """Model operations of the step: 3 (products + density x attention).

        Args:
            density: dense blocks over all blocks.
        """
        return (1 + _BACKWARD) * (self.products + density * self.attention)

    def hardware(self, density: float, recompute: str) -> float:
        """Operations that are carried out: attention 3.5 times, and again what is recomputed.

        Args:
            density: dense blocks over all blocks.
            recompute: `none`, `selective` (all but self-attention again) or `full`.
        """
        products = 1 + _BACKWARD + (recompute != "none")
        attention = 1 + _ATTENTION_BACKWARD + (recompute == "full")
        return products * self.products + attention * density * self.attention


@cache
def forward_flops(model: DiTConfig, num_video_tokens: int, batch: int) -> StepFlops:
    """Operations of the forward passes of `batch` samples.

    Args:
        model: the model description.
        num_video_tokens: patches of a sample's video.
        batch: samples of a step.
    """
    num_text = model.sequence_text_len
    tokens = num_text + num_video_tokens
    # The kernel of a CPU has no formula in PyTorch.
    formulas = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_flops}
    with (
        model_without_data(model, tokens, num_text, batch) as (_, run),
        FlopCounterMode(display=False, custom_mapping=formulas) as counter,
    ):
        run()
    attention = 4 * batch * model.num_heads * model.heads_dim * tokens**2 * model.num_attention_layers
    return StepFlops(products=counter.get_total_flops(), attention=attention)


def _sdpa_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    count: int = sdpa_flop_count(query, key, value)
    return count


def peak_tflops(device: str) -> float | None:
    """Dense bf16 peak of a device by its name, TFLOP/s; None for one that is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device), None)
