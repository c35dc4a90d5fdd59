"""Transformers of diffusers on several ranks equal the same transformer in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import MaskMethod, SlidingTileMask, TopPMask
from dbsp_megatron.models.diffusers import parallelize
from tests.distributed.diffusers_models import NUM_GRID, make_inputs, make_model, num_text
from tests.distributed.sharded import make_sp
from tests.harness import run_ranks
from tests.reference import max_error, random_blocks

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]

BLOCK = 4
"""Blocks of 4 tokens: the last one of 45 is short, text and grid share one where text comes first."""
ATOL = 1e-4
MESHES = {
    2: (("ulysses", 2), ("ring", 1), ("usp", 2), ("dbsp", 2), ("dbsp", 1)),
    3: (("ulysses", 3), ("ring", 1), ("usp", 3), ("dbsp", 1)),
    4: (("ulysses", 4), ("ring", 1), ("usp", 2), ("dbsp", 2)),
}
"""Strategies and Ulysses degrees by number of ranks; three heads, so that they never divide."""


def _sp(strategy: str, ulysses: int, world_size: int) -> SequenceParallel:
    return make_sp(strategy, ulysses, world_size // ulysses, block_size=BLOCK)


def alone() -> SequenceParallel:
    """The same on this rank by itself."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return SequenceParallel(SequenceParallelConfig(strategy="none", block_size=BLOCK), group=group)


def _mask(kind: str, name: str) -> BlockMask | MaskMethod:
    if kind == "top_p":
        return TopPMask(0.4)
    if kind == "tile":
        return SlidingTileMask(tile=(1, 3, 3), window=(1, 1, 1))
    seqlen = num_text(name) + NUM_GRID
    count = -(-seqlen // BLOCK)
    return BlockMask(random_blocks(3, 1, 3, count, count), BLOCK, BLOCK, seqlen, seqlen)


def _dense(rank: int, world_size: int, names: list[str]) -> list[str]:
    with torch.no_grad():
        return [f"rank {rank}: {problem}" for name in names for problem in _dense_problems(name, world_size)]


def _dense_problems(name: str, world_size: int) -> list[str]:
    problems = []
    model = make_model(name)
    inputs = make_inputs(name, model)
    want = model(**inputs).sample
    state = {key: x.clone() for key, x in model.state_dict().items()}
    for strategy, ulysses in MESHES[world_size]:
        sp = _sp(strategy, ulysses, world_size)
        with parallelize(model, sp):
            error = max_error(model(**inputs).sample, want)
        if not error < ATOL:
            problems.append(f"{name} under {strategy} U={ulysses} is off by {error:.3g}")
        sp.destroy()
    if not torch.equal(model(**inputs).sample, want):
        problems.append(f"{name} is not what it was")
    if any(not torch.equal(x, state[key]) for key, x in model.state_dict().items()):
        problems.append(f"weights of {name} changed")
    return problems


def _sparse(rank: int, world_size: int, cases: list[tuple[str, str]]) -> list[str]:
    single = alone()
    with torch.no_grad():
        return [f"rank {rank}: {problem}" for case in cases for problem in _sparse_problems(*case, world_size, single)]


def _sparse_problems(name: str, kind: str, world_size: int, single: SequenceParallel) -> list[str]:
    problems = []
    model, mask = make_model(name), _mask(kind, name)
    first = make_inputs(name, model)
    # The second step runs on plans of the first.
    calls = [first, {**make_inputs(name, model, seed=1), "timestep": first["timestep"] / 2}]
    dense = model(**first).sample
    with parallelize(model, single, mask=mask):
        wants = [model(**call).sample for call in calls]
    if not max_error(wants[0], dense) > 1e-3:
        problems.append(f"{name}: the {kind} mask changes nothing")
    for strategy, ulysses in MESHES[world_size]:
        sp = _sp(strategy, ulysses, world_size)
        with parallelize(model, sp, mask=mask) as handle:
            error = max(max_error(model(**call).sample, want) for call, want in zip(calls, wants, strict=True))
        if not error < ATOL:
            problems.append(f"{name}, {kind}, {strategy} U={ulysses}: off by {error:.3g}")
        if handle.step != 1:
            problems.append(f"{name}: two timesteps were counted as step {handle.step}")
        sp.destroy()
    return problems


def _run(function: Any, world_size: int, cases: Any) -> None:
    problems = [problem for rank in run_ranks(function, world_size, cases, timeout_s=120) for problem in rank]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parallelize_equals_one_process_wan(world_size: int) -> None:
    """Odd token counts, guidance as a batch of two, 769 context tokens, one timestep a token (Traps B23, B25, B33)."""
    _run(_dense, world_size, ["wan", "wan i2v", "wan ti2v"])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parallelize_equals_one_process_joint_text(world_size: int) -> None:
    """Text tokens count once, wherever they are, also on ranks that hold none (Traps B03, B31)."""
    names = ["cogvideox", "hunyuan", "flux"]
    extra = {2: ["cogvideox 1.5"], 3: ["hunyuan token replace"], 4: ["cogvideox 2b", "hunyuan token replace"]}
    _run(_dense, world_size, names + extra[world_size])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parallelize_with_mask_equals_one_process_with_it(world_size: int) -> None:
    kinds = ["top_p", "random", "tile"]
    more = {2: "wan i2v", 3: "cogvideox 1.5", 4: "hunyuan token replace"}
    names = ["wan", "cogvideox", "hunyuan", "flux", more[world_size]]
    _run(_sparse, world_size, [(name, kinds[(i + world_size) % 3]) for i, name in enumerate(names)])
