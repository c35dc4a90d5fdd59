"""Overlap of messages with kernels, by hand-made times of one chunk of heads and of several."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from dbsp_megatron.plan.calibration import reference_calibration
from tools import sp_timeline
from tools.sp_timeline import ChunkCosts, Machine, MeasuredLinks, StraightLinks, backward_pass, forward_pass

FAST = 1e30


class _ByteLinks:
    """A byte takes a millisecond, between nodes ten."""

    def swap(self, num_bytes: float, num_ranks: int, *, network: bool) -> float:
        return num_bytes * (10 if network else 1)

    def all_to_all(self, num_bytes: float, num_ranks: int, *, network: bool) -> float:
        return self.swap(num_bytes, num_ranks, network=network)


def _machine(**more: Any) -> Machine:
    return Machine(**({"links": _ByteLinks(), "ranks_per_node": 99, "copy_bytes_per_ms": FAST} | more))


def _costs(forward: Any, send: Any, calls: tuple[tuple[int, ...], ...] | None = None, **more: Any) -> ChunkCosts:
    """Costs by rank [U, R, ...]."""
    ms, sent = np.asarray(forward, dtype=float), np.asarray(send, dtype=np.int64)
    size = ms.shape[0] * ms.shape[1]
    nothing = np.zeros((size, size), dtype=np.int64)
    known: dict[str, Any] = {
        "calls": calls or tuple((step,) for step in range(ms.shape[2])),
        "forward": ms,
        "backward": 2 * ms,
        "send_bytes": sent,
        "there": nothing,
        "back": nothing,
        "moves": False,
        "home_bytes": np.zeros((*ms.shape[:2], 3), dtype=np.int64),
        "owner_bytes": np.zeros((*ms.shape[:2], 2), dtype=np.int64),
    }
    return ChunkCosts(**(known | more))


@pytest.mark.parametrize(
    ("num_bytes", "total"),
    [(0, 7.0), (3, 7.0), (5, 9.0)],
    ids=["no messages", "hidden under the first call", "two longer than the first call"],
)
def test_forward_pass_hides_messages_under_the_call_before(num_bytes: int, total: float) -> None:
    found = forward_pass([_costs([[[3, 4], [3, 4]]], [[[0, num_bytes], [0, num_bytes]]])], _machine())
    assert found.total == pytest.approx(total)
    assert found.compute == pytest.approx(7)
    assert found.exposed == pytest.approx(1 - 7 / total)


def test_forward_pass_lets_ranks_run_apart() -> None:
    """Trap of a lock-step ring: a barrier at every step would take 3 + 3."""
    assert forward_pass([_costs([[[3, 1], [1, 3]]], np.zeros((1, 2, 2)))], _machine()).total == pytest.approx(4)


def test_forward_pass_posts_as_far_ahead_as_the_prefetch() -> None:
    costs = _costs([[[1, 1, 6]] * 3], [[[0, 1, 4]] * 3])
    # Two ahead: step 2 follows step 1 on the link, at 1, and is there at 5.
    assert forward_pass([costs], _machine(prefetch=2)).total == pytest.approx(5 + 6)
    # One ahead: step 2 is posted when step 1 is asked for, after the first call; the same moment here.
    assert forward_pass([costs], _machine(prefetch=1)).total == pytest.approx(5 + 6)
    slower = _costs([[[3, 1, 6]] * 3], [[[0, 1, 4]] * 3])
    assert forward_pass([slower], _machine(prefetch=2)).total == pytest.approx(5 + 6)
    assert forward_pass([slower], _machine(prefetch=1)).total == pytest.approx(7 + 6)


def test_forward_pass_joins_chunks_once_all_are_there() -> None:
    costs = _costs([[[2, 6]] * 3], [[[0, 1, 4]] * 3], calls=((0,), (1, 2)))
    assert forward_pass([costs], _machine()).total == pytest.approx(5 + 6)
    # Packed at 0.2 and 1.0, sent until 1.2 and 5.2, joined until 6.2.
    assert forward_pass([costs], _machine(copy_bytes_per_ms=5.0)).total == pytest.approx(6.2 + 6)


def test_forward_pass_waits_for_the_heaviest_rank_in_both_exchanges() -> None:
    there, back = np.array([[0, 2], [1, 0]]), np.array([[0, 3], [4, 0]])
    home, owner = np.array([[[1, 1, 1]], [[1, 1, 1]]]), np.array([[[2, 2]], [[2, 2]]])
    costs = _costs([[[1]], [[5]]], np.zeros((2, 1, 1)), there=there, back=back, home_bytes=home, owner_bytes=owner)
    found = forward_pass([costs], _machine())
    assert found.total == pytest.approx(2 + 5 + 4)
    assert found.exchange == pytest.approx(2 + 4)
    copied = forward_pass([costs], _machine(copy_bytes_per_ms=1.0))
    assert copied.total == pytest.approx(1 + 2 + 2 + 5 + 2 + 4 + 1)
    # Each byte leaves its node.
    assert forward_pass([costs], _machine(ranks_per_node=1)).total == pytest.approx(20 + 5 + 40)


def test_backward_pass_sends_gradients_home_and_waits_for_them() -> None:
    costs = _costs([[[3, 4], [3, 4]]], [[[0, 2], [0, 2]]])
    # Kernels take twice as long; the gradients are fp32 and travel after the last call.
    assert backward_pass([costs], _machine()).total == pytest.approx(6 + 8 + 4)
    with patch.object(sp_timeline, "LEAST_HIDDEN_BYTES", 4):
        # Half of the own chunk, 3 of 6, is computed under them, and K and V travel under the other half.
        assert backward_pass([costs], _machine()).total == pytest.approx(6 + 8 + 1)
        # Three ranks and one message ahead: gradients have to be added before the end.
        three = _costs([[[3, 4, 4]] * 3], [[[0, 2, 2]] * 3])
        assert backward_pass([three], _machine(prefetch=1)).total > backward_pass([three], _machine()).total
    with pytest.raises(ValueError, match="was not measured"):
        backward_pass([_costs([[[1]]], [[[0]]], backward=None)], _machine())


def test_links_follow_their_curves() -> None:
    straight = StraightLinks(gb_per_s=2.0, latency_us=30.0)
    assert straight.swap(10**6, 4, network=False) == pytest.approx(0.03 + 0.5)
    assert straight.all_to_all(0, 4, network=False) == 0
    calibration = reference_calibration()
    measured = MeasuredLinks(calibration)
    assert measured.all_to_all(10**7, 8, network=False) == pytest.approx(
        calibration.link("all_to_all", 8, "node").time(10**7) / 1e3
    )


def _chunk(ms: Any, there: int, back: int, **more: Any) -> ChunkCosts:
    """One of the chunks of two Ulysses ranks, each of which sends so many bytes to the other."""
    swapped = np.array([[0, 1], [1, 0]])
    forward = np.broadcast_to(np.asarray(ms, dtype=float), (2,)).reshape(2, 1, 1)
    return _costs(forward, np.zeros((2, 1, 1)), there=there * swapped, back=back * swapped, **more)


def test_chunks_hide_all_but_the_first_exchange_and_the_last() -> None:
    """In 0-2 and 2-4; computed 2-7 and 7-11; out 7-8 and 11-12."""
    found = forward_pass([_chunk(5, 2, 1), _chunk(4, 2, 1)], _machine())
    assert found.total == pytest.approx(12)
    assert found.compute == pytest.approx(9)
    assert found.exchange == pytest.approx(6)
    assert forward_pass([_chunk(9, 4, 2)], _machine()).total == pytest.approx(15)


def test_chunks_wait_for_exchanges_that_take_longer_than_kernels() -> None:
    """In 0-4 and 4-8; computed 4-5 and 8-9; out 8-11, after the second one in, and 11-14."""
    assert forward_pass([_chunk(1, 4, 3)] * 2, _machine()).total == pytest.approx(14)


def test_exchanges_run_in_the_order_in_which_they_are_posted() -> None:
    """In 0-4, 4-8; first chunk computed 4-5; its way out 8-11 comes before the third one in, 11-15.

    The second chunk is computed 8-9, its way out 15-18; the third 15-25, its way out 25-28. With the third one in ahead
    of the first way out all would end at 25.
    """
    chunks = [_chunk(1, 4, 3), _chunk(1, 4, 3), _chunk(10, 4, 3)]
    assert forward_pass(chunks, _machine()).total == pytest.approx(28)


def test_ranks_run_apart_between_the_exchanges_of_chunks() -> None:
    """In 0-2, 2-4; computed 2-4 and 2-8, out 8-9; then 4-9 and 8-9, out 9-10. One rank is light where one is heavy."""
    found = forward_pass([_chunk([2, 6], 2, 1), _chunk([5, 1], 2, 1)], _machine())
    assert found.total == pytest.approx(10)
    assert found.compute == pytest.approx(7)


def test_copies_of_chunks_take_time_of_the_device_that_computes() -> None:
    """Packed 0-1, 1-2; in 1-3, 3-5; unpacked 3-4, computed 4-9, packed 9-10, out 10-11, beside it unpacked 10-11.

    Then computed 11-15, packed 15-16, out 16-17, beside it unpacked what came first, then the rest, 17-18.
    """
    copies = {"home_bytes": np.ones((2, 1, 3), dtype=int), "owner_bytes": np.ones((2, 1, 2), dtype=int)}
    chunks = [_chunk(5, 2, 1, **copies), _chunk(4, 2, 1, **copies)]
    found = forward_pass(chunks, _machine(copy_bytes_per_ms=1.0))
    assert found.total == pytest.approx(18)
    assert found.exchange == pytest.approx(2 * (1 + 2 + 1) + 2 * (1 + 1 + 1))


def test_backward_pass_of_chunks_sends_gradients_home_under_the_next() -> None:
    """Kernels take twice as long. In 0-1, 1-2; computed 1-11, 11-19; home 11-13, 19-21, set within 3 there."""
    home = np.array([[[9, 0, 3]]] * 2)
    chunks = [_chunk(5, 2, 1, home_bytes=home), _chunk(4, 2, 1, home_bytes=home)]
    assert backward_pass(chunks, _machine()).total == pytest.approx(21)
    # The gradients of the first chunk wait until all is computed; they are set 19-22, those of the second 22-25.
    assert backward_pass(chunks, _machine(copy_bytes_per_ms=1.0)).total == pytest.approx(25)


def test_chunks_whose_blocks_move_are_exchanged_by_all_ranks() -> None:
    """Two ring ranks, each alone in its Ulysses group; an exchange of one chunk is behind that of the other."""
    table = np.array([[0, 2], [1, 0]])
    chunk = _costs([[[1, 1], [1, 1]]], np.zeros((1, 2, 2)), there=table, back=table, moves=True)
    # In 0-2, 2-4; computed 2-4, 4-6; out 4-6, 6-8.
    assert forward_pass([chunk] * 2, _machine()).total == pytest.approx(8)


def test_rings_of_chunks_begin_when_their_chunk_does() -> None:
    """Without exchanges two chunks are twice one: K/V of the second is not sent ahead of its time."""
    chunk = _costs([[[3, 4], [3, 4]]], [[[0, 5], [0, 5]]])
    assert forward_pass([chunk], _machine()).total == pytest.approx(9)
    assert forward_pass([chunk] * 2, _machine()).total == pytest.approx(18)
