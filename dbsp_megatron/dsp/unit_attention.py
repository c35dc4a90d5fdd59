"""Attention over one dim computed in (frame, head) units, where ranks are more than the entries of the other dims.

The stream, and with it q, k and v of a stage, stay cut as they are. Only q, k and v go to the ranks of their units, in
one all-to-all, and the output comes back in another: 4 M / N bytes for each rank in place of the 2 M / N of a switch
there and back, but any number of ranks has work, and masks of unequal density are balanced.

Source: DSP (arXiv:2403.10266), db-SP (arXiv:2511.23113). Differs: units of heads and the entries of the other dims are
balanced by dense blocks, in place of whole entries or whole heads, and cut at q-blocks where one is too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dbsp_megatron.attention.api import block_sparse_attention, check_qkv, softmax_scale
from dbsp_megatron.attention.dense import dense_attention
from dbsp_megatron.attention.engines import check_engine
from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import Belief, digest_int
from dbsp_megatron.dsp.group import DspGroup, as_dsp_group
from dbsp_megatron.dsp.layout import Coords, Layout, normal_dim
from dbsp_megatron.dsp.mesh import DspMesh
from dbsp_megatron.dsp.patterns import Pattern
from dbsp_megatron.dsp.primitives import AnyGroup, agreed, grad_belief, tag_for
from dbsp_megatron.dsp.tags import Tag, tag, tag_of
from dbsp_megatron.dsp.unit_exchange import carry
from dbsp_megatron.dsp.unit_plan import UnitPlan, UnitShape, mask_key, plans

_WHERE = "dsp.attend_units"


@torch.compiler.disable
def attend_units(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: AnyGroup,
    dim: int,
    *,
    cut_dim: int | None = None,
    length: int | None = None,
    mask: BlockMask | None = None,
    scale: float | None = None,
    tolerance: float = 0.1,
    block_size: int = 64,
    engine: str = "auto",
) -> Tensor:
    """Attention over `dim`, all other dims batch, each head of each batch entry computed on one rank; collective.

    Args:
        q: this rank's part [..., H, D] of one dim or more before the heads, such as [B, T, s, H, D]; may hold nothing.
        k: [..., Hkv, D], of the same places; query head h reads kv head h // (H / Hkv).
        v: [..., Hkv, Dv].
        group: the ranks that cut q, k and v along `cut_dim`.
        dim: the attended dim.
        cut_dim: the dim that is cut, heads excepted; `dim` if None.
        length: whole length of `cut_dim`, needed where q carries no tag because an operation made it.
        mask: pattern over the whole `dim`, equal on all ranks: batch 1, or one for each entry of the other dims in
            their order (whole ones, or what other axes leave of them to this group); it has H heads. None attends
            everything.
        scale: softmax scale, default D ** -0.5.
        tolerance: units are cut only if ranks else have more than this above the mean, as a fraction.
        block_size: tokens of the blocks at which units may be cut where there is no mask.
        engine: as in `block_sparse_attention`; "auto" without a mask is PyTorch's own attention.

    Returns:
        [..., H, Dv], cut as q is, tagged, with memory of its own. Gradients are exact; they are not scaled.

    Raises:
        ValueError: on every rank: tensors, mask or layout do not fit, or ranks disagree.
    """
    options = {"mask": mask, "scale": scale, "tolerance": tolerance, "block_size": block_size, "engine": engine}
    return _in_units((q, k, v), as_dsp_group(group), dim, cut_dim, length, plans.find, **options)  # type: ignore[arg-type]


def _in_units(
    qkv: Sequence[Tensor],
    where: DspGroup,
    dim: int,
    cut_dim: int | None,
    length: int | None,
    find: Callable[..., UnitPlan],
    *,
    check: bool = True,
    mask: BlockMask | None = None,
    scale: float | None = None,
    tolerance: float = 0.1,
    block_size: int = 64,
    engine: str = "auto",
) -> Tensor:
    """`attend_units` with a plan of the caller's; `check=False` where ranks are known to do the same."""
    q, k, v = qkv

    def prepare() -> tuple[Tag, UnitShape, BlockMask, float]:
        check_engine(engine)
        _check_tensors(q, k, v)
        attended = normal_dim(dim, q.dim() - 2, "dim")
        cut = attended if cut_dim is None else normal_dim(cut_dim, q.dim() - 2, "cut_dim")
        before = tag_for(q, where, cut, length, _WHERE)
        shape = _shape_in_group(q, k, v, before, where, attended, cut)
        pattern = mask
        if pattern is None:
            sizes = {"block_size_q": block_size, "block_size_k": block_size}
            pattern = BlockMask.dense(shape.heads, shape.num_places, device=q.device, **sizes)
        around = before.layout.gather(where.axis)
        _check_mask(pattern, shape, math.prod(around.shape[:-2]) // max(1, shape.num_places))
        if all(shape.lengths) and pattern.batch_size not in (1, shape.num_frames):
            pattern = _of_frames(pattern, around, attended, before.coords)
        if not (isinstance(tolerance, (int, float)) and 0 <= tolerance < float("inf")):
            raise ValueError(f"{_WHERE}: tolerance must be a number of at least 0, got {tolerance!r}: pass a fraction")
        return before, shape, pattern, softmax_scale(scale, shape.head_dim)

    def beliefs(found: tuple[Tag, UnitShape, BlockMask, float]) -> dict[str, Belief]:
        _, shape, pattern, factor = found
        sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim_v)
        options = (factor, float(tolerance), engine)
        return {
            "heads": Belief(digest_int(sizes), lambda: f"H, Hkv, D, Dv = {sizes}", "pass projections of one shape"),
            "the mask": Belief(
                digest_int(mask_key(pattern)),
                lambda: f"{pattern.num_heads} heads, density {pattern.density:.3f}",
                "pass one mask to all ranks",
            ),
            "options": Belief(
                digest_int(options), lambda: f"scale, tolerance, engine = {options}", "pass the same to all ranks"
            ),
            "requires_grad": grad_belief(torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))),
        }

    if check:
        found = agreed(where, _WHERE, q, prepare, lambda found: (found[0], "attention over", found[1].dim), beliefs)
    else:
        found = prepare()
    before, shape, pattern, factor = found
    if not all(shape.lengths):
        # Other axes left nothing to this group, and all of its ranks know.
        return tag(_nothing(q, k, v), _with_entries(before.layout, shape.head_dim_v), before.coords)
    plan = find(shape, pattern, float(tolerance), where.rank, q.device)
    flat = [x.reshape(-1, x.shape[-1]) for x in (q, k, v)]
    out = _attend(plan, shape, carry(plan.routes.into, where, True, *flat), factor, engine)
    (home,) = carry(plan.routes.back, where, False, out)
    home = home.view(*q.shape[:-1], shape.head_dim_v)
    return tag(home, _with_entries(before.layout, shape.head_dim_v), before.coords)


