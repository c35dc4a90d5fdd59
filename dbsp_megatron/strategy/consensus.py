"""What ranks compare before they exchange anything for an attention call, and the times that they learn from."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import Belief, agree, digest_int
from dbsp_megatron.comm.collectives import gather_vectors
from dbsp_megatron.masks import HeadOrders, MaskMethod
from dbsp_megatron.plan import PartitionPlan
from dbsp_megatron.plan.selector import Choice
from dbsp_megatron.strategy.call import LayerCall

_PLANS = (
    "plans follow from the counts of all ranks, so give every rank the same plan file and the same calls before, or "
    "make SequenceParallel anew on all ranks"
)
LEAST_US = 1
"""The shortest time that ranks compare; a rank that has none to tell gives this one."""


def call_beliefs(
    call: LayerCall | None,
    plan: PartitionPlan | None,
    orders: HeadOrders | None,
    layer: int,
    step: int,
    num_begun: int,
) -> dict[str, Belief]:
    """What must be equal on all ranks before a call of a layer.

    Args:
        call: the call; None on a rank that has an error to tell.
        plan: its plan, if there is one already.
        orders: orders of the heads that its mask method asks for, if it does.
        layer: layer index.
        step: number of the step.
        num_begun: exchanges that the rank has begun in calls before.
    """
    # Asked for now: where words are made, gradients may be off.
    needs_grad = call is not None and call.needs_grad
    return {
        "layer and step": Belief(
            digest_int(layer, step),
            lambda: f"layer {layer}, step {step}",
            "call the layers in the same order on all ranks, and sp.begin_step(step) with the same step",
        ),
        "tensor shapes, dtype, layout, grid and scale": Belief(
            call.shape_digest if call else 0,
            lambda: _shape_text(call),
            "pass q, k, v of one batch size, of the same heads, head dims and dtype, with the layout, grid and scale "
            "that all ranks use",
        ),
        "whether gradients are needed": Belief(
            int(needs_grad),
            lambda: "needed" if needs_grad else "not needed",
            "run all ranks in the same grad mode, on tensors that require gradients alike",
        ),
        "mask": Belief(
            call.mask_digest if call else 0,
            lambda: _mask_text(call),
            "pass the whole mask, made with one seed, or a mask method with the same settings, on every rank",
        ),
        "orders of heads": Belief(
            digest_int(orders.key, orders.of_head) if orders else 0,
            lambda: f"orders {orders.of_head} of {orders.key}" if orders else "that of the tokens",
            "give the mask method the same file and settings on every rank",
        ),
        "partition plan": plan_belief(plan),
        "exchanges so far": Belief(
            num_begun,
            lambda: str(num_begun),
            "an earlier call failed on some ranks after others had sent more, which would be taken for a part of this "
            "call: restart the run",
        ),
    }


def plan_belief(plan: PartitionPlan | None) -> Belief:
    """The plan that a call is executed with, if it was made already."""
    return Belief(digest_int(plan.digest) if plan else 0, lambda: _plan_text(plan), _PLANS)


def choice_beliefs(choice: Choice | None, history: str) -> dict[str, Belief]:
    """The mesh and plan that a rank chose for a layer, and a digest of all that it chose before."""
    plan = None if choice is None else choice.plan
    return {
        "mesh and plan of the layer": Belief(
            0 if choice is None else digest_int(choice.ulysses_degree, choice.ring_degree, choice.plan.digest),
            lambda: _plan_text(plan),
            "ranks choose from counts and times that all of them were given alike, so run the same version and "
            "sp.calibration on all ranks, or fix the mesh by sp.ulysses_degree and sp.ring_degree",
        ),
        "earlier choices of meshes": Belief(
            digest_int(history),
            lambda: f"digest {history[:12] or 'none'}",
            "make SequenceParallel anew on all ranks at the same time, or fix the mesh by sp.ulysses_degree and "
            "sp.ring_degree",
        ),
    }


def _shape_text(call: LayerCall | None) -> str:
    if call is None:
        return "no call"
    layout = call.layout
    return (
        f"q [B={call.q.shape[0]}, s, H={call.q.shape[2]}, D={call.q.shape[3]}], k and v [Hkv={call.v.shape[2]}, "
        f"Dv={call.v.shape[3]}], {str(call.q.dtype).removeprefix('torch.')}, layout of {layout.seqlen} tokens in "
        f"blocks of {layout.block_size} ({layout.policy}), grid {call.grid}, scale {call.scale:.6g}, "
        f"engine {call.engine.name}"
    )


def _mask_text(call: LayerCall | None) -> str:
    if call is None:
        return "no call"
    mask: BlockMask | MaskMethod = call.mask
    if isinstance(mask, MaskMethod):
        return f"method {mask.describe()}, which needs {mask.needs(call.layer, call.step)}"
    return (
        f"BlockMask of {list(mask.blocks.shape)} blocks of {mask.block_size_q} x {mask.block_size_k} tokens, density "
        f"{mask.density:.4f}, digest {mask.digest}"
    )


def _plan_text(plan: PartitionPlan | None) -> str:
    if plan is None:
        return "none yet"
    return (
        f"U={plan.ulysses_degree} R={plan.ring_degree}, heads {plan.head_policy}, blocks {plan.block_policy}, "
        f"digest {plan.digest[:12]}"
    )


def slowest_us(measured_us: float, group: dist.ProcessGroup | None) -> int:
    """The longest of all ranks' times as an integer that all of them get, for `StrategySelector.observe_time`.

    Args:
        measured_us: this rank's time in microseconds, at least 0.
        group: ranks that ran together; None for a single rank.

    Returns:
        Microseconds, at least `LEAST_US`.

    Raises:
        ValueError: on every rank alike: a time is negative or not finite.
    """
    problem = None
    if not math.isfinite(measured_us) or measured_us < 0:
        problem = f"measured_us must be a finite time of at least 0, got {measured_us!r}: measure the layer again"
    agree("time of a layer", problem, {}, group)
    mine = torch.tensor([max(LEAST_US, math.ceil(measured_us))], dtype=torch.int64)
    return int(mine if group is None else gather_vectors(mine, group).max())
