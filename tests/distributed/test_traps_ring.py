"""Traps of the ring: backward of rotated keys, empty steps, precision that must not fall with the ring's size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron import BlockMask, block_sparse_attention
from tests.distributed.sharded import check, make_sp, random_problem, sharded_gradients
from tests.harness import run_ranks
from tests.reference import FP32_ATOL, Gradients, attention_gradients, expand_blocks, random_qkv


def _backward(rank: int, world_size: int) -> None:
    for strategy in ("ring", "usp", "dbsp"):
        sp = make_sp(strategy, 1, world_size)
        for layer, dense in enumerate((True, False)):
            inputs, mask, want = random_problem(layer, 20, 3, 4, dense=dense)
            check(sharded_gradients(sp, inputs, mask, 4, layer=layer), want, FP32_ATOL, f"{strategy} dense={dense}")


@pytest.mark.parametrize("ring_degree", [2, 3])
def test_backward_uses_the_keys_of_each_step(ring_degree: int) -> None:
    """dq, dk and dv, not only the output, equal the reference (Trap B17)."""
    run_ranks(_backward, ring_degree)


def _empty_steps(rank: int, world_size: int) -> None:
    num_blocks = 7
    masks = {"anti-diagonal": torch.eye(num_blocks, dtype=torch.bool).flip(1)}
    for column in (0, num_blocks - 1):
        masks[f"only column {column}"] = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
        masks[f"only column {column}"][:, column] = True
    masks["one row"] = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
    masks["one row"][3] = True
    masks["nothing"] = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
    inputs = random_qkv(1, 1, 26, 2, 8)
    for strategy in ("ring", "dbsp"):
        sp = make_sp(strategy, 1, world_size)
        for layer, (name, pattern) in enumerate(masks.items()):
            blocks = torch.stack([pattern, pattern.roll(1, 0)])[None]
            mask = BlockMask(blocks, 4, 4, 26, 26)
            want = attention_gradients(*inputs[:3], expand_blocks(blocks, 4, 4, 26, 26), inputs[3])
            got = sharded_gradients(sp, inputs, mask, 4, layer=layer)
            assert all(bool(x.isfinite().all()) for x in (got.out, got.dq, got.dk, got.dv)), name
            check(got, want, FP32_ATOL, f"{strategy} {name}")
            unseen = ~blocks.any(-1)[0].repeat_interleave(4, dim=1)[:, :26].T
            assert not bool(got.out[0][unseen].any()), name
            assert not bool(got.dq[0][unseen].any()), name


@pytest.mark.parametrize("ring_degree", [2, 3, 4])
def test_steps_without_a_key_merge_to_the_identity(ring_degree: int) -> None:
    """Rows that see keys in one step, in the last step only, or in none: finite, exact zeros where empty (Trap B11)."""
    run_ranks(_empty_steps, ring_degree)


def _projection(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 26, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(16, 3 * 2 * 8, generator=generator, dtype=torch.float64) / 4
    dout = torch.randn(2, 26, 2, 8, generator=generator, dtype=torch.float64)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()[None, None].expand(1, 2, 7, 7)
    for name, blocks in (("causal", causal), ("full", torch.ones_like(causal))):
        wide = weight.clone().requires_grad_()
        q, k, v = (x @ wide).unflatten(-1, (3, 2, 8)).unbind(2)
        parts = attention_gradients(q, k, v, expand_blocks(blocks, 4, 4, 26, 26), dout)
        (want,) = torch.autograd.grad((q, k, v), wide, (parts.dq, parts.dk, parts.dv))
        for u, r in [(u, world_size // u) for u in range(1, world_size + 1) if world_size % u == 0]:
            sp = make_sp("dbsp", u, r)
            layout = sp.layout(26, block_size=4)
            leaf = weight.float().requires_grad_()
            local = layout.shard(x).float()
            q, k, v = (local @ leaf).unflatten(-1, (3, 2, 8)).unbind(2)
            out = sp.attention(q, k, v, mask=BlockMask(blocks, 4, 4, 26, 26), layer=0, layout=layout)
            (grad,) = torch.autograd.grad((out * layout.shard(dout).float()).sum(), leaf)
            dist.all_reduce(grad)
            relative = (grad.double() - want).norm() / want.norm()
            assert relative <= 1e-5, f"{name} U{u}R{r}: {relative}"
            sp.destroy()


@pytest.mark.parametrize("world_size", [2, 4])
def test_projection_weight_gradient_summed_over_ranks(world_size: int) -> None:
    """The qkv weight's gradient, summed over ranks, is the single process's: no stray factor (Traps B19, B55)."""
    run_ranks(_projection, world_size)


def _mean_errors(got: Gradients, want: Gradients) -> dict[str, float]:
    names = ("out", "dq", "dk", "dv")
    return {name: float((getattr(got, name).double() - getattr(want, name)).abs().mean()) for name in names}


def _precision(rank: int, world_size: int) -> dict[str, Any]:
    q, k, v, dout = random_qkv(0, 1, 512, 2, 16, dtype=torch.bfloat16)
    blocks = torch.ones(1, 2, 32, 32, dtype=torch.bool)
    mask = BlockMask(blocks, 16, 16, 512, 512)
    want = attention_gradients(q, k, v, None, dout)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _ = block_sparse_attention(*leaves, mask)
    single = Gradients(out.detach(), *torch.autograd.grad((out * dout).sum(), leaves))
    errors = {"single": _mean_errors(single, want)}
    for strategy in ("ring", "dbsp"):
        sp = make_sp(strategy, 1, world_size)
        errors[strategy] = _mean_errors(sharded_gradients(sp, (q, k, v, dout), mask, 16), want)
    return errors


@pytest.mark.parametrize("ring_degree", [2, 4, 8])
def test_bf16_error_does_not_grow_with_the_ring(ring_degree: int) -> None:
    """Partial results stay in fp32 and are rounded once: mean errors are within 1.2 times those of R = 1 (Trap B21)."""
    errors = run_ranks(_precision, ring_degree)[0]
    for strategy in ("ring", "dbsp"):
        for name, error in errors[strategy].items():
            assert error <= 1.2 * errors["single"][name], (strategy, name, errors)
