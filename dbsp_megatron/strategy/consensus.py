"""Consensus on what a StrategySelector chose, and on the times it learns from."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from dbsp_megatron.comm.agree import agree, digest_int
from dbsp_megatron.comm.collectives import gather_vectors
from dbsp_megatron.plan.selector import Choice, StrategySelector


def choice_belief(choice: Choice) -> int:
    """Equal on ranks that chose the same mesh and plan."""
    return digest_int(choice.ulysses_degree, choice.ring_degree, choice.plan.digest)


def agree_on_choices(
    choices: dict[int, Choice], selector: StrategySelector, group: dist.ProcessGroup | None, *, step: int
) -> None:
    """Makes sure that all ranks chose the same mesh, policies and plan for every layer; one gather of few integers.

    Args:
        choices: layer -> what this rank chose at this step; the same layers on every rank.
        selector: the selector that chose, whose history must agree as well.
        group: ranks that must agree, best one whose backend moves CPU tensors; None for a single rank.
        step: step number, for the message.

    Raises:
        ValueError: on every rank alike, naming the first layer on which ranks differ.
    """
    beliefs = {f"mesh and plan of layer {layer}": choice_belief(c) for layer, c in sorted(choices.items())}
    # First the number, as ranks with fewer layers would gather fewer integers.
    agree(f"strategy selection, step {step}", None, {"layers to choose for": digest_int(*sorted(choices))}, group)
    agree(f"strategy selection, step {step}", None, {**beliefs, "earlier choices": digest_int(selector.digest)}, group)


def slowest_us(measured_us: float, group: dist.ProcessGroup | None) -> int:
    """The longest of all ranks' times as an integer that all of them get, for `StrategySelector.observe_time`.

    Args:
        measured_us: this rank's time in microseconds, at least 0.
        group: ranks that ran together; None for a single rank.

    Returns:
        Microseconds, at least 1.

    Raises:
        ValueError: on every rank alike: a time is negative or not finite.
    """
    problem = None
    if not math.isfinite(measured_us) or measured_us < 0:
        problem = f"measured_us must be a finite time of at least 0, got {measured_us!r}: measure the layer again"
    agree("time of a layer", problem, {}, group)
    mine = torch.tensor([max(1, math.ceil(measured_us))], dtype=torch.int64)
    return int(mine if group is None else gather_vectors(mine, group).max())
