"""Traps of repeated work: recompute, accumulation, masked losses, plan reuse, repeated runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dbsp_megatron import BlockMask, SequenceParallel
from dbsp_megatron.masks import MaskMethod, TopPMask
from tests.distributed.sharded import check, is_equal, make_sp, random_problem, recorded_collectives, sharded_gradients
from tests.harness import run_ranks
from tests.reference import FP32_ATOL, attention_gradients, expand_blocks, max_error, random_blocks, random_qkv

MESHES = {2: [(2, 1), (1, 2)], 4: [(2, 2)]}


class _Blocks(torch.nn.Module):
    """Two residual attention layers whose weights are equal on all ranks."""

    def __init__(self, sp: SequenceParallel, mask: BlockMask | MaskMethod, seqlen: int, recompute: bool | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(16, 48, generator=generator) / 4 for _ in range(2)]
        self.weights = torch.nn.ParameterList(weights)
        self.sp, self.mask, self.recompute = sp, mask, recompute
        self.layout = sp.layout(seqlen)

    def block(self, x: Tensor, layer: int) -> Tensor:
        q, k, v = (x @ self.weights[layer]).unflatten(-1, (3, 2, 8)).unbind(2)
        return x + self.sp.attention(q, k, v, mask=self.mask, layer=layer, layout=self.layout).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        # One gradient per call reaches the caller's leaf, so that recompute cannot change the order of additions.
        x = x.clone()
        for layer in range(2):
            if self.recompute is None:
                x = self.block(x, layer)
            else:
                x = checkpoint(self.block, x, layer, use_reentrant=self.recompute)
        return x


def _recompute(rank: int, world_size: int, use_method: bool) -> list[list[Any]]:
    logs = []
    mask = TopPMask(0.6) if use_method else BlockMask(random_blocks(2, 1, 2, 4, 4), 8, 8, 29, 29)
    for u, r in MESHES[world_size]:
        kept = {}
        for recompute in (None, False, True):
            sp = make_sp("dbsp", u, r, block_size=8)
            model = _Blocks(sp, mask, 29, recompute)
            grads: list[Tensor] = []
            with recorded_collectives() as log:
                for step in range(3):
                    sp.begin_step(step)
                    x = torch.randn(1, 29, 16, generator=torch.Generator().manual_seed(step))
                    local = model.layout.shard(x).requires_grad_()
                    out = model(local)
                    # Two losses on one graph of blocks, whose recompute must not swap collectives.
                    loss = out.square().sum() + model(local).sin().sum()
                    grads += _gradients(loss, [local, *model.weights])
            kept[recompute] = grads
            logs.append([(name, size) for name, size, *_ in log])
            sp.destroy()
        for recompute in (False, True):
            same = [torch.equal(a, b) for a, b in zip(kept[recompute], kept[None], strict=True)]
            assert all(same), f"U{u}R{r} use_reentrant={recompute}: {same}"
    return logs


def _gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients by backward(): reentrant checkpoints do not work with autograd.grad."""
    loss.backward()
    grads = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    return grads


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("use_method", [False, True], ids=["block-mask", "mask-method"])
def test_recompute_repeats_the_forward_exactly(world_size: int, use_method: bool) -> None:
    """Checkpointed blocks give bitwise the gradients of plain ones; all ranks log the same collectives (Trap B89)."""
    logs = run_ranks(_recompute, world_size, use_method)
    assert all(logs[0])
    # A ring rank may have nothing to send in a hop, so only what every rank must join is compared there.
    joined = [[[entry for entry in log if entry[0] != "batch_isend_irecv"] for log in rank] for rank in logs]
    assert all(other == joined[0] for other in joined)


def _accumulate(rank: int, world_size: int, keep: list[range]) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(16, 48, generator=generator, dtype=torch.float64) / 4
    batches = [torch.randn(1, 8, 16, generator=generator, dtype=torch.float64) for _ in keep]
    dout = torch.randn(1, 8, 2, 8, generator=generator, dtype=torch.float64)
    blocks = random_blocks(4, 1, 2, 4, 4, density=0.7)
    want = torch.zeros_like(weight)
    for x, tokens in zip(batches, keep, strict=True):
        leaf = weight.clone().requires_grad_()
        q, k, v = (x @ leaf).unflatten(-1, (3, 2, 8)).unbind(2)
        counted = torch.zeros_like(dout)
        counted[:, list(tokens)] = dout[:, list(tokens)]
        parts = attention_gradients(q, k, v, expand_blocks(blocks, 2, 2, 8, 8), counted)
        want += torch.autograd.grad((q, k, v), leaf, (parts.dq, parts.dk, parts.dv))[0]
    for u, r in ((2, 1), (1, 2)):
        sp = make_sp("dbsp", u, r)
        layout = sp.layout(8, block_size=2)
        leaf = weight.float().requires_grad_()
        for x, tokens in zip(batches, keep, strict=True):
            q, k, v = (layout.shard(x).float() @ leaf).unflatten(-1, (3, 2, 8)).unbind(2)
            out = sp.attention(q, k, v, mask=BlockMask(blocks, 2, 2, 8, 8), layer=0, layout=layout)
            counted = torch.isin(layout.positions, torch.tensor(list(tokens), dtype=torch.int64))
            (out * layout.shard(dout).float())[:, counted].sum().backward()
        assert leaf.grad is not None
        total = leaf.grad.clone()
        dist.all_reduce(total)
        assert bool(total.isfinite().all())
        assert max_error(total, want) <= 2 * FP32_ATOL * len(keep), f"U{u}R{r}"


