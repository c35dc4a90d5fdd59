"""Mistakes of one rank or of a user's mask method: the same error everywhere, nothing finite and wrong, no waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import BlockSummary, MaskMethod
from tests.harness import run_ranks


class _BrokenMask(MaskMethod):
    """Gives something else than the mask that it should, on one rank or on all."""

    name = "broken"

    def __init__(self, kind: str, only: int | None) -> None:
        self.kind, self.only = kind, only

    def predict(self, q_summary: BlockSummary, k_summary: BlockSummary, layer: int, step: int, grid: Any) -> Any:
        shape = (q_summary.batch, q_summary.num_heads, len(q_summary.blocks), len(k_summary.blocks))
        good = torch.ones(shape).bool()
        if self.only not in (None, dist.get_rank()):
            return good
        if self.kind == "raises":
            raise KeyError("a user's bug")
        return {"one head": good[:, :1], "float": good * 0.4, "none": None, "short": good[..., :-1]}[self.kind]


def _broken_methods(rank: int, world_size: int) -> list[str]:
    sp = SequenceParallel(SequenceParallelConfig(ulysses_degree=2, ring_degree=world_size // 2, block_size=4))
    layout = sp.layout(23)
    q = torch.randn(1, layout.num_local, 4, 8)
    messages = []
    for kind in ("one head", "float", "none", "short", "raises"):
        for only in (None, 1):
            with pytest.raises(ValueError, match="mask method broken") as error:
                sp.attention(q, q, q, mask=_BrokenMask(kind, only))
            messages.append(str(error.value))
    sp.attention(q, q, q)
    return messages


def test_a_broken_mask_method_is_refused_on_every_rank() -> None:
    """Also when it is broken on one rank only: nobody waits, nothing finite and wrong comes out (Trap B65)."""
    messages = run_ranks(_broken_methods, 4)
    assert all(texts == messages[0] for texts in messages)
    assert "(1, 4, " in messages[0][0]
    assert "a user's bug" in messages[0][-1]


def _one_sided(rank: int, world_size: int) -> list[str]:
    sp = SequenceParallel(SequenceParallelConfig(ulysses_degree=world_size, block_size=4))
    layout = sp.layout(23)
    q = torch.randn(1, layout.num_local, 4, 8)
    messages = []
    for mine, scale, dim in ((None, None, 8), (q.clone().requires_grad_(), None, 8), (q, 0.5, 8), (q, None, 4)):
        first = mine if rank == 1 else q
        try:
            if dim == 4:
                layout.gather(q[..., :dim] if rank == 1 else q)
            else:
                sp.attention(first, q, q, scale=scale if rank == 1 else None)  # type: ignore[arg-type]
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    sp.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        sp.attention(q, q, q)
    return messages


def test_one_sided_mistakes_end_on_all_ranks() -> None:
    """No tensor at all, gradients on one rank, another scale, another shape to gather (Traps B65, B67)."""
    messages = run_ranks(_one_sided, 3)
    assert all(texts == messages[0] for texts in messages)
    for text, word in zip(messages[0], ("NoneType", "gradients", "scale", "shape"), strict=True):
        assert word in text


def _ambiguous(rank: int, world_size: int) -> None:
    sp = SequenceParallel(SequenceParallelConfig(ulysses_degree=1))
    first, _ = sp.layout(64, 4), sp.layout(64, 8)
    q = torch.randn(1, first.num_local, 2, 8, requires_grad=True)
    with pytest.raises(ValueError, match="2 token layouts fit"):
        sp.attention(q, q, q, mask=BlockMask.dense(2, 64, block_size_q=4, block_size_k=4))
    out = sp.attention(q, q, q, layout=first)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.pow(2).sum().backward()


def test_ambiguous_layouts_and_double_backward_are_refused() -> None:
    """A guess between two token orders, or a dropped second derivative, would be finite and wrong."""
    run_ranks(_ambiguous, 2)
