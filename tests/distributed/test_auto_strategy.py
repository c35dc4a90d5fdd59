"""strategy=auto: meshes differ by layer and change over steps, outputs and gradients stay those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dbsp_megatron import BlockMask, SequenceParallel
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.strategy import selection
from dbsp_megatron.strategy.layout import TokenLayout
from tests.distributed.sharded import check, make_sp, refusal, sharded_gradients
from tests.harness import run_ranks
from tests.reference import (
    Gradients,
    attention_gradients,
    expand_blocks,
    max_error,
    random_blocks,
    random_qkv,
    tolerance,
)
from tests.unit.strategy.auto_cases import compute_bound_calibration, skewed_blocks

BLOCK = 4
POLICIES = {"head_policy": "contiguous", "block_policy": "stripe", "block_size": BLOCK}
KINDS = [("heads", "rows"), ("heads", "rows"), ("rows", "heads"), ("rows", "heads")]
"""What is skewed in the mask of each layer, step by step."""

BUDGET_MIB = 11
"""Between what both meshes need."""


class _Given(MaskMethod):
    """Rows of masks that are known, by step and layer, for the blocks of one rank."""

    name = "given"

    def __init__(self, layout: TokenLayout, masks: list[list[BlockMask]], batch: int) -> None:
        self.blocks, self.masks, self.batch = torch.from_numpy(layout.local_blocks), masks, batch

    def predict(self, q_summary: Any, k_summary: Any, layer: int, step: int, grid: Any) -> Tensor:
        return self.masks[step][layer].blocks[:, :, self.blocks].expand(self.batch, -1, -1, -1)


def _masks(world_size: int, num_heads: int, num_blocks: int) -> list[list[BlockMask]]:
    seqlen = num_blocks * BLOCK - 1
    return [
        [
            BlockMask(skewed_blocks(kind, num_heads, num_blocks, world_size), BLOCK, BLOCK, seqlen, seqlen)
            for kind in kinds
        ]
        for kinds in KINDS
    ]


def _calibrated(folder: Path) -> str:
    path = folder / "calibration.json"
    compute_bound_calibration().save(path)
    return str(path)


def _case(step: int, layer: int, mask: BlockMask, num_kv_heads: int) -> tuple[tuple[Tensor, ...], Gradients]:
    seqlen = mask.seqlen_q or 0
    inputs = random_qkv(10 * step + layer, 2, seqlen, mask.num_heads, 8, num_kv_heads=num_kv_heads, dtype=torch.float64)
    allowed = expand_blocks(mask.blocks, BLOCK, BLOCK, seqlen, seqlen)
    return inputs, attention_gradients(*inputs[:3], allowed, inputs[3])


def _parity(
    rank: int, world_size: int, path: str, method: bool, plan_counts: str, num_heads: int, num_kv_heads: int
) -> tuple[list[list[str]], list[str]]:
    sp = make_sp("auto", calibration=path, plan_counts=plan_counts, **POLICIES)
    masks = _masks(world_size, num_heads, 4 * world_size + 1)
    layout = sp.layout(masks[0][0].seqlen_q or 0, block_size=BLOCK)
    given = _Given(layout, masks, 2) if method else None
    used, named = [], []
    for step in range(len(masks)):
        sp.begin_step(step)
        for layer, mask in enumerate(masks[step]):
            inputs, want = _case(step, layer, mask, num_kv_heads)
            for repeat in range(2):
                got = sharded_gradients(sp, inputs, given or mask, BLOCK, layer=layer)
                check(got, want, tolerance(torch.float64), f"step {step}, layer {layer}, call {repeat}")
        used.append([str(layer["mesh"]) for layer in sp.layer_stats()])
        named.append(str(sp.stats()["sp/mesh"]))
    assert sp.stats()["sp/mesh_changes"] == len(used[0])
    sp.destroy()
    return used, named


@pytest.mark.parametrize(("world_size", "heads"), [(2, (4, 2)), (4, (8, 4)), (6, (12, 3))])
def test_meshes_differ_by_layer_and_change_between_steps(
    world_size: int, heads: tuple[int, int], tmp_path: Path
) -> None:
    """Given masks, whose counts are known at once: a change is answered in the same step."""
    results = run_ranks(_parity, world_size, _calibrated(tmp_path), False, "previous", *heads)
    assert all(result == results[0] for result in results)
    ring, ulysses = f"U1R{world_size}", f"U{world_size}R1"
    assert results[0][0] == [[ring, ulysses]] * 2 + [[ulysses, ring]] * 2
    assert set(results[0][1][0].split()) == {f"{ring}:1", f"{ulysses}:1"}


@pytest.mark.parametrize(("world_size", "heads"), [(2, (4, 4)), (4, (8, 4)), (6, (12, 6))])
def test_predicted_masks_choose_the_mesh_of_the_next_step(
    world_size: int, heads: tuple[int, int], tmp_path: Path
) -> None:
    """The first step waits for its counts, a change shows one step later."""
    results = run_ranks(_parity, world_size, _calibrated(tmp_path), True, "previous", *heads)
    assert all(result == results[0] for result in results)
    ring, ulysses = f"U1R{world_size}", f"U{world_size}R1"
    assert results[0][0] == [[ring, ulysses]] * 3 + [[ulysses, ring]]


def test_current_counts_choose_the_mesh_of_their_step(tmp_path: Path) -> None:
    results = run_ranks(_parity, 2, _calibrated(tmp_path), True, "current", 4, 2)
    assert results[0] == results[1]
    assert results[0][0] == [["U1R2", "U2R1"]] * 2 + [["U2R1", "U1R2"]] * 2


def _mixed(rank: int, world_size: int, path: str) -> str:
    sp = make_sp("auto", calibration=path, **POLICIES)
    mask = BlockMask(skewed_blocks("both", 8, 17, world_size), BLOCK, BLOCK, 67, 67)
    inputs, want = _case(0, 0, mask, 4)
    check(sharded_gradients(sp, inputs, mask, BLOCK), want, tolerance(torch.float64), "both")
    mesh = str(sp.layer_stats()[0]["mesh"])
    sp.destroy()
    return mesh


def test_a_mask_that_is_skewed_both_ways_takes_a_mesh_in_between(tmp_path: Path) -> None:
    assert run_ranks(_mixed, 4, _calibrated(tmp_path)) == ["U2R2"] * 4


def _odd_shapes(rank: int, world_size: int, path: str) -> list[tuple[str, str]]:
    """Default policies: few heads, cut heads, grouped heads, a dense mask, blocks that no ring can cut."""
    sp = make_sp("auto", calibration=path, block_size=8, verify_steps=1)
    used = []
    for layer, (seqlen, num_heads, num_kv_heads, batch, sizes) in enumerate(SHAPES):
        for step in range(2):
            sp.begin_step(2 * layer + step)
            seed = layer + 100 * step
            inputs = random_qkv(seed, batch, seqlen, num_heads, 8, num_kv_heads=num_kv_heads, dtype=torch.float64)
            num_blocks = [-(-seqlen // size) for size in sizes]
            blocks = random_blocks(seed, batch, num_heads, *num_blocks)
            allowed = expand_blocks(blocks, *sizes, seqlen, seqlen)
            mask = BlockMask(blocks, *sizes, seqlen, seqlen)
            want = attention_gradients(*inputs[:3], allowed, inputs[3])
            got = sharded_gradients(sp, inputs, mask, 8, layer=layer)
            check(got, want, tolerance(torch.float64), f"shape {layer}, step {step}")
            used.append((str(sp.layer_stats()[0]["mesh"]), str(sizes)))
    sp.destroy()
    return used


SHAPES = (
    (101, 5, 5, 1, (8, 8)),
    (67, 3, 1, 2, (8, 8)),
    (77, 6, 2, 1, (4, 8)),
    (23, 2, 2, 2, (8, 8)),
    (75, 5, 5, 1, (12, 5)),
)
"""Tokens, heads, kv heads, batch, block sizes of the mask."""


@pytest.mark.parametrize("world_size", [4, 6])
def test_odd_shapes_equal_the_reference_on_whatever_mesh(world_size: int, tmp_path: Path) -> None:
    """Verification is on, so that every rank compares with a gathered reference too."""
    results = run_ranks(_odd_shapes, world_size, _calibrated(tmp_path))
    assert all(result == results[0] for result in results)
    assert len({mesh for mesh, _ in results[0]}) > 1
    assert {mesh for mesh, sizes in results[0] if sizes == "(12, 5)"} == {f"U{world_size}R1"}


def _budget(rank: int, world_size: int, path: str, budget: int) -> str:
    sp = make_sp("auto", calibration=path, memory_budget_mib=budget, kv_gather_mib=0, **POLICIES)
    mask = BlockMask(skewed_blocks("rows", 16, 65, 2), BLOCK, BLOCK, 259, 259)
    q, k, v, _ = random_qkv(0, 8, 259, 16, 32)
    layout = sp.layout(259, block_size=BLOCK)
    message = refusal(lambda: sp.attention(*(layout.shard(x) for x in (q, k, v)), mask=mask))
    mesh = str(sp.layer_stats()[0]["mesh"]) if message == "accepted" else message
    sp.destroy()
    return mesh


def test_meshes_over_the_memory_budget_are_no_candidates(tmp_path: Path) -> None:
    """Ulysses is faster but needs more; with room for none of them every rank hears of it."""
    path = _calibrated(tmp_path)
    found = {budget: run_ranks(_budget, 2, path, budget) for budget in (1, BUDGET_MIB, 1000)}
    assert found[1000] == ["U2R1"] * 2
    assert found[BUDGET_MIB] == ["U1R2"] * 2
    assert found[1][0] == found[1][1]
    assert "sp.memory_budget_mib=1 is less than" in found[1][0]


def _recalibrated(rank: int, world_size: int, path: str) -> tuple[Any, ...]:
    sp = make_sp("auto", calibration=path, head_policy="contiguous", block_policy="hot_stripe", block_size=BLOCK)
    blocks = skewed_blocks("heads", 4, 17, 2)
    blocks[:, :2, 1::2, 9:] = False
    mask = BlockMask(blocks, BLOCK, BLOCK, 67, 67)
    inputs, want = _case(0, 0, mask, 2)
    found = []
    for step in range(3):
        sp.begin_step(step)
        for layer in range(2):
            got = sharded_gradients(sp, inputs, mask, BLOCK, layer=layer)
            check(got, want, tolerance(torch.float64), f"step {step}, layer {layer}")
        found.append((sp.stats()["sp/mesh"], sp.stats()["sp/imbalance_after"]))
        changed = sp.recalibrate()
        assert changed == (step == 0)
    sp.destroy()
    return tuple(found)


def test_recalibrate_evens_out_the_ring_of_the_chosen_mesh(tmp_path: Path) -> None:
    """Hot rows at a stride of 2 leave the ring uneven, Ulysses is still worse; then the layout follows its counts."""
    first, second = run_ranks(_recalibrated, 2, _calibrated(tmp_path))
    assert first == second
    assert [mesh for mesh, _ in first] == ["U1R2:2"] * 3
    assert first[1][1] < first[0][1]


class _Layers(torch.nn.Module):
    """Two attention layers, recomputed in the backward pass or not."""

    def __init__(self, sp: SequenceParallel, layout: TokenLayout, masks: list[list[BlockMask]], method: bool) -> None:
        super().__init__()
        self.sp, self.layout, self.masks, self.step = sp, layout, masks, 0
        self.method = _Given(layout, masks, 1) if method else None

    def block(self, x: Tensor, layer: int) -> Tensor:
        mask = self.method or self.masks[self.step][layer]
        return x + self.sp.attention(x, x[:, :, ::2], x[:, :, 1::2], mask=mask, layer=layer, layout=self.layout)

    def forward(self, x: Tensor, recompute: bool | None) -> Tensor:
        for layer in range(2):
            again = recompute is not None
            x = checkpoint(self.block, x, layer, use_reentrant=recompute) if again else self.block(x, layer)
        return x


def _recompute(rank: int, world_size: int, path: str, method: bool) -> list[list[str]]:
    gradients: dict[bool | None, list[Tensor]] = {}
    for recompute in (None, False, True):
        sp = make_sp("auto", calibration=path, **POLICIES)
        masks = _masks(world_size, 4, 9)
        layers = _Layers(sp, sp.layout(35, block_size=BLOCK), masks, method)
        used = []
        for step in range(4):
            layers.step = step
            sp.begin_step(step)
            x = torch.randn(1, 35, 4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            local = layers.layout.shard(x).requires_grad_()
            layers(local, recompute).square().sum().backward()
            assert local.grad is not None
            gradients.setdefault(recompute, []).append(local.grad)
            used.append([str(layer["mesh"]) for layer in sp.layer_stats()])
        sp.destroy()
    for recompute in (False, True):
        for step, (got, want) in enumerate(zip(gradients[recompute], gradients[None], strict=True)):
            assert max_error(got, want) <= 1e-9, f"use_reentrant={recompute}, step {step}"
    return used


@pytest.mark.parametrize("method", [False, True], ids=["block-mask", "mask-method"])
def test_recompute_uses_the_mesh_of_its_forward(method: bool, tmp_path: Path) -> None:
    """Also in the step in which the mesh changes, and when its forward ran without gradients (reentrant)."""
    results = run_ranks(_recompute, 2, _calibrated(tmp_path), method)
    assert results[0] == results[1]
    assert len({mesh for step in results[0] for mesh in step}) == 2


def _learn(rank: int, world_size: int, path: str) -> tuple[Any, ...]:
    sp = make_sp("auto", calibration=path, **POLICIES)
    mask = _masks(world_size, 4, 9)[0][0]
    inputs, _ = _case(0, 0, mask, 2)
    for step in range(selection._FIRST_MEASURED + selection.MEASURE_STEPS + 1):
        sp.begin_step(step)
        sharded_gradients(sp, inputs, mask, BLOCK)
    planning = sp._planning
    assert isinstance(planning, selection.MeshSelection)
    (family,) = planning._families.values()
    stats = sp.stats()
    sp.destroy()
    return family.selector.report(), stats["sp/predicted_ms"], stats["sp/plan_reuse"]


def test_measured_times_are_shared_and_correct_predictions(tmp_path: Path) -> None:
    """Once in so many steps the longest time of all ranks; all of them predict alike from then on."""
    first, second = run_ranks(_learn, 2, _calibrated(tmp_path))
    assert first == second
    (record,) = first[0]
    assert record.num_measured == 2
    assert first[1] > 0
    assert first[2] > 0.9


def _differ(rank: int, world_size: int, paths: list[str]) -> str:
    return refusal(lambda: make_sp("auto", calibration=paths[rank]))


def test_ranks_with_other_calibrations_are_refused_alike(tmp_path: Path) -> None:
    """Files count by what is in them, wherever they lie; a file that is missing on one rank stops all (Trap B65)."""
    paths = []
    for rank, factor in enumerate((1.0, 1.0, 2.0)):
        paths.append(str(tmp_path / f"rank_{rank}.json"))
        compute_bound_calibration(factor).save(paths[-1])
    assert run_ranks(_differ, 2, paths[:2]) == ["accepted"] * 2
    faults = set(run_ranks(_differ, 3, paths))
    assert len(faults) == 1
    fault = faults.pop()
    assert "sp.calibration" in fault
    assert "; rank 2: " in fault
    faults = set(run_ranks(_differ, 2, [paths[0], str(tmp_path / "missing.json")]))
    assert len(faults) == 1
    assert "missing.json is no calibration" in faults.pop()


def _one_sided(rank: int, world_size: int, path: str) -> list[str]:
    """One rank's mask differs, then one rank's tensors are wrong; afterwards all go on as if nothing had been."""
    sp = make_sp("auto", calibration=path, **POLICIES)
    masks = _masks(world_size, 4, 9)
    layout = sp.layout(35, block_size=BLOCK)
    inputs, want = _case(0, 0, masks[0][0], 2)
    local = [layout.shard(x) for x in inputs[:3]]
    faults = []
    for step in range(2):
        sp.begin_step(2 * step)
        check(sharded_gradients(sp, inputs, masks[0][0], BLOCK), want, tolerance(torch.float64), f"step {step}")
        sp.begin_step(2 * step + 1)
        other = masks[2 * rank][0]
        faults.append(refusal(lambda mask=other: sp.attention(*local, mask=mask, layer=0)))  # type: ignore[misc]
        short = [x[:, rank:] for x in local]
        faults.append(refusal(lambda qkv=short: sp.attention(*qkv, mask=masks[0][0], layer=0)))  # type: ignore[misc]
    sp.destroy()
    return faults


def test_a_refused_call_leaves_the_choices_of_ranks_alike(tmp_path: Path) -> None:
    first, second = run_ranks(_one_sided, 2, _calibrated(tmp_path))
    assert first == second
    assert ["mask" in first[0], "shard q, k, v" in first[1]] == [True, True]
    assert first[:2] == [fault.replace("step 3", "step 1") for fault in first[2:]]
