"""Gradients through parallel transformers: whole for the inputs, a share on each rank for the parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.models.diffusers import parallelize
from tests.distributed.diffusers_models import make_inputs, make_model
from tests.distributed.sharded import make_sp
from tests.harness import run_ranks
from tests.reference import max_error

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]

LEAVES = ("hidden_states", "encoder_hidden_states")


def _gradients(name: str) -> dict[str, Tensor]:
    """Of a loss of the whole output, by parameter and input."""
    model = make_model(name)
    inputs = make_inputs(name, model)
    leaves = {key: inputs[key].requires_grad_() for key in LEAVES}
    return _backward(model, inputs, leaves)


def _backward(model: torch.nn.Module, inputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    out = model(**inputs).sample
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    (out * weight).sum().backward()
    found = {key: x.grad.clone() for key, x in leaves.items() if x.grad is not None}
    # A rank without tokens of a kind may have no gradient of their layers at all.
    return found | {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in model.named_parameters()}


def _compare(rank: int, world_size: int, names: list[str]) -> list[str]:
    problems = []
    for name in names:
        want = _gradients(name)
        sp = make_sp("dbsp", world_size // 2, 2, block_size=8 * world_size)
        model = make_model(name)
        inputs = make_inputs(name, model)
        leaves = {key: inputs[key].requires_grad_() for key in LEAVES}
        with parallelize(model, sp):
            got = _backward(model, inputs, leaves)
        for key, grad in got.items():
            if key not in LEAVES:
                dist.all_reduce(grad)
            error = max_error(grad, want[key]) / max(1.0, float(want[key].abs().max()))
            if not error < 1e-4:
                problems.append(f"rank {rank}: {name}: gradient of {key} is off by {error:.3g}")
        sp.destroy()
    return problems


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_equal_one_process(world_size: int) -> None:
    """Large blocks: most ranks hold no text, and half of four hold nothing at all (Traps B17, B55)."""
    names = ["wan", "cogvideox", "hunyuan", "flux"]
    problems = [problem for rank in run_ranks(_compare, world_size, names, timeout_s=120) for problem in rank]
    assert not problems, "\n".join(problems)
