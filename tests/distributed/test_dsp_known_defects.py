"""What is known to go wrong in another implementation of DSP, as tests of this one.

Source: VideoSys (https://github.com/NUS-HPC-AI-Lab/VideoSys) keeps one pad for each dim name in a module, cuts merged
dims by the pad of one of them, assumes that lengths divide in its all-to-all, and scales gradients by a string whose
default does nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.dsp import Boundary, DspGroup, DspMesh, DspSession, gather, parallelize, split, switch
from dbsp_megatron.dsp.layout import Layout
from dbsp_megatron.dsp.naive import naive_part
from dbsp_megatron.dsp.tags import tag_of
from tests.distributed.dsp_models import (
    DimAttention,
    check,
    gradients,
    inputs,
    make,
    make_in_code,
    mesh_of_world,
    reference,
    specs,
    summed,
)
from tests.harness import run_ranks


def _two_axes(num_inner: int, outer: str, inner: str) -> tuple[DspGroup, DspGroup]:
    size = dist.get_world_size()
    inner_lists = [list(range(start, start + num_inner)) for start in range(0, size, num_inner)]
    outer_lists = [list(range(start, size, num_inner)) for start in range(num_inner)]
    groups = [dist.new_subgroups_by_enumeration(lists)[0] for lists in (outer_lists, inner_lists)]
    return DspGroup(groups[0], outer), DspGroup(groups[1], inner)


def _cfg(rank: int, world_size: int, num_cfg: int, batch: int) -> None:
    """CFG-parallel cuts the batch, DSP the grid; each gather takes the layout of its own group."""
    cfg, dsp = _two_axes(world_size // num_cfg, "cfg", "dsp")
    whole = torch.arange(batch * 5 * 7 * 2, dtype=torch.float64).view(batch, 5, 7, 2)
    x = split(split(whole, cfg, 0), dsp, 2)
    # In image mode the other code switches the batch too, under the same name.
    y = switch(switch(x, dsp, 2, 1), dsp, 1, 2)
    out = gather(gather(y, dsp, 2), cfg, 0)
    assert out.shape == whole.shape
    assert torch.equal(out, whole)
    z = switch(x, dsp, 2, 0)
    found = tag_of(z)
    assert found is not None
    assert found.layout.shards[0] == (cfg.axis, dsp.axis)
    assert torch.equal(gather(gather(z, dsp, 0), cfg, 0), whole)


@pytest.mark.parametrize(("num_cfg", "world_size", "batch"), [(2, 4, 2), (2, 4, 3), (2, 4, 1), (2, 8, 2)])
def test_cfg_parallel_beside_dsp_keeps_every_row(num_cfg: int, world_size: int, batch: int) -> None:
    """Defect 1: the pad of the batch of one group was overwritten by the other's: 1 row of 2, or a negative length."""
    run_ranks(_cfg, world_size, num_cfg, batch)