def attend_over(
    qkv: Sequence[Tensor],
    pattern: Pattern,
    over: str,
    on_grid: Layout,
    grid: tuple[str, ...],
    mesh: DspMesh,
    find: Callable[..., UnitPlan],
    options: Mapping[str, Any],
) -> Tensor:
    """`DspRun.attend` of opened tensors: attention over a grid dim, in units if it is cut.

    Ranks compare masks; what else they do is what the plan of the pass says, on which they agreed.

    Args:
        qkv: q, k, v, one dim for each name.
        pattern: names of their dims.
        over: the attended dim.
        on_grid: how they are cut.
        grid: names of the grid.
        mesh: the axes.
        find: as `plans.find`.
        options: of `attend_units`, and `check`, whether ranks compare their calls: if there is a mask, by default.

    Raises:
        ValueError: the pattern lacks the dim or ends with dims of the grid, or `attend_units` refuses the call.
    """
    names = pattern.names
    if over not in names[:-2] or over not in grid or set(names[-2:]) & set(grid):
        raise ValueError(
            f"dsp: attend over {over!r} needs a pattern with this grid dim, heads and entries last, got "
            f"{pattern.text!r} and the grid {list(grid)}: write it like 'B T S H D'"
        )
    dim = names.index(over)
    cutting = [axis for axis in on_grid.shards[grid.index(over)] if axis.size > 1]
    layouts = [pattern.layout(tuple(x.shape), grid, on_grid) for x in qkv]
    # Objects of their own, as tensors of the caller may have tags that say the same with other words.
    parts = [tag(x.view_as(x), layout, mesh.coords) for x, layout in zip(qkv, layouts, strict=True)]
    given = dict(options)
    check = given.pop("check", given.get("mask") is not None)
    if cutting:
        return _in_units(parts, mesh.groups[cutting[-1].name], dim, None, None, find, check=check, **given)
    return _attend_here(parts, dim, layouts[0], mesh.coords, **given)


