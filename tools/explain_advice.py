"""What is likely to go wrong or slow in a run, and which setting would be better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.explain_layout import GroupKind, Situation, TokenFacts
from tools.explain_masks import ExpectedMasks
from tools.explain_memory import MemoryPart
from tools.explain_time import Times

_WORTH_SAYING = 0.03
"""Share of the attention time that another mesh must save."""
_LEAST_EFFICIENCY = 0.5
_MOST_UNEVEN = 1.1
_NEXT_TO_EVEN = 1.03
_LEAST_BLOCKS = 4
_HEADROOM = 0.9
_FAST_BLOCKS = (64, 128)
_FAST_HEAD_DIM_STEP, _MAX_FAST_HEAD_DIM = 8, 128


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One warning, or one better setting."""

    what: str
    """What is the matter."""
    remedy: str
    """What to do about it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the job gets."""

    time_s: float | None = None
    """Seconds until the job is ended; None if not said."""
    memory_gib: float | None = None
    """Memory of a device; None if not known."""


def warnings_of(
    situation: Situation,
    tokens: TokenFacts,
    groups: Sequence[GroupKind],
    memory: Sequence[MemoryPart],
    times: Times,
    limits: Limits,
) -> list[Advice]:
    """Everything that looks wrong, the worst first.

    Args:
        situation: the run.
        tokens: its layout.
        groups: process groups of the mesh that is used.
        memory: memory of a rank.
        times: predicted times.
        limits: what the job gets.
    """
    return [
        *_about_data(situation),
        *_about_memory(situation, memory, limits),
        *_about_ranks(situation, tokens, groups, times),
        *_about_sp(situation, times),
        *_about_time(situation, times, limits),
        *_about_kernels(situation),
    ]


def _about_data(situation: Situation) -> list[Advice]:
    from dbsp_megatron.data.sources import expand_entry

    found = []
    # Files of latents were looked at for their size, which the run was resolved with.
    for entry in () if situation.config.data.latents else situation.config.data.paths:
        try:
            expand_entry(entry)
        except ValueError as error:
            found.append(Advice(what=f"the data are not here: {error}", remedy="dbsp-train refuses to start without"))
    return found


def _about_memory(situation: Situation, memory: Sequence[MemoryPart], limits: Limits) -> list[Advice]:
    found, total = [], sum(part.num_bytes for part in memory) / 2**30
    fixed = sum(part.num_bytes for part in memory if part.exact) / 2**30
    if limits.memory_gib is not None and total > _HEADROOM * limits.memory_gib:
        remedy = "use more sequence-parallel ranks or a smaller train.micro_batch_size"
        if fixed > _HEADROOM * limits.memory_gib:
            remedy = (
                f"weights, gradients and optimizer alone take {fixed:.3g} GiB on every rank: split them "
                "(parallel.data_parallel=fsdp, train.engine=megatron or deepspeed, parallel.tensor_parallel_size), "
                "train adapters (lora.rank), or take a smaller model"
            )
        elif situation.recompute != "full":
            remedy = f"set train.recompute=true, or {remedy}"
        found.append(
            Advice(what=f"a rank needs about {total:.3g} GiB of a device's {limits.memory_gib:g} GiB", remedy=remedy)
        )
    budget, at_work = situation.config.sp.memory_budget_mib, memory[-1].num_bytes / 2**20
    if budget is not None and at_work > budget:
        found.append(
            Advice(
                what=f"an attention layer needs about {at_work:.0f} MiB, more than sp.memory_budget_mib={budget}: "
                "plans give way to contiguous heads, or the run is refused",
                remedy=f"raise the budget to {math.ceil(at_work)}, or lower sp.kv_gather_mib="
                f"{situation.config.sp.kv_gather_mib}",
            )
        )
    return found


