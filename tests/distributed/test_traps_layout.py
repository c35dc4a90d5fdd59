"""Traps of the token layout: lengths that do not divide, tail tokens, positions, permutations, tiny sequences."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron import SequenceParallel, SequenceParallelConfig
from tests.distributed.sharded import check, is_equal, make_sp, random_problem, sharded_gradients
from tests.harness import run_ranks
from tests.reference import FP32_ATOL, Gradients

MESHES_4 = [("ulysses", 4, 1), ("ring", 1, 4), ("usp", 2, 2), ("dbsp", 4, 1), ("dbsp", 2, 2), ("dbsp", 1, 4)]


def _lengths(rank: int, world_size: int, seqlens: list[int], block_size: int) -> None:
    meshes = [(u, world_size // u) for u in range(1, world_size + 1) if world_size % u == 0]
    for strategy in ("usp", "dbsp"):
        for u, r in meshes:
            sp = make_sp(strategy, u, r)
            for layer, seqlen in enumerate(seqlens):
                inputs, mask, want = random_problem(seqlen, seqlen, 4, block_size, dense=layer % 2 == 0)
                got = sharded_gradients(sp, inputs, mask, block_size, layer=layer)
                assert got.out.shape[1] == seqlen
                check(got, want, FP32_ATOL, f"{strategy} U{u}R{r} S{seqlen} block {block_size}")
            sp.destroy()


@pytest.mark.parametrize(
    ("world_size", "seqlens", "block_size"), [(2, [7, 5], 1), (2, [7, 5], 4), (4, [10, 18, 23], 3), (4, [10, 18], 16)]
)
def test_length_that_does_not_divide(world_size: int, seqlens: list[int], block_size: int) -> None:
    """Outputs have length S exactly and equal the reference on every token (Trap B03)."""
    run_ranks(_lengths, world_size, seqlens, block_size)


def _last_token(rank: int, world_size: int) -> None:
    for strategy, u, r in (("ulysses", 2, 1), ("ring", 1, 2), ("dbsp", 2, 1), ("dbsp", 1, 2)):
        sp = make_sp(strategy, u, r)
        inputs, mask, want = random_problem(0, 7, 2, 4, dense=True)
        got = sharded_gradients(sp, inputs, mask, 4)
        check(got, want, FP32_ATOL, strategy)
        for name in ("out", "dk", "dv"):
            assert getattr(got, name)[:, 6].abs().min() > 1e-3, (strategy, name)


def test_last_token_of_an_odd_length_attends_and_is_attended() -> None:
    """Seven tokens on two ranks: token 6 is not dropped by len // 2 (Trap B05)."""
    run_ranks(_last_token, 2)


def _tail(rank: int, world_size: int) -> None:
    for strategy, u, r in MESHES_4:
        sp = make_sp(strategy, u, r)
        inputs, mask, want = random_problem(2, 18, 3, 4, dense=True)
        runs = [sharded_gradients(sp, inputs, mask, 4) for _ in range(5)]
        check(runs[0], want, FP32_ATOL, f"{strategy} U{u}R{r}")
        assert bool(runs[0].out.abs().amax((0, 2, 3)).gt(0).all()), strategy
        assert all(is_equal(run, runs[0]) for run in runs), f"{strategy} U{u}R{r} differs from run to run"
        sp.destroy()