def _merged(rank: int, world_size: int) -> None:
    """Stages that see "(B T) S C" and "(B S) T C", as models with merged batches do."""
    for batch, num_t, num_s in ((2, 7, 5), (2, 3, 6), (3, 4, 7), (1, 1, 5)):
        torch.manual_seed(0)
        spatial, temporal = DimAttention(1).double(), DimAttention(1).double()
        x, _, _ = inputs((batch, num_t, num_s))
        x = torch.cat([x, x[..., :1].sin()], -1)
        weights = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

        def whole(x: Tensor, s: Any = spatial, t: Any = temporal) -> Tensor:
            b, n = x.shape[0], x.shape[1]
            x = s(x.flatten(0, 1)).unflatten(0, (b, n))
            x = t(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (b, -1)).transpose(1, 2)
            return x

        leaf = x.clone().requires_grad_()
        expected = whole(leaf)
        (expected * weights).sum().backward()
        wanted = {"x": leaf.grad, **{f"s.{k}": v for k, v in gradients(spatial).items()}}
        wanted |= {f"t.{k}": v for k, v in gradients(temporal).items()}
        session = DspSession(mesh_of_world(), ("T", "S"))
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            with session.run({"T": num_t, "S": num_s}, {"B": batch}) as run:
                y = run.enter(leaf, "B T S C").flatten(0, 1)
                y = spatial(run.stage("spatial", y, "(B T) S C", needs={"S"}))
                y = y.unflatten(0, (batch, run.local("T"))).transpose(1, 2).flatten(0, 1)
                y = temporal(run.stage("temporal", y, "(B S) T C", needs={"T"}))
                y = y.unflatten(0, (batch, run.local("S"))).transpose(1, 2)
                (y * run.slice(weights, "B T S C")).sum().backward()
                got = run.leave(run.mark(y.detach(), "B T S C"), "B T S C")
            torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-12)
            grads = {"x": leaf.grad, **{f"s.{k}": v for k, v in gradients(spatial).items()}}
            grads |= {f"t.{k}": v for k, v in gradients(temporal).items()}
            check(summed(grads), wanted, f"{batch} {num_t} {num_s}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_merged_batch_of_any_length_is_cut_by_its_own_dim(world_size: int) -> None:
    """Defect 2: with 2 samples and 5 positions on 4 ranks the pad of 5 was put on 10, and the code stopped."""
    run_ranks(_merged, world_size)


def _uneven(rank: int, world_size: int) -> None:
    group = DspGroup(dist.group.WORLD, "dsp")
    for shape in ((1, 13, 9, 2), (2, 5, 3, 1), (1, 3, 2, 4)):
        whole = torch.arange(torch.Size(shape).numel()).view(shape).double()
        x = split(whole, group, 2)
        moved = switch(x, group, 2, 1)
        assert torch.equal(moved, naive_part(whole, Layout.sharded(shape, 1, group.axis), group.coords))
        assert torch.equal(switch(moved, group, 1, 2), x)


def test_lengths_that_do_not_divide_neither_hang_nor_mix() -> None:
    """Defect 3: receive buffers had the size of the first chunk, so that uneven ones never came."""
    run_ranks(_uneven, 4, timeout_s=20)


def _gradients(rank: int, world_size: int) -> dict[str, float]:
    """Gradients summed over the ranks, with nothing to choose; a wrong factor would be seen."""
    model = make_in_code()
    x, text, weights = inputs((2, 5, 7))
    _, wanted = reference(model, x, text, weights)
    session = DspSession(mesh_of_world(), ("T", "S"))
    with session.run({"T": 5, "S": 7}) as run:
        out = model.run_on(run, x, text, "B T S C", ("T", "S"))
        part = run.slice(weights, "B T S C")
    (out * part).sum().backward()
    got = summed(gradients(model))
    check(got, wanted, "loss on parts")
    # A loss that all ranks compute alike after a gather: each rank has its part of the gradient too.
    with session.run({"T": 5, "S": 7}) as run:
        out = run.leave(model.run_on(run, x, text, "B T S C", ("T", "S")), "B T S C")
    (out * weights).sum().backward()
    check(summed(gradients(model)), wanted, "loss after a gather")
    return {name: float(got[name].norm() / wanted[name].norm()) for name in wanted}


def test_gradients_need_no_scale() -> None:
    """Defect 4: the default scale did nothing, which left 1 / N of each gradient in the region."""
    for ratios in run_ranks(_gradients, 4):
        assert set(ratios) >= {"embed.weight", "blocks.0.text.weight", "head.bias"}
        for name, ratio in ratios.items():
            assert ratio == pytest.approx(1, abs=1e-12), name


def _few_frames(rank: int, world_size: int) -> None:
    """T <= ranks, and images: no branch may look at the number of frames that a rank has."""
    for shape in ((2, 4, 6), (1, 2, 9), (3, 1, 5)):
        model = make()
        x, text, weights = inputs(shape)
        expected, wanted = reference(model, x, text, weights)
        boundary = Boundary(tensor="B T S C")
        with parallelize(
            model, mesh_of_world(), grid=("T", "S"), entries=[boundary], stages=specs(("T", "S")), example=(x, text)
        ) as handle:
            runs: list[Any] = []
            keep = model.head.register_forward_hook(lambda *_, h=handle, r=runs: r.append(h.run))
            out = model(x, text)
            assert torch.allclose(out, runs[0].slice(expected, "B T S C"), rtol=0, atol=1e-12)
            (out * runs[0].slice(weights, "B T S C")).sum().backward()
            check(summed(gradients(model)), wanted, str(shape))
            keep.remove()


def test_one_frame_or_none_on_a_rank() -> None:
    run_ranks(_few_frames, 4)


def _axes_in_a_model(rank: int, world_size: int) -> None:
    """Two axes cut one model: the planner moves each of them, switches are hierarchical where both go."""
    outer, inner = _two_axes(2, "out", "in")
    for shape, grid in (((2, 5, 7), ("T", "S")), ((1, 3, 4, 5), ("T", "H", "W"))):
        model = make_in_code(num_dims=len(grid))
        x, text, weights = inputs(shape)
        expected, wanted = reference(model, x, text, weights)
        mesh = DspMesh([outer, inner], links={"out": (10, 0)})
        session = DspSession(mesh, grid, check_stages=True)
        pattern = f"B {' '.join(grid)} C"
        for attempt in range(2):
            mesh.traffic.reset()
            with session.run(dict(zip(grid, shape[1:], strict=True))) as run:
                out = model.run_on(run, x, text, pattern, grid)
                part = run.slice(weights, pattern)
                assert torch.allclose(out, run.slice(expected, pattern), rtol=0, atol=1e-12)
                if attempt:
                    assert session.last_plan is not None
                    assert mesh.traffic.total_bytes == session.last_plan.sent_bytes(mesh.coords)
                whole = run.leave(out, pattern)
            torch.testing.assert_close(whole.detach(), expected, rtol=0, atol=1e-12)
            (out * part).sum().backward()
            check(summed(gradients(model)), wanted, f"{shape} attempt {attempt}")


def test_two_axes_cut_one_model() -> None:
    run_ranks(_axes_in_a_model, 4)
