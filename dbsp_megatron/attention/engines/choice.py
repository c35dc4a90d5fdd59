"""Choice of the attention engine: by name, or the fastest that can run a class of calls, said once why."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .base import AttentionClass, Engine
from .triton import kernel_path

logger = logging.getLogger(__name__)

_CLASSES = {
    "torch": ("torch_reference", "TorchEngine"),
    "triton": ("triton", "TritonEngine"),
    "flash_attn_4": ("flash_attn_4", "FlashAttention4Engine"),
    "cudnn": ("cudnn_bsa", "CudnnBlockSparseEngine"),
    "flex": ("flex", "FlexEngine"),
}
"""Module of this package and class of every engine."""

ENGINES = ("auto", *_CLASSES)
"""Names that `engine=` takes."""

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True, kw_only=True)
class _Preference:
    """Engines in order of speed for some classes on CUDA; what is None fits everything."""

    engines: tuple[str, ...]
    capability: tuple[int, int] | None = None
    head_dims: tuple[int, ...] | None = None
    blocks: tuple[tuple[int, int], ...] | None = None

    def fits(self, call: AttentionClass) -> bool:
        return (
            (self.capability is None or self.capability == torch.cuda.get_device_capability(call.device))
            and (self.head_dims is None or call.head_dim in self.head_dims)
            and (self.blocks is None or (call.block_size_q, call.block_size_k) in self.blocks)
        )


# The first that fits counts. RESULTS.md has the figures; tools/bench_attention.py measures them.
_PREFERENCES = (
    _Preference(capability=(9, 0), engines=("triton",)),
    _Preference(engines=("triton",)),
)

_said: set[str] = set()


def check_engine(name: str) -> None:
    """Check the name alone; whether the engine is installed and fits shows when it is used.

    Raises:
        ValueError: unknown name.
    """
    if name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}: use 'auto'")


@cache
def engine_named(name: str) -> Engine:
    """The engine called `name` (not "auto"), one instance in a process.

    Raises:
        ValueError: unknown name.
    """
    check_engine(name)
    if name == "auto":
        raise ValueError("engine must be the name of one engine, got 'auto': call choose_engine")
    module, class_name = _CLASSES[name]
    engine: Engine = getattr(importlib.import_module(f".{module}", __package__), class_name)()
    return engine


def attention_class(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size_q: int,
    block_size_k: int,
    *,
    batch_masks: bool,
    backward: bool,
    deterministic: bool,
    resume: bool = False,
) -> AttentionClass:
    """Class of a call on these tensors.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D]; with another number of heads than q the class is grouped.
        v: [B, Sk, Hkv, Dv].
        block_size_q: tokens per q-block.
        block_size_k: tokens per k-block.
        batch_masks: samples have masks of their own.
        backward: gradients will be asked for.
        deterministic: gradients must repeat bitwise.
        resume: parts of K and V are added to one state.
    """
    return AttentionClass(
        device=q.device,
        dtype=q.dtype,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        block_size_q=block_size_q,
        block_size_k=block_size_k,
        grouped=q.shape[2] != k.shape[2],
        batch_masks=batch_masks,
        backward=backward,
        deterministic=deterministic,
        resume=resume,
    )


@cache
def choose_engine(name: str, call: AttentionClass) -> Engine:
    """Engine called `name`, or the one that `auto` takes for a class; decided once, the choice of `auto` logged once.

    Raises:
        ValueError: unknown name, or the named engine cannot run this class.
    """
    check_engine(name)
    if name != "auto":
        if (reason := engine_named(name).refusal(call)) is not None:
            raise ValueError(
                f"engine={name!r} cannot run {_in_words(call)}: {reason}; use engine='auto', which takes "
                f"{next(_able(call)).name} here"
            )
        return engine_named(name)
    chosen = next(_able(call))
    skipped = []
    for other in _order(call):
        if other == chosen.name:
            break
        skipped.append(f"{other}: {engine_named(other).refusal(call)}")
    # The engine that takes all is tens of times slower on a GPU; fp64 is there for checks.
    slow = chosen.name == "torch" and call.device.type == "cuda" and call.dtype != torch.float64
    how = kernel_path(call) if chosen.name == "triton" else getattr(chosen, "description", "")
    _say_once(
        logging.WARNING if slow else logging.INFO,
        f"attention engine for {_in_words(call)}: {chosen.name}"
        + (f" ({how})" if how else "")
        + (f"; not {'; not '.join(skipped)}" if skipped else "")
        + ("; this is slow: pad the head dim with zeros and keep the scale, or take other blocks" if slow else ""),
    )
    return chosen


def engine_for_tensors(name: str, call: AttentionClass, q: Tensor, k: Tensor, v: Tensor) -> Engine:
    """`choose_engine`, or where `auto` chose one that cannot read these tensors, the next one that can.

    Raises:
        ValueError: as `choose_engine`, or the named engine cannot read these tensors.
    """
    engine = choose_engine(name, call)
    reason = engine.refuses_tensors(q, k, v)
    if reason is None:
        return engine
    remedy = "call .contiguous() on it"
    if name != "auto":
        raise ValueError(f"engine={name!r} cannot read these tensors: {reason}; {remedy}, or use engine='auto'")
    other = next(x for x in _able(call) if x is not engine and x.refuses_tensors(q, k, v) is None)
    _say_once(
        logging.WARNING,
        f"attention engine {engine.name} cannot read the tensors of a call ({reason}): {other.name} runs it, which may "
        f"be slower; {remedy}",
    )
    return other


def engine_reading(engine: Engine, q: Tensor, k: Tensor, v: Tensor) -> Engine:
    """An engine that was chosen for a class, or one of ours where it cannot read these tensors of the class.

    Ranks may differ in it: what they send one another does not depend on the engine.
    """
    reason = engine.refuses_tensors(q, k, v)
    if reason is None:
        return engine
    names = ("triton", "torch") if q.is_cuda and q.dtype != torch.float64 else ("torch",)
    others = (engine_named(name) for name in names if name != engine.name)
    other = next(x for x in others if x.refuses_tensors(q, k, v) is None)
    _say_once(
        logging.WARNING,
        f"attention engine {engine.name} cannot read the tensors of a rank ({reason}): {other.name} runs it there",
    )
    return other


def _order(call: AttentionClass) -> tuple[str, ...]:
    """Names in the order in which `auto` tries them; the last one runs everything."""
    if call.device.type != "cuda":
        return ("torch",)
    return (*next(x for x in _PREFERENCES if x.fits(call)).engines, "torch")


def _able(call: AttentionClass) -> Iterator[Engine]:
    """Engines that can run a class, the preferred one first."""
    return (engine_named(name) for name in _order(call) if engine_named(name).refusal(call) is None)


def _in_words(call: AttentionClass) -> str:
    dtype = _DTYPE_NAMES.get(call.dtype, str(call.dtype))
    dims = f"D{call.head_dim}" + ("" if call.head_dim_v == call.head_dim else f"/{call.head_dim_v}")
    return f"{dtype} {dims} {call.block_size_q}x{call.block_size_k} on {call.device.type}"


def _say_once(level: int, line: str) -> None:
    if line not in _said:
        _said.add(line)
        logger.log(level, line)
