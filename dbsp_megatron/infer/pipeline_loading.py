"""Loads a pipeline of diffusers onto a rank's device, with its adapter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from dbsp_megatron.compat import diffusers_dtype_argument
from dbsp_megatron.config.generate import GenerateConfig
from dbsp_megatron.infer.pipeline_folder import PipelineFolder

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_adapter(asked: GenerateConfig) -> None:
    """Refuse an adapter that cannot be loaded.

    Raises:
        ValueError: there is no safetensors file of that name, or peft is missing.
    """
    if not asked.lora:
        return
    if not Path(asked.lora).is_file() or Path(asked.lora).suffix != ".safetensors":
        raise ValueError(f"generate.lora={asked.lora} must be a safetensors file, there is none of that name")
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"generate.lora={asked.lora} needs the package peft; run pip install peft")


def load_pipeline(folder: PipelineFolder, asked: GenerateConfig, device: torch.device, *, speaks: bool) -> Any:
    """The pipeline with its weights on a device.

    Args:
        folder: where it lies.
        asked: dtypes, tiling and adapter.
        device: where to.
        speaks: whether progress and warnings of the libraries are shown.

    Raises:
        ValueError: the adapter does not fit.
        OSError: a file is missing or damaged.
    """
    import diffusers
    import transformers

    if not speaks:
        for library in (diffusers, transformers):
            library.utils.logging.set_verbosity_error()
            library.utils.logging.disable_progress_bar()
    vae = asked.vae_dtype
    if vae == "auto":
        vae = "fp32" if folder.components["vae"][1] == "AutoencoderKLWan" else asked.dtype
    dtypes = {"default": _DTYPES[asked.dtype], "vae": _DTYPES[vae]}
    pipe = folder.pipeline_class.from_pretrained(
        str(folder.path), local_files_only=True, use_safetensors=True, **{diffusers_dtype_argument(): dtypes}
    )
    pipe.set_progress_bar_config(disable=True)
    if asked.lora:
        _load_adapter(pipe, asked)
    if asked.vae_tiling:
        if not hasattr(pipe.vae, "enable_tiling"):
            raise ValueError(f"generate.vae_tiling=true: {type(pipe.vae).__name__} decodes whole only; leave it out")
        pipe.vae.enable_tiling()
    return pipe.to(device)


def _load_adapter(pipe: Any, asked: GenerateConfig) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(asked.lora)
    except SafetensorError as error:
        raise ValueError(f"generate.lora={asked.lora} is not a whole safetensors file ({error})") from error
    try:
        # Read here, so that the loader of diffusers has no name to look up.
        pipe.load_lora_weights(weights, adapter_name="adapter")
        pipe.set_adapters("adapter", asked.lora_scale)
    except (KeyError, RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"generate.lora={asked.lora} does not fit {type(pipe).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
