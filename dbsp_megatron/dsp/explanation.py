"""A stage plan in plain words, with its bytes."""

from __future__ import annotations

import sys
from typing import TextIO

from torch import nn

from dbsp_megatron.dsp.graph import BEGIN
from dbsp_megatron.dsp.hooks import Parallelized, installed
from dbsp_megatron.dsp.layout import Layout
from dbsp_megatron.dsp.session import DspSession
from dbsp_megatron.dsp.stages import StagePlan, unit_share

_MAX_LISTED = 40


def explain(
    what: nn.Module | Parallelized | DspSession | StagePlan, file: TextIO | None = None, *, quiet: bool = False
) -> str:
    """Prints what is switched where, and the bytes.

    Args:
        what: a parallelized model, its handle, a session, or a plan; of a model, the plan made last.
        file: where to print; standard output if None.
        quiet: do not print.

    Returns:
        The text, without a final newline.

    Raises:
        ValueError: the model is not parallelized, or nothing was planned yet.
    """
    text = describe(_plan_of(what))
    if not quiet:
        print(text, file=sys.stdout if file is None else file)
    return text


def _plan_of(what: nn.Module | Parallelized | DspSession | StagePlan) -> StagePlan:
    if isinstance(what, StagePlan):
        return what
    if isinstance(what, nn.Module):
        # Inside what wraps a model (DDP, torch.compile) too.
        session = next(filter(None, map(_session_of, what.modules())), None)
        if session is None:
            raise ValueError("dsp.explain: the model is not parallelized: call dsp.parallelize or dsp.trace first")
    else:
        session = what.session if isinstance(what, Parallelized) else what
    if session.last_plan is None:
        raise ValueError("dsp.explain: nothing is planned yet: run a pass, or declare stages and call session.plan()")
    return session.last_plan


def _session_of(model: nn.Module) -> DspSession | None:
    handle = installed(model)
    # A traced model, or one that is written for several ranks.
    session = getattr(getattr(model, BEGIN, model) if handle is None else handle, "session", None)
    return session if isinstance(session, DspSession) else None


def describe(plan: StagePlan) -> str:
    """A plan in words."""

    def cut(layout: Layout) -> str:
        named = zip(plan.grid, layout.shards, strict=True)
        return " and ".join(f"{name} by {'/'.join(map(str, axes))}" for name, axes in named if axes) or "nothing"

    sizes = " x ".join(f"{name}={length}" for name, length in zip(plan.grid, plan.shape, strict=True))
    lines = [
        f"Grid {sizes} on {' x '.join(str(link.axis) for link in plan.links)}: {len(plan.steps)} stages, "
        f"{plan.num_switches} switches, {_bytes(plan.mean_sent_bytes)} sent by a rank forward (mean), and backward.",
        f"Enters with {cut(plan.start)} cut, leaves with {cut(plan.end)} cut.",
    ]
    ranks = 1
    for link in plan.links:
        ranks *= link.axis.size
    rows = []
    for step, move, layout, size in plan.switches():
        where = "at the end" if step is None else f"{step.stage.name}"
        kind = "branch" if step is not None and (move in step.into or move in step.out) else "stream"
        sent = move.sent_by_all(layout) * size / ranks
        rows.append(
            f"  {where}: {kind} {plan.grid[move.from_dim]} -> {plan.grid[move.to_dim]} over {move.axis}, {_bytes(sent)}"
        )
    for step in plan.steps:
        share = unit_share(step.compute, step.stage, plan.grid) if step.in_units else None
        if share is not None:
            sent = share.sent * (step.stage.unit_bytes or 4 * step.stage.stream_bytes)
            rows.append(
                f"  {step.stage.name}: attention in units over {share.axis}, about {_bytes(sent)}; fullest rank "
                f"{share.share * ranks:.2f} of an even share"
            )
    lines += rows[:_MAX_LISTED]
    if len(rows) > _MAX_LISTED:
        lines.append(f"  ... and {len(rows) - _MAX_LISTED} more")
    fullest = max(plan.steps, key=lambda step: step.compute.share())
    if fullest.compute.share() * ranks > 1.05:
        lines.append(
            f"Fullest rank of {fullest.stage.name}: {fullest.compute.share() * ranks:.2f} of an even share, as "
            f"{cut(fullest.compute)} does not divide."
        )
    return "\n".join(lines)


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:.4g} GB"
