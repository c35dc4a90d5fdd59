"""Input and output ends of the model: timestep, text, and the modulated output layer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.init_weights import mark_init, zero_init
from dbsp_megatron.models.dit.linear import ColumnLinear, Linear, whole_input
from dbsp_megatron.models.dit.modulation import AffineNorm


def sinusoidal_features(timestep: Tensor, num_features: int, scale: float) -> Tensor:
    """Cosines, then sines, of the scaled timestep at geometric frequencies from 1 to 1/10000.

    Args:
        timestep: float [b], in [0, 1].
        num_features: Even number of features.
        scale: Factor on the timestep.

    Returns:
        float32 [b, num_features] (float64 for a float64 timestep).
    """
    dtype = torch.promote_types(timestep.dtype, torch.float32)
    half = num_features // 2
    index = torch.arange(half, dtype=dtype, device=timestep.device)
    angles = (timestep.to(dtype) * scale)[:, None] * torch.exp(index * (-math.log(10000.0) / half))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimestepEmbedding(nn.Module):
    """Sinusoids followed by two linear layers, kept out of autocast: a timestep in bf16 has three digits only."""

    def __init__(self, dit: DiTConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_features = dit.time_freq_dim
        self.scale = dit.time_scale
        self.linear_1 = Linear(dit.time_freq_dim, dit.time_channels, dtype=dtype)
        self.linear_2 = Linear(dit.time_channels, dit.time_channels, dtype=dtype)

    def forward(self, timestep: Tensor) -> Tensor:
        """Maps float [b] in [0, 1] to [b, time_channels] in the dtype of the weights."""
        with torch.autocast(timestep.device.type, enabled=False):
            features = sinusoidal_features(timestep, self.num_features, self.scale)
            hidden = self.linear_1(features.to(self.linear_1.weight.dtype))
            embedding: Tensor = self.linear_2(F.silu(hidden))
        return embedding


class TextProjection(nn.Module):
    """Maps text features [..., text_dim] to [..., hidden_size], one token at a time."""

    def __init__(self, dit: DiTConfig, dtype: torch.dtype) -> None:
        super().__init__()
        if dit.text_dim is None:
            raise ValueError("text_dim must be given to project text; got None")
        self.linear_1 = Linear(dit.text_dim, dit.hidden_size, dtype=dtype)
        self.linear_2 = Linear(dit.hidden_size, dit.hidden_size, dtype=dtype) if dit.text_projection == "mlp" else None

    def forward(self, text: Tensor) -> Tensor:
        """Projects [..., text_dim]."""
        hidden: Tensor = self.linear_1(text.to(self.linear_1.weight.dtype))
        if self.linear_2 is not None:
            hidden = self.linear_2(F.gelu(hidden, approximate="tanh"))
        return hidden


class ImageProjection(MegatronModule):
    """Maps features of an image encoder [..., image_dim] to [..., hidden_size], one token at a time.

    Source: Wan (arXiv 2503.20314), image to video.
    """

    def __init__(self, config: TransformerConfig, *, image_dim: int, hidden_size: int) -> None:
        super().__init__(config=config)
        dtype = config.params_dtype
        self.norm_in = AffineNorm(config, hidden_size=image_dim, eps=1e-5, affine=True)
        self.linear_1 = Linear(image_dim, image_dim, dtype=dtype)
        self.linear_2 = Linear(image_dim, hidden_size, dtype=dtype)
        self.norm_out = AffineNorm(config, hidden_size=hidden_size, eps=1e-5, affine=True)

    def forward(self, image: Tensor) -> Tensor:
        """Projects [..., image_dim]; returns the dtype of the second layer's output."""
        hidden = self.linear_1(self.norm_in(image).to(self.linear_1.weight.dtype))
        hidden = self.linear_2(F.gelu(hidden))
        return self.norm_out(hidden).to(hidden.dtype)


class OutputLayer(MegatronModule):
    """Modulated norm and a projection to patches; starts at zero, so that a new model predicts zero."""

    def __init__(self, config: TransformerConfig, *, dit: DiTConfig, tp_group: ProcessGroup | None) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        size, dtype = dit.hidden_size, config.params_dtype
        self.final_norm: AffineNorm | None = None
        if dit.final_norm:
            self.final_norm = AffineNorm(config, hidden_size=size, eps=dit.norm_eps, affine=True)
        self.norm = AffineNorm(config, hidden_size=size, eps=dit.norm_eps, affine=dit.norm_affine)
        self.linear: ColumnLinear | None = None
        self.table: nn.Parameter | None = None
        if dit.modulation == "linear":
            self.linear = ColumnLinear(
                dit.time_channels,
                2 * size,
                config=whole_input(config),
                init_method=config.init_method,
                gather_output=True,
                tp_group=tp_group,
            )
            zero_init(self.linear)
        else:
            self.table = mark_init(nn.Parameter(torch.empty(2, size, dtype=dtype)), "zero")
        self.proj = Linear(size, dit.patch_out_dim, dtype=dtype)
        zero_init(self.proj)

    def forward(self, x: Tensor, time_embedding: Tensor) -> Tensor:
        """Maps [s, b, hidden] and the timestep embedding [b, time_channels] to [s, b, patch_out_dim]."""
        dtype = x.dtype
        if self.final_norm is not None:
            x = self.final_norm(x)
        x = self.norm(x)
        if self.linear is not None:
            shift, scale = self.linear(F.silu(time_embedding))[0].to(x.dtype).chunk(2, dim=-1)
        else:
            shift, scale = (self.table[:, None] + time_embedding).to(x.dtype)  # type: ignore[index]
        projected: Tensor = self.proj((x * (1 + scale) + shift).to(dtype))
        return projected
