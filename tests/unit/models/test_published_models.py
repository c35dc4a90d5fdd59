"""Small VideoDiTs with the weights of small Wan, CogVideoX and HunyuanVideo transformers compute the same function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.model import VideoDiT
from tests.unit.models.cores import DenseCore

pytestmark = pytest.mark.diffusers

HEADS, HEAD_DIM, HIDDEN, TEXT_DIM, TEXT_LEN = 2, 16, 32, 7, 5
CHANNELS, GRID = 3, (2, 3, 4)


class Weights:
    """Copies layers of a diffusers transformer into a VideoDiT."""

    def __init__(self, theirs: nn.Module, ours: nn.Module) -> None:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
        self.theirs, self.ours = dict(theirs.named_parameters()), dict(ours.named_parameters())
        self.unset = set(self.ours)

    @torch.no_grad()
    def put(self, name: str, value: Tensor) -> None:
        self.ours[name].copy_(value.reshape(self.ours[name].shape))
        self.unset.remove(name)

    def layer(self, ours: str, theirs: str, rows: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Copies weight, and bias if ours has one, after rearranging rows."""
        for part in ("weight", "bias"):
            if f"{ours}.{part}" in self.ours:
                self.put(f"{ours}.{part}", rows(self.theirs[f"{theirs}.{part}"]))

    def qkv(self, ours: str, names: tuple[str, ...]) -> None:
        """Interleaves separate projections head by head."""
        for part in ("weight", "bias"):
            parts = [self.theirs[f"{name}.{part}"].unflatten(0, (HEADS, 1, HEAD_DIM)) for name in names]
            self.put(f"{ours}.{part}", torch.cat(parts, dim=1).flatten(0, 2))

    def attention(self, ours: str, theirs: str, norms: tuple[str, str] = ("norm_q", "norm_k")) -> None:
        self.qkv(f"{ours}.qkv.linear_qkv", tuple(f"{theirs}.to_{x}" for x in "qkv"))
        self.layer(f"{ours}.qkv.q_norm", f"{theirs}.{norms[0]}")
        self.layer(f"{ours}.qkv.k_norm", f"{theirs}.{norms[1]}")
        if f"{ours}.linear_proj.bias" in self.ours:
            self.layer(f"{ours}.linear_proj", f"{theirs}.to_out.0")

    def mlp(self, ours: str, theirs: str) -> None:
        self.layer(f"{ours}.linear_fc1", f"{theirs}.net.0.proj")
        self.layer(f"{ours}.linear_fc2", f"{theirs}.net.2")


def small(text: str, **fields: Any) -> DiTConfig:
    return DiTConfig(
        hidden_size=HIDDEN, num_layers=2, num_heads=HEADS, in_channels=CHANNELS, patch_size=(1, 2, 2),
        text_dim=TEXT_DIM, text_len=TEXT_LEN, text=text, **fields,
    )  # fmt: skip


