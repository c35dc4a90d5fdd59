"""Parameter groups, schedule, clipping and saved state of the optimizer."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from dbsp_megatron.config.sections import OptimConfig
from dbsp_megatron.train.optimizer import (
    allocate_state,
    build_optimizer,
    clip_by_global_norm,
    learning_rate,
    set_learning_rate,
    state_tensors,
)
from tests.harness import run_ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def test_build_optimizer_decays_matrices_only() -> None:
    model = _model()
    optimizer = build_optimizer(OptimConfig(weight_decay=0.3), model.named_parameters())
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.3, 0.0, 0.0, 0.0, 0.3, 0.0]


def test_build_optimizer_needs_weights() -> None:
    with pytest.raises(ValueError, match="no trainable"):
        build_optimizer(OptimConfig(), [])


def test_learning_rate_warms_up_and_decays() -> None:
    config = OptimConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.25)
    rates = [learning_rate(config, step, 20) for step in range(25)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[12] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[20:] == [0.5] * 5
    assert all(later <= earlier for earlier, later in pairwise(rates[4:]))
    constant = OptimConfig(lr=2.0, warmup_steps=2, schedule="constant")
    assert [learning_rate(constant, step, 9) for step in (0, 1, 8)] == [1.0, 2.0, 2.0]


def _clip_on_rank(rank: int, world_size: int) -> list[tuple[float, float]]:
    results = []
    for norm_type in (1.0, 2.0, math.inf):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([0.8])
        norm = clip_by_global_norm([(parameter, ())], 1.0, norm_type)
        results.append((norm.item(), parameter.grad.item()))
    return results


def test_clip_by_global_norm_does_not_add_up_equal_gradients_of_ranks() -> None:
    """Trap B63: 0.8 on two ranks is 0.8, not 1.13, and stays unclipped; so for p = 1 and inf."""
    for results in run_ranks(_clip_on_rank, 2):
        for norm, grad in results:
            assert norm == pytest.approx(0.8)
            assert grad == pytest.approx(0.8)


def test_clip_by_global_norm_scales_all_gradients_alike() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_by_global_norm([(first, ()), (second, ())], 0.0).item() == pytest.approx(5.0)
    assert first.grad[0].item() == 3.0
    assert clip_by_global_norm([(first, ()), (second, ())], 1.0).item() == pytest.approx(5.0)
    torch.testing.assert_close(torch.cat([first.grad, second.grad]), torch.tensor([0.6, 0.0, 0.8]))


def test_clip_by_global_norm_does_not_hide_broken_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, math.nan])
    assert math.isnan(clip_by_global_norm([(parameter, ())], 1.0).item())
    assert parameter.grad.isnan().all()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_saved_state_continues_like_the_original(name: str) -> None:
    config = OptimConfig(name=name, lr=0.1)  # type: ignore[arg-type]
    models = [_model(), _model()]
    inputs = torch.randn(4, 3)

    def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        set_learning_rate(optimizer, 0.05)
        optimizer.step()

    optimizers = [build_optimizer(config, model.named_parameters()) for model in models]
    for _ in range(3):
        advance(models[0], optimizers[0])
    models[1].load_state_dict(models[0].state_dict())
    allocate_state(optimizers[1], 3)
    saved, loaded = (
        {(moment, name): tensor for moment, name, tensor in state_tensors(optimizer, dict(model.named_parameters()))}
        for optimizer, model in zip(optimizers, models, strict=True)
    )
    assert saved.keys() == loaded.keys()
    assert len(saved) == (12 if name == "adamw" else 0)
    for key, tensor in saved.items():
        loaded[key].copy_(tensor)
    for model, optimizer in zip(models, optimizers, strict=True):
        advance(model, optimizer)
    for original, resumed in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(original, resumed)