@pytest.mark.parametrize(
    "keep", [[range(2), range(6)], [range(4)], [range(0)]], ids=["two-microbatches", "rank-0-only", "no-token"]
)
def test_gradients_of_masked_and_accumulated_losses(keep: list[range]) -> None:
    """Microbatches of 2 and 6 counted tokens, a loss without a token on rank 1, a loss without any (Traps B15, B91)."""
    run_ranks(_accumulate, 2, keep)


def _reuse(rank: int, world_size: int) -> None:
    inputs, mask, want = random_problem(6, 61, 7, 4)
    for u, r in ((4, 1), (2, 2), (1, 4)):
        for plan_counts in ("previous", "current"):
            kept = {}
            for gain in (0.0, 1e9):
                # Whole heads: the gradients of a cut head's K and V are summed over ranks, in an order of their own.
                options = {"plan_counts": plan_counts, "replan_gain": gain, "head_policy": "lpt_swap"}
                sp = make_sp("dbsp", u, r, **options)
                label = f"U{u}R{r} {plan_counts} gain {gain}"
                runs, reused = [], []
                for step in range(10):
                    sp.begin_step(step)
                    runs.append(sharded_gradients(sp, inputs, mask, 4))
                    (layer,) = sp.layer_stats()
                    reused.append(layer["reused"])
                check(runs[0], want, FP32_ATOL, label)
                assert reused == [False] + [True] * 9, (label, reused)
                assert all(is_equal(run, runs[-1]) for run in runs[2:]), label
                assert 0.0 < float(sp.stats()["sp/plan_reuse"]) <= 1.0, label
                kept[gain] = runs[-1]
                sp.destroy()
            assert is_equal(kept[0.0], kept[1e9]), f"U{u}R{r} {plan_counts}"


def test_plan_of_an_unchanged_mask_is_built_once() -> None:
    """Ten equal steps: one build, nine hits; reuse does not change a bit of the result (Trap B97)."""
    run_ranks(_reuse, 4)


def _drift(rank: int, world_size: int) -> list[list[bool]]:
    kept = []
    for plan_counts in ("previous", "current"):
        sp = make_sp("dbsp", 2, 2, plan_counts=plan_counts)
        reused = []
        for step in range(8):
            sp.begin_step(step)
            inputs, mask, want = random_problem(step, 61, 7, 4, batch=2)
            check(sharded_gradients(sp, inputs, mask, 4), want, FP32_ATOL, f"{plan_counts} step {step}")
            reused.append(bool(sp.layer_stats()[0]["reused"]))
        kept.append(reused)
    return kept


def test_stale_plan_never_changes_the_result() -> None:
    """A mask that changes at each step is right at each step, and all ranks reuse or re-plan alike (Traps B65, B97)."""
    found = run_ranks(_drift, 4)
    assert all(reused == found[0] for reused in found)


def _repeat(rank: int, world_size: int) -> None:
    for dense in (True, False):
        inputs, mask, _ = random_problem(8, 45, 5, 8, batch=2, dense=dense)
        runs = []
        for _ in range(5):
            sp = make_sp("dbsp", 2, 2)
            runs.append(sharded_gradients(sp, inputs, mask, 8))
            sp.destroy()
        assert all(is_equal(run, runs[0]) for run in runs), f"dense={dense}"


def test_five_runs_agree_bitwise() -> None:
    """out, dq, dk and dv of five objects on the same input, dense and sparse (Trap B103)."""
    run_ranks(_repeat, 4)


def _method_parity(rank: int, world_size: int) -> None:
    inputs = random_qkv(3, 2, 53, 6, 8, num_kv_heads=3)
    inputs = (inputs[0] * 3, *inputs[1:])
    single = TopPMask(0.6)
    blocks = single.mask(inputs[0], inputs[1], block_size=8).blocks
    want = attention_gradients(*inputs[:3], expand_blocks(blocks, 8, 8, 53, 53), inputs[3])
    for u, r in ((4, 1), (2, 2), (1, 4)):
        sp = make_sp("dbsp", u, r, block_size=8)
        for step in range(2):
            sp.begin_step(step)
            check(sharded_gradients(sp, inputs, single, 8), want, FP32_ATOL, f"U{u}R{r} step {step}")
        rows, _ = sp.layer_mask(0)
        assert torch.equal(torch.from_numpy(rows), blocks[0])
        assert 0.0 < float(sp.stats()["sp/density"]) < 1.0
        sp.destroy()


def test_mask_method_gives_the_single_process_mask() -> None:
    """Rows predicted where their query blocks live make the mask that one process makes, and its result (Trap B65)."""
    run_ranks(_method_parity, 4)