def run_ours(model: VideoDiT, video: Tensor, context: Tensor, timestep: Tensor) -> Tensor:
    """Runs [B, C, T, H, W] and returns tokens."""
    b, c, t, h, w = video.shape
    tokens = video.view(b, c, t, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
    positions = torch.arange(model.dit_config.sequence_text_len + tokens.shape[1])
    return model(tokens, timestep, grid=GRID, positions=positions, context=context)


def tokens_of(video: Tensor, channels_last: bool) -> Tensor:
    """Output tokens of [B, C, T, H, W] in the channel order of the output layer."""
    b, c, t, h, w = video.shape
    order = (0, 2, 3, 5, 4, 6, 1) if channels_last else (0, 2, 3, 5, 1, 4, 6)
    return video.reshape(b, c, t, h // 2, 2, w // 2, 2).permute(order).flatten(4).flatten(1, 3)


@pytest.fixture
def example() -> tuple[Tensor, Tensor, Tensor]:
    """Video [2, C, T, H, W], context, and timestep in [0, 1]."""
    t, h, w = GRID
    video = torch.randn(2, CHANNELS, t, 2 * h, 2 * w)
    return video, torch.randn(2, TEXT_LEN, TEXT_DIM), torch.tensor([0.25, 0.75])


@torch.no_grad()
def test_cross_text_computes_what_wan_does(example: tuple[Tensor, Tensor, Tensor]) -> None:
    from diffusers import WanTransformer3DModel

    theirs = WanTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=CHANNELS, out_channels=CHANNELS,
        text_dim=TEXT_DIM, freq_dim=16, ffn_dim=48, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    config = small("cross", ffn_hidden_size=48, time_freq_dim=16, modulation="table", qk_norm="rms_hidden")
    ours = VideoDiT(config, core_attention=DenseCore)
    weights = Weights(theirs, ours)
    weights.layer("patch_embed", "patch_embedding")
    for i in (1, 2):
        weights.layer(f"time_embed.linear_{i}", f"condition_embedder.time_embedder.linear_{i}")
        weights.layer(f"text_proj.linear_{i}", f"condition_embedder.text_embedder.linear_{i}")
    weights.layer("time_proj", "condition_embedder.time_proj")
    for i in range(2):
        layer, block = f"block.layers.{i}", f"blocks.{i}"
        table = weights.theirs[f"{block}.scale_shift_table"]
        weights.put(f"{layer}.attention_norm.table", table[:, :3])
        weights.put(f"{layer}.mlp_norm.table", table[:, 3:])
        weights.attention(f"{layer}.self_attention", f"{block}.attn1")
        weights.layer(f"{layer}.cross_norm", f"{block}.norm2")
        weights.layer(f"{layer}.cross_attention.linear_q", f"{block}.attn2.to_q")
        weights.qkv(f"{layer}.cross_attention.linear_kv", (f"{block}.attn2.to_k", f"{block}.attn2.to_v"))
        for x in "qk":
            weights.layer(f"{layer}.cross_attention.{x}_norm", f"{block}.attn2.norm_{x}")
        weights.layer(f"{layer}.cross_attention.linear_proj", f"{block}.attn2.to_out.0")
        weights.mlp(f"{layer}.mlp", f"{block}.ffn")
    weights.put("output.table", weights.theirs["scale_shift_table"])
    weights.layer("output.proj", "proj_out")
    assert not weights.unset
    video, context, timestep = example
    expected = theirs(video, timestep * 1000, context).sample
    torch.testing.assert_close(
        run_ours(ours, video, context, timestep), tokens_of(expected, channels_last=True), rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_joint_text_computes_what_cogvideox_does(example: tuple[Tensor, Tensor, Tensor]) -> None:
    from diffusers import CogVideoXTransformer3DModel
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    theirs = CogVideoXTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=CHANNELS, out_channels=CHANNELS,
        time_embed_dim=24, text_embed_dim=TEXT_DIM, num_layers=2, max_text_seq_length=TEXT_LEN, sample_width=8,
        sample_height=6, sample_frames=5, use_rotary_positional_embeddings=True,
    )  # fmt: skip
    config = small(
        "joint", text_projection="linear", qk_norm="layer_head", rope_axes=(4, 6, 6), time_embed_dim=24,
        time_freq_dim=HIDDEN, norm_eps=1e-5, norm_affine=True, final_norm=True,
    )  # fmt: skip
    ours = VideoDiT(config, core_attention=DenseCore)
    weights = Weights(theirs, ours)
    weights.layer("patch_embed", "patch_embed.proj")
    weights.layer("text_proj.linear_1", "patch_embed.text_proj")
    for i in (1, 2):
        weights.layer(f"time_embed.linear_{i}", f"time_embedding.linear_{i}")
    for i in range(2):
        layer, block = f"block.layers.{i}", f"transformer_blocks.{i}"
        for mine, other in (("attention_norm", "norm1"), ("mlp_norm", "norm2")):
            weights.layer(f"{layer}.{mine}.linear", f"{block}.{other}.linear")
            weights.layer(f"{layer}.{mine}.norm", f"{block}.{other}.norm")
        weights.attention(f"{layer}.self_attention", f"{block}.attn1")
        weights.mlp(f"{layer}.mlp", f"{block}.ff")
    weights.layer("output.final_norm", "norm_final")
    weights.layer("output.linear", "norm_out.linear")
    weights.layer("output.norm", "norm_out.norm")
    weights.layer("output.proj", "proj_out")
    assert not weights.unset
    t, h, w = GRID
    rope = get_3d_rotary_pos_embed(HEAD_DIM, ((0, 0), (h, w)), (h, w), t)
    video, context, timestep = example
    expected = theirs(video.transpose(1, 2), context, timestep * 1000, image_rotary_emb=rope).sample.transpose(1, 2)
    torch.testing.assert_close(
        run_ours(ours, video, context, timestep), tokens_of(expected, channels_last=False), rtol=1e-4, atol=1e-4
    )


class _TextInput(nn.Module):
    """HunyuanVideo's text side without the refiner, which VideoDiT leaves to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in = nn.Linear(TEXT_DIM, HIDDEN)

    def forward(self, text: Tensor, *_: Any) -> Tensor:
        projected: Tensor = self.proj_in(text)
        return projected


@torch.no_grad()
def test_dual_stream_text_computes_what_hunyuan_video_does(example: tuple[Tensor, Tensor, Tensor]) -> None:
    from diffusers import HunyuanVideoTransformer3DModel

    theirs = HunyuanVideoTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=CHANNELS, out_channels=CHANNELS,
        num_layers=2, num_single_layers=2, num_refiner_layers=1, guidance_embeds=False, text_embed_dim=TEXT_DIM,
        pooled_projection_dim=6, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    theirs.context_embedder = _TextInput()
    config = small("dual_stream", num_single_layers=2, text_projection="linear", rope_axes=(4, 6, 6), rope_theta=256.0)
    ours = VideoDiT(config, core_attention=DenseCore)
    weights = Weights(theirs, ours)
    weights.layer("patch_embed", "x_embedder.proj")
    weights.layer("text_proj.linear_1", "context_embedder.proj_in")
    for i in (1, 2):
        weights.layer(f"time_embed.linear_{i}", f"time_text_embed.timestep_embedder.linear_{i}")
        theirs.time_text_embed.text_embedder.get_submodule(f"linear_{i}").weight.zero_()
        theirs.time_text_embed.text_embedder.get_submodule(f"linear_{i}").bias.zero_()
    for i in range(2):
        layer, block = f"block.layers.{i}", f"transformer_blocks.{i}"
        for part in ("weight", "bias"):
            streams = [weights.theirs[f"{block}.{norm}.linear.{part}"] for norm in ("norm1", "norm1_context")]
            for mine, half in (("attention_norm", 0), ("mlp_norm", 1)):
                rows = torch.cat([stream.chunk(2)[half] for stream in streams])
                weights.put(f"{layer}.{mine}.linear.{part}", rows)
        attention = f"{layer}.self_attention"
        weights.attention(attention, f"{block}.attn")
        weights.qkv(f"{attention}.text_qkv.linear_qkv", tuple(f"{block}.attn.add_{x}_proj" for x in "qkv"))
        for x in "qk":
            weights.layer(f"{attention}.text_qkv.{x}_norm", f"{block}.attn.norm_added_{x}")
        weights.layer(f"{attention}.text_linear_proj", f"{block}.attn.to_add_out")
        weights.mlp(f"{layer}.mlp", f"{block}.ff")
        weights.mlp(f"{layer}.text_mlp", f"{block}.ff_context")
    for i in range(2):
        layer, block = f"block.layers.{2 + i}", f"single_transformer_blocks.{i}"
        weights.layer(f"{layer}.norm.linear", f"{block}.norm.linear")
        weights.attention(f"{layer}.self_attention", f"{block}.attn")
        weights.layer(f"{layer}.mlp.linear_fc1", f"{block}.proj_mlp")
        of_attention, of_mlp = weights.theirs[f"{block}.proj_out.weight"].split((HIDDEN, 4 * HIDDEN), dim=1)
        weights.put(f"{layer}.self_attention.linear_proj.weight", of_attention)
        weights.put(f"{layer}.mlp.linear_fc2.weight", of_mlp)
        weights.put(f"{layer}.mlp.linear_fc2.bias", weights.theirs[f"{block}.proj_out.bias"])
    weights.layer("output.linear", "norm_out.linear", lambda x: x.roll(HIDDEN, 0))  # theirs: scale, then shift
    weights.layer("output.proj", "proj_out")
    assert not weights.unset
    video, context, timestep = example
    expected = theirs(video, timestep * 1000, context, torch.ones(2, TEXT_LEN), torch.zeros(2, 6)).sample
    torch.testing.assert_close(
        run_ours(ours, video, context, timestep), tokens_of(expected, channels_last=False), rtol=1e-4, atol=1e-4
    )
