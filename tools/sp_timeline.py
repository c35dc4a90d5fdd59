"""Time of a sequence-parallel attention from measured kernels and link curves, with the overlap that the runtime has.

All ranks run one program: messages are posted, awaited, and calls are computed in between. A swap starts when both its
ends have posted it and their swaps before it are done, an all-to-all when all ranks of its group have posted it and
their all-to-alls before it are done; both end by their curves. An all-to-all and a swap that are under way at the same
time do not slow one another, and messages take no multiprocessor from the kernels beside them. Copies (packing,
unpacking, joining) take the time of the device that computes. Arrays hold one entry for each rank, [U, R], milliseconds
and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dbsp_megatron.attention.ring import LEAST_HIDDEN_BYTES
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
class ChunkCosts:
    """What the heads of a plan that are exchanged together cost on its ranks."""

    calls: tuple[tuple[int, ...], ...]
    """Ring steps of each call of the engine; the first is that of the own chunk of K/V."""
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
    """[U, R, 3], copied at home: q, k, v; the output; the gradients of q, k, v, with what adding copies takes."""
    owner_bytes: IntArray
    """[U, R, 2], q, k, v and the output where they are computed."""


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
    """All-to-alls of all chunks, both ways, packing included, each as long as it takes alone: hidden or not."""

    @property
    def exposed(self) -> float:
        """Share of the time in which the fullest rank computes nothing."""
        return 1 - self.compute / self.total if self.total else 0.0


class _Clocks:
    """Program time of all ranks."""

    def __init__(self, num_ranks: tuple[int, int], machine: Machine) -> None:
        self.machine = machine
        self.now: FloatArray = np.zeros(num_ranks)
        self._link_free: FloatArray = np.zeros_like(self.now)
        self._channel_free: FloatArray = np.zeros_like(self.now)
        self._done: dict[tuple[str, int], FloatArray] = {}
        ulysses, ring = num_ranks
        self._rank = np.arange(ring)[None, :] * ulysses + np.arange(ulysses)[:, None]

    def copy(self, num_bytes: IntArray) -> None:
        """A copy on the device."""
        self.now = self.now + num_bytes / self.machine.copy_bytes_per_ms

    def exchange(self, table: IntArray, *, everywhere: bool) -> FloatArray:
        """Posts an all-to-all of bytes [P, P] by sender and receiver, in Ulysses groups or `everywhere`.

        Returns:
            When it is done.
        """
        ulysses, ring = self.now.shape
        # Rank p = r * U + u.
        done = np.maximum(self.now, self._channel_free).T.reshape(-1)
        groups = [np.arange(ulysses * ring)] if everywhere else np.arange(ulysses * ring).reshape(ring, ulysses)
        for group in groups:
            part = table[np.ix_(group, group)]
            node = group // self.machine.ranks_per_node
            same = node[:, None] == node[None, :]
            took = 0.0
            for network, share in ((False, np.where(same, part, 0)), (True, np.where(same, 0, part))):
                most = float(max(share.sum(axis=0).max(), share.sum(axis=1).max()))
                took = max(took, self.machine.links.all_to_all(most, len(group), network=network))
            done[group] = done[group].max() + took
        self._channel_free = done.reshape(ring, ulysses).T.copy()
        return self._channel_free

    def wait_until(self, done: FloatArray) -> None:
        """Program goes on when something is done."""
        self.now = np.maximum(self.now, done)

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
        self.wait_until(self._done.pop((kind, step)))

    def compute(self, ms: FloatArray) -> None:
        """Kernels [U, R]."""
        self.now = self.now + ms


@dataclass(frozen=True, eq=False)
class _Chunk:
    """One direction of a chunk: an exchange to the owners, calls of the engine, and an exchange to the homes."""

    costs: ChunkCosts
    ms: FloatArray
    """[U, R, calls]."""
    there: tuple[IntArray, IntArray, IntArray]
    """Bytes that are packed [U, R], sent [P, P] and unpacked [U, R]."""
    back: tuple[IntArray, IntArray, IntArray]
    """The same of the way back."""

    @property
    def exchanges(self) -> bool:
        """Whether anything leaves a rank; else tensors are used as they are."""
        return bool(self.costs.there.any())

    def begin(self, clocks: _Clocks, which: tuple[IntArray, IntArray, IntArray]) -> FloatArray:
        """Pack and post; returns when that is done."""
        if not self.exchanges:
            return clocks.now
        clocks.copy(which[0])
        return clocks.exchange(which[1], everywhere=self.costs.moves)

    def take(self, clocks: _Clocks, done: FloatArray, which: tuple[IntArray, IntArray, IntArray]) -> None:
        """Wait and unpack."""
        clocks.wait_until(done)
        if self.exchanges:
            clocks.copy(which[2])

    def alone(self, machine: Machine) -> float:
        """Milliseconds of both exchanges when all ranks start together and nothing else runs."""
        total = 0.0
        for which in (self.there, self.back):
            clocks = _Clocks((self.ms.shape[0], self.ms.shape[1]), machine)
            self.take(clocks, self.begin(clocks, which), which)
            total += float(clocks.now.max())
        return total


def forward_pass(chunks: Sequence[ChunkCosts], machine: Machine) -> Emulated:
    """Exchange in, the ring and exchange out, of the chunks of heads of a plan as `PipelinedAttention` runs them.

    Args:
        chunks: in the order in which they are computed; one for a layer that is not pipelined.
        machine: what they run on.
    """
    return _run(
        [
            _Chunk(
                costs,
                costs.forward,
                (costs.home_bytes[..., 0], costs.there, costs.owner_bytes[..., 0]),
                (costs.owner_bytes[..., 1], costs.back, costs.home_bytes[..., 1]),
            )
            for costs in chunks
        ],
        machine,
        gradients=False,
    )


def backward_pass(chunks: Sequence[ChunkCosts], machine: Machine) -> Emulated:
    """The gradient of the output to the owners, the ring with gradients on their way home, gradients to the homes.

    Args:
        chunks: as in `forward_pass`.
        machine: what they run on.

    Raises:
        ValueError: the backward pass was not measured.
    """
    found = []
    for costs in chunks:
        if costs.backward is None:
            raise ValueError("the backward pass was not measured: measure it too")
        there = (costs.home_bytes[..., 1], costs.back.T, costs.owner_bytes[..., 1])
        back = (costs.owner_bytes[..., 0], costs.there.T, costs.home_bytes[..., 2])
        found.append(_Chunk(costs, costs.backward, there, back))
    return _run(found, machine, gradients=True)


def _run(chunks: Sequence[_Chunk], machine: Machine, *, gradients: bool) -> Emulated:
    """The order of operations of `PipelinedAttention`: one exchange ahead of the chunk that is computed."""
    shape = chunks[0].ms.shape[0], chunks[0].ms.shape[1]
    clocks = _Clocks(shape, machine)
    arriving: list[FloatArray] = []
    leaving = []
    for number, chunk in enumerate(chunks):
        while len(arriving) < min(number + 2, len(chunks)):
            ahead = chunks[len(arriving)]
            arriving.append(ahead.begin(clocks, ahead.there))
        chunk.take(clocks, arriving[number], chunk.there)
        _ring(clocks, chunk, gradients=gradients)
        leaving.append(chunk.begin(clocks, chunk.back))
    for chunk, done in zip(chunks, leaving, strict=True):
        chunk.take(clocks, done, chunk.back)
    return Emulated(
        total=float(clocks.now.max()),
        compute=float(sum(chunk.ms.sum(axis=2) for chunk in chunks).max()),
        exchange=sum(chunk.alone(machine) for chunk in chunks),
    )


def _ring(clocks: _Clocks, chunk: _Chunk, *, gradients: bool) -> None:
    """The order of operations of `ring_forward` and `ring_backward`."""
    costs, ms, ring = chunk.costs, chunk.ms, chunk.ms.shape[1]
    prefetch, posted, going = clocks.machine.prefetch, 0, list[int]()
    # Half of the heads of the own chunk come last, under the gradients of the others.
    last = 2 * costs.send_bytes[..., ring - 1] >= LEAST_HIDDEN_BYTES
    late = np.where(last & (gradients and 1 < ring <= prefetch + 1), 0.5 * ms[..., 0], 0.0)
    for number, steps in enumerate(costs.calls):
        for step in sorted(steps):
            while posted < min(step + prefetch, ring - 1):
                posted += 1
                clocks.post("kv", posted, costs.send_bytes[..., posted])
            if step:
                clocks.wait("kv", step)
        if len(steps) > 1:
            clocks.copy(sum((_came(costs, step) for step in steps), np.zeros_like(costs.send_bytes[..., 0])))
        clocks.compute(ms[..., number] - (late if number == 0 else 0.0))
        if not gradients or number == 0:
            continue
        for step in sorted(steps):
            # fp32, twice the bytes of what came.
            clocks.post("gradient", step, 2 * _came(costs, step))
            going.append(step)
            if len(going) > prefetch:
                clocks.wait("gradient", going.pop(0))
    clocks.compute(late)
    for step in going:
        clocks.wait("gradient", step)


def _came(costs: ChunkCosts, step: int) -> IntArray:
    """Bytes of K and V that come in at a step, [U, R]."""
    return np.roll(costs.send_bytes[..., step], step, axis=1)
