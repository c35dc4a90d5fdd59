"""Small attention cores, configs and inputs for the tests of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.model import VideoDiT

GRID = (2, 3, 3)
BATCH = 2
TEXT_LEN = 5
IMAGE_LEN = 11
MODES = ("none", "cross", "joint", "dual_stream")


class DenseCore(nn.Module):
    """Dense attention over the tokens it is given."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, **_: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).permute(2, 0, 1, 3).flatten(-2)


class _GatherTokens(torch.autograd.Function):
    """Concatenates dim 0 of all ranks of the default group; any lengths, also 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(lengths, torch.tensor([x.shape[0]]))
        sizes = [int(n) for n in lengths]
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        ctx.start, ctx.length = sum(sizes[: dist.get_rank()]), x.shape[0]
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.length]


class GatherCore(DenseCore):
    """Dense attention of local queries to the keys of all ranks; keys need no order."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, **kwargs: Any) -> Tensor:
        k, v = _GatherTokens.apply(torch.stack((k, v), dim=1)).unbind(1)
        return super().forward(q, k, v, attention_mask, **kwargs)


def tiny_config(text: str, **changes: Any) -> DiTConfig:
    """A model of odd sizes; each text mode with the options of the published model that has it."""
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
        "ffn_hidden_size": 48,
        "patch_size": (1, 2, 2),
        "in_channels": 3,
        "out_channels": 2,
        "time_freq_dim": 16,
        "text": text,
    }
    if text != "none":
        fields |= {"text_dim": 7, "text_len": TEXT_LEN}
    if text == "none":
        fields |= {"num_kv_heads": 2}
    elif text == "cross":
        fields |= {"modulation": "table", "qk_norm": "rms_hidden"}
    elif text == "joint":
        fields |= {"qk_norm": "layer_head", "norm_affine": True, "final_norm": True, "time_embed_dim": 24}
        fields |= {"text_projection": "linear"}
    else:
        fields |= {"num_layers": 1, "num_single_layers": 1}
    return DiTConfig(**(fields | changes))


def randomize(model: nn.Module, tp_rank: int = 0, tp_size: int = 1) -> None:
    """Fills every parameter, zero-initialised ones too; each rank takes its slice of the same whole tensors."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            split = getattr(parameter, "tensor_model_parallel", False)
            dim: int | None = getattr(parameter, "partition_dim", None) if split else None
            shape = list(parameter.shape)
            if dim is not None:
                shape[dim] *= tp_size
            whole = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
            parameter.copy_(whole if dim is None else whole.chunk(tp_size, dim)[tp_rank])


def make_model(config: DiTConfig, core: type = DenseCore, dtype: torch.dtype = torch.float64) -> VideoDiT:
    """A model on the CPU with random weights."""
    model = VideoDiT(config, core_attention=core).to(dtype)
    randomize(model)
    return model


def sequence_length(config: DiTConfig) -> int:
    """Tokens of the whole sequence for `GRID`."""
    return config.sequence_text_len + GRID[0] * GRID[1] * GRID[2]


def make_inputs(
    config: DiTConfig, dtype: torch.dtype = torch.float64, context_len: int | None = None
) -> dict[str, Any]:
    """Arguments of `VideoDiT.forward` for the whole sequence on one rank."""
    generator = torch.Generator().manual_seed(3)
    num_video = GRID[0] * GRID[1] * GRID[2]
    inputs: dict[str, Any] = {
        "video_tokens": torch.randn(BATCH, num_video, config.patch_dim, generator=generator, dtype=dtype),
        "timestep": torch.tensor([0.25, 0.875], dtype=dtype),
        "grid": GRID,
        "positions": torch.arange(sequence_length(config)),
    }
    if config.text != "none":
        length = context_len or config.text_len
        inputs["context"] = torch.randn(BATCH, length, config.text_dim or 0, generator=generator, dtype=dtype)
    if config.image_dim is not None:
        inputs["image_context"] = torch.randn(BATCH, IMAGE_LEN, config.image_dim, generator=generator, dtype=dtype)
    return inputs


def loss_weight(config: DiTConfig, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random cotangent [BATCH, num_video, patch_out_dim]: a plain sum would hide a permutation of tokens."""
    generator = torch.Generator().manual_seed(11)
    num_video = GRID[0] * GRID[1] * GRID[2]
    return torch.randn(BATCH, num_video, config.patch_out_dim, generator=generator, dtype=dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name; a parameter without one fails the test."""
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing, missing
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
