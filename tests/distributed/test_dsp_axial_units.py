"""Video models whose ranks outnumber frames: attention in (frame, head) units equals one process, dense and sparse."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.dsp import DspGroup, StagePlan, explain
from dbsp_megatron.dsp.layout import balanced_lengths
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.masks.duo import DuoMask
from dbsp_megatron.masks.sparge import SpargeMask
from dbsp_megatron.masks.sparse_videogen import SparseVideoGenMask
from dbsp_megatron.masks.top_k import TopKMask
from dbsp_megatron.masks.top_p import TopPMask
from dbsp_megatron.models.axial import AxialConfig, AxialDiT
from dbsp_megatron.models.axial.layer import axial_stages
from dbsp_megatron.models.axial.sparse import SparseAttention
from tests.distributed.axial_models import build, guidance, inputs, part, reference, sent_numbers, tiny
from tests.distributed.dsp_models import check, mesh_of_world, refused, summed
from tests.harness import run_ranks
from tests.unit.models.cores import gradients

# Images; fewer frames than ranks, odd lengths; places fewer than ranks, so that frames of T layers are cut; one token.
CASES = [((1, 1, 9), 3), ((1, 3, 3), 1), ((3, 1, 7), 2), ((2, 1, 5), 1), ((7, 1, 2), 2), ((1, 1, 1), 1)]
# Blocks of 2 in at least four blocks, the last one short; unlike between heads, frames and samples.
METHODS = (TopPMask(top_p=0.4), SpargeMask(top_p=0.3, similarity=0.4), TopKMask(density=0.3))


def _grouped(name: str) -> AxialConfig:
    """Four query heads, two for K and V, and as many channels."""
    return tiny(name, num_heads=4, num_kv_heads=2, head_dim=4)


def _plan(model: AxialDiT) -> StagePlan:
    assert model.session is not None
    plan = model.session.last_plan
    assert plan is not None
    return plan


def _step(model: AxialDiT, given: dict[str, Any], weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    positions = model.local_positions(given["grid"])
    out = model(**part(model, given))
    (out * weights[:, positions]).sum().backward()
    grads = summed(gradients(model))
    model.zero_grad(set_to_none=True)
    return out.detach(), grads


def _parity(rank: int, world_size: int, name: str, method: MaskMethod | None) -> int:
    config = _grouped(name)
    model = build(config, mesh_of_world())
    assert model.session is not None
    units = 0
    for grid, batch in CASES:
        given, weights = inputs(config, grid, batch)
        if batch == 2:
            given = guidance(given)
        if method is not None:
            given["sparse"] = SparseAttention(method=method, block_size=2, engine="torch")
        want, wanted = reference(config, given, weights)
        traffic = model.session.mesh.traffic
        traffic.reset()
        got, grads = _step(model, given, weights)
        plan = _plan(model)
        torch.testing.assert_close(got, want[:, model.local_positions(grid)], rtol=0, atol=1e-11)
        check(grads, wanted, f"{name} {grid} {batch}")
        in_units = [step.stage.name for step in plan.steps if step.in_units]
        units += len(in_units)
        text = explain(model, quiet=True)
        assert all(f"{stage}: attention in units over dsp:{world_size}" in text for stage in in_units)
        if method is None:
            assert traffic.total_bytes == 8 * sent_numbers(plan, config, batch, rank), (name, grid, batch)
    return units


@pytest.mark.parametrize(("world_size", "name"), [(2, "open_sora_plan_1_1"), (3, "stdit3_xl_2"), (4, "latte_xl_2")])
def test_dense_units_equal_one_process_and_send_what_the_formula_says(world_size: int, name: str) -> None:
    units = run_ranks(_parity, world_size, name, None)
    assert units[0] > 0
    assert len(set(units)) == 1


@pytest.mark.parametrize(("world_size", "name"), [(5, "stdit3_xl_2"), (4, "axial_k3")])
def test_other_ranks_and_models(world_size: int, name: str) -> None:
    assert run_ranks(_parity, world_size, name, None)[0] > 0


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_masks_of_units_do_not_depend_on_the_ranks(method: MaskMethod) -> None:
    """Blocks are shared by ranks, whose lengths are no multiples of blocks."""
    for world_size in (2, 3, 5):
        assert run_ranks(_parity, world_size, "stdit3_xl_2", method)[0] > 0


def _changing(rank: int, world_size: int) -> list[int]:
    """Masks that change from step to step: units stay while they balance; recomputed passes are under way in pairs."""
    moved = []
    for kind in ("none", "full", "selective"):
        config = tiny("stdit3_xl_2", recompute=kind, num_heads=4, head_dim=4)
        model = build(config, mesh_of_world())
        for step in range(3):
            made = []
            for grid, scale in (((3, 1, 11), 1.0), ((1, 1, 11), 3.0 + step), ((3, 1, 11), 5.0)):
                given, weights = inputs(config, grid, 2)
                given["video_tokens"] = given["video_tokens"].roll(step, 1) * scale
                given["sparse"] = SparseAttention(
                    method=TopPMask(top_p=0.2 + 0.3 * step), block_size=2, engine="torch", step=step
                )
                made.append((given, weights))
            outs = [model(**part(model, given)) for given, _ in made]
            for (given, weights), out in zip(reversed(made), reversed(outs), strict=True):
                want, wanted = reference(config, given, weights)
                positions = model.local_positions(given["grid"])
                torch.testing.assert_close(out.detach(), want[:, positions], rtol=0, atol=1e-11)
                (out * weights[:, positions]).sum().backward()
                check(summed(gradients(model)), wanted, f"{kind} {step}")
                model.zero_grad(set_to_none=True)
        moved.append(sum(each.in_units for each in _plan(model).steps))
    return moved


def test_changing_masks_with_recompute_and_passes_in_between() -> None:
    for world_size in (2, 4):
        assert all(min(units) > 0 for units in run_ranks(_changing, world_size))


def _precision(rank: int, world_size: int) -> None:
    config = _grouped("stdit3_xl_2")
    for method in (None, METHODS[0]):
        given, weights = inputs(config, (3, 1, 11), 2, torch.float32)
        if method is not None:
            given["sparse"] = SparseAttention(method=method, block_size=2, engine="torch")
        want, wanted = reference(config, given, weights, torch.float32)
        model = build(config, mesh_of_world(), torch.float32)
        got, grads = _step(model, given, weights)
        largest = float(want.abs().max())
        assert float((got - want[:, model.local_positions((3, 1, 11))]).abs().max()) <= 1e-5 * largest
        for key, grad in grads.items():
            assert float((grad - wanted[key]).abs().max()) <= 1e-5 * max(1.0, float(wanted[key].abs().max())), key
        with torch.no_grad():
            assert torch.equal(model(**part(model, given)), got)


def test_single_precision_is_within_1e_5() -> None:
    run_ranks(_precision, 4)


def _masks(rank: int, world_size: int) -> None:
    """Ranks hold any number of tokens, blocks are shorter and longer than that; bitwise, in any precision."""
    group = DspGroup(dist.group.WORLD, "dsp")
    generator = torch.Generator().manual_seed(1)
    for length, block_size in ((23, 2), (23, 5), (40, 7), (9, 2), (3 * world_size, 3)):
        pieces = balanced_lengths(length, world_size)
        begin = sum(pieces[:rank])
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            q, k, v = (torch.randn(length, 3, heads, 4, generator=generator).to(dtype) for heads in (4, 2, 2))
            for method in (*METHODS, DuoMask(global_heads=(1,), sink_tokens=2, window_tokens=3)):
                sparse = SparseAttention(method=method, block_size=block_size)
                whole = (x.transpose(0, 1) for x in (q, k, v))
                want = method.mask(next(whole), next(whole), 1, 0, None, block_size, v=next(whole))
                mine = (x[begin : begin + pieces[rank]] for x in (q, k, v))
                group.traffic.reset()
                got = sparse.mask_of_parts(*mine, 1, (group, pieces))
                assert got.blocks.shape == (3, *want.blocks.shape[1:])
                assert torch.equal(got.blocks, want.blocks.expand_as(got.blocks)), (length, block_size, dtype, method)
                # Tokens of q and k in blocks that begin on another rank, means (and similarities) of k, and rows.
                needs = method.needs(1, 0)
                first = torch.arange(begin, begin + pieces[rank]) // block_size * block_size
                away = int((first < begin).sum()) * 3 * 4 * (4 * bool(needs.q) + 2 * bool(needs.k)) * q.element_size()
                blocks = len([b for b in range(0, length, block_size) if begin <= b < begin + pieces[rank]])
                wide = max(4, q.element_size()) * (4 * ("means" in needs.k) + ("similarity" in needs.k))
                rows = 3 * 4 * -(-length // block_size)
                sent = away + blocks * (3 * 2 * wide + rows) * (world_size - 1)
                assert group.traffic.total_bytes == sent, (length, block_size, dtype, method)


def test_masks_of_parts_are_those_of_the_whole_bitwise() -> None:
    for world_size in (2, 3, 5):
        run_ranks(_masks, world_size)


def _modes(rank: int, world_size: int) -> None:
    """A pass under inference_mode first, whose tables training uses; bf16."""
    config = _grouped("stdit3_xl_2")
    for grid, method in (((1, 1, 11), None), ((3, 1, 11), METHODS[0]), ((1, 1, 9), METHODS[0])):
        given, weights = inputs(config, grid, 1)
        if method is not None:
            given["sparse"] = SparseAttention(method=method, block_size=2, engine="torch")
        want, wanted = reference(config, given, weights)
        model = build(config, mesh_of_world())
        with torch.inference_mode():
            model(**part(model, given))
        _, grads = _step(model, given, weights)
        check(grads, wanted, f"{grid}")
        low = {name: x.float() if isinstance(x, Tensor) else x for name, x in given.items()}
        single = build(config, mesh_of_world(), torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = single(**part(single, low))
        (out.float() * weights[:, single.local_positions(grid)]).sum().backward()
        assert all(bool(grad.isfinite().all()) for grad in gradients(single).values())
        if method is None:
            mine = want[:, model.local_positions(grid)]
            assert float((out - mine).detach().abs().max() if mine.numel() else 0) < 0.05 * float(want.abs().max())


def test_inference_before_training_and_half_precision() -> None:
    """Eight ranks for four heads: some have no unit."""
    for world_size in (4, 8):
        run_ranks(_modes, world_size)


def _compiled(rank: int, world_size: int) -> None:
    config = dataclasses.replace(_grouped("stdit3_xl_2"), num_layers=2)
    model = build(config, mesh_of_world())
    given, weights = inputs(config, (3, 1, 7), 1)
    want, wanted = reference(config, given, weights)
    out = torch.compile(model, backend="aot_eager")(**part(model, given))
    positions = model.local_positions((3, 1, 7))
    torch.testing.assert_close(out.detach(), want[:, positions], rtol=0, atol=1e-11)
    (out * weights[:, positions]).sum().backward()
    check(summed(gradients(model)), wanted, "compiled")


@pytest.mark.slow
def test_compiled_models_equal_one_process() -> None:
    run_ranks(_compiled, 2, timeout_s=250)


def _refusals(rank: int, world_size: int) -> list[str]:
    config = _grouped("stdit3_xl_2")
    model = build(config, mesh_of_world())
    given, _ = inputs(config, (3, 1, 11), 1)
    mine = part(model, given)
    sparse = {
        "grid": SparseAttention(method=SparseVideoGenMask(), block_size=2),
        "differs": SparseAttention(method=TopKMask(density=0.3 + 0.1 * rank), block_size=2, engine="torch"),
        "step": SparseAttention(method=TopKMask(), block_size=2, engine="torch", step=rank),
        "heads": SparseAttention(method=SpargeMask(top_p=(0.3, 0.4)), block_size=2, engine="torch"),
    }
    texts = [refused(partial(model, **mine, sparse=each)) for each in sparse.values()]
    with torch.set_grad_enabled(rank == 0):
        texts.append(refused(partial(model, **mine)))
    # What one rank alone is given, of any kind.
    odd: list[dict[str, Any]] = [
        {"grid": (3, 11)},
        {"grid": 3},
        {"video_tokens": None},
        {"sparse": TopKMask()},
        {"timestep": torch.ones(())},
    ]
    odd += [{"video_tokens": mine["video_tokens"].float()}]
    texts += [refused(partial(model, **(mine | (each if rank == 1 else {})))) for each in odd]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank == 2):
        texts.append(refused(partial(model, **mine)))
    texts.append(refused(partial(model, **mine)))
    return texts


def test_wrong_sparse_attention_is_refused_on_every_rank() -> None:
    """Also on ranks that hold nothing; afterwards the model runs."""
    words = [
        *("needs the token grid", "disagree about the call", "step 1", "heads", "gradients"),
        *("grid must be three integers", "rank 1", "video_tokens must be a tensor", "sparse must be a SparseAttention"),
        *("timestep must be", "torch.float32", "autocast"),
        "accepted",
    ]
    for texts in run_ranks(_refusals, 4):
        for text, word in zip(texts, words, strict=True):
            assert word in text, (word, text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "topk"}, "method must be a MaskMethod, got str"),
        ({"block_size": 0}, "block_size must be an integer"),
    ],
)
def test_sparse_attention_names_what_it_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseAttention(**({"method": TopKMask(), "block_size": 2} | change))


def test_attention_of_the_callers_is_not_cut_into_units() -> None:
    config = _grouped("stdit3_xl_2")
    assert all(stage.units == 4 for stage in axial_stages(config))
    assert not any(stage.units for stage in axial_stages(config, in_units=False))
