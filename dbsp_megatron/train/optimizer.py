"""AdamW or SGD over parameter groups, the learning-rate schedule, and clipping by the true global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dbsp_megatron import compat
from dbsp_megatron.config.sections import OptimConfig
from dbsp_megatron.train.state import local_part


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


NormGroups: TypeAlias = tuple[dist.ProcessGroup, ...]
"""Groups whose ranks hold different parts of a gradient; none if every rank holds it whole."""


@torch.no_grad()
def clip_by_global_norm(
    parameters: Iterable[tuple[nn.Parameter, NormGroups]],
    max_norm: float,
    norm_type: float = 2.0,
    device: torch.device | None = None,
) -> Tensor:
    """Scale gradients so that their norm is at most `max_norm`; returns the norm before.

    Only parts are added up over ranks: adding up whole gradients, which are equal on every rank after the reduction,
    would count each of them once per rank.

    Args:
        parameters: parameters with reduced gradients, each with the groups that split it.
        max_norm: limit; 0 measures without clipping.
        norm_type: p of the norm; `inf` for the largest entry.
        device: where the norm is computed; None takes the gradients'.

    Returns:
        fp32 scalar; no host synchronisation.
    """
    by_groups: dict[NormGroups, list[Tensor]] = {}
    for parameter, groups in parameters:
        mine = by_groups.setdefault(groups, [])
        if parameter.grad is not None:
            mine.append(local_part(parameter.grad))
    grads = [grad for part in by_groups.values() for grad in part]
    device = device or (grads[0].device if grads else torch.device("cpu"))
    parts = []
    for groups, part in by_groups.items():
        norm = torch.zeros((), device=device)
        if part:
            norms = torch._foreach_norm([grad.float() for grad in part], norm_type)
            norm = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type).to(device)
        parts.append(_norm_over(norm, groups, norm_type))
    total = torch.linalg.vector_norm(torch.stack(parts), norm_type) if parts else torch.zeros((), device=device)
    if max_norm > 0 and grads:
        # A non-finite norm gives a non-finite factor, on purpose: a broken gradient must not become a small one.
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor.to(grads[0].device))
    return total


def _norm_over(norm: Tensor, groups: NormGroups, norm_type: float) -> Tensor:
    """Norm of a vector whose parts, on the ranks of all groups, have the norms given."""
    if math.isinf(norm_type):
        for group in groups:
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    power = norm**norm_type
    for group in groups:
        dist.all_reduce(power, group=group)
    return power ** (1 / norm_type) if groups else norm


MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


def state_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, nn.Parameter]
) -> list[tuple[str, str, Tensor]]:
    """(moment, parameter name, tensor) of everything the optimizer keeps; empty for plain gradient descent."""
    return [
        (moment, name, optimizer.state[parameter][moment])
        for name, parameter in named_parameters.items()
        for moment in MOMENTS
        if moment in optimizer.state.get(parameter, {})
    ]


def allocate_state(optimizer: torch.optim.Optimizer, num_steps_done: int) -> None:
    """Give a fresh optimizer the state it has after `num_steps_done` steps, with moments still to be filled in.

    The step count is one number for all parameters, and not stored as tensors.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if isinstance(optimizer, torch.optim.AdamW):
                on_device = bool(group.get("fused")) or bool(group.get("capturable"))
                device = parameter.device if on_device else torch.device("cpu")
                state["step"] = torch.tensor(float(num_steps_done), dtype=torch.float32, device=device)
        if not isinstance(optimizer, torch.optim.AdamW):
            group["step"] = num_steps_done
