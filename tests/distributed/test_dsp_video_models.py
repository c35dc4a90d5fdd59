"""Video models whose layers attend along one dim each: outputs and gradients on parts equal one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron.dsp import DspGroup, DspMesh, explain
from dbsp_megatron.masks.top_k import TopKMask
from dbsp_megatron.models.axial.sparse import SparseAttention
from tests.distributed.axial_models import NAMES, build, guidance, inputs, part, reference, tiny
from tests.distributed.dsp_models import check, mesh_of_world, refused, summed
from tests.distributed.sharded import recorded_collectives
from tests.harness import run_ranks
from tests.unit.models.cores import gradients

CASES = [((5, 1, 7), 2), ((1, 3, 3), 3), ((3, 1, 11), 1), ((8, 3, 4), 1), ((2, 1, 1), 2)]


def _parity(rank: int, world_size: int, name: str, cases: list[Any]) -> None:
    config, mesh = tiny(name), mesh_of_world()
    model = build(config, mesh)
    for grid, batch in cases:
        for guided in (False, True):
            given, weights = inputs(config, grid, batch)
            if guided:
                given, weights = guidance(given), weights[:1].repeat(2, 1, 1)
            out, wanted = reference(config, given, weights)
            positions = model.local_positions(grid)
            mesh.traffic.reset()
            with recorded_collectives() as log:
                got = model(**part(model, given))
            assert model.session is not None
            plan = model.session.last_plan
            assert plan is not None
            # One more brings the prediction back to where the input was.
            home = plan.start != plan.end
            exchanges = [kind for kind, *_ in log if kind == "all_to_all_single"]
            in_units = sum(step.in_units for step in plan.steps)
            assert len(exchanges) == (plan.num_switches + 2 * in_units + home if world_size > 1 else 0)
            assert explain(model.session, quiet=True).count("attention in units") == in_units
            torch.testing.assert_close(got, out[:, positions], rtol=0, atol=1e-11)
            (got * weights[:, positions]).sum().backward()
            check(summed(gradients(model)), wanted, f"{name} {grid} {batch} {guided}")
            model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", NAMES)
def test_models_on_parts_equal_one_process(name: str) -> None:
    """Odd lengths, images, fewer frames than ranks, batches and guidance batches."""
    run_ranks(_parity, 3, name, CASES)


@pytest.mark.parametrize(("world_size", "name"), [(1, "latte_xl_2"), (2, "stdit3_xl_2"), (4, "axial_k3")])
def test_other_numbers_of_ranks(world_size: int, name: str) -> None:
    run_ranks(_parity, world_size, name, CASES[:2])


def test_eight_ranks_where_most_hold_nothing_in_some_layers() -> None:
    run_ranks(_parity, 8, "stdit3_xl_2", [((3, 1, 5), 1)])


def _single_precision(rank: int, world_size: int) -> None:
    for name in NAMES:
        config = tiny(name)
        given, weights = inputs(config, (5, 1, 7), 2, torch.float32)
        out, wanted = reference(config, given, weights, torch.float32)
        model = build(config, mesh_of_world(), torch.float32)
        positions = model.local_positions(given["grid"])
        got = model(**part(model, given))
        assert float((got - out[:, positions]).detach().abs().max()) <= 1e-5 * float(out.abs().max())
        (got * weights[:, positions]).sum().backward()
        for key, grad in summed(gradients(model)).items():
            assert float((grad - wanted[key]).abs().max()) <= 1e-5 * max(1.0, float(wanted[key].abs().max())), key


def test_single_precision_is_within_1e_5() -> None:
    run_ranks(_single_precision, 2)


def _interleaved(rank: int, world_size: int, kind: str) -> None:
    """Two videos of other sizes under way at once, each layer recomputed in the backward pass."""
    for name in ("latte_xl_2", "axial_k3"):
        config = tiny(name, recompute=kind)
        model = build(config, mesh_of_world())
        made = [inputs(config, grid, batch) for grid, batch in (((5, 1, 7), 2), ((2, 3, 3), 1))]
        outs = [model(**part(model, given)) for given, _ in made]
        for (given, weights), got in zip(made, outs, strict=True):
            _, wanted = reference(config, given, weights)
            (got * weights[:, model.local_positions(given["grid"])]).sum().backward()
            check(summed(gradients(model)), wanted, f"{name} {given['grid']}")
            model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_two_sizes_at_once_with_recompute(kind: str) -> None:
    run_ranks(_interleaved, 3, kind)


def _sparse(rank: int, world_size: int) -> None:
    """Frames of 11 tokens in blocks of 2: a mask for each frame and sample."""
    config = tiny("stdit3_xl_2")
    given, weights = inputs(config, (3, 1, 11), 2)
    dense, _ = reference(config, given, weights)
    given["sparse"] = SparseAttention(method=TopKMask(density=0.3), block_size=2, engine="torch")
    out, wanted = reference(config, given, weights)
    assert float((out - dense).abs().max()) > 1e-3
    model = build(config, mesh_of_world())
    positions = model.local_positions(given["grid"])
    got = model(**part(model, given))
    torch.testing.assert_close(got, out[:, positions], rtol=0, atol=1e-11)
    (got * weights[:, positions]).sum().backward()
    check(summed(gradients(model)), wanted, "sparse")


def test_masks_of_frames_do_not_depend_on_the_ranks() -> None:
    """Also where a rank holds no frame in layers along S."""
    for world_size in (2, 4):
        run_ranks(_sparse, world_size)


def _two_axes(rank: int, world_size: int) -> None:
    groups = {}
    for name, lists in {"node": [[0, 1], [2, 3]], "rail": [[0, 2], [1, 3]]}.items():
        for ranks in lists:
            made = dist.new_group(ranks)
            if rank in ranks:
                groups[name] = made
    for model_name in ("stdit3_xl_2", "axial_k3"):
        config = tiny(model_name)
        mesh = DspMesh([DspGroup(groups["rail"], "rail"), DspGroup(groups["node"], "node")])
        model = build(config, mesh)
        given, weights = inputs(config, (5, 3, 3), 1)
        out, wanted = reference(config, given, weights)
        positions = model.local_positions(given["grid"])
        got = model(**part(model, given))
        torch.testing.assert_close(got, out[:, positions], rtol=0, atol=1e-11)
        (got * weights[:, positions]).sum().backward()
        check(summed(gradients(model)), wanted, model_name)


def test_two_mesh_axes_equal_one_process() -> None:
    run_ranks(_two_axes, 4)


def _refusals(rank: int, world_size: int) -> list[str]:
    config = tiny("stdit3_xl_2")
    model = build(config, mesh_of_world())
    given, _ = inputs(config, (4, 1, 6), 2)
    mine = part(model, given)
    wrong = mine | ({"video_tokens": mine["video_tokens"][:, 1:]} if rank == 1 else {})
    other = mine | {"fps": torch.ones(3, dtype=torch.float64)}
    longer, _ = inputs(config, (5, 1, 6), 2)
    sizes = mine if rank else part(model, longer)
    return [refused(partial(model, **each)) for each in (wrong, other, sizes)]


def test_wrong_arguments_are_refused_on_every_rank() -> None:
    for messages in run_ranks(_refusals, 2):
        assert "video_tokens must be" in messages[0]
        assert "fps must be of shape [2]" in messages[1]
        assert "lengths" in messages[2]


def _explained(rank: int, world_size: int) -> tuple[int, int, str]:
    config = tiny("stdit3_xl_2", num_layers=56)
    model = build(config, mesh_of_world())
    assert model.session is not None
    three = build(tiny("axial_k3", num_layers=60), mesh_of_world())
    assert three.session is not None
    plans = [
        each.session.plan(each.dit_config.lengths((4, 2, 4))) for each in (model, three) if each.session is not None
    ]
    assert all(plan is not None for plan in plans)
    counts = [plan.num_switches for plan in plans if plan is not None]
    return counts[0], counts[1], explain(model.session, quiet=True)


def test_plans_have_the_fewest_switches() -> None:
    """Two for each pair of layers but the last, and 29 for 20 cycles of three dims."""
    two, three, text = run_ranks(_explained, 2)[0]
    assert (two, three) == (55, 29)
    assert "56 stages, 55 switches" in text