def _about_ranks(situation: Situation, tokens: TokenFacts, groups: Sequence[GroupKind], times: Times) -> list[Advice]:
    found, (ulysses, ring) = [], times.chosen.mesh
    across = {kind.name: kind.num_across_nodes for kind in groups}
    per_node, heads = situation.gpus_per_node, situation.resolved.num_heads
    size = situation.sp_size
    if across["ulysses"]:
        fitting = max(u for u in range(1, min(ulysses, per_node) + 1) if size % u == 0 and per_node % u == 0)
        found.append(
            Advice(
                what=f"{across['ulysses']} Ulysses group(s) of {ulysses} cross nodes of {per_node}: their all-to-all, "
                "which nothing hides but chunks of heads, goes over the network",
                remedy=_other_mesh(situation, times, fitting),
            )
        )
    elif across["ring"]:
        found.append(
            Advice(
                what=f"{across['ring']} ring group(s) of {ring} cross nodes of {per_node}: K and V go over the network",
                remedy="nothing, if the network is fast enough to hide it under the attention; measure it with "
                "tools/fit_latency.py on two nodes and give the file as sp.calibration",
            )
        )
    plans = situation.config.sp.strategy in ("dbsp", "auto")
    if heads < ulysses:
        what = f"{heads} heads for a Ulysses degree of {ulysses}"
        what += ": heads are cut" if plans else f": {ulysses - heads} of {ulysses} ranks compute no attention"
        fewer = max(u for u in range(1, heads + 1) if size % u == 0)
        found.append(Advice(what=what, remedy=_other_mesh(situation, times, fewer)))
    elif heads % ulysses and not plans:
        most = -(-heads // ulysses)
        found.append(
            Advice(
                what=f"{heads} heads do not divide by the Ulysses degree {ulysses}: some ranks have {most}, others "
                f"{heads // ulysses}, and strategy {situation.config.sp.strategy} does not balance them",
                remedy="use sp.strategy=dbsp, which cuts heads, or a degree that divides the heads",
            )
        )
    idle, least, most = tokens.tokens.count(0), min(tokens.tokens), max(tokens.tokens)
    if idle:
        found.append(
            Advice(
                what=f"{idle} of {size} ranks hold no token: {tokens.num_blocks} blocks of {tokens.block_size} in all",
                remedy=f"lower sp.block_size to {max(1, tokens.num_tokens // size)} or less, or use fewer ranks",
            )
        )
    elif most > _MOST_UNEVEN * tokens.num_tokens / size:
        found.append(
            Advice(
                what=f"ranks hold {least} to {most} tokens: all layers but attention wait for the fullest",
                remedy=f"lower sp.block_size={tokens.block_size} or use fewer sequence-parallel ranks",
            )
        )
    elif tokens.num_blocks < _LEAST_BLOCKS * size and plans and size > 1:
        found.append(
            Advice(
                what=f"only {tokens.num_blocks / size:.1f} blocks a rank: there is little to balance with",
                remedy="a smaller sp.block_size, or fewer ranks",
            )
        )
    return found


def _other_mesh(situation: Situation, times: Times, ulysses: int) -> str:
    """What to do about a mesh that looks wrong: take another, unless that is predicted to be slower."""
    strategy, ring = situation.config.sp.strategy, situation.sp_size // ulysses
    other = next(option for option in times.options if option.mesh == (ulysses, ring))
    now, then = times.chosen.ms(strategy), other.ms(strategy)
    if then < now:
        return f"set sp.ulysses_degree={ulysses} sp.ring_degree={ring}: {then:.3g} ms a layer instead of {now:.3g} ms"
    rates = "the measured rates" if times.step.measured else "the assumed rates; measure yours to be sure"
    return f"none: {other.name} would take {then:.3g} ms a layer instead of {now:.3g} ms by {rates}"


def _about_sp(situation: Situation, times: Times) -> list[Advice]:
    found, step, size = [], times.step, situation.sp_size
    layer = step.forward_ms + step.backward_ms
    if size > 1 and step.alone_ms < _LEAST_EFFICIENCY * size * layer:
        found.append(
            Advice(
                what=f"{size} ranks are many for {situation.resolved.num_tokens} tokens: attention is only "
                f"{step.alone_ms / layer:.2g} times as fast as on one",
                remedy="use fewer sequence-parallel ranks and more data parallelism (or train.global_batch_size), as "
                "far as memory allows",
            )
        )
    if not step.measured and size > 1 and situation.config.train.device != "cpu":
        found.append(
            Advice(
                what=f"times are those of an assumed machine: {step.machine}",
                remedy="measure yours with tools/fit_latency.py and give the file as sp.calibration",
            )
        )
    return found


def _about_time(situation: Situation, times: Times, limits: Limits) -> list[Advice]:
    if limits.time_s is None:
        return []
    loop, step_s = situation.config.train, times.step.step_ms / 1e3
    found, whole = [], loop.steps * step_s
    interval = loop.checkpoint_every * step_s
    fitting = max(1, int(limits.time_s / 3 / step_s))
    if whole > limits.time_s and not loop.checkpoint_every:
        found.append(
            Advice(
                what=f"the run takes about {duration(whole)}, the job ends after {duration(limits.time_s)}, and "
                "train.checkpoint_every=0 saves at the end only",
                remedy=f"set train.checkpoint_every={fitting} or less",
            )
        )
    elif whole > limits.time_s and interval > limits.time_s:
        found.append(
            Advice(
                what=f"train.checkpoint_every={loop.checkpoint_every} steps take about {duration(interval)}, longer "
                f"than the job's {duration(limits.time_s)}: it would never get on",
                remedy=f"set train.checkpoint_every={fitting} or less",
            )
        )
    elif whole > limits.time_s:
        found.append(
            Advice(
                what=f"the run takes about {duration(whole)}: {math.ceil(whole / limits.time_s)} jobs of "
                f"{duration(limits.time_s)}",
                remedy="let the job be requeued; it goes on from its newest checkpoint",
            )
        )
    return found


def _about_kernels(situation: Situation) -> list[Advice]:
    config, head_dim = situation.config, situation.model.heads_dim
    if config.train.device == "cpu":
        return []
    slow = []
    if config.sp.block_size not in _FAST_BLOCKS:
        slow.append(f"sp.block_size={config.sp.block_size} (64 or 128)")
    if head_dim % _FAST_HEAD_DIM_STEP or head_dim > _MAX_FAST_HEAD_DIM:
        slow.append(f"head dim {head_dim} (a multiple of 8 up to 128)")
    if config.train.precision != "bf16":
        slow.append(f"train.precision={config.train.precision} (bf16)")
    if not slow:
        return []
    return [
        Advice(
            what=f"on a Hopper GPU the portable kernels would run, which are slower, because of {', '.join(slow)}",
            remedy="take the value in brackets where you can",
        )
    ]


def better_settings(situation: Situation, masks: ExpectedMasks, times: Times) -> list[Advice]:
    """Settings that are predicted to be faster, the largest gain first."""
    strategy, chosen = situation.config.sp.strategy, times.chosen
    now = times.step.forward_ms + times.step.backward_ms
    if situation.sp_size == 1 or now <= 0:
        return []
    kind = "measured" if masks.measured else "assumed"
    offers = []
    for other in ("dbsp", "auto"):
        best = min(times.options, key=lambda option: option.ms(other))
        if (other, best.mesh) != (strategy, chosen.mesh) and best.ms(other) < (1 - _WORTH_SAYING) * now:
            offers.append((best.ms(other), other, best))
    found = []
    for then, other, best in sorted(offers, key=lambda offer: offer[0]):
        degrees = f" sp.ulysses_degree={best.ulysses_degree} sp.ring_degree={best.ring_degree}"
        found.append(
            Advice(
                what=f"attention would take {1 - then / now:.0%} less time, on mesh {best.name} (masks: {kind})",
                remedy=f"sp.strategy={other}" + ("" if other == "auto" else degrees),
            )
        )
    if strategy in ("dbsp", "auto") and chosen.usp_ms <= now * (1 + _WORTH_SAYING / 10):
        what = "balance gains no time here: attention is short beside what it exchanges"
        if chosen.rho_before < _NEXT_TO_EVEN:
            what = f"there is next to nothing to balance in these masks (rho_s {chosen.rho_before:.3f} unplanned)"
        found.append(Advice(what=what, remedy=f"sp.strategy=usp would be as fast ({chosen.usp_ms:.3g} ms a layer)"))
    return found


def duration(seconds: float) -> str:
    """Seconds for people: `1 d 03:20:00`, `02:05:00` or `3.2 s`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    days, rest = divmod(round(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days} d {clock}" if days else clock
