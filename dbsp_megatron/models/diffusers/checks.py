"""What cannot be parallel is refused: wrappers, foreign processors, compiled modules, caches whose ranks would part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dbsp_megatron.models.diffusers.processor import SequenceParallelProcessor
from dbsp_megatron.models.diffusers.table import TransformerTable

_REMEDIES = {
    "OptimizedModule": "pass the module that was compiled (its _orig_mod), and compile its blocks",
    "DistributedDataParallel": "pass its .module",
    "FullyShardedDataParallel": "use fully_shard, or parallelize the module before it is wrapped",
    "PeftModel": "load the adapter with transformer.add_adapter or load_lora_adapter",
}
# Hooks of diffusers on blocks and attention that do the same on all ranks, or nothing to the tokens.
_HARMLESS_HOOKS = (
    "group_offloading",
    "layer_execution_tracker",
    "lazy_prefetch_group_offloading",
    "layerwise_casting",
    "peft_autocast_disable",
)
# Feature caches that count calls to decide, and so decide alike on all ranks.
_CACHES = (
    "faster_cache_block",
    "faster_cache_denoiser",
    "mag_cache_block_hook",
    "mag_cache_leader_block_hook",
    "pyramid_attention_broadcast",
    "taylorseer_cache",
)


def find_table(transformer: Any, tables: tuple[TransformerTable, ...]) -> TransformerTable:
    """The table of a transformer's class, or of the class that it inherits its forward from.

    Raises:
        ValueError: there is none.
    """
    kind: Any = type(transformer)
    by_name = {table.class_name: table for table in tables}
    for base in kind.__mro__:
        if base.__name__ in by_name and base.__module__.startswith("diffusers.") and kind.forward is base.forward:
            return by_name[base.__name__]
    remedies = [_REMEDIES[base.__name__] for base in kind.__mro__ if base.__name__ in _REMEDIES]
    remedy = remedies[0] if remedies else f"supported are {', '.join(by_name)}, and pipelines that hold one"
    raise ValueError(f"cannot parallelize a {kind.__name__}: {remedy}")


def check_installable(transformer: nn.Module, table: TransformerTable) -> None:
    """Refuse a transformer whose processors or groups are somebody else's.

    Raises:
        ValueError: they are.
    """
    if getattr(transformer, "_parallel_config", None) is not None:
        raise ValueError(
            f"{table.class_name} has parallelism of diffusers enabled: load it without enable_parallelism, one kind of "
            "sequence parallelism is enough"
        )
    attentions = table.attentions(transformer)
    if not attentions:
        raise ValueError(f"{table.class_name} has no blocks: load it whole on every rank")
    for layer, attention in enumerate(attentions):
        processor = attention.processor
        if isinstance(processor, SequenceParallelProcessor):
            raise ValueError(f"this {table.class_name} is parallel already: leave the other parallelize first")
        if type(processor).__name__ not in table.stock_processors:
            raise ValueError(
                f"attention layer {layer} of {table.class_name} has the processor {type(processor).__name__}, ours "
                f"do what {' and '.join(table.stock_processors)} does: set that (unload IP adapters) and try again"
            )


def check_runnable(
    transformer: nn.Module,
    table: TransformerTable,
    processors: list[SequenceParallelProcessor],
    hooked: Mapping[str, nn.Module],
    gradients: bool,
) -> bool:
    """Refuse what was done to a transformer since, and what it cannot do.

    Args:
        transformer: with our processors.
        table: its table.
        processors: those that were set, by layer.
        hooked: modules with our hooks, by path.
        gradients: whether gradients are on.

    Returns:
        Whether a feature cache is on, which keeps tensors of this rank's tokens between calls.

    Raises:
        ValueError: it cannot run.
    """
    cached = bool(getattr(transformer, "is_cache_enabled", False))
    modules = dict(transformer.named_modules())
    for path, module in hooked.items():
        if modules.get(path) is not module:
            raise ValueError(
                f"module {path} of {table.class_name} was replaced while it is parallel, which takes our hook off it: "
                "load, add and remove adapters before parallelize"
            )
    blocks, attentions = table.blocks(transformer), table.attentions(transformer)
    for layer, (attention, processor) in enumerate(zip(attentions, processors, strict=True)):
        if attention.processor is not processor:
            raise ValueError(
                f"attention layer {layer} of {table.class_name} was given the processor "
                f"{type(attention.processor).__name__} while it is parallel, and would see its own tokens only: set "
                "processors, adapters and fused projections before parallelize"
            )
    if getattr(transformer, "_compiled_call_impl", None) is not None:
        raise ValueError(
            f"{table.class_name} is compiled as a whole, and exchanges between ranks cannot be: compile its blocks, "
            "with compile_repeated_blocks() or block.compile(), without fullgraph=True"
        )
    for module in (transformer, *blocks, *attentions):
        for name, hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).items():
            cached = cached or name in _CACHES
            if getattr(getattr(hook, "config", None), "calibrate", False):
                raise ValueError(
                    "MagCache calibrates: it would measure the ratios of this rank's tokens alone. Calibrate without "
                    "parallelize and pass mag_ratios"
                )
            if name not in _HARMLESS_HOOKS + _CACHES:
                raise ValueError(
                    f"{type(module).__name__} has the hook {name!r} of diffusers: each rank would decide by its own "
                    "tokens, or the hook would do nothing. Disable it; caches that count steps work: pyramid attention "
                    "broadcast, FasterCache, MagCache, TaylorSeer"
                )
    if gradients and getattr(transformer, "gradient_checkpointing", False):
        raise ValueError(
            f"{table.class_name} has gradient checkpointing on, which would call attention again out of its forward: "
            "call disable_gradient_checkpointing(), or use torch.no_grad()"
        )
    return cached


def check_guidance(cached: bool, gradients: bool) -> None:
    """Refuse what ranks cannot do while each half of them computes one branch of guidance.

    Raises:
        ValueError: it cannot run.
    """
    if cached:
        raise ValueError(
            "a feature cache is on, which would mix what it keeps of the two branches of guidance: disable it, or "
            "leave guidance_group out"
        )
    if gradients:
        raise ValueError(
            "gradients are on, and branches of guidance on other ranks have none: use torch.no_grad(), or leave "
            "guidance_group out"
        )