def _attend_here(
    qkv: Sequence[Tensor],
    dim: int,
    layout: Layout,
    coords: Coords,
    *,
    mask: BlockMask | None = None,
    scale: float | None = None,
    tolerance: float = 0.1,
    block_size: int = 64,
    engine: str = "auto",
) -> Tensor:
    """Attention over a dim that is whole here, options as in `attend_units`."""
    q, k, v = qkv
    _check_tensors(q, k, v)
    heads, places = q.shape[-2], q.shape[dim]
    lengths = layout.shape[:-2]
    whole = UnitShape(lengths, dim, dim, (places,), heads, k.shape[-2], q.shape[-1], v.shape[-1])
    check_engine(engine)
    factor = softmax_scale(scale, q.shape[-1])
    if mask is None:
        mask = BlockMask.dense(heads, places, block_size_q=block_size, block_size_k=block_size, device=q.device)
    _check_mask(mask, whole, whole.num_frames)
    if not q.numel():
        return _nothing(q, k, v)
    if mask.batch_size > 1:
        # Frames of the mask are counted in the whole.
        mask = _of_frames(mask, layout, dim, coords)
    moved = [x.movedim(dim, -3) for x in qkv]
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in moved)
    out = _attention(query, key, value, mask, factor, engine)
    return out.reshape(*moved[0].shape[:-1], -1).movedim(-3, dim)


def _of_frames(mask: BlockMask, layout: Layout, dim: int, coords: Coords) -> BlockMask:
    """The masks of the frames in a layout [..., heads, D], of those of all frames."""
    others = [at for at in range(len(layout.shape) - 2) if at != dim]
    blocks = mask.blocks.unflatten(0, [layout.shape[at] for at in others])
    for place, at in enumerate(others):
        here = layout.positions(at, coords)
        blocks = blocks.narrow(place, here.start, len(here))
    blocks = blocks.flatten(0, len(others) - 1)
    return BlockMask(blocks, mask.block_size_q, mask.block_size_k, mask.seqlen_q, mask.seqlen_k)


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output where no place is held; a part of the graph, as the backward pass is collective."""
    return (q.sum() + k.sum() + v.sum()).to(q.dtype) + q.new_zeros(*q.shape[:-1], v.shape[-1])


def _with_entries(layout: Layout, width: int) -> Layout:
    """The layout with other entries of a head."""
    return Layout((*layout.shape[:-1], width), layout.shards)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, engine: str) -> Tensor:
    """[B, S, H, D] attention: by PyTorch's own kernels where everything is attended to and no engine is named."""
    if mask.made_dense and engine == "auto":
        # In the dtype that was exchanged, and is on the way back: a rank without units casts nothing.
        with torch.autocast(q.device.type, enabled=False):
            return dense_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale).transpose(1, 2)
    return cast(Tensor, block_sparse_attention(q, k, v, mask, scale, return_lse=False, engine=engine))


def unit_plan_of(
    lengths: tuple[int, ...], dim: int, num_ranks: int, heads: int, *, kv_heads: int | None = None,
    mask: BlockMask | None = None, tolerance: float = 0.1, block_size: int = 64,
) -> UnitPlan:  # fmt: skip
    """The plan of `attend_units` for any number of ranks, without them: for predictions.

    Args:
        lengths: whole lengths of all dims before the heads.
        dim: the attended dim, which is taken as cut.
        num_ranks: ranks.
        heads: query heads.
        kv_heads: K/V heads, default as many.
        mask: as there.
        tolerance: as there.
        block_size: as there.
    """
    base, extra = divmod(lengths[dim], num_ranks)
    pieces = tuple(base + (rank < extra) for rank in range(num_ranks))
    shape = UnitShape(tuple(lengths), dim, dim, pieces, heads, kv_heads or heads, 1, 1)
    if mask is None:
        mask = BlockMask.dense(heads, lengths[dim], block_size_q=block_size, block_size_k=block_size)
    return UnitPlan(shape, mask, tolerance, 0, torch.device("cpu"))


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() < 3 or x.dim() != q.dim() or x.shape[:-2] != q.shape[:-2]:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{_WHERE}: q, k and v must be tensors [..., heads, D] of the same places, got {name}={got} beside "
                f"q={list(q.shape)}: pass this rank's parts in one layout"
            )
        known, first = tag_of(x), tag_of(q)
        if known is not None and first is not None and known.layout.shards != first.layout.shards:
            raise ValueError(f"{_WHERE}: {name} is in layout {known.layout}, q in {first.layout}: pass one layout")
    # Shapes without places: some ranks hold none.
    check_qkv(*(x.new_empty((1, 1, *x.shape[-2:])) for x in (q, k, v)))


