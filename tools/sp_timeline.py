"""Time of a sequence-parallel attention from measured kernels and link curves, with the overlap that the runtime has.

All ranks run one program: swaps are posted, awaited, and calls are computed in between. A message starts when both its
ends have posted it and their messages before it are done; it ends by its curve. Arrays hold one entry for each rank,
[U, R], milliseconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dbsp_megatron.plan.calibration import Calibration
from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.rates import FloatArray


class Links(Protocol):
    """Times of messages, milliseconds."""

    def swap(self, num_bytes: float, num_ranks: int, *, network: bool) -> float:
        """One message to a rank while one comes from another."""

    def all_to_all(self, num_bytes: float, num_ranks: int, *, network: bool) -> float:
        """An exchange in which a rank sends so many bytes to others."""


@dataclass(frozen=True)
class MeasuredLinks:
    """Curves of a calibration file."""

    calibration: Calibration

    def swap(self, num_bytes: float, num_ranks: int, *, network: bool) -> float:
        """See `Links`."""
        return self._time("p2p", num_bytes, num_ranks, network)

    def all_to_all(self, num_bytes: float, num_ranks: int, *, network: bool) -> float:
        """See `Links`."""
        return self._time("all_to_all", num_bytes, num_ranks, network)

    def _time(self, collective: str, num_bytes: float, num_ranks: int, network: bool) -> float:
        if not num_bytes:
            return 0.0
        return self.calibration.link(collective, num_ranks, "network" if network else "node").time(num_bytes) / 1e3


@dataclass(frozen=True)
class StraightLinks:
    """One latency and one bandwidth for every message."""

    gb_per_s: float
    latency_us: float

    def swap(self, num_bytes: float, num_ranks: int, *, network: bool) -> float:
        """See `Links`."""
        return self.latency_us / 1e3 + num_bytes / (self.gb_per_s * 1e6) if num_bytes else 0.0

    def all_to_all(self, num_bytes: float, num_ranks: int, *, network: bool) -> float:
        """See `Links`."""
        return self.swap(num_bytes, num_ranks, network=network)


@dataclass(frozen=True, eq=False, kw_only=True)
class RingCosts:
    """What one plan costs on its ranks."""

    calls: tuple[tuple[int, ...], ...]
    """Ring steps of each call of the engine; the first is that of the own chunk."""
    forward: FloatArray
    """[U, R, calls]."""
    backward: FloatArray | None
    """The same of the backward pass."""
    send_bytes: IntArray
    """[U, R, R], K and V that go out at each step."""
    there: IntArray
    """[P, P], q, k, v by home and owner."""
    back: IntArray
    """[P, P], the output by owner and home."""
    moves: bool
    """Blocks leave the ring rank of their home, so that all ranks exchange."""
    home_bytes: IntArray
    """[U, R, 2], q, k, v and the output of a rank at home."""
    owner_bytes: IntArray
    """[U, R, 2], the same where they are computed."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What ranks run on."""

    links: Links
    ranks_per_node: int
    """Consecutive sp ranks that share a node."""
    copy_bytes_per_ms: float
    """Bytes that a device reads and writes again in a millisecond."""
    prefetch: int = 2
    """Chunks under way ahead of the one that is waited for."""


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """One pass; milliseconds of the rank that ends last, unless said."""

    total: float
    compute: float
    """Kernels of the rank with most of them."""
    exchange: float
    """All-to-alls, both ways, packing included."""

    @property
    def exposed(self) -> float:
        """Share of the time in which the fullest rank computes nothing."""
        return 1 - self.compute / self.total if self.total else 0.0