def test_short_tail_is_computed_and_repeats_bitwise() -> None:
    """Eighteen tokens in blocks of four on four ranks: no row is zero, five runs agree bitwise (Traps B09, B103)."""
    run_ranks(_tail, 4)


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [B, s, H, D] at given positions, fp64."""
    half = x.shape[-1] // 2
    frequency = 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = (positions[:, None].double() * frequency)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def _positions(rank: int, world_size: int, seqlen: int, block_size: int) -> list[list[int]]:
    kept = []
    for strategy in ("usp", "dbsp"):
        sp = make_sp(strategy, 1, world_size)
        layout = sp.layout(seqlen, block_size=block_size)
        assert layout.positions.dtype == torch.int64
        x = torch.randn(3, seqlen, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        local = _rotate(layout.shard(x), layout.positions)
        assert torch.equal(layout.gather(local), _rotate(x, torch.arange(seqlen)))
        kept.append(layout.positions.tolist())
    return kept


@pytest.mark.parametrize(("seqlen", "block_size"), [(16, 4), (16, 8), (2, 1), (13, 4)])
def test_positions_are_the_global_token_indices(seqlen: int, block_size: int) -> None:
    """Rotary angles from `positions` rotate each token by its global place, also with one token a rank (Trap B25)."""
    ranks = run_ranks(_positions, 2, seqlen, block_size)
    for index in range(2):
        positions = [rank[index] for rank in ranks]
        assert sorted(chain.from_iterable(positions)) == list(range(seqlen))
        assert all(held == sorted(held) for held in positions)
    contiguous = [rank[0] for rank in ranks]
    num_blocks = -(-seqlen // block_size)
    first = (num_blocks + 1) // 2 * block_size
    assert contiguous[1][0] == first
    if seqlen == 16:
        assert first == 8


def _round_trip(rank: int, world_size: int, meshes: list[tuple[int, int]]) -> list[list[int]]:
    held = []
    for strategy, policy in (("usp", "auto"), ("dbsp", "contiguous"), ("dbsp", "stripe"), ("dbsp", "paper")):
        for u, r in meshes:
            sp = make_sp(strategy, u, r, block_policy=policy)
            for seqlen, block_size in ((32, 4), (35, 4), (5, 8), (61, 3)):
                layout = sp.layout(seqlen, block_size=block_size)
                held.append(layout.positions.tolist())
                for shape, dim in (((2, seqlen, 3), 1), ((seqlen, 2), 0), ((2, 3, seqlen), 2), ((2, 3, seqlen), -1)):
                    x = torch.randn(shape, generator=torch.Generator().manual_seed(seqlen))
                    local = layout.shard(x, dim=dim)
                    assert local.shape[dim] == layout.num_local == layout.positions.numel()
                    assert torch.equal(local, x.index_select(dim, layout.positions))
                    assert torch.equal(layout.gather(local, dim=dim), x), (strategy, policy, u, r, seqlen, dim)
            sp.destroy()
    return held


@pytest.mark.parametrize("meshes", [[(3, 1), (1, 3)], [(4, 2), (2, 4)]], ids=["3", "8"])
def test_gather_of_shard_is_the_identity(meshes: list[tuple[int, int]]) -> None:
    """Bitwise, for every layout, mesh and dim; the ranks' positions partition the sequence (Trap B27)."""
    held = run_ranks(_round_trip, meshes[0][0] * meshes[0][1], meshes)
    for parts in zip(*held, strict=True):
        tokens = sorted(chain.from_iterable(parts))
        assert tokens == list(range(len(tokens)))


