"""Small models with the options of the published ones, their inputs and single-process results."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dbsp_megatron.compat import group_rank, group_size
from dbsp_megatron.dsp import DspMesh, StagePlan, unit_plan_of
from dbsp_megatron.models.axial import AxialConfig, AxialDiT
from dbsp_megatron.models.dit import load_model_config
from tests.unit.models.cores import gradients, randomize

NAMES = ("stdit3_xl_2", "latte_xl_2", "open_sora_plan_1_1", "axial_k3")


def tiny(name: str, **changes: Any) -> AxialConfig:
    """A published model with few channels and layers; all other options as they are."""
    config = load_model_config(name)
    assert isinstance(config, AxialConfig)
    small: dict[str, Any] = {
        "hidden_size": 16,
        "num_layers": 2 * len(config.attention_dims),
        "num_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 24,
        "in_channels": 3,
        "out_channels": 2,
        "time_freq_dim": 8,
        "space_base": 4,
    }
    if config.text == "cross":
        small |= {"text_dim": 7, "text_len": 5}
    return dataclasses.replace(config, **(small | changes))


def build(
    config: AxialConfig,
    mesh: DspMesh | None = None,
    dtype: torch.dtype = torch.float64,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> AxialDiT:
    """A model with the same random weights on all ranks, or parts of them on tensor-parallel ones."""
    groups = None if tp_group is None else ProcessGroupCollection(tp=tp_group, cp=None, pp=None)
    model = AxialDiT(config, mesh=mesh, pg_collection=groups, sequence_parallel=sequence_parallel).to(dtype)
    randomize(model, group_rank(tp_group), group_size(tp_group))
    return model


def inputs(
    config: AxialConfig, grid: tuple[int, int, int], batch: int, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Any], Tensor]:
    """(arguments for the whole video, weights of the loss)."""
    generator = torch.Generator().manual_seed(3)
    tokens = grid[0] * grid[1] * grid[2]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    given: dict[str, Any] = {
        "video_tokens": draw(batch, tokens, config.patch_dim),
        "timestep": torch.linspace(0.125, 0.875, batch, dtype=dtype),
        "grid": grid,
    }
    if config.text == "cross":
        given["context"] = draw(batch, 4, config.text_dim or 0)
    return given, draw(batch, tokens, config.patch_out_dim)


def guidance(given: dict[str, Any]) -> dict[str, Any]:
    """The first sample twice, with a text and with another, as guidance batches them."""
    twice = dict(given)
    twice["video_tokens"] = given["video_tokens"][:1].repeat(2, 1, 1)
    twice["timestep"] = given["timestep"][:1].repeat(2)
    if "context" in given:
        twice["context"] = torch.cat([given["context"][:1], torch.zeros_like(given["context"][:1])])
    return twice


def reference(
    config: AxialConfig, given: dict[str, Any], weights: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of the whole in one process."""
    model = build(config, dtype=dtype)
    out = model(**given)
    (out * weights).sum().backward()
    return out.detach(), gradients(model)


def part(model: AxialDiT, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of this rank."""
    return given | {"video_tokens": given["video_tokens"][:, model.local_positions(given["grid"])]}


def sent_numbers(plan: StagePlan, config: AxialConfig, batch: int, rank: int) -> int:
    """Numbers that a rank sends forward and backward: switches, q, k, v to units and outputs back, the prediction home.

    Of dense attention on one mesh axis, from lengths alone.
    """
    dims, (axis,) = plan.grid, [link.axis for link in plan.links]
    coords = {axis.name: rank}
    total = 0
    for _, move, layout, _ in plan.switches():
        back = (move.apply(layout), dataclasses.replace(move, from_dim=move.to_dim, to_dim=move.from_dim))
        total += (move.sent(layout, coords) + back[1].sent(back[0], coords)) * config.hidden_size * batch
    if plan.start != plan.end:
        (source,), (target,) = ([at for at, axes in enumerate(x.shards) if axes] for x in (plan.end, plan.start))
        kept, cut = plan.start.bounds(target, coords)[1], plan.end.bounds(source, coords)[1]
        there = (plan.shape[target] - kept) * cut + (plan.shape[source] - cut) * kept
        rest = math.prod(plan.shape) // (plan.shape[target] * plan.shape[source])
        total += there * rest * config.patch_out_dim * batch
    for step in plan.steps:
        if step.in_units:
            (dim,) = step.stage.needs
            total += _unit_numbers(plan, config, batch, rank, dims.index(dim))
    return total


def _unit_numbers(plan: StagePlan, config: AxialConfig, batch: int, rank: int, dim: int) -> int:
    """Entries of q, k, v and output that a rank sends, forward and backward, unit by unit."""
    num_ranks = plan.links[0].axis.size
    others = [length for at, length in enumerate(plan.shape) if at != dim]
    length, heads, kv_heads, width = plan.shape[dim], config.num_heads, config.kv_heads, config.heads_dim
    unit_plan = unit_plan_of((length, *others, batch), 0, num_ranks, heads, kv_heads=kv_heads)
    here = length // num_ranks + (rank < length % num_ranks)
    sent, keys = 0, set()
    for unit, begin, end, owner in unit_plan.items.tolist():
        rows = min(64 * end, length) - 64 * begin
        assert rows == length, "short sequences are one block"
        # q there and dout; out back and dq.
        sent += 2 * (here if owner != rank else rows - here) * width
        keys.add((unit * kv_heads // heads, owner))
    for _, owner in keys:
        # k and v there; their gradients back.
        sent += 2 * (here if owner != rank else length - here) * width
    return sent
