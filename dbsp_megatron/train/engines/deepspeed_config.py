"""DeepSpeed's configuration of a run: a user's JSON, and what the run itself decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.config.sections import LoopConfig

_NO_CLIPPING = 1e30
_REFUSED = {
    "optimizer": "optim.*",
    "scheduler": "optim.*",
    "sequence_parallel_size": "sp.*",
    "data_parallel_size": "the number of processes",
    "tensor_parallel": "parallel.tensor_parallel_size",
    "fp16": "train.precision (fp32 or bf16)",
    "torch_autocast": "train.precision (fp32 or bf16)",
}
_SWITCHES = ("fp16", "torch_autocast", "tensor_parallel")
"""Sections that say nothing while they are off."""


def build_deepspeed_config(
    loop: LoopConfig, parallel: ParallelConfig, *, dp_size: int, data_size: int
) -> dict[str, Any]:
    """What `deepspeed.initialize` is given.

    Args:
        loop: batch sizes, clipping, precision.
        parallel: ZeRO stage, and the user's JSON file if there is one.
        dp_size: groups of ranks with different samples.
        data_size: data and sequence ranks.

    Raises:
        ValueError: the file cannot be read, or says something else than the run.
    """
    settings = _read(parallel.deepspeed_config) if parallel.deepspeed_config else {}
    if parallel.zero_stage == 0 and loop.precision == "bf16":
        raise ValueError(
            "parallel.zero_stage=0 does not go with train.precision=bf16: DeepSpeed gives no access to its master "
            "weights then, so nothing could be saved; use parallel.zero_stage=1"
        )
    for key, ours in _REFUSED.items():
        if _says_something(key, settings.get(key)):
            raise ValueError(f"parallel.deepspeed_config: {key} is set by {ours} here; remove it from the file")
    micro_batches = loop.global_batch_size // (dp_size * loop.micro_batch_size)
    decided: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": loop.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        # DeepSpeed counts sequence ranks as data ranks here.
        "train_batch_size": loop.micro_batch_size * micro_batches * data_size,
        # 0 would leave the norm unmeasured.
        "gradient_clipping": loop.grad_clip or _NO_CLIPPING,
    }
    for key, value in decided.items():
        given = settings.get(key, "auto")
        if given not in ("auto", value) and not (key == "gradient_clipping" and given == loop.grad_clip):
            raise ValueError(
                f"parallel.deepspeed_config: {key}={given} contradicts this run, which has {value}; remove it from the "
                'file, write "auto", or change train.global_batch_size, train.micro_batch_size or train.grad_clip'
            )
    zero = _section(settings, "zero_optimization")
    if zero.get("stage", "auto") not in ("auto", parallel.zero_stage):
        raise ValueError(
            f"parallel.deepspeed_config: zero_optimization.stage={zero['stage']} contradicts "
            f"parallel.zero_stage={parallel.zero_stage}; set one of them"
        )
    bf16 = _section(settings, "bf16")
    wanted = loop.precision == "bf16"
    if bf16.get("enabled", "auto") not in ("auto", wanted):
        raise ValueError(
            f"parallel.deepspeed_config: bf16.enabled={bf16['enabled']} contradicts train.precision={loop.precision}; "
            "set one of them"
        )
    return {
        "zero_allow_untested_optimizer": True,
        # Offloaded state is stepped by torch's AdamW on the CPU; DeepSpeed's own would have to be compiled.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **settings,
        **decided,
        "zero_optimization": zero | {"stage": parallel.zero_stage},
        "bf16": bf16 | {"enabled": wanted},
    }


def _section(settings: dict[str, Any], key: str) -> dict[str, Any]:
    value = settings.get(key, "auto")
    if value == "auto":
        return {}
    if not isinstance(value, dict):
        raise ValueError(f'parallel.deepspeed_config: {key} must be an object or "auto", got {value!r}; remove it')
    return dict(value)


def _says_something(key: str, value: Any) -> bool:
    if key in _SWITCHES and isinstance(value, dict):
        return value.get("enabled", key == "tensor_parallel") not in (False, "auto")
    return bool(value) and value != "auto"


def _read(path: str) -> dict[str, Any]:
    try:
        settings = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"parallel.deepspeed_config={path} must be a JSON file: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"parallel.deepspeed_config={path} must hold a JSON object, got {type(settings).__name__}")
    return settings
