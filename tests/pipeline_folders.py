"""Tiny pipelines of diffusers with random weights, saved as published ones are: safetensors, JSON, fast tokenizers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

WORDS = ("a", "the", "cat", "dog", "bird", "walks", "runs", "sleeps", "on", "in", "grass", "snow", "rain", "red")
"""What the tokenizers know; other words are one unknown token."""
WIDTH = 16
"""Channels of text encoders."""


def missing_packages() -> str | None:
    """What published pipelines need to load and run, and this machine lacks; None if nothing."""
    needed = ("accelerate", "diffusers", "ftfy", "peft", "transformers")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}: pip install 'dbsp-megatron[diffusers]'" if missing else None


def _tokenizer(bos_tokens: int = 0, max_length: int = 24) -> Any:
    """Words to numbers, ended by </s>.

    Args:
        bos_tokens: beginnings of a text in front.
        max_length: tokens that a text may have.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "</s>", "<unk>", "<s>")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*special, *WORDS))}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single=" ".join(["<s>"] * bos_tokens + ["$A", "</s>"]), special_tokens=[("<s>", 3), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
        model_max_length=max_length,
    )


def _t5(kind: str) -> Any:
    import transformers

    config = getattr(transformers, kind.replace("EncoderModel", "Config"))(
        vocab_size=32, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=1, num_heads=2, relative_attention_num_buckets=8
    )
    return getattr(transformers, kind)(config)


def _clip_text() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=32, **sizes, eos_token_id=1, pad_token_id=0, bos_token_id=3))


def _flow() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler()


def _wan_transformer(**options: Any) -> nn.Module:
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 3, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    widths = {"text_dim": WIDTH, "freq_dim": 32, "ffn_dim": 24, "rope_max_seq_len": 32}
    return WanTransformer3DModel(**{**sizes, **widths, **options})


def _wan_vae() -> nn.Module:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4, z_dim=4, num_res_blocks=1, latents_mean=[0.1, -0.1, 0.0, 0.2], latents_std=[1.0, 1.1, 0.9, 1.2]
    )


def _wan() -> Any:
    """Wan 2.2: two experts."""
    from diffusers import WanPipeline

    return WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=_t5("UMT5EncoderModel"),
        vae=_wan_vae(),
        scheduler=_flow(),
        transformer=_wan_transformer(),
        transformer_2=_wan_transformer(num_layers=1),
        boundary_ratio=0.6,
    )


def _wan_i2v() -> Any:
    """Image to video without an image encoder, as in Wan 2.2."""
    from diffusers import WanImageToVideoPipeline

    return WanImageToVideoPipeline(
        tokenizer=_tokenizer(),
        text_encoder=_t5("UMT5EncoderModel"),
        vae=_wan_vae(),
        scheduler=_flow(),
        # Noise, 4 channels of a mask and the latents of the image.
        transformer=_wan_transformer(in_channels=12),
    )


def _wan_i2v_clip() -> Any:
    """Image to video with an image encoder, as in Wan 2.1: 257 tokens of the image beside 512 of the text."""
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return WanImageToVideoPipeline(
        tokenizer=_tokenizer(),
        text_encoder=_t5("UMT5EncoderModel"),
        vae=_wan_vae(),
        scheduler=_flow(),
        image_processor=CLIPImageProcessor(),
        image_encoder=CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=224, patch_size=14)),
        transformer=_wan_transformer(in_channels=12, image_dim=8, added_kv_proj_dim=36),
    )


def _cogvideox() -> Any:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

    sizes = {"num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    widths = {"time_embed_dim": 8, "text_embed_dim": WIDTH, "max_text_seq_length": 9}
    video = {"sample_width": 6, "sample_height": 10, "sample_frames": 9, "use_rotary_positional_embeddings": True}
    kinds = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
    channels = {"block_out_channels": (4, 4, 4, 4), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    return CogVideoXPipeline(
        tokenizer=_tokenizer(),
        text_encoder=_t5("T5EncoderModel"),
        vae=AutoencoderKLCogVideoX(**kinds, **channels, temporal_compression_ratio=4),
        transformer=CogVideoXTransformer3DModel(**sizes, **widths, **video),
        scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction", clip_sample=False),
    )


def _hunyuan() -> Any:
    from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
    from transformers import LlamaConfig, LlamaModel

    sizes = {"num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    depth = {"num_single_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2.0, "guidance_embeds": True}
    widths = {"text_embed_dim": WIDTH, "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6)}
    llama = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    channels = {"block_out_channels": (4, 4, 4, 4), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    # The pipeline cuts the first tokens off, which are those of its template in the published tokenizer.
    before = DEFAULT_PROMPT_TEMPLATE["template"].split("{}")[0] + "x"
    missing = DEFAULT_PROMPT_TEMPLATE["crop_start"] - (len(before.split()) - 1)
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(vocab_size=32, **llama, pad_token_id=0)),
        tokenizer=_tokenizer(bos_tokens=missing, max_length=400),
        transformer=HunyuanVideoTransformer3DModel(**sizes, **depth, **widths),
        vae=AutoencoderKLHunyuanVideo(**channels, mid_block_add_attention=False),
        scheduler=_flow(),
        text_encoder_2=_clip_text(),
        tokenizer_2=_tokenizer(bos_tokens=1, max_length=77),
    )


def _flux() -> Any:
    from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel

    sizes = {"num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 16, "num_layers": 2}
    widths = {"num_single_layers": 2, "joint_attention_dim": WIDTH, "pooled_projection_dim": 8, "guidance_embeds": True}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    channels = {"block_out_channels": (4, 4, 4, 4), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    factors = {"shift_factor": 0.1, "scaling_factor": 0.4, "use_quant_conv": False, "use_post_quant_conv": False}
    return FluxPipeline(
        scheduler=_flow(),
        vae=AutoencoderKL(**kinds, **channels, **factors),
        text_encoder=_clip_text(),
        tokenizer=_tokenizer(bos_tokens=1, max_length=77),
        text_encoder_2=_t5("T5EncoderModel"),
        tokenizer_2=_tokenizer(),
        transformer=FluxTransformer2DModel(**sizes, **widths, axes_dims_rope=(4, 6, 6)),
    )


PIPELINES = {
    "wan": _wan,
    "wan i2v": _wan_i2v,
    "wan i2v clip": _wan_i2v_clip,
    "cogvideox": _cogvideox,
    "hunyuan": _hunyuan,
    "flux": _flux,
}
"""Builders by name."""


def text_length(name: str) -> int:
    """Text tokens: few, where the model does not count on the published number."""
    return 512 if name == "wan i2v clip" else 9


def save_pipeline(name: str, folder: Path) -> Path:
    """Save the pipeline of a name, with the same weights each time."""
    torch.manual_seed(1)
    pipe = PIPELINES[name]()
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            for parameter in component.parameters():
                # Weights that start at 0 or 1 would hide what is done to them.
                parameter.data += 0.05 * torch.randn(parameter.shape)
    pipe.save_pretrained(folder, safe_serialization=True)
    return folder
