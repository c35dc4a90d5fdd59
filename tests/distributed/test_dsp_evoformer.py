"""The Evoformer on parts equals one process: both tracks, all gradients, and a training step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.dsp import DspGroup, DspMesh
from dbsp_megatron.models.evoformer import Evoformer, EvoformerConfig, load_evoformer_config
from tests.distributed.dsp_models import check, gradients, mesh_of_world, refused, summed
from tests.harness import run_ranks
from tests.unit.models.cores import randomize

SMALL = EvoformerConfig(
    num_blocks=2, msa_channels=6, pair_channels=5, msa_heads=2, pair_heads=3, head_dim=4, outer_channels=2,
    triangle_channels=3, transition_factor=2,
)  # fmt: skip
SIZES = [((5, 7), 2), ((3, 4), 1), ((1, 5), 3), ((2, 1), 1)]
"""(sequences, residues), samples."""


def _model(config: EvoformerConfig = SMALL, mesh: Any = None) -> Evoformer:
    model = Evoformer(config, mesh=mesh).double()
    randomize(model)
    return model


def _inputs(size: tuple[int, int], batch: int, masked: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(arguments, weights of the loss), whole."""
    generator = torch.Generator().manual_seed(size[0])
    shapes = {"msa": (batch, *size, SMALL.msa_channels), "pair": (batch, size[1], size[1], SMALL.pair_channels)}
    draws = [
        {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()} for _ in "xw"
    ]
    if masked:
        for name, shape in shapes.items():
            mask = (torch.rand(shape[:-1], generator=generator) > 0.3).double()
            mask[:, 0], mask[:, :, 0] = 1.0, 1.0
            draws[0][f"{name}_mask"] = mask
    return draws[0], draws[1]


def _step(
    model: Evoformer, given: dict[str, Tensor], weights: dict[str, Tensor], size: tuple[int, int]
) -> list[Tensor]:
    """Outputs of this rank; gradients are left in the model, and those of the inputs in them."""
    parts = {name: model.cut(given[name], name, "start", size).clone().requires_grad_() for name in ("msa", "pair")}  # type: ignore[arg-type]
    masks = {name: mask for name, mask in given.items() if name.endswith("mask")}
    outs = model(parts["msa"], parts["pair"], size, **masks)
    losses = [
        (out * model.cut(weights[name], name, "end", size)).sum()  # type: ignore[arg-type]
        for name, out in zip(("msa", "pair"), outs, strict=True)
    ]
    (losses[0] + losses[1]).backward()
    return [*(out.detach() for out in outs), *(part.grad for part in parts.values() if part.grad is not None)]


def _parity(rank: int, world_size: int, masked: bool, recompute: str) -> None:
    config = dataclasses.replace(SMALL, recompute=recompute)  # type: ignore[arg-type]
    model, whole = _model(config, mesh_of_world()), _model()
    for size, batch in SIZES:
        given, weights = _inputs(size, batch, masked)
        expected = _step(whole, given, weights, size)
        wanted = gradients(whole)
        got = _step(model, given, weights, size)
        for index, (name, at) in enumerate((("msa", "end"), ("pair", "end"), ("msa", "start"), ("pair", "start"))):
            mine = model.cut(expected[index], name, at, size)  # type: ignore[arg-type]
            torch.testing.assert_close(got[index], mine, rtol=0, atol=1e-10)
        check(summed(gradients(model)), wanted, f"{size} {batch}")


@pytest.mark.parametrize(
    ("world_size", "masked", "recompute"),
    [(1, True, "none"), (2, False, "none"), (3, True, "none"), (4, True, "full")],
)
def test_evoformer_on_parts_equals_one_process(world_size: int, masked: bool, recompute: str) -> None:
    """Odd lengths, ranks without sequences or residues, batches, masks, recompute."""
    run_ranks(_parity, world_size, masked, recompute)


def _training(rank: int, world_size: int) -> tuple[list[float], float]:
    """Losses of some steps of gradient descent towards a target, and the last weights' norm."""
    size = (4, 5)
    given, target = _inputs(size, 1, False)
    model = _model(SMALL, mesh_of_world() if world_size > 1 else None)
    losses = []
    for _ in range(4):
        parts = {name: model.cut(given[name], name, "start", size) for name in ("msa", "pair")}  # type: ignore[arg-type]
        outs = model(parts["msa"], parts["pair"], size)
        total = torch.zeros((), dtype=torch.float64)
        for name, out in zip(("msa", "pair"), outs, strict=True):
            total = total + (out - model.cut(target[name], name, "end", size)).square().mean(-1).sum()  # type: ignore[arg-type]
        total.backward()
        grads = gradients(model)
        shared = total.detach().clone()
        if world_size > 1:
            dist.all_reduce(shared)
            summed(grads)
        losses.append(float(shared))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 1e-4 * grads[name]
    return losses, float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())


def test_a_training_step_lowers_the_loss_alike_on_any_number_of_ranks() -> None:
    alone = _training(0, 1)
    assert alone[0][-1] < alone[0][0]
    for losses, norm in run_ranks(_training, 3):
        assert losses == pytest.approx(alone[0], rel=1e-10)
        assert norm == pytest.approx(alone[1], rel=1e-12)


def _plans(rank: int, world_size: int) -> list[int]:
    config = dataclasses.replace(SMALL, num_blocks=load_evoformer_config("af2_evoformer").num_blocks)
    model = Evoformer(config, mesh=mesh_of_world())
    assert model.msa_session is not None
    assert model.pair_session is not None
    plans = model.msa_session.plan({"s": 8, "r": 6}), model.pair_session.plan({"i": 6, "j": 6})
    return [plan.num_switches for plan in plans if plan is not None]


def test_plans_have_two_switches_a_block_for_sequences_and_four_for_pairs() -> None:
    assert run_ranks(_plans, 2)[0] == [2 * 48 - 1, 4 * 48 - 1]


def _refusals(rank: int, world_size: int) -> str:
    size = (4, 5)
    given, _ = _inputs(size, 1, False)
    model = _model(SMALL, mesh_of_world())
    parts = [model.cut(given[name], name, "start", size) for name in ("msa", "pair")]  # type: ignore[arg-type]
    if rank == 1:
        parts[1] = given["pair"]
    return refused(lambda: model(*parts, size))


def test_a_wrong_part_is_refused_on_every_rank() -> None:
    for message in run_ranks(_refusals, 2):
        assert "pair must be" in message
        assert "use cut()" in message


def _two_axes(rank: int, world_size: int) -> list[str]:
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    every = dist.new_group([0, 1, 2, 3])
    alone = [dist.new_group([each]) for each in range(4)][rank]
    texts = []
    for outer, inner in ((columns[rank % 2], rows[rank // 2]), (every, alone)):
        model = _model(mesh=DspMesh([DspGroup(outer, "out"), DspGroup(inner, "in")]))
        for size, batch in SIZES:
            given, weights = _inputs(size, batch, masked=False)
            texts.append(refused(lambda m=model, g=given, w=weights, s=size: _step(m, g, w, s)))
    return texts


def test_plans_that_cut_residues_by_other_axes_are_refused_on_all_ranks() -> None:
    """Before anything is exchanged: with lengths of their own some ranks would see it, and others wait for them."""
    for texts in run_ranks(_two_axes, 4):
        assert all("cut residues by other mesh axes in block 0: use a mesh of one axis" in text for text in texts[:4])
        assert texts[4:] == ["accepted"] * 4
