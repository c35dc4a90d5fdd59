"""AdamW or SGD over parameter groups, the learning-rate schedule, and clipping by the true global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dbsp_megatron import compat
from dbsp_megatron.config.sections import OptimConfig


def build_optimizer(config: OptimConfig, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Optimizer over two groups: matrices are decayed, vectors (biases, norms) are not.

    AdamW is NVIDIA apex's FusedAdam where that is installed and the weights are on CUDA, else torch's own.
    """
    trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameters")
    decayed = [parameter for _, parameter in trainable if parameter.dim() >= 2]
    others = [parameter for _, parameter in trainable if parameter.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr)
    on_cuda = trainable[0][1].is_cuda
    betas = (config.beta1, config.beta2)
    apex = compat.nvidia_apex()[0] if on_cuda else None
    if apex is not None:
        return apex.optimizers.FusedAdam(groups, lr=config.lr, betas=betas, eps=config.eps, adam_w_mode=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=on_cuda, foreach=not on_cuda)


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Learning rate of 0-based `step`: linear warm-up, then cosine (or constant) down to `min_lr_ratio`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, num_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def clip_by_global_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients so that their norm is at most `max_norm`; returns the norm before.

    Gradients are whole and equal on every rank after the reduction, so the norm is computed here once: adding it up
    over ranks again would count each gradient `world_size` times.

    Args:
        parameters: parameters with reduced gradients.
        max_norm: limit; 0 measures without clipping.
        norm_type: p of the norm; `inf` for the largest entry.

    Returns:
        fp32 scalar on the gradients' device; no host synchronisation.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros(())
    norms = torch._foreach_norm([grad.float() for grad in grads], norm_type)
    total = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    if max_norm > 0:
        # A non-finite norm gives a non-finite factor, on purpose: a broken gradient must not become a small one.
        torch._foreach_mul_(grads, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


_MOMENTS = ("exp_avg", "exp_avg_sq")


def state_tensors(optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Moments of the optimizer as `<moment>.<parameter name>`; empty for plain gradient descent."""
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in named_parameters.items()
        for moment in _MOMENTS
        if moment in optimizer.state.get(parameter, {})
    }


def allocate_state(optimizer: torch.optim.Optimizer, num_steps_done: int) -> None:
    """Give a fresh optimizer the state it has after `num_steps_done` steps, with moments still to be filled in.

    The step count is one number for all parameters, and not stored as tensors.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if isinstance(optimizer, torch.optim.AdamW):
                on_device = bool(group.get("fused")) or bool(group.get("capturable"))
                device = parameter.device if on_device else torch.device("cpu")
                state["step"] = torch.tensor(float(num_steps_done), dtype=torch.float32, device=device)
        if not isinstance(optimizer, torch.optim.AdamW):
            group["step"] = num_steps_done