class _Clocks:
    """Program time of all ranks."""

    def __init__(self, costs: RingCosts, machine: Machine) -> None:
        self.costs, self.machine = costs, machine
        self.now: FloatArray = np.zeros(costs.forward.shape[:2])
        self._link_free: FloatArray = np.zeros_like(self.now)
        self._done: dict[tuple[str, int], FloatArray] = {}
        ulysses, ring = costs.forward.shape[:2]
        self._rank = np.arange(ring)[None, :] * ulysses + np.arange(ulysses)[:, None]

    def copy(self, num_bytes: IntArray) -> None:
        """A copy on the device."""
        self.now = self.now + num_bytes / self.machine.copy_bytes_per_ms

    def exchange(self, table: IntArray) -> None:
        """An all-to-all of bytes [P, P] by sender and receiver; who takes part waits for the last."""
        if not table.any():
            return
        ulysses, ring = self.now.shape
        # Rank p = r * U + u.
        flat = self.now.T.reshape(-1)
        groups = [np.arange(ulysses * ring)] if self.costs.moves else np.arange(ulysses * ring).reshape(ring, ulysses)
        for group in groups:
            part = table[np.ix_(group, group)]
            node = group // self.machine.ranks_per_node
            same = node[:, None] == node[None, :]
            took = 0.0
            for network, share in ((False, np.where(same, part, 0)), (True, np.where(same, 0, part))):
                most = float(max(share.sum(axis=0).max(), share.sum(axis=1).max()))
                took = max(took, self.machine.links.all_to_all(most, len(group), network=network))
            flat[group] = flat[group].max() + took
        self.now = flat.reshape(ring, ulysses).T.copy()

    def post(self, kind: str, step: int, num_bytes: IntArray) -> None:
        """Every rank sends bytes [U, R]: K/V of a step onwards (`kv`), or their gradients home (`gradient`)."""
        ring = self.now.shape[1]
        shift = step if kind == "kv" else -step
        self.copy(num_bytes)
        # Who sends to r is r - shift, whom r sends to is r + shift.
        incoming = np.roll(num_bytes, shift, axis=1)
        ready = np.maximum(self.now, self._link_free)
        ready = np.maximum(ready, np.maximum(np.roll(ready, shift, axis=1), np.roll(ready, -shift, axis=1)))
        other = np.roll(self._rank, shift, axis=1)
        network = other // self.machine.ranks_per_node != self._rank // self.machine.ranks_per_node
        took = np.array(
            [
                self.machine.links.swap(float(size), ring, network=bool(far))
                for size, far in zip(np.maximum(num_bytes, incoming).flat, network.flat, strict=True)
            ]
        ).reshape(self.now.shape)
        done = ready + took
        self._link_free, self._done[kind, step] = done, done

    def wait(self, kind: str, step: int) -> None:
        """Program goes on when a message is there."""
        self.now = np.maximum(self.now, self._done.pop((kind, step)))

    def compute(self, ms: FloatArray) -> None:
        """Kernels [U, R]."""
        self.now = self.now + ms


def forward_pass(costs: RingCosts, machine: Machine) -> Emulated:
    """Exchange in, the ring, exchange out."""
    clocks = _Clocks(costs, machine)
    moved = bool(costs.there.any())
    began = _exchange(clocks, costs.there, costs.home_bytes[..., 0], costs.owner_bytes[..., 0], moved)
    _ring(clocks, costs.forward, gradients=False)
    ended = _exchange(clocks, costs.back, costs.owner_bytes[..., 1], costs.home_bytes[..., 1], moved)
    return _finished(clocks, costs.forward, began + ended)


def backward_pass(costs: RingCosts, machine: Machine) -> Emulated:
    """The gradient of the output to the owners, the ring with gradients on their way home, gradients to the homes.

    Raises:
        ValueError: the backward pass was not measured.
    """
    if costs.backward is None:
        raise ValueError("the backward pass was not measured: measure it too")
    clocks = _Clocks(costs, machine)
    moved = bool(costs.there.any())
    began = _exchange(clocks, costs.back.T, costs.home_bytes[..., 1], costs.owner_bytes[..., 1], moved)
    _ring(clocks, costs.backward, gradients=True)
    ended = _exchange(clocks, costs.there.T, costs.owner_bytes[..., 0], costs.home_bytes[..., 0], moved)
    return _finished(clocks, costs.backward, began + ended)


def _exchange(clocks: _Clocks, table: IntArray, packed: IntArray, unpacked: IntArray, moved: bool) -> float:
    """Pack, all-to-all, unpack; milliseconds that it takes when all ranks start at once, the most of any."""
    if not moved:
        return 0.0
    before = float(clocks.now.max())
    clocks.copy(packed)
    clocks.exchange(table)
    clocks.copy(unpacked)
    return max(0.0, float(clocks.now.max()) - before)


def _ring(clocks: _Clocks, ms: FloatArray, *, gradients: bool) -> None:
    """The order of operations of `ring_forward` and `ring_backward`."""
    costs, ring = clocks.costs, ms.shape[1]
    prefetch, posted, going = clocks.machine.prefetch, 0, list[int]()
    for number, steps in enumerate(costs.calls):
        for step in sorted(steps):
            while posted < min(step + prefetch, ring - 1):
                posted += 1
                clocks.post("kv", posted, costs.send_bytes[..., posted])
            if step:
                clocks.wait("kv", step)
        if len(steps) > 1:
            clocks.copy(sum((_came(costs, step) for step in steps), np.zeros_like(costs.send_bytes[..., 0])))
        clocks.compute(ms[..., number])
        if not gradients or number == 0:
            continue
        for step in sorted(steps):
            # fp32, twice the bytes of what came.
            clocks.post("gradient", step, 2 * _came(costs, step))
            going.append(step)
            if len(going) > prefetch:
                clocks.wait("gradient", going.pop(0))
    for step in going:
        clocks.wait("gradient", step)


def _came(costs: RingCosts, step: int) -> IntArray:
    """Bytes of K and V that come in at a step, [U, R]."""
    return np.roll(costs.send_bytes[..., step], step, axis=1)


def _finished(clocks: _Clocks, ms: FloatArray, exchange: float) -> Emulated:
    return Emulated(total=float(clocks.now.max()), compute=float(ms.sum(axis=2).max()), exchange=exchange)
