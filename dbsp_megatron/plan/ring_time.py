"""Time of a ring of attention steps, with one wait per step or with steps decoupled by prefetching."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_megatron.plan.rates import FloatArray


@dataclass(frozen=True, kw_only=True)
class RingTime:
    """Microseconds of the slowest ring group; `compute_us + exposed_us` is when it ends."""

    compute_us: float
    """Kernels on the critical path."""
    exposed_us: float
    """The rest: communication that no kernel of the critical path hides."""
    hop_us: float
    """Messages on the critical path, hidden or not."""
    ulysses_rank: int
    """Ulysses rank of that group."""
    ring_rank: int | None
    """Ring rank that ends last; None when the group waits at every step."""


def barrier_time(compute: FloatArray, hops: FloatArray, gradient_hops: FloatArray | None = None) -> RingTime:
    """Times rings whose ranks all wait for one another, and for the hop, at the end of every step.

    Args:
        compute: float64 [U, R, R], kernel microseconds by Ulysses rank, ring rank and step.
        hops: float64 [U, R, R], microseconds in which ring rank r passes on what it holds at step s; the hop of the
            last step is not made.
        gradient_hops: The same for the gradients of K and V of step s, which travel during step s + 1, after the last
            step alone; None in the forward pass.
    """
    steps = compute.max(axis=1)
    messages = hops.max(axis=1)
    messages[:, -1] = 0.0
    tail = np.zeros(compute.shape[0])
    if gradient_hops is not None and compute.shape[1] > 1:
        gradients = gradient_hops.max(axis=1)
        messages[:, 1:] += gradients[:, :-1]
        tail = gradients[:, -1]
    ends = np.maximum(steps, messages).sum(axis=1) + tail
    u = int(ends.argmax())
    busy = float(steps[u].sum())
    return RingTime(
        compute_us=busy,
        exposed_us=max(0.0, float(ends[u]) - busy),
        hop_us=float(messages[u].sum() + tail[u]),
        ulysses_rank=u,
        ring_rank=None if compute.shape[1] > 1 else 0,
    )


def decoupled_time(compute: FloatArray, hops: FloatArray, gradient_hops: FloatArray | None = None) -> RingTime:
    """Times rings in which a chunk is passed on as soon as it is there, whatever the kernels do.

    A step starts when the rank has finished its step before and the chunk has arrived; a link carries one message of a
    kind at a time. Gradients are passed on when this rank and those before it have added theirs. K/V and gradients
    share a link, so no link may end before the sum of its messages.

    Args:
        compute: As in `barrier_time`.
        hops: As in `barrier_time`.
        gradient_hops: As in `barrier_time`.
    """
    ring = compute.shape[1]
    arrived = np.zeros(compute.shape[:2])
    done = np.zeros_like(arrived)
    sent = np.zeros_like(arrived)
    grads_there = np.zeros_like(arrived)
    grads_sent = np.zeros_like(arrived)
    busy = np.zeros_like(arrived)
    for step in range(ring):
        done = np.maximum(done, arrived) + compute[:, :, step]
        if step + 1 < ring:
            sent = np.maximum(arrived, sent) + hops[:, :, step]
            busy += hops[:, :, step]
            arrived = np.roll(sent, 1, axis=1)
        if gradient_hops is not None and ring > 1:
            grads_sent = np.maximum(np.maximum(done, grads_there), grads_sent) + gradient_hops[:, :, step]
            busy += gradient_hops[:, :, step]
            grads_there = np.roll(grads_sent, 1, axis=1)
    ends = np.maximum(np.maximum(done, grads_there), busy)
    u, r = (int(i) for i in np.unravel_index(int(ends.argmax()), ends.shape))
    kernels = float(compute[u, r].sum())
    return RingTime(
        compute_us=kernels,
        exposed_us=max(0.0, float(ends[u, r]) - kernels),
        hop_us=float(busy[u, r]),
        ulysses_rank=u,
        ring_rank=r,
    )