def _stripes(rank: int, world_size: int, u: int, r: int) -> list[int]:
    sp = make_sp("dbsp", u, r, block_policy="stripe")
    inputs, mask, want = random_problem(5, 32, 8, 2)
    check(sharded_gradients(sp, inputs, mask, 2), want, FP32_ATOL, f"U{u}R{r}")
    blocks, plan = sp.layer_mask(0)
    assert torch.equal(torch.from_numpy(blocks), mask.blocks[0])
    layout = sp.layout(32, block_size=2)
    ring = {int(plan.q_block_owner[position // 2]) for position in layout.positions.tolist()}
    assert ring == {rank // u}, "tokens that no plan moves belong to the ring rank that computes them"
    return sorted({position // 2 for position in layout.positions.tolist()})


@pytest.mark.parametrize(("u", "r"), [(4, 2), (2, 4)])
def test_layout_follows_both_degrees(u: int, r: int) -> None:
    """After the all-to-all in a Ulysses group, a ring rank holds every R-th block, for (4,2) and (2,4) (Trap B27)."""
    held = run_ranks(_stripes, 8, u, r)
    for ring_rank in range(r):
        blocks = sorted(chain.from_iterable(held[ring_rank * u : (ring_rank + 1) * u]))
        assert len({block % r for block in blocks}) == 1
        assert len(blocks) == 16 // r


def _adjoint(rank: int, world_size: int) -> None:
    for strategy in ("usp", "dbsp"):
        sp = make_sp(strategy)
        layout = sp.layout(29, block_size=4)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 29, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(2, 29, 3, generator=generator, dtype=torch.float64)
        (grad,) = torch.autograd.grad((layout.gather(layout.shard(x)) * weight).sum(), x)
        assert torch.equal(grad, weight)
        local = x.detach()[:, layout.positions].requires_grad_()
        (grad,) = torch.autograd.grad((layout.gather(local) * weight).sum(), local)
        assert torch.equal(grad, weight[:, layout.positions])
        (grad,) = torch.autograd.grad((layout.shard(x) * weight[:, layout.positions]).sum(), x)
        assert torch.equal(grad, weight)


def test_shard_and_gather_are_exact_adjoints() -> None:
    """No factor of the rank count, in either direction (Trap B55)."""
    run_ranks(_adjoint, 3)


def _tiny(rank: int, world_size: int) -> list[Any]:
    held = []
    for strategy, u, r in MESHES_4:
        sp = make_sp(strategy, u, r, block_size=16)
        for seqlen in (1, 2, 3):
            inputs, mask, want = random_problem(seqlen, seqlen, 3, 16, dense=seqlen != 2)
            got = sharded_gradients(sp, inputs, mask, 16, layer=seqlen)
            assert all(bool(x.isfinite().all()) for x in (got.out, got.dq, got.dk, got.dv))
            check(got, want, FP32_ATOL, f"{strategy} U{u}R{r} S{seqlen}")
            held.append(sp.layout(seqlen).num_local)
        sp.destroy()
    return held


def test_sequence_shorter_than_a_block() -> None:
    """One to three tokens on four ranks: ranks without a token join every collective (Trap B117)."""
    held = run_ranks(_tiny, 4)
    assert any(count == 0 for count in held[3])


def _text_and_video(rank: int, world_size: int) -> list[Tensor]:
    texts = []
    for u, r in [(u, world_size // u) for u in range(1, world_size + 1) if world_size % u == 0]:
        sp = make_sp("dbsp", u, r)
        inputs, mask, want = random_problem(3, 16, 4, 4, batch=2)
        got = sharded_gradients(sp, inputs, mask, 4)
        for stream in (slice(0, 4), slice(4, 16)):
            parts = [Gradients(*(x[:, stream] for x in (g.out, g.dq, g.dk, g.dv))) for g in (got, want)]
            check(*parts, FP32_ATOL, f"U{u}R{r} {stream}")
        texts.append(got.out[:, :4])
    return texts


@pytest.mark.parametrize("world_size", [2, 4])
def test_joint_text_and_video_are_one_sequence(world_size: int) -> None:
    """Four text tokens before twelve video tokens: both streams right, text bitwise equal on all ranks (Trap B31)."""
    texts = run_ranks(_text_and_video, world_size)
    for other in texts[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, texts[0], strict=True))


def _short_rank(rank: int, world_size: int) -> list[int]:
    sp = make_sp("ring")
    inputs, mask, want = random_problem(4, 11, 2, 1, batch=2)
    check(sharded_gradients(sp, inputs, mask, 1), want, FP32_ATOL, "ring")
    lengths = [0] * world_size
    dist.all_gather_object(lengths, sp.layout(11, block_size=1).num_local)
    return lengths


def test_ring_of_unequal_local_lengths() -> None:
    """Six tokens on one rank and five on the other: right, not an aborted exchange (Trap B67)."""
    assert run_ranks(_short_rank, 2)[0] == [6, 5]


def _gather_too_short(rank: int, world_size: int) -> str:
    sp = SequenceParallel(SequenceParallelConfig(strategy="ring", block_size=4))
    layout = sp.layout(21)
    try:
        layout.gather(torch.zeros(1, layout.num_local - (rank == 1), 2))
    except ValueError as error:
        return str(error)
    return "no error"


def test_gather_of_a_wrong_length_on_one_rank_fails_on_all() -> None:
    """No rank waits for the one that raised (Traps B03, B65)."""
    messages = run_ranks(_gather_too_short, 3)
    assert len(set(messages)) == 1
    assert all(word in messages[0] for word in ("gather", "rank 1", "of 21"))