def _shape_in_group(q: Tensor, k: Tensor, v: Tensor, before: Tag, group: DspGroup, dim: int, cut_dim: int) -> UnitShape:
    """Sizes as the ranks of the group see them: what other axes cut counts as whole, but not the attended dim."""
    layout = before.layout
    # Raises if the axis is not the innermost one of its dim.
    if layout.dim_of(group.axis) != cut_dim:
        raise ValueError(
            f"{_WHERE}: layout {layout} is not cut along dim {cut_dim} by axis {group.axis.name!r}: pass the dim that "
            "the group cuts as cut_dim="
        )
    if left := layout.gather(group.axis).shards[dim]:
        raise ValueError(
            f"{_WHERE}: the attended dim {dim} of layout {layout} is cut by {', '.join(axis.name for axis in left)} "
            "too; expected this group alone: gather or switch the other axes before"
        )
    pieces = layout.pieces(cut_dim, group.axis, before.coords)
    lengths = [sum(pieces) if at == cut_dim else n for at, n in enumerate(q.shape[:-2])]
    if not all(layout.shape[:-2]):
        whole = list(layout.shape[:-2])
        raise ValueError(f"{_WHERE}: no dim may be empty as a whole, got {whole}: leave such a call out")
    return UnitShape(
        tuple(lengths), dim, cut_dim, pieces, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    )  # fmt: skip


def _check_mask(mask: BlockMask, shape: UnitShape, all_frames: int) -> None:
    if not isinstance(mask, BlockMask):
        raise ValueError(f"{_WHERE}: mask must be a BlockMask or None, got {type(mask).__name__}")
    if mask.num_heads != shape.heads or {mask.seqlen_q, mask.seqlen_k} != {shape.num_places}:
        raise ValueError(
            f"{_WHERE}: mask is for {mask.num_heads} heads, seqlen_q={mask.seqlen_q} and seqlen_k={mask.seqlen_k}; "
            f"expected {shape.heads} heads and {shape.num_places} on both sides, the whole length of dim {shape.dim}"
        )
    if mask.batch_size not in (1, shape.num_frames, all_frames):
        raise ValueError(
            f"{_WHERE}: mask has batch size {mask.batch_size}, expected 1 or {all_frames}, one for each entry of the "
            "other dims: repeat it"
        )


def _attend(plan: UnitPlan, shape: UnitShape, qkv: tuple[Tensor, ...], scale: float, engine: str) -> Tensor:
    """Outputs [rows, Dv] of this rank's units from rows of q, k and v."""
    q = qkv[0]
    k, v = (x.view(plan.routes.num_kv_units, shape.num_places, x.shape[-1]) for x in qkv[1:])
    outs, row = [], 0
    for call, mask, which in plan.calls:
        num, length = len(call.units), mask.seqlen_q
        # Units are the heads of one attention.
        query = q[row : row + num * length].view(1, num, length, -1).transpose(1, 2)
        key, value = k, v
        if which is not None:
            key, value = k.index_select(0, which), v.index_select(0, which)
        out = _attention(query, key[None].transpose(1, 2), value[None].transpose(1, 2), mask, scale, engine)
        outs.append(out.transpose(1, 2).reshape(num * length, shape.head_dim_v))
        row += num * length
    if not outs:
        # Nothing to compute, but a part of the graph: the backward pass is collective.
        return (q.sum() + k.sum() + v.sum()).to(q.dtype) + q.new_zeros(0, shape.head_dim_v)
    return torch.cat(outs) if len(outs) > 1 else outs[0]
