"""parallelize: a transformer of diffusers, or a pipeline, under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import Belief, agree, digest_int
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.models.diffusers.checks import check_installable, find_table
from dbsp_megatron.models.diffusers.cogvideox import COGVIDEOX
from dbsp_megatron.models.diffusers.flux import FLUX
from dbsp_megatron.models.diffusers.guidance import NUM_BRANCHES
from dbsp_megatron.models.diffusers.handle import ParallelTransformers
from dbsp_megatron.models.diffusers.hunyuan_video import HUNYUAN_VIDEO
from dbsp_megatron.models.diffusers.table import TransformerTable
from dbsp_megatron.models.diffusers.wan import WAN
from dbsp_megatron.strategy import SequenceParallel

TABLES: tuple[TransformerTable, ...] = (WAN, COGVIDEOX, HUNYUAN_VIDEO, FLUX)
SUPPORTED = tuple(table.class_name for table in TABLES)
"""Classes of diffusers that can be parallel."""
_COMPONENTS = ("transformer", "transformer_2")


def parallelize(
    transformer_or_pipe: Any,
    sp: SequenceParallel,
    mask: BlockMask | MaskMethod | None = None,
    guidance_group: dist.ProcessGroup | None = None,
) -> ParallelTransformers:
    """Split the sequence of a transformer over the ranks of `sp`, in place and until undone.

    Every rank holds the whole transformer and calls it (or the pipeline) alike, with the same inputs; all get the whole
    output. Weights are not touched. Attention over the sequence runs on `sp`, with its engine; cross-attention stays as
    it is, on this rank alone.

    ```python
    with parallelize(pipe, sp, mask=SpargeMask()):
        video = pipe(prompt, generator=torch.Generator().manual_seed(0)).frames
    ```

    Args:
        transformer_or_pipe: a transformer of one of the classes SUPPORTED, or a pipeline that holds one (both experts
            of Wan 2.2). What replaces its modules, processors or hooks comes before (adapters, offloading); what wraps
            it comes after.
        sp: ranks and strategy.
        mask: which blocks are computed: a method, which is told the token grid; or a BlockMask over the sequence, text
            tokens of joint attention first; None for all. Blocks with text tokens are always computed.
        guidance_group: this rank and the one at its place in another `sp`, made by `split_guidance`: each of the two
            computes one branch of classifier-free guidance (or half of a batch). The first step of a pipeline that
            calls twice for a step is computed by both alike. None for no such split.

    Returns:
        The handle, a context manager; it is parallel from now on, entering does nothing more.

    Raises:
        ValueError: on every rank: the class is not supported, or something is on it that sequence parallelism cannot
            honour.
    """
    problem, found, kind = None, [], ""
    try:
        if not isinstance(sp, SequenceParallel):
            raise ValueError(f"sp must be a SequenceParallel, got {type(sp).__name__}")
        if mask is not None and not isinstance(mask, BlockMask | MaskMethod):
            raise ValueError(
                f"mask must be a BlockMask, a method of dbsp_megatron.masks or None, got {type(mask).__name__}"
            )
        kind = mask.describe() if isinstance(mask, MaskMethod) else type(mask).__name__
        _check_guidance_group(guidance_group, mask)
        found = _find(transformer_or_pipe)
    except ValueError as error:
        problem = str(error)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = f"{type(error).__name__}: {error}"
    if not isinstance(sp, SequenceParallel):
        # There is no group to tell the other ranks by.
        raise ValueError(problem)
    held = ", ".join(f"{table.class_name} of {len(table.attentions(x))} attentions" for x, table in found)
    beliefs = {
        "the transformers": Belief(digest_int(held), lambda: held, "load the same model on all ranks"),
        "the kind of mask": Belief(
            digest_int(kind), lambda: kind, "pass the same mask method and settings, or a BlockMask, on all ranks"
        ),
        "the halves of guidance": _half_belief(
            -1 if guidance_group is None else dist.get_rank(guidance_group),
            "pass the guidance_group that split_guidance made together with the group of sp",
        ),
    }
    if guidance_group is not None:
        both = {**beliefs, "the halves of guidance": _half_belief(0, "pass guidance_group on all ranks or on none")}
        problem = _agree_halves(problem, both, guidance_group)
    agree("parallelize", problem, beliefs, sp.groups.control_group)
    return ParallelTransformers(found, sp, mask, guidance_group)


def _check_guidance_group(group: dist.ProcessGroup | None, mask: BlockMask | MaskMethod | None) -> None:
    if group is None:
        return
    if group.size() != NUM_BRANCHES:
        raise ValueError(
            f"guidance_group must hold {NUM_BRANCHES} ranks, one for each branch, got {group.size()}; split_guidance "
            "makes it, and the group of sp"
        )
    if isinstance(mask, BlockMask) and mask.blocks.shape[0] > 1:
        raise ValueError(
            f"mask has {mask.blocks.shape[0]} samples, of which each half of the ranks would need its own: pass one "
            "for all samples, or leave guidance_group out"
        )


def _half_belief(half: int, remedy: str) -> Belief:
    return Belief(half, lambda: "no half" if half < 0 else f"half {half}", remedy)


def _agree_halves(problem: str | None, beliefs: dict[str, Belief], group: dist.ProcessGroup) -> str | None:
    try:
        agree("", problem, beliefs, group)
    except ValueError as error:
        return str(error)
    return None


def _find(given: Any) -> list[tuple[nn.Module, TransformerTable]]:
    """Transformers and their tables.

    Raises:
        ValueError: there is none, or one of them cannot be parallel.
    """
    if isinstance(given, nn.Module):
        parts = [given]
    else:
        parts = [part for part in (getattr(given, name, None) for name in _COMPONENTS) if part is not None]
        if not parts:
            raise ValueError(
                f"cannot parallelize a {type(given).__name__}: it has no {' or '.join(_COMPONENTS)}; supported are "
                f"{', '.join(SUPPORTED)}, and pipelines that hold one"
            )
    found = [(part, find_table(part, TABLES)) for part in parts]
    for part, table in found:
        check_installable(part, table)
    return found
